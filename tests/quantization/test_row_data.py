"""A leaf type of this file alone, with data for each row, goes through products and models: the product knows none."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.cache import attend_as_stored
from jaxinfer.models import bind, init_params
from jaxinfer.quantization import quantize
from jaxinfer.quantization.matmul import KINDS, WeightKind, matmul, rows, transposed
from jaxinfer.quantization.packed import pack_weight, why_not_packed
from jaxinfer.quantization.tree import is_weight, num_parameters
from tests.tiny import OPTIONS, TINY

NUM_ADAPTERS, RANK = 3, 2


@partial(jax.tree_util.register_dataclass, data_fields=["base", "scales", "down", "up", "ids"], meta_fields=[])
@dataclass(frozen=True)
class AdaptedWeight:
    """base [K, N], any weight, with scales of outputs [A, N] and an update of low rank, [A, K, R] @ [A, R, N], for each
    of A adapters; ids int32 [T], the adapter of each row, or [], that of all."""

    base: Any
    scales: jax.Array
    down: jax.Array
    up: jax.Array
    ids: jax.Array

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


def product(x, weight, out_dtype, *, is_transposed=False):
    assert not is_transposed
    ids = jnp.broadcast_to(weight.ids.reshape(x.shape[:-1] if weight.ids.ndim else ()), x.shape[:-1])
    inner = jnp.einsum("...k,...kr->...r", x, weight.down[ids], precision="highest")
    update = jnp.einsum("...r,...rn->...n", inner, weight.up[ids], precision="highest")
    return (matmul(x, weight.base, jnp.float32) * weight.scales[ids] + update).astype(out_dtype)


KINDS[AdaptedWeight] = WeightKind(product)


def adapted(base, ids, seed=0):
    """A weight whose adapter 0 changes nothing."""
    keys = jax.random.split(jax.random.key(seed), 3)
    (inputs, outputs), is_any = base.shape, jnp.arange(NUM_ADAPTERS) > 0
    scales = 1 + 0.3 * jax.random.normal(keys[0], (NUM_ADAPTERS, outputs)) * is_any[:, None]
    down = 0.3 * jax.random.normal(keys[1], (NUM_ADAPTERS, inputs, RANK))
    up = 0.3 * jax.random.normal(keys[2], (NUM_ADAPTERS, RANK, outputs)) * is_any[:, None, None]
    return AdaptedWeight(base, scales, down, up, jnp.asarray(ids, jnp.int32))


def is_linear(path, leaf):
    return path[-1].key == "weight" and path[-2].key.endswith("_proj")


def adapted_params(params, ids):
    def of_leaf(path, leaf):
        return adapted(leaf, ids, seed=len(path) + leaf.shape[-1]) if is_linear(path, leaf) else leaf

    return jax.tree_util.tree_map_with_path(of_leaf, params, is_leaf=is_weight)


def with_ids(params, ids):
    """The parameters for rows of these adapters: no array of a weight is copied."""
    ids = jnp.asarray(ids, jnp.int32)
    return jax.tree.map(
        lambda leaf: replace(leaf, ids=ids) if isinstance(leaf, AdaptedWeight) else leaf, params, is_leaf=is_weight
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


def test_a_batch_of_mixed_rows_is_each_alone(params):
    tokens = jax.random.randint(jax.random.key(3), (4, 9), 0, TINY.vocab_size)
    adapters = [1, 0, 2, 1]
    together = adapted_params(params, np.repeat(adapters, 9))
    found = logits(together, tokens)
    for row, adapter in enumerate(adapters):
        alone = logits(with_ids(together, [adapter] * 9), tokens[row : row + 1])[0]
        np.testing.assert_array_equal(found[row], alone)
    # One prompt is a different one under each adapter; adapter 0 is the model without any.
    each = [logits(with_ids(together, adapter), tokens[:1]) for adapter in range(NUM_ADAPTERS)]
    np.testing.assert_array_equal(each[0], logits(params, tokens[:1]))
    assert min(float(jnp.abs(one - each[0]).max()) for one in each[1:]) > 0.1


@pytest.mark.parametrize("adapter", range(NUM_ADAPTERS))
def test_an_adapter_is_the_model_with_merged_weights(params, adapter):
    tokens = jax.random.randint(jax.random.key(4), (2, 9), 0, TINY.vocab_size)
    own = adapted_params(params, adapter)
    merged = jax.tree.map(
        lambda leaf: leaf.merged(adapter) if isinstance(leaf, AdaptedWeight) else leaf, own, is_leaf=is_weight
    )
    np.testing.assert_allclose(logits(own, tokens), logits(merged, tokens), atol=2e-3)


def test_an_engine_takes_the_type(params):
    """With one adapter for all rows: ids of rows are no argument of its programs yet."""
    sampling, prompts = SamplingParams(max_tokens=8, temperature=0), [[1, 2, 3, 4] * 5, [7, 8]]

    def told(llm):
        return llm.fingerprint(), llm.explain().to_dict()["model"]["parameters"]

    def facts(params):
        with LLM((TINY, params), **OPTIONS, draft="layers:1") as llm:
            answers = [one.outputs[0].token_ids for one in llm.generate(prompts, sampling, use_tqdm=False)]
            return answers, [one.raw_total for one in llm.score(prompts, use_tqdm=False)], *told(llm)

    own = adapted_params(params, 1)
    merged = jax.tree.map(
        lambda leaf: leaf.merged(1) if isinstance(leaf, AdaptedWeight) else leaf, own, is_leaf=is_weight
    )
    (expected, scores, *_), (plain, _, fingerprint, _), found = facts(merged), facts(params), facts(own)
    assert found[0] == expected != plain
    np.testing.assert_allclose(found[1], scores, atol=2e-3)
    assert len({fingerprint, found[2], facts(adapted_params(params, 2))[2]}) == 3
    assert found[3] == num_parameters(params)

    with LLM((TINY, own), **OPTIONS) as llm:
        llm.engine.weights.replace(with_ids(own, 0))
        assert [one.outputs[0].token_ids for one in llm.generate(prompts, sampling, use_tqdm=False)] == plain


def test_other_rows_compile_nothing(params):
    tokens = jnp.zeros((2, 4), jnp.int32)
    own = adapted_params(params, [0] * 4 + [1] * 4)
    logits(own, tokens)
    count = logits._cache_size()
    logits(with_ids(own, [2] * 8), tokens)
    assert logits._cache_size() == count


def test_a_type_that_is_not_registered_for_embeddings_is_refused(params):
    leaf = adapted(params["lm_head"], [0])
    with pytest.raises(ValueError, match="AdaptedWeight is no embedding"):
        rows(leaf, jnp.array([1]))
    with pytest.raises(ValueError, match="AdaptedWeight cannot be transposed"):
        transposed(leaf)


def test_it_is_one_weight_of_the_tree(params):
    own = adapted_params(params, [0])
    assert num_parameters(own) == num_parameters(params)
    assert not is_weight({"weight": own})
