"""Moments of a prompt's queries, computed from stored keys, against NumPy's of the queries of one dense pass."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache import KVScales, init_paged_cache
from jaxinfer.cache.policy.prompt_queries import PromptQueries, prompt_moments, stored_prompt
from jaxinfer.cache.policy.scores import NUM_SINKS, QueryMoments
from jaxinfer.models import RopeConfig, bind, init_params
from jaxinfer.models.rope import rotation
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.paged_attention.layout import append
from tests.cache.policy.test_compaction import CASES, HEADS, LENGTH, TABLE, WIDTH, stored_numbers, stored_prompt_pages
from tests.pallas_kernels.quick import quick
from tests.tiny import TINY

PAGE, NUM_TOKENS, BLOCK = 8, 61, 16
YARN = RopeConfig(kind="yarn", rotary_dim=4, factor=4.0, original_length=32, attention_factor=1.7)
ROPES = {"all": TINY.rope, "half, with a factor": YARN, "none": None}


def before_rotation(rope: RopeConfig | None, q: np.ndarray) -> np.ndarray:
    """Queries [T, Hq, K] at positions 0 and on, from pairs of numbers as complex ones."""
    if rope is None:
        return q
    cos, sin = (np.asarray(part, np.float64) for part in rotation(rope, jnp.arange(q.shape[0])))
    half = cos.shape[-1]
    pairs = (q[..., :half] + 1j * q[..., half : 2 * half]) / (cos + 1j * sin)[:, None]
    return np.concatenate([pairs.real, pairs.imag, q[..., 2 * half :]], axis=-1)


@pytest.mark.matrix
@pytest.mark.parametrize("name", quick(ROPES, "half, with a factor"))
def test_blocks_add_up_to_the_moments_of_all_queries(name):
    """Where a block begins or a prompt ends does not matter; nothing is read that was not stored."""
    rope = ROPES[name]
    rotated = None if rope is not None else (False,) * TINY.num_layers
    config = replace(TINY, rope=rope or TINY.rope, rotated_layers=rotated)
    params = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, init_params(config, jax.random.key(3)))
    tokens, dense = jax.random.randint(jax.random.key(4), (NUM_TOKENS,), 0, 97), []

    def attend(layer, q, k, v, window):
        dense.append((q, k, v))
        return flash_attention(q[None], k[None], v[None])[0]

    bind(config, params)(tokens, jnp.arange(NUM_TOKENS), attend)
    cache: Any = init_paged_cache(config, 12, PAGE, "float32")
    table = jnp.array([5, 9, 2, 7, 11, 3, 1, 4, 6])
    at = jnp.arange(9 * PAGE)
    layers = []
    for pages, (_, k, v) in zip(cache.layers, dense, strict=True):
        k, v = (jnp.pad(x, ((0, len(at) - len(x)), (0, 0), (0, 0)), constant_values=jnp.nan) for x in (k, v))
        layers.append(append(pages, k, v, table[at // PAGE], at % PAGE))
    cache = replace(cache, layers=tuple(layers))

    @jax.jit
    def moments_before(end):
        padded = jnp.pad(tokens, (0, 80 - NUM_TOKENS))
        return prompt_moments(bind(config, params), cache, (table,), padded, end, BLOCK)

    for end in (NUM_TOKENS, 48, 33, NUM_SINKS + 1, 2):
        for layer, found in enumerate(moments_before(end)):
            queries = before_rotation(config.rope_of(layer), np.asarray(dense[layer][0], np.float64))[NUM_SINKS:end]
            assert found.count == max(end - NUM_SINKS, 0)
            mean = queries.mean(0) if len(queries) else np.zeros(queries.shape[1:])
            spread = np.einsum("nhi,nhj->hij", queries - mean, queries - mean)
            np.testing.assert_allclose(found.mean, mean, atol=1e-5 * np.abs(dense[layer][0]).max())
            np.testing.assert_allclose(found.spread, spread, atol=1e-5 * max(1, np.abs(spread).max()))


def test_a_large_mean_costs_no_digits():
    """Biases of queries may be large; sums of squares would have lost their spread."""
    queries = np.random.default_rng(0).standard_normal((600, 1, 2)).astype(np.float32) + np.float32(3000)
    found = QueryMoments.none(1, 2)
    for start in range(0, 600, 200):
        found = found.add(jnp.asarray(queries[start : start + 200]))
    wanted = np.cov(queries[:, 0].astype(np.float64).T, bias=True)
    np.testing.assert_allclose(found.spread[0] / found.count, wanted, atol=1e-3)


def test_the_last_tokens_are_counted_with_those_before():
    """Also where a prompt is so short that the first ones are among them."""
    config, positions = replace(TINY, num_layers=1), jnp.arange(2, 34)
    queries = PromptQueries(config, (QueryMoments.none(4, 8),), positions, jnp.int32(34)).of_layer(0)
    assert queries.is_counted.tolist() == [False, False] + [True] * 30
    future: Any = queries.future
    np.testing.assert_allclose(future, rotation(config.rope, 34 + jnp.arange(512)), atol=1e-6)
    assert queries.add(jnp.ones((32, 4, 8))).count == 30


@pytest.mark.parametrize(("dtype", "layout"), quick(CASES))
def test_what_is_read_is_what_attention_reads(dtype, layout):
    shape, pages, _ = stored_prompt_pages(dtype, layout)
    for scales in (None, KVScales(jnp.array([0.5, 3]), jnp.array([2, 0.25]))):
        found = stored_prompt(pages, jnp.array(TABLE), (HEADS, WIDTH), scales, jnp.float32)
        factors = (None, None) if scales is None else (scales.keys, scales.values)
        for one, wanted, factor in zip(found, jax.device_get(stored_numbers(pages, shape)), factors, strict=True):
            wanted = wanted[TABLE].reshape(-1, HEADS, WIDTH)[:LENGTH]
            wanted = wanted if factor is None else wanted * np.asarray(factor)[:, None]
            np.testing.assert_allclose(np.asarray(one)[:LENGTH], wanted, rtol=1e-6)
