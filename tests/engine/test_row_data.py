"""A leaf type of this file alone, with adapters for each row, goes through products, models and engines: the product
knows none.

One answer: a request among others with other adapters is what it is alone, in every pass that an engine has.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams, parallel
from jaxinfer.cache import attend_as_stored
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.request import Pooling, Request, RequestOptions, SequenceState
from jaxinfer.models import Decoder, MoEConfig, bind, init_params
from jaxinfer.quantization import quantize
from jaxinfer.quantization.matmul import KINDS, WeightKind, matmul, rows, transposed
from jaxinfer.quantization.packed import pack_weight, why_not_packed
from jaxinfer.quantization.tree import for_rows, is_weight, num_adapters, num_parameters
from jaxinfer.speculative import ModelDraft
from tests.pallas_kernels.quick import quick
from tests.tiny import OPTIONS, TINY

NUM_ADAPTERS, RANK = 3, 2


@partial(jax.tree_util.register_dataclass, data_fields=["base", "scales", "down", "up", "ids"], meta_fields=[])
@dataclass(frozen=True)
class AdaptedWeight:
    """base [K, N], any weight, with scales of outputs [A, N] and an update of low rank, [A, K, R] @ [A, R, N], for each
    of A adapters; ids int32 [T], the adapter of each row, or [], that of all; None for 0."""

    base: Any
    scales: jax.Array
    down: jax.Array
    up: jax.Array
    ids: jax.Array | None = None

    scheme = None

    @property
    def shape(self):
        return self.base.shape

    @property
    def ndim(self):
        return self.base.ndim

    def merged(self, adapter):
        """The weight [K, N] of one adapter."""
        base = self.base if isinstance(self.base, jax.Array) else self.base.dequantize()
        return base * self.scales[adapter] + self.down[adapter] @ self.up[adapter]


def ids_of(weight, shape):
    """The adapter of each row of so many."""
    ids = jnp.int32(0) if weight.ids is None else weight.ids
    return jnp.broadcast_to(ids.reshape(shape if ids.ndim else ()), shape)


def product(x, weight, out_dtype, *, is_transposed=False):
    assert not is_transposed
    ids = ids_of(weight, x.shape[:-1])
    inner = jnp.einsum("...k,...kr->...r", x, weight.down[ids], precision="highest")
    update = jnp.einsum("...r,...rn->...n", inner, weight.up[ids], precision="highest")
    return (matmul(x, weight.base, jnp.float32) * weight.scales[ids] + update).astype(out_dtype)


def embedded(table, indices, dtype):
    ids = ids_of(table, indices.shape)
    update = jnp.einsum("...r,...rn->...n", table.down[ids, indices], table.up[ids], precision="highest")
    return (rows(table.base, indices, jnp.float32) * table.scales[ids] + update).astype(dtype)


def with_ids(leaf, ids):
    return replace(leaf, ids=jnp.asarray(ids, jnp.int32))


KINDS[AdaptedWeight] = WeightKind(product, embedded, for_rows=with_ids, num_adapters=lambda leaf: leaf.scales.shape[0])


def adapted(base, ids=None, seed=0):
    """A weight whose adapter 0 changes nothing."""
    keys = jax.random.split(jax.random.key(seed), 3)
    (inputs, outputs), is_any = base.shape, jnp.arange(NUM_ADAPTERS) > 0
    scales = 1 + 0.3 * jax.random.normal(keys[0], (NUM_ADAPTERS, outputs)) * is_any[:, None]
    down = 0.3 * jax.random.normal(keys[1], (NUM_ADAPTERS, inputs, RANK))
    up = 0.3 * jax.random.normal(keys[2], (NUM_ADAPTERS, RANK, outputs)) * is_any[:, None, None]
    weight = AdaptedWeight(base, scales, down, up)
    return weight if ids is None else with_ids(weight, ids)


def is_adapted(path):
    return path[-1].key in ("embed", "lm_head") or path[-2].key.endswith("_proj")


def adapted_params(params, ids=None):
    """Parameters with adapters in every linear layer, the embedding and the head."""

    def of_leaf(path, leaf):
        return adapted(leaf, seed=len(path) + leaf.shape[-1]) if is_adapted(path) else leaf

    made = jax.tree_util.tree_map_with_path(of_leaf, params, is_leaf=is_weight)
    return made if ids is None else for_rows(made, ids)


def merged_params(params, adapter):
    """Plain parameters of one adapter."""
    return jax.tree.map(
        lambda leaf: leaf.merged(adapter) if isinstance(leaf, AdaptedWeight) else leaf, params, is_leaf=is_weight
    )


@pytest.fixture(scope="module")
def params():
    found = init_params(TINY, jax.random.key(0), jnp.float32)
    return jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, found)


@jax.jit
def logits(params, tokens):
    """float32 [B, L, V] of int32 tokens [B, L]."""
    decoder = bind(TINY, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return decoder.logits(decoder(tokens, positions, attend_as_stored("float32", None)))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["plain", "int8", "int4-g32", "packed"])
def test_each_row_is_multiplied_by_its_own_weight(kind):
    weight = jax.random.normal(jax.random.key(1), (64, 48)) * 0.1
    if kind == "packed":
        if (reason := why_not_packed(weight)) is not None:
            pytest.skip(reason)
        base = pack_weight(weight)
    else:
        base = weight if kind == "plain" else quantize(weight, kind)
    ids = [0, 2, 1, 1, 0, 2]
    leaf, x = adapted(base, ids), jax.random.normal(jax.random.key(2), (2, 3, 64))
    found = jax.jit(matmul)(x, leaf).reshape(6, 48)
    for row, (adapter, one) in enumerate(zip(ids, x.reshape(6, 64), strict=True)):
        np.testing.assert_allclose(found[row], one @ leaf.merged(adapter), atol=2e-5)
    assert matmul(x.astype(jnp.bfloat16), leaf).dtype == jnp.bfloat16


@pytest.mark.slow
def test_a_batch_of_mixed_rows_is_each_alone(params):
    tokens = jax.random.randint(jax.random.key(3), (4, 9), 0, TINY.vocab_size)
    adapters = [1, 0, 2, 1]
    together = adapted_params(params, np.repeat(adapters, 9))
    found = logits(together, tokens)
    for row, adapter in enumerate(adapters):
        alone = logits(for_rows(together, [adapter] * 9), tokens[row : row + 1])[0]
        np.testing.assert_array_equal(found[row], alone)
    # One prompt is a different one under each adapter; adapter 0 is the model without any.
    each = [logits(for_rows(together, adapter), tokens[:1]) for adapter in range(NUM_ADAPTERS)]
    np.testing.assert_array_equal(each[0], logits(params, tokens[:1]))
    assert min(float(jnp.abs(one - each[0]).max()) for one in each[1:]) > 0.1


@pytest.mark.parametrize("adapter", range(NUM_ADAPTERS))
def test_an_adapter_is_the_model_with_merged_weights(params, adapter):
    tokens = jax.random.randint(jax.random.key(4), (2, 9), 0, TINY.vocab_size)
    own = adapted_params(params, adapter)
    np.testing.assert_allclose(logits(own, tokens), logits(merged_params(own, adapter), tokens), atol=2e-3)


def test_other_rows_compile_nothing(params):
    tokens = jnp.zeros((2, 4), jnp.int32)
    own = adapted_params(params, [0] * 4 + [1] * 4)
    logits(own, tokens)
    count = logits._cache_size()
    logits(for_rows(own, [2] * 8), tokens)
    assert logits._cache_size() == count


def test_a_type_that_is_not_registered_for_embeddings_is_refused(params, monkeypatch):
    monkeypatch.setitem(KINDS, AdaptedWeight, WeightKind(product))
    leaf = adapted(params["lm_head"])
    with pytest.raises(ValueError, match="AdaptedWeight is no embedding"):
        rows(leaf, jnp.array([1]))
    with pytest.raises(ValueError, match="AdaptedWeight cannot be transposed"):
        transposed(leaf)


def test_it_is_one_weight_of_the_tree(params):
    own = adapted_params(params)
    assert num_parameters(own) == num_parameters(params)
    assert not is_weight({"weight": own})
    assert (num_adapters(own), num_adapters(params)) == (NUM_ADAPTERS, 0)


# Engines.

# Two prompts under all adapters, one that is longer than a chunk, and one that repeats itself, for n-grams.
PROMPTS = [[5, 6, 7, 8] * 10, [number * 7 % 97 for number in range(70)], [3, 1]]
PARAMS = [
    {"temperature": 0},
    {"temperature": 0.7, "seed": 3, "logprobs": 1},
    {"temperature": 0, "repetition_penalty": 1.3},
]
JOBS = [
    (prompt, SamplingParams(max_tokens=4 + 5 * ((number + adapter) % 4), **PARAMS[(number + adapter) % 3]), adapter)
    for number, prompt in enumerate(PROMPTS)
    for adapter in range(NUM_ADAPTERS)
]


def answers_to(llm, requests):
    """The answers to requests that run together."""
    answers = [answer for request in requests for answer in llm.submit(request)]
    for _ in llm.client.run(dict.fromkeys(answers)):
        pass
    llm.engine.scheduler.check()
    return answers


def tokens_of(llm, jobs=JOBS):
    requests = [replace(llm.prepare(prompt, params), adapter=adapter) for prompt, params, adapter in jobs]
    return [answer.output for answer in answers_to(llm, requests)]


def short_request(adapter=0):
    return Request(PROMPTS[2], SamplingParams(temperature=0), max_tokens=1, seed=0, adapter=adapter)


def of_merged(model, found, jobs=JOBS, **options):
    """Results of `found(llm, jobs)` for the jobs of each adapter, by a plain model that has it merged, in order."""
    results = {}
    for adapter in range(NUM_ADAPTERS):
        own = [number for number, job in enumerate(jobs) if job[-1] == adapter]
        with LLM((TINY, merged_params(model[1], adapter)), **OPTIONS | options) as llm:
            results |= dict(zip(own, found(llm, [(*jobs[number][:-1], 0) for number in own]), strict=True))
    return [results[number] for number in range(len(jobs))]


@pytest.fixture(scope="module")
def model(params):
    return TINY, adapted_params(params)


@pytest.fixture(scope="module")
def expected(model):
    found = of_merged(model, tokens_of)
    assert len({tuple(one) for one in found}) == len(found)
    return found


VARIANTS = {
    "plain": {},
    "one at a time": {"max_seqs": 1},
    "chunks of 16": {"prefill_chunk": 16},
    "one shape": {"deterministic": True},
    "n-grams": {"draft": "ngram"},
    "layers": {"draft": "layers:1"},
    "n-grams, one shape": {"draft": "ngram", "deterministic": True},
    "trees of layers": {"draft": "layers:1", "draft_tree": (2, 2)},
    "contiguous": {"cache": "contiguous", "num_pages": None},
    "host layers": {"offload": 1},
}


@pytest.mark.matrix("layers", "plain")
@pytest.mark.parametrize("variant", quick(VARIANTS, "plain", "layers", "n-grams"))
def test_mixed_rows_are_each_with_merged_weights(model, expected, variant):
    with LLM(model, **OPTIONS | VARIANTS[variant]) as llm:
        assert tokens_of(llm) == expected
        if "draft" in VARIANTS[variant]:
            assert llm.engine.speculation_stats.accepted > 0


COMPACTED = [("snapkv(48)", None), ("snapkv(48)", "ngram"), ("expected_attention(48)", None)]


@pytest.mark.parametrize(("policy", "draft"), quick(COMPACTED, COMPACTED[0]))
def test_mixed_prompts_that_are_compacted(model, policy, draft):
    with LLM(model, **OPTIONS, kv_policy=policy, draft=draft) as llm:
        assert tokens_of(llm) == of_merged(model, tokens_of, kv_policy=policy)


def jobs_of_lengths(*counts):
    """One prompt under each adapter, with so many tokens for its answer."""
    params = [SamplingParams(max_tokens=count, temperature=0) for count in counts]
    return [(PROMPTS[0], one, adapter) for adapter, one in enumerate(params)]


@pytest.mark.slow
def test_preempted(model):
    jobs = jobs_of_lengths(40, 40, 40)
    with LLM(model, **OPTIONS | {"num_pages": 10}) as llm:
        assert tokens_of(llm, jobs) == of_merged(model, tokens_of, jobs)
        assert llm.engine.scheduler.counters.num_preemptions > 0


@pytest.mark.all_buckets
def test_moved_to_other_slots(model):
    jobs, moved = jobs_of_lengths(16, 32, 48), []
    with LLM(model, **OPTIONS) as llm:
        run = llm.engine.runner.run
        llm.engine.runner.run = lambda plan: moved.extend(plan.moves) or run(plan)
        assert tokens_of(llm, jobs) == of_merged(model, tokens_of, jobs)
    assert moved


def test_prefixes_are_of_one_adapter(model):
    params = SamplingParams(max_tokens=6, temperature=0)
    with LLM(model, **OPTIONS) as llm:

        def run(adapter, salt=""):
            request = llm.prepare(PROMPTS[1], params, RequestOptions(cache_salt=salt))
            [answer] = answers_to(llm, [replace(request, adapter=adapter)])
            return answer.output, answer.num_reused

        fresh = [run(adapter) for adapter in range(NUM_ADAPTERS)]
        assert [num_reused for _, num_reused in fresh] == [0] * NUM_ADAPTERS
        assert [run(adapter) for adapter in range(NUM_ADAPTERS)] == [(tokens, 64) for tokens, _ in fresh]
        assert run(1, "other") == (fresh[1][0], 0)
    # Without an adapter, pages have the salt that they have in an engine without any.
    request = replace(short_request(), options=RequestOptions(cache_salt="mine"))
    assert SequenceState(request).salt == "mine"


def test_scores_and_vectors(model):
    """Raw and processed log-probabilities, pooled states and logits of tokens, of mixed prompts in one step."""
    processed, plain = SamplingParams(temperature=0.6, top_k=20), SamplingParams(max_tokens=1)

    kinds = (plain, processed, Pooling(), Pooling("mean"), Pooling(token_ids=(3, 5)))
    jobs = [(prompt, kind, adapter) for prompt in PROMPTS for kind in kinds for adapter in range(NUM_ADAPTERS)]

    def made(llm, prompt, kind):
        if isinstance(kind, Pooling):
            return llm.client.prepare_pooled(prompt, plain, kind, RequestOptions(), what="it")
        return llm.client.prepare_score(prompt, None, kind, what="it")

    def found(llm, jobs):
        requests = [replace(made(llm, prompt, kind), adapter=adapter) for prompt, kind, adapter in jobs]
        for answer in answers_to(llm, requests):
            raw = [next(iter(one.values())).logprob for one in answer.prompt_logprobs if one]
            yield np.array([*raw, *answer.processed_logprobs, *(() if answer.pooled is None else answer.pooled)])

    with LLM(model, **OPTIONS) as llm:
        for one, other in zip(found(llm, jobs), of_merged(model, found, jobs), strict=True):
            assert len(one) > 0
            np.testing.assert_allclose(one, other, atol=1e-3)


def test_warm_up_compiles_all(model, expected):
    with LLM(model, **OPTIONS) as llm:
        llm.warm_up()
        with jax.no_tracing():
            assert tokens_of(llm) == expected


def test_adapters_that_there_are_not(params, model):
    with LLM(model, **OPTIONS) as llm:
        for adapter in (3, -1):
            with pytest.raises(ValueError, match=f"adapter {adapter} .* hold adapters 0 to 2"):
                llm.submit(short_request(adapter=adapter))
        assert not llm.engine.has_work
    with LLM((TINY, params), **OPTIONS) as llm, pytest.raises(ValueError, match=r"adapter 1 .* hold no adapters"):
        llm.submit(short_request(adapter=1))


@pytest.mark.slow
def test_without_adapters_nothing_is_passed(params, model):
    """Each argument of the programs is one that there is without adapters, and a decoder is not bound again."""

    def arguments(model):
        with LLM(model, **OPTIONS, draft="ngram") as llm:
            runner = llm.engine.runner
            assert (runner._slots.adapters is None) == (llm.engine.spec.num_adapters == 0)
            names = ("step", "decode", "speculation", "scores")
            lowered = {one.name: one.lower() for one in runner.all_programs if one.name.startswith(names)}
            return {name: len(jax.tree.leaves(one.in_avals)) for name, one in lowered.items()}, len(
                runner.weights.value
            )

    (plain, num_plain), (own, num_own) = arguments((TINY, params)), arguments(model)
    for name, count in own.items():  # of slots, their adapters and where these start
        assert count - plain[name] == (1 if name.startswith("scores") else 2) + num_own - num_plain, name
    decoder = Decoder(TINY, params, None)
    assert decoder.for_rows(None) is decoder


def test_weights_with_adapters_are_replaced_and_fingerprinted(params, model, expected):
    other = adapted_params(jax.tree.map(lambda leaf: leaf * 1.1, params))
    with LLM((TINY, other), **OPTIONS) as llm:
        before = llm.fingerprint()
        assert tokens_of(llm) != expected
        llm.engine.weights.replace(model[1])
        assert tokens_of(llm) == expected
        assert llm.fingerprint() != before
        assert llm.explain().to_dict()["model"]["parameters"] == num_parameters(params)


def test_weights_that_cannot_have_adapters_are_named(params, model):
    head = adapted(params["lm_head"])
    fewer = replace(head, scales=head.scales[:2])
    with pytest.raises(ValueError, match=r"the same number of them: .* 3, lm_head 2"):
        LLM((TINY, model[1] | {"lm_head": fewer}), **OPTIONS)
    config = replace(TINY, moe=MoEConfig(num_experts=4, num_experts_per_token=2, expert_size=16, layers=(0, 1)))
    experts = jax.tree_util.tree_map_with_path(
        lambda path, leaf: replace(head, base=leaf) if path[-2:-1] and path[-2].key == "up_proj" else leaf,
        init_params(config, jax.random.key(0), jnp.float32),
    )
    with pytest.raises(ValueError, match=r"experts.up_proj.weight: adapters are for matrices, .* \[4, 32, 16\]"):
        LLM((config, experts), **OPTIONS)
    draft = ModelDraft("small", *model)
    with pytest.raises(ValueError, match="draft 'small' has weights with adapters"):
        Engine(TINY, params, EngineOptions(**OPTIONS), draft=draft)
    with pytest.raises(ValueError, match=r"embed: a AdaptedWeight runs on one device, without a mesh"):
        LLM(model, **OPTIONS, mesh="data=1")
    with pytest.raises(ValueError, match="adapters run without a mesh, not on one of 1 devices"):
        Engine(*model, EngineOptions(**OPTIONS), mesh=parallel.make_mesh("data=1"))
