"""`LLM(processors=...)`: arrays of requests, refusals, what reports show, and coordinates."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, AsyncEngine, Coordinate, Processor, RequestArray, SamplingParams
from jaxinfer.models import init_params
from tests.tiny import OPTIONS, TINY

GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPT = [5, 6, 7]


def add(logits, history, bias):
    """Adds to the logits, as logit_bias does."""
    del history
    return logits + bias


BIAS = Processor(add, {"bias": RequestArray((TINY.vocab_size,))})


@pytest.fixture(scope="module")
def model():
    params = init_params(TINY, jax.random.key(2))
    return TINY, jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, params)


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model, processors=[BIAS], **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(model):
    with LLM(model, **OPTIONS) as llm:
        yield llm


def bias_of(**values: float) -> np.ndarray:
    bias = np.zeros(TINY.vocab_size, np.float32)
    for token, value in values.items():
        bias[int(token[1:])] = value
    return bias


def tokens_of(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.slow
def test_arrays_are_for_all_prompts_or_each_and_logprobs_are_raw(llm, plain):
    """Oracle: logit_bias."""
    params = replace(GREEDY, logprobs=2)
    biased = replace(params, logit_bias={11: 9.0, 12: 8.5})
    arrays = {"bias": bias_of(t11=9.0, t12=8.5)}
    expected = plain.generate([PROMPT, PROMPT], [params, biased])
    assert tokens_of(expected)[0] != tokens_of(expected)[1]
    for found, wanted in (
        (llm.generate([PROMPT, PROMPT], params, arrays=[None, arrays]), expected),
        (llm.generate([PROMPT, PROMPT], params, arrays=arrays), [expected[1]] * 2),
    ):
        assert tokens_of(found) == tokens_of(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert one.outputs[0].logprobs == other.outputs[0].logprobs
    last = list(llm.stream(PROMPT, params, arrays=arrays))[-1]
    assert last.output is not None
    assert last.output.outputs[0].token_ids == tokens_of(expected)[1]


@pytest.mark.slow
def test_what_cannot_be_served_is_refused_with_a_sentence(llm, plain, model):
    wrong: list[tuple[Any, type[Exception], str]] = [
        ({"bais": bias_of()}, ValueError, "prompt 0: no array 'bais' .*did you mean 'bias'"),
        ({"bias": bias_of()[1:]}, ValueError, r"prompt 0: array 'bias' has shape \[96\]"),
        ({"bias": bias_of().astype(np.float64)}, ValueError, "dtype float64"),
        ({"bias": bias_of(t3=np.nan)}, ValueError, r"NaN at \[3\]"),
        ([{}, {}], ValueError, "2 mappings of arrays for 1 prompts"),
        ("bias", TypeError, "arrays must be a mapping"),
    ]
    for arrays, error, told in wrong:
        with pytest.raises(error, match=told):
            llm.generate([PROMPT], GREEDY, arrays=arrays)
    with pytest.raises(ValueError, match="declared by processors: none is"):
        plain.generate([PROMPT], GREEDY, arrays={"bias": bias_of()})
    with pytest.raises(ValueError, match="scores under sampling parameters are not computed under processors"):
        llm.score([PROMPT], params=SamplingParams(temperature=0.5))
    assert llm.score([PROMPT])[0].raw == plain.score([PROMPT])[0].raw
    with pytest.raises(ValueError, match="vectors are not computed under processors"):
        llm.embed([PROMPT], pooling="last")
    with pytest.raises(ValueError, match="processor '<lambda>' must return"):
        LLM(model, processors=[lambda logits, history: logits[:, :3]], **OPTIONS)
    with pytest.raises(TypeError, match="a list of functions"):
        LLM(model, processors=add, **OPTIONS)


def test_a_coordinate_has_the_arrays_and_the_functions(llm, plain, model):
    params = SamplingParams(seed=3, max_tokens=8)
    (output,) = llm.generate([PROMPT], params, arrays={"bias": bias_of(t11=12.0, t12=-np.inf)})
    coordinate = llm.coordinate(output)
    again = Coordinate.from_dict(json.loads(json.dumps(coordinate.to_dict())))
    assert again == coordinate
    assert llm.replay([again])[0].is_equal
    assert not llm.replay([replace(again, arrays={})])[0].is_equal  # other arrays, other tokens
    (check,) = plain.replay([again])
    assert "declared by processors: none is" in check.refused[0]

    def subtract(logits, history, bias):
        return logits - jnp.maximum(bias, 0)

    with LLM(model, processors=[replace(BIAS, fn=subtract, name="add")], **OPTIONS) as other:
        assert other.fingerprint() != llm.fingerprint() != plain.fingerprint()
        (check,) = other.replay([again])
        assert "made them" in check.refused[0]
        assert not other.replay([again], force=True)[0].is_equal
    (plain_output,) = plain.generate([PROMPT], params)
    assert "arrays" not in plain.coordinate(plain_output).to_dict()
    assert "add" in str(llm.explain())


@pytest.mark.slow
def test_clients_of_an_async_engine_give_arrays(model, llm):
    expected = tokens_of(llm.generate([PROMPT], GREEDY, arrays={"bias": bias_of(t9=7.0)}))

    async def main() -> list[int]:
        async with AsyncEngine(model, processors=[BIAS], **OPTIONS) as engine:
            tokens: list[int] = []
            async for delta in engine.generate(PROMPT, GREEDY, arrays={"bias": bias_of(t9=7.0)}):
                tokens += delta.token_ids
            return tokens

    assert asyncio.run(main()) == expected[0]


@pytest.mark.slow
def test_a_mesh_gives_the_same_tokens(model, llm):
    prompts, arrays = [PROMPT, [1, 2, 3, 4]], [{"bias": bias_of(t9=7.0)}, None]
    for params in (GREEDY, SamplingParams(seed=3, max_tokens=8)):
        expected = tokens_of(llm.generate(prompts, params, arrays=arrays))
        for mesh in ("model=2", "data=2", "sequence=2"):
            with LLM(model, processors=[BIAS], mesh=mesh, draft="ngram", num_draft_tokens=3, **OPTIONS) as sharded:
                assert tokens_of(sharded.generate(prompts, params, arrays=arrays)) == expected
