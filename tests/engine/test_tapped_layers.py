"""Hidden states that requests ask for are those of the passes that computed their answers: in chunks of prompts, decode
steps, rounds of drafts and after preemptions they are those of a plain forward pass over all tokens but the last, by
position, with what the request adds and whatever else runs. Engines without tapped layers return nothing more.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.cache import attend_without_cache
from jaxinfer.engine.request import Request, RequestOptions, SequenceState
from jaxinfer.engine.results import states_of_slots
from jaxinfer.models import bind, collect
from tests.engine.test_steering import LONG, PROMPTS, STEERING, model_of, vectors
from tests.pallas_kernels.quick import quick
from tests.speculative.tiny_heads import config_of
from tests.speculative.tiny_heads import random_params as random_head
from tests.tiny import OPTIONS, TINY

GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
LAYERS = (0, 1)


@pytest.fixture(scope="module")
def model():
    return model_of("tiny")


@partial(jax.jit, static_argnums=0)
def reference(config, params, tokens, added):
    names = [f"layers.{layer}.residual" for layer in range(config.num_layers)]
    states, tap = collect(names)
    decoder = bind(config, params).steered(added)
    decoder(tokens[None], jnp.arange(len(tokens))[None], attend_without_cache, tap)
    return [states[name][0] for name in names]


def check(model, output, steering=None, layers=LAYERS):
    prompt = output.prompt_token_ids
    for answer in output.outputs:
        tokens = np.array([*prompt, *answer.token_ids])
        added = {str(layer): jnp.asarray(vector) for layer, vector in (steering or {}).items()}
        states = reference(*model, np.pad(tokens, (0, 112 - len(tokens))), added)
        assert set(answer.hidden_states) == set(layers)
        for layer, found in answer.hidden_states.items():
            assert (found.shape, found.dtype) == ((len(tokens) - 1, TINY.hidden_size), np.float32)
            np.testing.assert_allclose(found, states[layer][: len(tokens) - 1], atol=2e-4)


VARIANTS = {
    "plain": {},
    "chunks of 16": {"prefill_chunk": 16, "steps_per_dispatch": 3},
    "one shape": {"deterministic": True},
    "n-grams": {"draft": "ngram", "num_draft_tokens": 3},
    "layers": {"draft": "layers:1", "num_draft_tokens": 3},
    "shared rows": {"draft": "layers:1"},
    "trees of layers": {"draft": "layers:1", "draft_tree": (2, 2)},
    "n-grams, one shape": {"draft": "ngram", "num_draft_tokens": 3, "deterministic": True},
    "head": {"draft": "eagle3", "num_draft_tokens": 3},
    "contiguous": {"cache": "contiguous", "num_pages": None},
    "host layers": {"offload": 1},
    "two devices": {"mesh": "model=2"},
    "two parts of a prompt": {"mesh": "sequence=2"},
    "two replicas": {"mesh": "data=2"},
    "snapkv": {"kv_policy": "snapkv(128)"},
}


@pytest.mark.parametrize("variant", quick(VARIANTS, "plain", "trees of layers"))
def test_every_pass(model, variant):
    options = dict(VARIANTS[variant])
    if options.get("draft") == "eagle3":
        config = config_of("eagle3", TINY)
        options["draft"] = (config, random_head(config))
    steering = [*STEERING[:2], None, None]
    with LLM(model, tapped_layers=LAYERS, steered_layers=LAYERS, **OPTIONS | options) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, steering=steering, tapped_layers=LAYERS)
    for output, added in zip(outputs, steering, strict=True):
        check(model, output, added)


@pytest.mark.slow
def test_preempted_and_several_answers(model):
    prompt, params = PROMPTS[2], replace(GREEDY, max_tokens=40)
    with LLM(model, tapped_layers=LAYERS, **OPTIONS | {"num_pages": 12}) as llm:
        outputs = llm.generate([[start, *prompt[1:]] for start in range(3)], params, tapped_layers=[1])
        assert llm.engine.scheduler.counters.num_preemptions > 0
        sampled = SamplingParams(n=2, temperature=1.5, seed=1, max_tokens=6)
        several = llm.generate(prompt, sampled, tapped_layers=LAYERS)[0]
    for output in outputs:
        check(model, output, layers=[1])
    check(model, several)


def test_cached_prompts_are_computed_again(model):
    with LLM(model, tapped_layers=LAYERS, **OPTIONS) as llm:
        first, second = llm.generate(LONG, GREEDY), llm.generate(LONG, GREEDY, tapped_layers=LAYERS)
        assert (second[0].num_cached_tokens, first[0].outputs[0].hidden_states) == (0, None)
        check(model, second[0])
        third = llm.generate(LONG, GREEDY)[0]
        assert third.num_cached_tokens > 0  # by those that ask for none
        *_, last = llm.stream(LONG, GREEDY, tapped_layers=[1])
        check(model, last.output, layers=[1])


def test_states_that_no_request_wants_stay_on_the_device():
    sequence = SequenceState(Request([3], GREEDY, 1, options=RequestOptions(tapped_layers=[1])))
    states = {"layers.0.residual": None, "layers.1.residual": jnp.ones((2, 4, TINY.hidden_size))}
    for decodes, wanted in (([(1, sequence)], {1: {"layers.1.residual": (2, TINY.hidden_size)}}), ([], {})):
        flight: Any = SimpleNamespace(chunks=[], decodes=decodes, output=SimpleNamespace(states=states))
        found = states_of_slots(flight)
        assert {slot: {name: own.shape for name, own in each.items()} for slot, each in found.items()} == wanted


@pytest.mark.slow
def test_chats_give_them_too():
    with LLM("demo", tapped_layers=[1], max_seqs=1, max_model_len=256) as llm:
        [output] = llm.chat([{"role": "user", "content": "hi"}], replace(GREEDY, max_tokens=4), tapped_layers=[1])
    found = output.outputs[0].hidden_states[1]
    assert found.shape == (len(output.prompt_token_ids) + 3, llm.config.hidden_size)


def test_an_answer_that_is_cut(model):
    """By a stop token: what was computed after it is left out."""
    with LLM(model, tapped_layers=LAYERS, **OPTIONS) as llm:
        answer = llm.generate(LONG, GREEDY)[0].outputs[0].token_ids
        stopped = replace(GREEDY, stop_token_ids=[answer[5]])
        output = llm.generate(LONG, stopped, tapped_layers=LAYERS)[0]
        assert len(output.outputs[0].token_ids) <= 6
        check(model, output)
        (aborted,) = llm.submit(llm.prepare(LONG, GREEDY, RequestOptions(tapped_layers=LAYERS)))
        while not aborted.num_output:
            llm.step(1)
        assert all(own.base is None for pieces in aborted.states.values() for _, own in pieces)  # not of all slots
        llm.client.abort([aborted])
        states = llm.collect([aborted]).outputs[0].hidden_states
    whole = output.outputs[0].hidden_states
    for layer in LAYERS:
        assert len(LONG) <= len(states[layer]) < len(whole[layer])
        np.testing.assert_array_equal(states[layer], whole[layer][: len(states[layer])])


def test_they_change_no_answer_and_compile_nothing(model):
    with LLM(model, **OPTIONS) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
        assert llm.engine.runner.model.taps == ()
        assert llm.engine.runner._states == {}
    with LLM(model, tapped_layers=LAYERS, **OPTIONS) as llm:
        tokens = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
        with jax.no_tracing():
            outputs = llm.generate(PROMPTS, GREEDY, tapped_layers=[0])
    assert tokens == expected == [output.outputs[0].token_ids for output in outputs]


def test_refused(model):
    with LLM(model, tapped_layers=[1], **OPTIONS) as llm:
        with pytest.raises(ValueError, match=r"after layer 0: tapped_layers=\(1,\); name it when"):
            llm.generate(LONG, GREEDY, tapped_layers=[0])
        with pytest.raises(TypeError, match="tapped_layers must be numbers of layers"):
            llm.generate(LONG, GREEDY, tapped_layers=["layers.1.residual"])
    with LLM(model, **OPTIONS) as llm, pytest.raises(ValueError, match="there are no tapped_layers"):
        llm.generate(LONG, GREEDY, tapped_layers=[0])
    with pytest.raises(ValueError, match=r"tapped_layers=\(2,\): the model has layers 0 to 1"):
        LLM(model, tapped_layers=[2], **OPTIONS)


@pytest.mark.slow
def test_bfloat16_states_are_given_in_float32(model):
    config, params = model
    own = replace(config, dtype="bfloat16"), jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    with LLM(own, dtype="bfloat16", tapped_layers=[1], steered_layers=[1], **OPTIONS) as llm:
        output = llm.generate([3, 1], GREEDY, tapped_layers=[1], steering=vectors([1]))[0].outputs[0]
    states = output.hidden_states[1]
    assert states.dtype == np.float32
    np.testing.assert_array_equal(states, states.astype(jnp.bfloat16).astype(np.float32))
