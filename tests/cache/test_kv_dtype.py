"""What a cache stores: names, bytes counted from arrays, static scales, and that bits do not depend on the writing."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxinfer import parallel
from jaxinfer.cache import (
    CachedAttention,
    KVScales,
    PagedAttention,
    applied_scales,
    attend_as_stored,
    check_kv_dtype,
    check_rotated,
    init_cache,
    init_paged_cache,
    kv_dtype_name,
    page_bytes,
    stored_dtype,
)
from jaxinfer.models import ModelConfig, RopeConfig
from pallas_kernels import flash_attention
from pallas_kernels.paged_attention import unpack

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=40,
    hidden_size=64,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rope=RopeConfig(rotary_dim=64),
)
PAGE, NUM_TOKENS = 4, 13
NAMES = ("float32", "bfloat16", "float16", "int8", "int8_int4", "int4", "fp8_e4m3", "fp8_e5m2")
TABLE = jnp.array([[3, 1, 5, 2]], jnp.int32)


def operands(seed=0, size=1.0):
    rng = np.random.default_rng(seed)
    heads = (CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.num_kv_heads)
    return [jnp.asarray(size * rng.standard_normal((NUM_TOKENS, n, CONFIG.head_dim), np.float32)) for n in heads]


@partial(jax.jit, static_argnames=("dtype", "chunks", "mesh"))
def attend_paged(dtype, chunks, q, k, v, scales=None, mesh=None):
    """The first layer's output and pages, the tokens written in chunks."""
    cache = init_paged_cache(CONFIG, 7, PAGE, dtype, mesh=mesh, scales=scales)
    outs, done = [], 0
    for count in chunks:
        rows = slice(done, done + count)
        done += count
        attend = PagedAttention(cache, TABLE, *(jnp.array([n], jnp.int32) for n in (0, count, done)), mesh=mesh)
        outs.append(attend(0, q[rows], k[rows], v[rows], None))
        cache = attend.cache
    return jnp.concatenate(outs), cache


@partial(jax.jit, static_argnames=("dtype", "chunks"))
def attend_contiguous(dtype, chunks, q, k, v, scales=None):
    cache = init_cache(CONFIG, 3, 16, dtype, scales)
    outs, done = [], 0
    for count in chunks:
        rows = slice(done, done + count)
        attend = CachedAttention(cache, jnp.array([1]), jnp.array([done]), jnp.array([count]), count)
        outs.append(attend(0, q[None, rows], k[None, rows], v[None, rows], None)[0])
        cache, done = attend.cache, done + count
    return jnp.concatenate(outs), cache


@cache
def run(attend, name, chunks):
    """Output and cache of the first operands."""
    return attend(stored_dtype(name, "float32"), chunks, *operands())


WHOLE, CUT = (NUM_TOKENS,), (5, 1, 7)


