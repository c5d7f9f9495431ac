"""Vectors that requests add to hidden states: the oracle is the plain forward pass of a decoder that adds them between
its layers, for each request alone; engines give its tokens and log-probabilities, in every pass that they have,
whatever the other requests add. Pages are of equal vectors, and a request without any has every bit that it has in an
engine without steered layers.
"""

import asyncio
import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, Coordinate, SamplingParams
from jaxinfer.api.async_engine import AsyncEngine
from jaxinfer.cache import attend_without_cache
from jaxinfer.engine import request as requests
from jaxinfer.engine.request import Request, RequestOptions
from jaxinfer.engine.steering import Steering
from jaxinfer.models import Decoder
from jaxinfer.models.hidden import summed
from tests.pallas_kernels.quick import quick
from tests.random_params import random_params
from tests.speculative.tiny_heads import config_of
from tests.speculative.tiny_heads import random_params as random_head
from tests.tiny import OPTIONS, TINY
from tests.training.test_fixed_forward import FAMILIES

GREEDY = SamplingParams(max_tokens=8, temperature=0, logprobs=1, ignore_eos=True)
LONG = [number * 7 % 97 for number in range(70)]  # more than a chunk
PROMPTS = [LONG, LONG, [5, 6, 7, 8] * 10, [3, 1]]
NUM_SHARED = 64  # tokens of LONG in full pages


def vectors(layers, seed=0, width=TINY.hidden_size, size=2.0):
    random = np.random.default_rng(seed)
    return {layer: size * random.normal(size=width).astype(np.float32) for layer in layers}


STEERING = [vectors([0, 1]), None, vectors([1], 1), vectors([0], 2)]


def model_of(family, size=8):
    config = TINY if family == "tiny" else FAMILIES[family]
    params = random_params(config)
    return config, jax.tree.map(lambda leaf: leaf * size if leaf.ndim >= 2 else leaf, params)


@pytest.fixture(scope="module")
def model():
    return model_of("tiny")


class Reference(Decoder):
    """A decoder that adds vectors behind its layers; it has no other code for them."""

    def _run_layer(self, number, *arguments):
        x = summed(super()._run_layer(number, *arguments))
        return x + self.extra[number] if number in self.extra else x


@partial(jax.jit, static_argnums=0)
def reference(config, params, tokens, extra):
    decoder = Reference(config, params, None)
    decoder.extra = extra
    hidden = decoder(tokens[None], jnp.arange(len(tokens))[None], attend_without_cache)
    return jax.nn.log_softmax(decoder.logits(hidden)[0])


def check(model, output, steering, is_greedy=True):
    """The answers' tokens have the log-probabilities of the reference, and are its best ones."""
    prompt = output.prompt_token_ids
    for answer in output.outputs:
        tokens = np.array([*prompt, *answer.token_ids])
        logprobs = reference(*model, np.pad(tokens, (0, 96 - len(tokens))), steering or {})[: len(tokens)]
        for number, (token, entries) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
            row = logprobs[len(prompt) + number - 1]
            assert int(row.argmax()) == token or not is_greedy
            assert entries[token].logprob == pytest.approx(float(row[token]), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "Gemma 3", "Qwen3-MoE"])
def test_families(family):
    model = model_of(family, 3)
    width, last = model[0].hidden_size, model[0].num_layers - 1
    steering = [vectors([0, last], 3, width), None, vectors([last], 4, width), vectors([0], 5, width)]
    with LLM(model, steered_layers=(0, last), **OPTIONS) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, steering=steering)
    for output, added in zip(outputs, steering, strict=True):
        check(model, output, added)
    assert outputs[0].outputs[0].token_ids != outputs[1].outputs[0].token_ids


