"""Tokens that an adapter adds: its requests have those of the merged model, and no other can read or write one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert.adapters import merged
from jaxinfer import LLM, SamplingParams
from jaxinfer.models.adapter import Adapter, LowRank, TokenRows
from tests import tiny
from tests.engine.test_adapter_stacks import random_adapter, random_params
from tests.tiny import TINY

SOFT = replace(TINY, tie_word_embeddings=True, logit_softcap=20.0)
OPTIONS = {**tiny.OPTIONS, "prefix_cache": False}
BASE, ADDED = [5, 9, 2, 44, 7, 9, 9, 1, 60, 33, 12], [5, 98, 2, 44, 97, 9, 98]
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=0)
SAMPLED = SamplingParams(temperature=1.5, max_tokens=8, seed=3, logprobs=0)
EAGER = SamplingParams(temperature=0, max_tokens=4, logit_bias={97: 100.0})


@pytest.fixture(scope="module")
def served():
    """A tied model with a cap of its logits, and adapters that add two, three and no tokens to it."""
    params, rng = random_params(SOFT), np.random.default_rng(7)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    embed = np.asarray(params["embed"])
    two, three = (np.concatenate([embed, 3 * normal(count, 32)]) for count in (2, 3))
    changed = np.concatenate([normal(97, 32), 3 * normal(3, 32)])
    pairs = {
        "embed": LowRank(normal(100, 2), normal(2, 32), 0.5),
        "lm_head": LowRank(normal(32, 2), normal(2, 100), 0.5),
    }
    rows = TokenRows((9, 98), normal(2, 32))
    adapters = {
        "two": random_adapter(params, 1, replaced={"embed": two, "lm_head": two.T}),
        "three": random_adapter(params, 2, replaced={"embed": changed, "lm_head": changed.T}),
        "all": Adapter(pairs, {"embed": three, "lm_head": three.T}, {"embed": rows, "lm_head": rows}),
        "none": random_adapter(params, 3),
    }
    with LLM((SOFT, params), adapters=adapters, max_adapters=2, **OPTIONS) as llm:
        yield llm, params, adapters


def tokens_of(answers):
    return [one.outputs[0].token_ids for one in answers]


@pytest.mark.slow
def test_an_adapter_with_added_tokens_is_the_merged_model(served):
    llm, params, adapters = served
    assert (llm.engine.spec.options.max_adapter_tokens, llm.config.vocab_size) == (3, 97)
    for name in ("three", "all"):
        config, own = merged(SOFT, params, adapters[name])
        assert config.vocab_size == 97 + llm.adapters[name].num_added == 100
        with LLM((config, jax.tree.map(jnp.asarray, own)), **OPTIONS) as alone:
            for prompts, sampling in (([ADDED] * 2, [GREEDY, EAGER]), ([BASE, ADDED], [SAMPLED] * 2)):
                want = tokens_of(alone.generate(prompts, sampling))
                assert tokens_of(llm.generate(prompts, sampling, adapter=name)) == want
            [got], [want] = llm.score([ADDED], adapter=name), alone.score([ADDED])
            np.testing.assert_allclose(got.raw, want.raw, atol=2e-4)


@pytest.mark.slow
def test_an_answer_with_an_added_token_is_made_again(served):
    llm, _, _ = served
    [output] = llm.generate([ADDED], EAGER, adapter="two")
    assert 97 in output.outputs[0].token_ids
    assert llm.replay([llm.coordinate(output)])[0].is_equal


def test_others_have_their_bits_and_never_an_added_token(served):
    llm, params, adapters = served
    with LLM((SOFT, params), adapters={"none": adapters["none"]}, **OPTIONS) as plain:
        for sampling in (GREEDY, SAMPLED):
            names = [None, "two", "none", "three"]
            answers = llm.generate([BASE] * 4, sampling, adapter=names)
            want = plain.generate([BASE] * 2, sampling, adapter=[None, "none"])
            for one, other in zip(answers[::2], want, strict=True):
                assert one.outputs[0].token_ids == other.outputs[0].token_ids
                assert one.outputs[0].logprobs == other.outputs[0].logprobs
    many = SamplingParams(temperature=50.0, max_tokens=60, seed=1)  # of nearly equal probabilities
    for name, size in ((None, 97), ("none", 97), ("two", 99), ("three", 100)):
        written = {token for tokens in tokens_of(llm.generate([BASE] * 4, many, adapter=name)) for token in tokens}
        assert max(written) < size
        assert size == 97 or max(written) >= 97
    for name, token, size in ((None, 97, 97), ("none", 97, 97), ("two", 99, 99)):
        with pytest.raises(ValueError, match=f"token id {token} is outside the vocabulary of {size}, at position 1"):
            llm.generate([[5, token]], GREEDY, adapter=name)
        with pytest.raises(ValueError, match=f"token id {token} is outside the vocabulary of {size}"):
            llm.score([[5, token]], adapter=name)
        with pytest.raises(ValueError, match=f"logit_bias has token id {token}, the vocabulary has {size} tokens"):
            llm.generate([BASE], SamplingParams(logit_bias={token: 100.0}), adapter=name)


def test_an_adapter_without_them_is_cleared_of_those_before(served):
    """In the slots whose former adapters added tokens."""
    llm, _, _ = served
    many = SamplingParams(temperature=50.0, max_tokens=60, seed=1)
    for before in (["three", "two"], ["two", "three"]):
        for name in before:
            llm.generate([BASE], GREEDY, adapter=name)
        assert max(max(tokens) for tokens in tokens_of(llm.generate([BASE] * 2, many, adapter="none"))) < 97


def test_adapters_for_which_there_is_no_room(served):
    llm, params, adapters = served
    four = np.concatenate([adapters["three"].replaced["embed"], np.ones((1, 32), np.float32)])
    rows = {"embed": TokenRows((98,), np.ones((1, 32), np.float32))}
    alone = {"lm_head": TokenRows((97,), np.ones((1, 32), np.float32))}
    refused = {
        "it adds 4 tokens, and there is room for 3: max_adapter_tokens=4 makes some": Adapter({}, {"embed": four}),
        "embed has no vector of the added token 97": Adapter({}, token_rows=rows),
        "lm_head has 1 added tokens, embed 0": Adapter({}, token_rows=alone),
        "it has invocation tokens and adds 2 tokens": replace(adapters["two"], invocation_tokens=(5,)),
    }
    for message, adapter in refused.items():
        with pytest.raises(ValueError, match=message):
            llm.load_adapter("refused", adapter)
    with pytest.raises(ValueError, match="max_adapter_tokens=2: draft 'layers:1' cannot read added tokens"):
        LLM((SOFT, params), max_adapters=1, max_adapter_tokens=2, draft="layers:1", **OPTIONS)
