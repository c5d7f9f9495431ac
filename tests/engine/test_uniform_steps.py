"""Steps of a deterministic engine that run in one dispatch: every bit of one step a dispatch, of one sequence alone.

In bfloat16, where programs of other shapes round otherwise, with weights and caches of fewer bits and with drafts.
"""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.cache.kv_dtype import KV_DTYPES
from jaxinfer.engine.programs import paged
from jaxinfer.models import init_params
from jaxinfer.quantization import quantize_params
from tests.engine.mixed_requests import random_prompts
from tests.tiny import TINY

PROMPTS = random_prompts(6, 60, seed=11)
PARAMS = [
    SamplingParams(temperature=number % 2, seed=number, max_tokens=9 + 3 * number, logprobs=2) for number in range(6)
]
OPTIONS: dict[str, Any] = {"max_seqs": 4, "max_model_len": 128, "num_pages": 60, "deterministic": True}
# (weights, kv_dtype, draft)
PLAIN = ("bfloat16", "auto", None)
DRAFTS = (None, "ngram", "layers:1", "own")
CASES = [
    *((weights, "auto", draft) for weights in ("bfloat16", "int8", "int4-g128") for draft in DRAFTS),
    *(("bfloat16", kv_dtype, draft) for kv_dtype in KV_DTYPES for draft in DRAFTS[:2]),
    *(("int8", kv_dtype, draft) for kv_dtype in ("int8", "int4") for draft in ("ngram", "own")),
]


@cache
def model(weights: str):
    dtype = "float32" if weights == "float32" else "bfloat16"
    config = replace(TINY, hidden_size=128, intermediate_size=256, head_dim=32, dtype=dtype)
    params = init_params(config, jax.random.key(3))
    params = jax.tree.map(lambda leaf: (leaf * 6 if leaf.ndim == 2 else leaf).astype(dtype), params)
    return config, params if weights == dtype else jax.jit(partial(quantize_params, how=weights))(params)


@cache
def own_draft():
    """A model with weights of its own, as from a draft checkpoint, that often agrees with the target."""
    config, params = model("bfloat16")
    keys = iter(jax.random.split(jax.random.key(9), 100))

    def noisy(leaf):
        noise = 0.1 * jnp.std(leaf) * jax.random.normal(next(keys), leaf.shape)
        return (leaf + noise).astype(leaf.dtype) if leaf.ndim == 2 else leaf

    return config, jax.tree.map(noisy, params)


def drafting(draft: str | None) -> dict[str, Any]:
    """The options of a draft."""
    return {} if draft is None else {"draft": own_draft() if draft == "own" else draft, "num_draft_tokens": 3}


def bits(outputs) -> list:
    return [(one.token_ids, one.logprobs) for one in (output.outputs[0] for output in outputs)]


def together(weights: str, kv_dtype: str, **options) -> list:
    with LLM(model(weights), kv_dtype=kv_dtype, **{**OPTIONS, **options}) as llm:
        return bits(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@cache
def alone(weights: str, kv_dtype: str) -> list:
    """One sequence after another, one step a dispatch: with the program of prompts, if decoding had none."""
    with LLM(model(weights), kv_dtype=kv_dtype, **{**OPTIONS, "steps_per_dispatch": 1}) as llm:
        return [bits(llm.generate(one, how))[0] for one, how in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize(
    ("weights", "kv_dtype", "draft"),
    CASES,
    ids=str,
)
def test_every_bit_is_that_of_one_step_alone(weights, kv_dtype, draft):
    assert together(weights, kv_dtype, **drafting(draft)) == alone(weights, kv_dtype)


def test_every_pass_has_the_same_arithmetic(monkeypatch):
    """Those of prompts, and those in the loop of a dispatch: on a CPU attention rounds alike in both, on a TPU not."""
    passes = []
    right = paged._one_pass
    monkeypatch.setattr(paged, "_one_pass", lambda *given: passes.append(given[5]) or right(*given))
    with LLM(model("float32"), **{**OPTIONS, "max_seqs": 3, "num_pages": 53}) as llm:  # no test before had these sizes
        llm.generate(PROMPTS[:2], SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
    assert len(passes) >= 2
    assert all(passes)


@pytest.mark.slow
def test_a_draft_with_weights_of_its_own_keeps_every_bit():
    """Tokens and log-probabilities in bfloat16, of which some are from accepted drafts and some from rejected ones."""
    options = {**OPTIONS, "max_seqs": 2}
    found = {}
    for draft in (None, "own"):
        with LLM(model("bfloat16"), **options, **drafting(draft)) as llm:
            found[draft] = bits(llm.generate(PROMPTS[:2], PARAMS[2:4], use_tqdm=False))
            stats = llm.speculation_stats()
    assert stats is not None
    assert 0 < stats.acceptance_rate < 1
    assert found["own"] == found[None]


def halves(weights: str, **options) -> tuple[list, list]:
    """The second halves of answers, and the same where the first halves were given as parts of the prompts."""
    options = {**OPTIONS, "max_seqs": 1, "prefix_cache": False, **options}
    with LLM(model(weights), **options) as llm:
        whole = bits(llm.generate(PROMPTS[:3], PARAMS[:3], use_tqdm=False))
        middles = [len(tokens) // 2 for tokens, _ in whole]
        prompts = [prompt + tokens[:n] for prompt, (tokens, _), n in zip(PROMPTS, whole, middles, strict=False)]
        params = [replace(one, max_tokens=(one.max_tokens or 0) - n) for one, n in zip(PARAMS, middles, strict=False)]
        found = bits(llm.generate(prompts, params, use_tqdm=False))
    return [(tokens[n:], logprobs[n:]) for (tokens, logprobs), n in zip(whole, middles, strict=True)], found


@pytest.mark.slow
def test_a_token_decoded_has_the_bits_of_one_in_a_prompt():
    """In float32 and alone, where XLA:CPU rounds a product of one row otherwise than one of many."""
    decoded, given = halves("float32")
    assert decoded == given
    decoded, given = halves("float32", deterministic=False)
    assert decoded != given


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("weights", ["bfloat16", "float32", "int8"])
def test_so_it_has_with_other_weights(weights):
    decoded, given = halves(weights)
    assert decoded == given