VARIANTS = {
    "plain": {},
    "one at a time": {"max_seqs": 1},
    "chunks of 16": {"prefill_chunk": 16},
    "one shape": {"deterministic": True},
    "n-grams": {"draft": "ngram"},
    "layers": {"draft": "layers:1"},
    "trees of layers": {"draft": "layers:1", "draft_tree": (2, 2)},
    "n-grams, one shape": {"draft": "ngram", "deterministic": True},
    "head": {"draft": "eagle3"},
    "contiguous": {"cache": "contiguous", "num_pages": None},
    "host layers": {"offload": 1},
    "two devices": {"mesh": "model=2"},
    "two parts of a prompt": {"mesh": "sequence=2"},
    "two replicas": {"mesh": "data=2"},
    "snapkv": {"kv_policy": "snapkv(128)"},
    "expected attention": {"kv_policy": "expected_attention(128)"},
}


@pytest.mark.parametrize("variant", quick(VARIANTS, "plain", "layers"))
def test_every_pass(model, variant):
    options = dict(VARIANTS[variant])
    if "draft" in options and "draft_tree" not in options:
        options["num_draft_tokens"] = 3
    if options.get("draft") == "eagle3":
        config = config_of("eagle3", TINY)
        options["draft"] = (config, random_head(config))
    params = replace(GREEDY, max_tokens=20)
    with LLM(model, steered_layers=(0, 1), **OPTIONS | options) as llm:
        outputs = llm.generate(PROMPTS, params, steering=STEERING)
        if variant == "layers":  # drafted from steered states too
            assert llm.engine.speculation_stats.accepted > 0
    for output, added in zip(outputs, STEERING, strict=True):
        check(model, output, added)


@pytest.mark.slow
def test_preempted_and_several_answers(model):
    params, prompt, steering = replace(GREEDY, max_tokens=40), PROMPTS[2], STEERING[:3]
    with LLM(model, steered_layers=(0, 1), **OPTIONS | {"num_pages": 12}) as llm:
        outputs = llm.generate([prompt] * 3, params, steering=steering)
        assert llm.engine.scheduler.counters.num_preemptions > 0
        sampled = SamplingParams(n=2, temperature=1.5, seed=1, logprobs=1, max_tokens=6)
        several = llm.generate(prompt, sampled, steering=steering[2])[0]
    for output, added in zip(outputs, steering, strict=True):
        check(model, output, added)
    check(model, several, steering[2], is_greedy=False)


def entries_of(output):
    return [(token, entry.logprob) for step in output.outputs[0].logprobs for token, entry in step.items()]


@pytest.mark.slow
def test_a_request_without_steering_keeps_its_bits(model):
    """Beside steered ones, and in an engine without steered layers."""
    plain = [PROMPTS[1], PROMPTS[3]]
    with LLM(model, **OPTIONS) as llm:
        expected = [entries_of(output) for output in llm.generate(plain, GREEDY)]
    with LLM(model, steered_layers=(0, 1), **OPTIONS) as llm:
        outputs = llm.generate([*plain, *PROMPTS[:2]], GREEDY, steering=[None, None, STEERING[0], STEERING[2]])
    assert [entries_of(output) for output in outputs[:2]] == expected


@pytest.mark.slow
def test_a_request_keeps_its_bits_in_bfloat16(model):
    """In one engine of one shape: alone, and beside requests with other vectors. XLA leaves out other roundings where a
    program adds vectors, so an engine without steered layers may have other bits."""
    config, params = model
    own = replace(config, dtype="bfloat16"), jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    with LLM(own, dtype="bfloat16", deterministic=True, steered_layers=(0, 1), **OPTIONS) as llm:
        each = [
            llm.generate(*job, steering=added)[0] for *job, added in zip(PROMPTS, [GREEDY] * 4, STEERING, strict=True)
        ]
        together = llm.generate(PROMPTS, GREEDY, steering=STEERING)
    assert [entries_of(output) for output in together] == [entries_of(output) for output in each]


def reused(llm, steering, prompt=LONG, **options):
    request = llm.prepare(prompt, GREEDY, RequestOptions(steering=steering, **options))
    [answer] = llm.submit(request)
    for _ in llm.client.run({answer: None}):
        pass
    return answer.output, answer.num_reused


