"""Caches of a tiny model against its full one: what is exact, what is smaller, and what is refused as a row."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxinfer.cache.policy.kinds import parse_policy
from jaxinfer.engine.cache_quality import hidden_states, log_probs
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.weights import ModelWeights
from jaxinfer.loading import LoadedModel
from jaxinfer.measure.kv_report.measure import CacheReporter, ReportSettings, equal_start, pieces
from jaxinfer.measure.kv_report.needle import DEPTHS
from jaxinfer.measure.kv_report.report import ALL, FULL, CacheChoice
from jaxinfer.models import init_params
from tests.engine import dense_heavy, dense_quest
from tests.engine.dense_prompt_policy import dense_logits
from tests.tiny import TINY

CONFIG = replace(TINY, dtype="float32")
POLICY = "sinks(1)+window(8)"
TEXT = "".join(chr(97 + number * number % 23) for number in range(400))
# A tokenizer as far as the reporter reads it: a token for each character, and none that begins a text.
TOKENIZER = SimpleNamespace(
    encode_content=lambda text: [ord(letter) % 96 for letter in text],
    encode=lambda text: [],
    bos_token_id=None,
)


@pytest.fixture(scope="module")
def params():
    """Weights large enough that rounding shows."""
    return jax.tree.map(lambda leaf: leaf * 6 if leaf.ndim > 1 else leaf, init_params(CONFIG, jax.random.key(0)))


def reporter(params, **more) -> CacheReporter:
    loaded = LoadedModel("tiny", CONFIG, ModelWeights(params), TOKENIZER)
    values = {"text_tokens": 48, "num_texts": 2, "num_answers": 1, "answer_tokens": 4, "num_needles": 0, **more}
    return CacheReporter(loaded, [TEXT], ReportSettings(["auto", "int8"], [ALL, POLICY], {"page_size": 8}, **values))


def test_pieces_are_of_each_document_in_turn():
    documents = [list(range(10, 19)), [1], list(range(30, 38))]
    assert pieces(documents, [9], 5, 4) == [[9, 10, 11, 12, 13], [9, 1], [9, 30, 31, 32, 33], [9, 14, 15, 16, 17]]
    assert pieces([[1], [2, 3]], [], 4, 9) == [[2, 3]]
    with pytest.raises(ValueError, match="fewer than two tokens"):
        pieces([[1]], [], 4, 1)


def test_equal_starts():
    assert [equal_start(one, [1, 2, 3]) for one in ([1, 2, 3], [1, 2, 4], [5], [1, 2])] == [3, 2, 0, 2]


@pytest.mark.slow
def test_a_policy_is_applied_while_the_texts_are_read(params):
    """Tokens within the policy's first pages are as with the full cache, later ones are not."""
    one = reporter(params, num_answers=0)
    states = []
    for policy in (None, POLICY):
        options = EngineOptions(max_model_len=56, max_seqs=1, prefill_chunk=64, page_size=8, kv_policy=policy)
        engine = Engine(CONFIG, params, options)
        states.append(hidden_states(engine, one.texts[:1])[0])
        engine.close()
    difference = np.abs(states[0] - states[1]).max(-1)
    assert difference[:24].max() < 1e-4 < difference[24:].min()  # pages of sinks, of the window, and the own one


@pytest.mark.slow
def test_figures_of_the_full_cache_and_of_smaller_ones(params):
    one = reporter(params)
    assert one.computed == "float32"
    assert one.choices == [FULL, CacheChoice("auto", POLICY), CacheChoice("int8"), CacheChoice("int8", POLICY)]
    full, kept = one(FULL), one(CacheChoice("auto", POLICY))
    assert (full.kl, full.top1_agreement, full.num_equal, full.equal_tokens) == (0, 1, 1, 1)
    assert full.token_bytes == 2 * 2 * 2 * 8 * 4  # keys and values of 2 layers, 2 heads of 8 floats
    assert full.sequence_bytes == 48 * full.token_bytes
    assert kept.sequence_bytes == 3 * 8 * full.token_bytes
    assert kept.kl > 1e-3
    assert kept.seconds_per_token > 0


