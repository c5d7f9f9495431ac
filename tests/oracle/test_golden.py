"""Parity with Hugging Face Transformers, from the golden files that `make golden` writes."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import parity
import pytest
from families import VARIANTS, Variant
from parity import TOLERANCE, cached_logits, for_length, full_logits, max_error
from safetensors.numpy import load_file

import checkpoints_convert
from jaxinfer.models import ModelConfig, Params


@cache
def checkpoint(variant: Variant) -> tuple[ModelConfig, Params]:
    return checkpoints_convert.load(variant.folder, dtype="float32")


@cache
def golden(variant: Variant) -> dict[str, np.ndarray]:
    return load_file(variant.folder / "golden.safetensors")


def pairs(variant: Variant) -> parity.Pairs:
    """Prompts and greedy answers, shortest prompt first."""
    stored = golden(variant)
    names = [f"greedy.{i}" for i in range(len(variant.greedy_lengths))]
    return [(stored[f"{name}.prompt"].tolist(), stored[f"{name}.output"].tolist()) for name in names]


def error(variant: Variant, config: ModelConfig, params: Params, chunk: int | None = None) -> float:
    """Largest difference from the stored logits, in one pass or `chunk` tokens at a time."""
    stored = golden(variant)
    tokens = stored["prompt"][: variant.num_logit_tokens]
    config = for_length(config, variant.num_logit_tokens)
    if chunk is None:
        logits = full_logits(config, params, tokens)
    else:
        logits = cached_logits(config, params, tokens, chunk)
    found = max_error(logits[stored["positions"]], stored["logits"])
    print(f"{variant.name}: max |difference| {found:.1e} of logits up to {np.abs(stored['logits']).max():.1f}")
    return found


@pytest.fixture(autouse=True, scope="module")
def _quick_compilation():
    """Halves the time of a hundred compilations. test_live.py compares the optimized programs."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(params=list(VARIANTS), scope="module")
def variant(request) -> Variant:
    return VARIANTS[request.param]


def test_logits_of_one_pass(variant):
    assert error(variant, *checkpoint(variant)) <= TOLERANCE


def test_logits_through_the_cache_in_ragged_chunks(variant):
    assert error(variant, *checkpoint(variant), chunk=37) <= TOLERANCE


def test_logits_through_the_cache_one_token_at_a_time(variant):
    assert error(variant, *checkpoint(variant), chunk=1) <= TOLERANCE


def test_greedy_tokens_of_a_padded_batch(variant):
    # The four longest prompts fit in one size of prompt chunk, so one program prefills them.
    with parity.engine(*checkpoint(variant), variant) as llm:
        parity.assert_batched(llm, pairs(variant)[-4:])


# In the other ways of getting at a token, families differ by their windows and rotations, if at all; the rest of them
# runs with --slow, and live in test_live.py.
SAMPLE = ("llama", "llama_longrope_long", "mistral_window")


@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]
)
def test_greedy_tokens_one_request_and_one_token_at_a_time(name):
    variant = VARIANTS[name]
    with parity.engine(*checkpoint(variant), variant) as llm:
        parity.assert_alone(llm, pairs(variant))
        parity.assert_streamed(llm, pairs(variant))
        parity.assert_regrown(llm, pairs(variant)[:2], num_tokens=16)


@pytest.mark.slow
def test_greedy_tokens_of_more_prompts_than_slots(variant):
    with parity.engine(*checkpoint(variant), variant) as llm:
        parity.assert_batched(llm, pairs(variant))


# The check itself: a small fault in what a variant is about must show.


def rope(**changes):
    return lambda config: replace(config, rope=replace(config.rope, **changes))


def field(**changes):
    return lambda config: replace(config, **changes)


FAULTS = {
    "llama": rope(theta=10050.0),
    "llama_tied_head_dim": rope(rotary_dim=30),
    "llama_linear": rope(factor=4.01),
    "llama_llama3": rope(low_freq_factor=1.01),
    "llama_yarn": rope(truncate=False),
    "llama_longrope_short": rope(short_factor=(1.0, 1.2, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0)),
    "llama_longrope_long": rope(attention_factor=1.0),
    "mistral": field(norm_eps=1e-5),
    "mistral_window": field(sliding_windows=(25, 24)),
    "qwen2_window": field(sliding_windows=(None, None, 24)),
    "qwen3": field(norm_eps=1e-4),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_config_shows_in_the_logits(name):
    config, params = checkpoint(VARIANTS[name])
    assert error(VARIANTS[name], FAULTS[name](config), params) > 2 * TOLERANCE


def test_a_fault_in_the_length_of_a_dynamic_rotation_shows():
    variant = VARIANTS["llama_dynamic"]
    config, params = checkpoint(variant)
    stored = golden(variant)
    logits = full_logits(for_length(config, 298), params, stored["prompt"])
    assert max_error(logits[stored["positions"]], stored["logits"]) > 2 * TOLERANCE


@pytest.mark.parametrize("name", ["llama_bias", "qwen3_mqa"])
def test_a_fault_in_any_one_parameter_shows_in_the_logits(name):
    config, params = checkpoint(VARIANTS[name])
    leaves, tree = jax.tree.flatten(params)
    for i in range(len(leaves)):
        faulty = [leaf * 1.01 if j == i else leaf for j, leaf in enumerate(leaves)]
        found = error(VARIANTS[name], config, jax.tree.unflatten(tree, faulty))
        assert found > 2 * TOLERANCE, jax.tree_util.tree_leaves_with_path(params)[i][0]


def test_a_fault_shows_in_the_greedy_tokens():
    variant = VARIANTS["llama"]
    config, params = checkpoint(variant)
    params = jax.tree.map(lambda leaf: leaf, params)
    params["final_norm"] = {"weight": params["final_norm"]["weight"].at[3].multiply(1.5)}
    with parity.engine(config, params, variant) as llm, pytest.raises(AssertionError, match="Transformers gives"):
        parity.assert_batched(llm, pairs(variant)[-4:])