def test_pages_are_of_equal_vectors(model):
    first, second = vectors([0, 1]), vectors([0, 1], 9)
    with LLM(model, steered_layers=(0, 1), **OPTIONS) as llm:
        kinds = [None, first, second, {0: first[0]}, {1: first[0]}]
        fresh = [reused(llm, steering) for steering in kinds]
        assert [count for _, count in fresh] == [0] * len(kinds)
        again = [reused(llm, steering) for steering in kinds]
        assert again == [(tokens, NUM_SHARED) for tokens, _ in fresh]
        assert reused(llm, {layer: vector.astype(np.float64).tolist() for layer, vector in first.items()})[1] > 0
        assert reused(llm, first, cache_salt="other") == (fresh[1][0], 0)


@pytest.mark.slow
def test_pages_of_files_are_of_equal_vectors(model, tmp_path):
    options = {**OPTIONS, "host_cache_gib": 0.01, "prefix_store": str(tmp_path), "steered_layers": (0, 1)}
    with LLM(model, **options) as llm:
        expected = reused(llm, STEERING[0])[0]
    for steering, is_there in ((STEERING[2], False), (None, False), (STEERING[0], True)):
        with LLM(model, **options) as llm:
            tokens, count = reused(llm, steering)
            assert (count > 0, llm.engine.scheduler.counters.disk_read_tokens > 0) == (is_there, is_there)
            assert (tokens == expected) == is_there


def test_without_the_salt_pages_are_wrong(model, monkeypatch):
    """The check of equal vectors notices pages that were made with others."""
    monkeypatch.setattr(requests.SequenceState, "salt", property(lambda self: self.request.options.cache_salt))
    with LLM(model, steered_layers=(0, 1), **OPTIONS) as llm:
        reused(llm, None)
        assert reused(llm, STEERING[0])[1] == NUM_SHARED
        output = llm.generate([[*LONG[:-1], 4]], GREEDY, steering=STEERING[0])[0]
    with pytest.raises(AssertionError):
        check(model, output, STEERING[0])


def test_vectors_of_all_requests(model):
    """They are added to those of a request; scores and embeddings have them too."""
    base, own = vectors([0]), vectors([0, 1], 1)
    both = {0: base[0] + own[0], 1: own[1]}
    with LLM(model, steering=base, steered_layers=[1], **OPTIONS) as llm:
        assert llm.engine.spec.steered_layers == (0, 1)
        assert "steered layers" in str(llm.explain())
        check(model, llm.generate(LONG, GREEDY)[0], base)
        output = llm.generate(LONG, GREEDY, steering=own)[0]
        check(model, output, both)
        coordinate = Coordinate.from_dict(json.loads(json.dumps(llm.coordinate(output).to_dict())))
        others = [replace(coordinate, steering=given) for given in ({}, {"0": coordinate.steering["1"]}, {"east": {}})]
        same, none, other, damaged = llm.replay([coordinate, *others])
        assert (same.is_equal, none.is_equal, other.is_equal) == (True, False, False)
        assert "steering is damaged" in damaged.refused[0]
        score, fingerprint = llm.score(LONG)[0], llm.fingerprint()
    found = reference(*model, np.array(LONG), base)
    np.testing.assert_allclose(score.raw, [found[place - 1, LONG[place]] for place in range(1, len(LONG))], atol=2e-5)
    with LLM(model, steered_layers=[0], **OPTIONS) as llm:
        assert llm.fingerprint() != fingerprint


def test_taps_of_a_pass_of_its_own(model):
    name = "layers.0.residual"
    with LLM(model, steered_layers=(0, 1), **OPTIONS) as llm:
        outputs = llm.generate([[3, 1]] * 2, GREEDY, steering=[STEERING[3], None], taps=[name])
    difference = outputs[0].taps[name][:2] - outputs[1].taps[name][:2]
    np.testing.assert_allclose(difference, [STEERING[3][0]] * 2, atol=1e-6)