def test_where_prompts_are_compacted_the_second_half_is_measured(params):
    """Its states are those of dense attention to what the policy leaves of the first half."""
    policy, config = "snapkv(40)", replace(CONFIG, max_position_embeddings=256)
    one = reporter(params, text_tokens=180, num_texts=1, num_answers=0)
    one.model, one.settings = replace(one.model, config=config), replace(one.settings, policies=[ALL, policy])
    assert (one.starts, one.num_predicted) == ([90], 89)
    full, kept = one(FULL), one(CacheChoice("auto", policy))
    assert (full.kl, full.top1_agreement) == (0, 1)
    assert kept.kl > 1e-3
    lost = (180 - 40) // 8  # pages of a text that is a prompt
    assert kept.sequence_bytes == full.sequence_bytes - lost * 8 * full.token_bytes

    engine = Engine(config, params, EngineOptions(max_model_len=200, max_seqs=1, page_size=8, kv_policy=policy))
    states = hidden_states(engine, one.texts, [90])[0]
    found = log_probs(engine, states)
    engine.close()
    dense = dense_logits(config, params, parse_policy(policy), 8, np.array(one.texts[0]), 90)[0]
    np.testing.assert_allclose(found, jax.nn.log_softmax(dense), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["h2o(40)", "quest(24)"])
def test_what_answers_lose_or_read_is_measured_on_the_second_half(policy):
    """Its states are those of dense attention to what the policy keeps, or chooses, token by token."""
    config = replace(CONFIG, num_layers=3, max_position_embeddings=256)
    params = jax.tree.map(lambda leaf: leaf * 6 if leaf.ndim > 1 else leaf, init_params(config, jax.random.key(1)))
    one = reporter(params, text_tokens=160, num_texts=1, num_answers=0)
    one.model, one.settings = replace(one.model, config=config), replace(one.settings, policies=[ALL, policy])
    assert one.starts == [80]
    full, kept = one(FULL), one(CacheChoice("auto", policy))
    assert kept.kl > 1e-3
    has_bounds = policy.startswith("quest")
    assert kept.token_bytes > full.token_bytes  # bounds of pages, or sums
    assert kept.sequence_bytes == (160 if has_bounds else 6 * 8) * kept.token_bytes

    engine = Engine(config, params, EngineOptions(max_model_len=200, max_seqs=1, page_size=8, kv_policy=policy))
    found = log_probs(engine, hidden_states(engine, one.texts, [80])[0])
    engine.close()
    if has_bounds:
        best = parse_policy(policy).pages(8)
        dense = dense_quest.dense_logits(config, params, best, np.array(one.texts[0]), np.int32(80))
    else:
        dense = dense_heavy.dense_logits(config, params, one.texts[0], dense_heavy.DenseHeavy(80, 8, 40))
    np.testing.assert_allclose(found, jax.nn.log_softmax(dense), atol=1e-4)


def test_needles_of_each_length_and_depth_against_the_full_cache(params):
    one = reporter(params, num_needles=1, num_answers=0, text_tokens=246, num_texts=1)
    one.model = replace(one.model, config=replace(CONFIG, max_position_embeddings=256))
    full, kept = one(FULL), one(CacheChoice("auto", POLICY))
    # In half of the text a line would be more than a quarter.
    assert [(cell.num_tokens, cell.depth) for cell in full.needle] == [(246, depth) for depth in DEPTHS]
    assert [cell.gain for cell in full.needle] == [cell.full_gain for cell in full.needle]
    assert [cell.full_gain for cell in kept.needle] == [cell.full_gain for cell in full.needle]
    assert [cell.gain for cell in kept.needle] != [cell.gain for cell in full.needle]
    # The weights are random, so that a line helps as much as it harms: far less than the tokens' own surprise.
    surprise = np.log(full.perplexity)
    assert all(abs(cell.gain) < surprise / 2 for cell in (*full.needle, *kept.needle))


def test_a_refusal_is_a_row_and_a_full_cache_that_fails_an_error(params):
    one = reporter(params, num_answers=0)
    one(FULL)
    one.settings.arguments["cache"] = "contiguous"
    del one.settings.arguments["page_size"]
    row = one(CacheChoice("auto", POLICY))
    assert "kv_policy='sinks(1)+window(8)' is of pages" in row.reason
    one.settings.arguments["page_size"] = 8
    with pytest.raises(ValueError, match="page_size=8 is for cache='paged' only"):
        one(FULL)


def test_models_that_cannot_read_texts_are_refused(params):
    loaded = LoadedModel("tiny", CONFIG, ModelWeights(params), None)
    with pytest.raises(ValueError, match="no tokenizer"):
        CacheReporter(loaded, [TEXT], ReportSettings(["auto"]))
    loaded = replace(loaded, tokenizer=TOKENIZER)
    with pytest.raises(ValueError, match="no text fits beside answers of 127"):
        CacheReporter(loaded, [TEXT], ReportSettings(["auto"], answer_tokens=127))


def test_a_text_without_room_for_one_more_token_is_refused(params):
    engine = Engine(CONFIG, params, EngineOptions(max_model_len=16, max_seqs=1))
    try:
        with pytest.raises(ValueError, match="a text of 16 tokens does not fit an engine with max_model_len=16"):
            hidden_states(engine, [[1] * 15, [1] * 16])
    finally:
        engine.close()