def test_names():
    for name in NAMES:
        assert check_kv_dtype(name) == name
        assert kv_dtype_name(stored_dtype(name, jnp.bfloat16)) == name
    assert stored_dtype("auto", jnp.bfloat16) == "bfloat16"
    for wrong in ("fp8", "int3", "int4_int8", "float8_e4m3fn", "", None, 8):
        with pytest.raises(
            ValueError, match=r"not one of auto, float32, bfloat16, float16, int8, int8_int4, int4, fp8_e4m3, fp8_e5m2"
        ):
            check_kv_dtype(wrong)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("float32", 32),
        ("bfloat16", 16),
        ("fp8_e4m3", 8),
        ("int8", 8 + 32 / 64),
        ("int8_int4", 6 + 32 / 64),
        ("int4", 4 + 32 / 64),
    ],
)
def test_bytes_of_a_token_are_those_of_the_arrays(name, bits):
    """8 bits are a quarter of float32; int8 and int4 have 4 bytes more for each token and head of 64."""
    dtype = stored_dtype(name, "float32")
    values = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim
    cache = init_paged_cache(CONFIG, 5, 16, dtype, "separate")
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) == 5 * 16 * values * bits / 8
    assert page_bytes(CONFIG, 16, dtype, "separate") == 16 * values * bits / 8
    rows = init_cache(CONFIG, 3, 20, dtype)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(rows)) == 3 * 20 * values * bits / 8


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "attend"),
    [
        ("int8", attend_paged),
        ("int8", attend_contiguous),
        ("int4", attend_paged),
        ("int8_int4", attend_contiguous),
        ("fp8_e4m3", attend_paged),
        *(pytest.param(name, attend_paged, marks=pytest.mark.slow) for name in ("bfloat16", "fp8_e5m2")),
        *(
            pytest.param(name, attend_contiguous, marks=pytest.mark.slow)
            for name in ("bfloat16", "fp8_e4m3", "fp8_e5m2")
        ),
    ],
)
def test_what_is_attended_to_is_what_is_stored(attend, name):
    dtype, tensors = stored_dtype(name, "float32"), operands()
    attend_whole = jax.jit(lambda *tensors: attend_as_stored(dtype)(0, *(x[None] for x in tensors), None)[0])
    expected = attend_whole(*tensors)
    for chunks in (WHOLE, CUT):
        found, _ = run(attend, name, chunks)
        np.testing.assert_allclose(found, expected, atol=2e-6, rtol=0)
    exact = flash_attention(*(x[None] for x in tensors))[0]
    error = float(jnp.abs(expected - exact).max())
    step = {"bfloat16": 2**-8, "int8": 2**-6, "int8_int4": 2**-3, "int4": 2**-3, "fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3}
    assert error <= 4 * step[name]
    assert error > 0


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "name",
    [
        *("int8", "int4", "fp8_e4m3"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("bfloat16", "int8_int4", "fp8_e5m2")),
    ],
)
def test_stored_bits_do_not_depend_on_how_a_token_was_written(name):
    assert_bits_do_not_depend_on_the_writing(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bfloat16", "int8", "int8_int4", "int4", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.optimized
def test_nor_do_they_in_programs_compiled_as_for_users(name):
    for program in (attend_paged, attend_contiguous):
        program.clear_cache()
    run.cache_clear()
    assert_bits_do_not_depend_on_the_writing(name)


def assert_bits_do_not_depend_on_the_writing(name):
    for attend in (attend_paged, attend_contiguous):
        whole, cut = (jax.tree.leaves(run(attend, name, chunks)[1]) for chunks in (WHOLE, CUT))
        for one, other in zip(whole, cut, strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    # Nor on the kind of cache.
    pages, rows = (unpack(run(attend, name, WHOLE)[1].layers[0], 2, 64) for attend in (attend_paged, attend_contiguous))
    in_pages = np.asarray(pages.k, np.float32)[np.asarray(TABLE[0])].reshape(16, 2, -1)[:NUM_TOKENS]
    np.testing.assert_array_equal(in_pages, np.asarray(rows.k, np.float32)[1, :NUM_TOKENS])


SCALES = KVScales(np.array([[8.0, 12.0], [1, 1]], np.float32), np.array([[6.0, 7.0], [1, 1]], np.float32))


@pytest.mark.parametrize("attend", [attend_paged, attend_contiguous])
def test_static_scales_hold_what_fp8_alone_would_clip(attend):
    """Keys and values of up to 3,000, whose scores are divided by as much."""
    q, k, v = operands()
    k, v = k * 800, v * 600
    q = q / 800
    dtype = stored_dtype("fp8_e4m3", "float32")
    exact = flash_attention(q[None], k[None], v[None])[0]
    scaled, cache = attend(dtype, WHOLE, q, k, v, SCALES)
    clipped, _ = attend(dtype, WHOLE, q, k, v)
    assert float(jnp.abs(scaled - exact).max()) < 0.25 * float(jnp.abs(clipped - exact).max())
    # What is stored times its scale is the key, but for rounding.
    stored = unpack(cache.layers[0], 2, 64)
    first = stored.k[TABLE[0, 0], 0] if attend is attend_paged else stored.k[1, 0]
    back = np.asarray(first, np.float32) * SCALES.keys[0][:, None]
    limit = 448 * SCALES.keys[0][:, None]
    np.testing.assert_allclose(back, np.clip(k[0], -limit, limit), rtol=2**-4, atol=0.01)
    expected = attend_as_stored(dtype, SCALES)(0, q[None], k[None], v[None], None)[0]
    np.testing.assert_allclose(scaled, expected, rtol=1e-5, atol=1e-3)


def test_scales_of_powers_of_two_change_nothing():
    """Where nothing is clipped or too small, a stored value's rounding does not see them. Each head has its own."""
    twos = KVScales(np.array([[2.0, 0.5], [1, 1]], np.float32), np.array([[0.5, 4.0], [1, 1]], np.float32))
    q, k, v = operands()
    k, v = (jnp.sign(x) * jnp.clip(jnp.abs(x), 0.1, None) for x in (k, v))
    plain, _ = attend_paged("float8_e4m3fn", (NUM_TOKENS,), q, k, v)
    scaled, _ = attend_paged("float8_e4m3fn", (NUM_TOKENS,), q, k, v, twos)
    np.testing.assert_allclose(scaled, plain, atol=1e-6, rtol=0)


def test_scales_on_a_mesh():
    mesh = Mesh(np.array(jax.devices()[:2]), (parallel.MODEL,))
    tensors = operands()
    alone, _ = attend_paged("float8_e4m3fn", WHOLE, *tensors, SCALES)
    cut, cache = attend_paged("float8_e4m3fn", WHOLE, *tensors, SCALES, mesh=mesh)
    np.testing.assert_allclose(cut, alone, atol=1e-6, rtol=0)
    assert cache.scales is not None


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["int8_int4", "int4"])
def test_four_bits_on_a_mesh(dtype):
    mesh = Mesh(np.array(jax.devices()[:2]), (parallel.MODEL,))
    tensors = operands()
    alone, one = run(attend_paged, dtype, WHOLE)
    cut, cache = attend_paged(dtype, WHOLE, *tensors, mesh=mesh)
    np.testing.assert_allclose(cut, alone, atol=1e-6, rtol=0)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), cache.layers, one.layers)
    assert cache.layers[0].k.sharding.shard_shape(cache.layers[0].k.shape)[2] == 1