def test_nothing_compiles_for_other_vectors(model):
    with LLM(model, steered_layers=(0, 1), **OPTIONS) as llm:
        llm.generate(PROMPTS, GREEDY, steering=STEERING)
        with jax.no_tracing():
            llm.generate(PROMPTS, GREEDY, steering=[vectors([0, 1], number) for number in range(4)])


def test_programs_have_arguments_for_declared_layers_alone(model):
    """Without steered layers no program has an argument more."""
    with LLM(model, **OPTIONS) as llm:
        plain = jax.tree.leaves(llm.engine.runner._slots)
        assert llm.engine.runner._slots.steering is None
    with LLM(model, steered_layers=(1,), **OPTIONS) as llm:
        assert len(jax.tree.leaves(llm.engine.runner._slots)) == len(plain) + 1
        assert set(llm.engine.runner._slots.steering) == {"1"}


async def _streamed(model, steering):
    async with AsyncEngine(model, steered_layers=(0, 1), **OPTIONS) as engine:
        return [delta async for delta in engine.generate([3, 1], GREEDY, steering=steering)][-1].output


@pytest.mark.slow
def test_other_methods(model):
    check(model, asyncio.run(_streamed(model, STEERING[3])), STEERING[3])
    with LLM(model, steered_layers=(0, 1), **OPTIONS) as llm:
        expected = llm.generate([3, 1], GREEDY, steering=STEERING[3])[0].outputs[0].token_ids
        streamed = [token for delta in llm.stream([3, 1], GREEDY, steering=STEERING[3]) for token in delta.token_ids]
        each = dict(llm.generate_each([("key", [3, 1], GREEDY, RequestOptions(steering=STEERING[3]))]))
    assert streamed == expected == each["key"].outputs[0].token_ids


REFUSED = [
    ({0: np.zeros(5, np.float32)}, ValueError, "layer 0: the vector has 5 numbers, hidden states 32"),
    ({0: np.zeros((2, 32), np.float32)}, ValueError, r"one axis, got the shape \(2, 32\)"),
    ({0: np.full(32, np.nan, np.float32)}, ValueError, "32 of 32 numbers are NaN or infinite"),
    ({0: np.full(32, 1e300)}, ValueError, "infinite in float32"),
    ({0: np.zeros(32, np.int32)}, TypeError, "must be floating point, got int32"),
    ({0: [[1.0], [1.0, 2.0]]}, TypeError, "no vector of numbers"),
    ({7: np.zeros(32, np.float32)}, ValueError, "layer 7: the model has layers 0 to 1"),
    ({1: np.zeros(32, np.float32)}, ValueError, r"layer 1: steered_layers=\(0,\); name it when"),
    ({-1: np.zeros(32, np.float32)}, ValueError, "layers count from 0"),
    ({"0": np.zeros(32, np.float32)}, TypeError, "got the key '0'"),
    ({}, TypeError, "a mapping from layers to vectors"),
    ("east", TypeError, "a mapping from layers to vectors"),
    ([None, None], ValueError, "2 mappings of steering for 1 prompts"),
]


@pytest.fixture(scope="module")
def first_layer(model):
    with LLM(model, steered_layers=[0], **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize(("steering", "error", "match"), REFUSED)
def test_refused(first_layer, steering, error, match):
    with pytest.raises(error, match=match):
        first_layer.generate([3, 1], GREEDY, steering=steering)


def test_refused_of_a_request_and_an_option(model, first_layer):
    with pytest.raises(TypeError, match="embed has no argument 'steering'"):
        first_layer.embed("text", steering={})
    request = Request([3, 1], GREEDY, 1, 0, steering=Steering(vectors([1])))
    with pytest.raises(ValueError, match=r"steering of layer 1: steered_layers=\(0,\)"):
        first_layer.submit(request)
    for given, match in (((2,), "has layers 0 to 1"), ((0, 0), "different numbers"), ("01", "different numbers")):
        with pytest.raises(ValueError, match=match):
            LLM(model, steered_layers=given, **OPTIONS)
    with pytest.raises(ValueError, match="hidden states 32"):
        LLM(model, steering=vectors([0], width=31), **OPTIONS)
