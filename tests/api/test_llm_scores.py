"""`LLM.score` of whole texts: against logits of a pass without a cache, in any number, with their lengths checked."""

import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, ModelConfig, RopeConfig, SamplingParams, Tokenizer
from jaxinfer.cache import attend_without_cache
from jaxinfer.engine.request import Score
from jaxinfer.models import bind, init_params
from tests.api.test_llm import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One that begins texts with a BOS token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    bos = train_tokenizer(folder).token_to_id("<user>")
    data = json.loads((folder / "tokenizer.json").read_text())
    piece = {"Sequence": {"id": "A", "type_id": 0}}
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<user>", "type_id": 0}}, piece],
        "pair": [piece, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<user>": {"id": "<user>", "ids": [bos], "tokens": ["<user>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return Tokenizer.from_dir(folder)


@pytest.fixture(scope="module")
def model(tokenizer):
    config = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=48,
        num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, rope=RopeConfig(rotary_dim=16),
        max_position_embeddings=64,
    )  # fmt: skip
    params = init_params(config, jax.random.key(1))
    return config, jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, params), tokenizer


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model, max_seqs=3, max_model_len=32) as llm:
        yield llm


def dense_logprobs(model, ids):
    """Log-probabilities of each token but the first, by a pass without a cache; one program for up to 32 tokens."""
    config, params, _ = model
    tokens = np.zeros((1, 32), np.int32)
    tokens[0, : len(ids)] = ids
    logprobs = np.asarray(all_logprobs(config, params, tokens))[0]
    return logprobs[np.arange(len(ids) - 1), ids[1:]]


@partial(jax.jit, static_argnums=0)
def all_logprobs(config, params, tokens):
    decoder = bind(config, params)
    logits = decoder.logits(decoder(tokens, jnp.arange(tokens.shape[1])[None], attend_without_cache))
    return jax.nn.log_softmax(logits.astype(jnp.float32))


def test_texts_are_scored_from_the_first_token_after_bos(llm, model, tokenizer):
    texts = ["the quick brown fox", "a", "and the dog sleeps. " * 3, "jumps"] * 3
    scores = llm.score(texts, use_tqdm=False)
    for text, score in zip(texts, scores, strict=True):
        assert score.token_ids == tokenizer.encode(text, False)
        expected = dense_logprobs(model, tokenizer.encode(text))
        np.testing.assert_allclose(score.raw, expected, atol=1e-4)
        np.testing.assert_allclose(score.raw_total, expected.sum(), rtol=1e-5)
        np.testing.assert_allclose(score.loss, -expected.mean(), rtol=1e-5)
        np.testing.assert_allclose(score.perplexity, np.exp(-expected.mean()), rtol=1e-5)
        assert score.processed == score.raw


def test_token_ids_are_texts_too_and_one_needs_no_list(llm, tokenizer):
    ids = tokenizer.encode("the lazy dog")
    [one], [other] = llm.score(ids), llm.score("the lazy dog")
    assert one == other


def test_processed_is_under_the_parameters(llm, tokenizer):
    params = SamplingParams(temperature=0.5, min_tokens=8)  # fewer than what is scored has
    [score] = llm.score("the lazy dog", params=params)
    assert score.processed != score.raw
    [pair] = llm.score([tokenizer.encode("the lazy dog")[:1]], [score.token_ids], params)
    np.testing.assert_allclose(score.processed, pair.processed, atol=1e-4)


def test_a_score_that_is_the_models_own_is_computed_once(llm, monkeypatch):
    """One position at a time through the head took nine tenths of the time."""
    work = []
    runner = llm.engine.runner
    monkeypatch.setattr(runner, "run_scores", lambda given, run=runner.run_scores: work.append(given) or run(given))
    llm.score(["the dog"], params=SamplingParams(temperature=0, stop="x", seed=3))
    assert [one for found in work for one in found.processed] == [None]
    llm.score(["the dog"], params=SamplingParams(top_k=3))
    assert work[-1].processed[0] is not None


def test_texts_that_cannot_be_scored_are_named_with_their_lengths(llm, tokenizer):
    num_tokens = len(tokenizer.encode("dog " * 40))
    with pytest.raises(ValueError, match=f"text 1: {num_tokens} tokens are too many: max_model_len=32"):
        llm.score(["the dog", "dog " * 40])
    with pytest.raises(ValueError, match="text 2: a score needs at least 2 tokens, got 1"):
        llm.score(["a", "b", ""])
    with pytest.raises(TypeError, match="text 1 must be a text"):
        llm.score(["a", None])


def test_no_perplexity_is_an_overflow():
    assert Score([1], [-1000.0], [-1000.0], False).perplexity == math.inf
    assert Score([1, 2], [-math.inf, 0.0], [], False).perplexity == math.inf