def test_models_that_cannot_have_four_bits():
    check_rotated(CONFIG, "int4")
    check_rotated(replace(CONFIG, head_dim=81), "int8")
    with pytest.raises(ValueError, match=r"kv_dtype='int8_int4': head_dim is 81; two numbers share a byte"):
        check_rotated(replace(CONFIG, head_dim=81), "int8_int4")


def test_scales_as_checkpoints_have_them():
    scales = KVScales.of_layers(CONFIG, [0.5, [2.0, 3.0]], [[0.25], np.float32(1)])
    np.testing.assert_array_equal(scales.keys, [[0.5, 0.5], [2, 3]])
    np.testing.assert_array_equal(scales.values, [[0.25, 0.25], [1, 1]])
    assert applied_scales(scales, "float8_e5m2", CONFIG) is scales
    assert applied_scales(scales, "int8", CONFIG) is None
    with pytest.raises(ValueError, match=r"\[layers, heads\] = \[2, 2\] for this model, got \[1, 2\]"):
        applied_scales(scales.first(1), "float8_e4m3fn", CONFIG)
    for keys, message in (
        ([1.0], "1 layers have a k_scale, and the model has 2"),
        ([1.0, [1, 2, 3]], "k_scale of layer 1 has 3 numbers, not 1 or 2"),
        ([np.nan, 1.0], "k_scale of layer 0 must be finite and positive"),
        ([1.0, 0.0], "k_scale of layer 1 must be finite and positive"),
    ):
        with pytest.raises(ValueError, match=message):
            KVScales.of_layers(CONFIG, keys, [1.0, 1.0])


@pytest.mark.matrix
@pytest.mark.parametrize("attend", [attend_paged, attend_contiguous])
@pytest.mark.parametrize("name", ["int8", "int8_int4", "int4", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_key_is_not_hidden(attend, name, value):
    """An infinity must not be stored as the largest number."""
    q, k, v = operands()
    out, _ = attend(stored_dtype(name, "float32"), (NUM_TOKENS,), q, k.at[4, 1, 3].set(value), v)
    assert np.isfinite(out[:4]).all()
    assert np.isnan(out[4:, 2:]).all()
    huge, _ = attend(stored_dtype(name, "float32"), (NUM_TOKENS,), q, k.at[4, 1, 3].set(1e30), v)
    assert np.isfinite(huge).all()


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["bfloat16", "fp8_e4m3", "int8", "int4"])
def test_a_contiguous_cache_is_updated_in_place(name):
    """No copy of the cache beside it, but for a layer's rows as they are read."""
    cache = init_cache(CONFIG, 4, 512, stored_dtype(name, "float32"))
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    q, k, v = (x[:4, None] for x in operands())

    def step(cache, rows, starts, lengths):
        attend = CachedAttention(cache, rows, starts, lengths, 1)
        return attend.cache, attend(0, q, k, v, None)

    memory = jax.jit(step, donate_argnums=0).lower(cache, jnp.arange(4), *[jnp.ones(4, jnp.int32)] * 2).compile()
    assert memory.memory_analysis().alias_size_in_bytes >= num_bytes
