"""One suite for every implementation, against dense float64 attention; then what dense attention cannot show."""

import contextlib
import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.flash_attention import flash_attention, xla
from tests.pallas_kernels.flash_attention.harness import check_gradients
from tests.pallas_kernels.flash_attention.shapes import SMALL, FlashShape
from tests.pallas_kernels.quick import quick
from tests.pallas_kernels.relative_norm import assert_near

# Error of one rounding; a sum of n products of unit size errs by about this times sqrt(n).
ROUNDING = {"float32": 1e-6, "bfloat16": 2**-8}


def tolerance(shape: FlashShape) -> float:
    """For the outputs of a call: values of unit size, and scores that are sums of head_dim products."""
    return ROUNDING[shape.dtype] * math.sqrt(shape.head_dim)


def assert_close(found, expected, atol: float):
    """Equal up to `atol`, with -inf and NaN in the same places."""
    found, expected = (np.asarray(x).astype(np.float32) for x in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol, strict=True)


# Each path through an implementation, and together every feature. A case takes one to two seconds, of the GPU ten.
ALWAYS = {
    "xla": (*("keys_not_a_multiple", "window_17", "segments_window_sinks", "long_chunk", "everything"),),
    "pallas_tpu": ("long_chunk", "head_dim_80", "bf16_everything"),
    "pallas_gpu": ("segments_window_sinks",),
}
SUITE = quick([(name, case) for name in ALWAYS for case in SMALL], *((n, c) for n in ALWAYS for c in ALWAYS[n]))
# Properties that the kernels have by the way they block; the gradient, and XLA's blocks, are one for all.
ON_XLA, ON_TPU = (
    pytest.mark.parametrize("attend", quick(("xla", "pallas_tpu", "pallas_gpu"), name), indirect=True)
    for name in ("xla", "pallas_tpu")
)


@pytest.mark.matrix("xla-keys_not_a_multiple", "xla-long_chunk", "xla-window_17")
@pytest.mark.parametrize(("attend", "name"), SUITE, indirect=["attend"])
def test_equals_dense_attention(name, attend, expected):
    shape = attend.nearest(SMALL[name])
    # What lies beyond the lengths is NaN for the implementation, and only for it.
    found = attend(shape, shape.arguments(stale=None if shape.lengths is None else np.nan))
    out, dense = (found, expected(shape)) if not shape.return_lse else (found[0], expected(shape)[0])
    assert out.dtype == shape.dtype
    assert_close(out, dense, tolerance(shape))
    assert_near(out.reshape(-1, *out.shape[2:]), dense.reshape(-1, *out.shape[2:]), shape.dtype)
    if shape.return_lse:
        # Scores are float32 whatever the operands; a bfloat16 product of them is exact.
        assert_close(found[1], expected(shape)[1], tolerance(replace(shape, dtype="float32")))


def test_dense_attention_is_the_textbook_formula():
    # One query head with everything, written out in float64.
    shape = FlashShape(7, heads=(1, 1), window=3, soft_cap=2.0, sinks=True, scale=0.7)
    arguments = shape.arguments()
    q, k, v = (np.asarray(arguments[name], np.float64)[0, :, 0] for name in "qkv")
    scores = 2.0 * np.tanh(q @ k.T * 0.7 / 2.0)
    is_visible = np.tri(7, dtype=bool) & ~np.tri(7, k=-3, dtype=bool)
    weights = np.where(is_visible, np.exp(scores), 0)
    total = weights.sum(-1) + np.exp(np.asarray(arguments["sinks"], np.float64))
    out, lse = shape.call("reference")(arguments)
    np.testing.assert_allclose(out[0, :, 0], weights @ v / total[:, None], atol=1e-6)
    np.testing.assert_allclose(lse[0, :, 0], np.log(total), atol=1e-6)


@pytest.mark.matrix
@ON_TPU
def test_the_comparison_catches_a_window_that_is_one_key_short(attend, expected):
    shape = attend.nearest(FlashShape(50, window=16))
    out, _ = attend(replace(shape, window=15), shape.arguments())
    assert np.abs(np.asarray(out, np.float64) - expected(shape)[0]).max() > 10 * tolerance(shape)


@pytest.mark.slow
@pytest.mark.matrix
@ON_TPU
def test_a_query_without_keys_gives_zeros(attend):
    shape = attend.nearest(FlashShape(3, 140, offset=(0, 0), lengths=(0, 3)))
    out, lse = attend(shape, shape.arguments(stale=np.nan))
    assert np.array_equal(out[0], np.zeros_like(out[0]))
    assert np.all(np.isneginf(lse[0]))
    assert np.all(out[1] != 0)


def test_the_interpreter_flags_a_copy_that_nobody_waits_for(race_check):
    def kernel(x_ref, out_ref, scratch_ref, semaphore, *, waits):
        copy = pltpu.make_async_copy(x_ref, scratch_ref, semaphore)
        copy.start()
        if waits:
            copy.wait()
        out_ref[...] = scratch_ref[...]
        if not waits:
            copy.wait()

    # JAX 0.10 notes a race, 0.12 raises on it.
    race = (AssertionError, jax.errors.JaxRuntimeError)
    x = jnp.ones((8, 128))
    for waits in (True, False):
        with contextlib.nullcontext() if waits else pytest.raises(race), race_check():
            run = pl.pallas_call(
                partial(kernel, waits=waits),
                out_shape=x,
                in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
                scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
            )
            jax.block_until_ready(jax.jit(run)(x))


RAGGED = FlashShape(40, 200, heads=(2, 1), offset=(0, 30, 150), lengths=(40, 70, 190))


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "attend",
    [
        pytest.param("xla", marks=pytest.mark.optimized),
        "pallas_tpu",
        pytest.param("pallas_gpu", marks=pytest.mark.slow),
    ],
    indirect=True,
)
def test_rows_are_independent_to_the_bit_and_a_nan_is_never_hidden(attend):
    shape = attend.nearest(RAGGED)
    arguments = shape.arguments()
    clean, clean_lse = attend(shape, arguments)
    # Every query sees key 0, so none of the poisoned row may come out finite.
    for name in "qkv":
        poisoned = dict(arguments)
        poisoned[name] = arguments[name].at[(1,) if name == "q" else (1, 0)].set(jnp.nan)
        out, lse = attend(shape, poisoned)
        for row in (0, 2):
            assert np.array_equal(out[row], clean[row])
            assert np.array_equal(lse[row], clean_lse[row])
        assert np.isnan(out[1].astype(jnp.float32)).all(), name
        assert np.isnan(lse[1]).all() == (name != "v")


@pytest.mark.slow
@ON_TPU
def test_a_row_is_the_same_bits_beside_any_neighbours(attend):
    rng = np.random.default_rng(0)
    first = None
    for _ in range(4):
        others = [int(n) for n in rng.integers(0, 160, 2)]
        offsets = [max(n - 9, 0) for n in others]
        shape = attend.nearest(FlashShape(9, 170, window=40, sinks=True, lengths=(70, *others), offset=(61, *offsets)))
        arguments = shape.arguments(stale=np.nan)
        if first is None:
            first, expected = arguments, attend(shape, arguments)
            continue
        assert not np.array_equal(first["q"], arguments["q"])
        for name in ("q", "k", "v"):
            arguments[name] = arguments[name].at[0].set(first[name][0])
        arguments["sinks"] = first["sinks"]
        for one, other in zip(attend(shape, arguments), expected, strict=True):
            assert np.array_equal(one[0], other[0])


@pytest.mark.slow
@ON_XLA
@pytest.mark.optimized
def test_unused_capacity_changes_no_bit(attend):
    num_queries = 20
    offset = (0, 40, 8)
    lengths = tuple(start + num_queries for start in offset)
    shape = attend.nearest(FlashShape(num_queries, 80, offset=offset, lengths=lengths, window=30))
    arguments = shape.arguments(stale=np.nan)
    results = []
    for capacity in (200, 333):
        padding = ((0, 0), (0, capacity - 80), (0, 0), (0, 0))
        wider = {name: jnp.pad(arguments[name], padding, constant_values=jnp.nan) for name in ("k", "v")}
        results.append(attend(shape, arguments | wider))
    for one, other in zip(*results, strict=True):
        assert np.array_equal(one, other)


GRADIENTS = {
    "one_token": SMALL["one_token"],
    "plain": FlashShape(61, heads=(4, 2), head_dim=16, batch=2, return_lse=False),
    "fewer_keys": FlashShape(40, 10, head_dim=16, causal=False),
    "window_past_the_keys": FlashShape(40, 10, head_dim=16, window=5),
    "everything": replace(SMALL["everything"], head_dim=16),
    "empty_row": replace(SMALL["empty_row"], head_dim=16),
    "bf16": FlashShape(61, head_dim=16, dtype="bfloat16"),
}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", quick(GRADIENTS, "everything"))
def test_gradients_equal_those_of_dense_attention(name, attend_xla):
    check_gradients(GRADIENTS[name], attend_xla)


@pytest.mark.slow
@ON_TPU
def test_gradients_through_every_implementation(attend):
    # One gradient serves all; what it needs of an implementation is a right log-sum-exp.
    shape = attend.nearest(FlashShape(20, 140, window=100, soft_cap=3.0, sinks=True, offset=(110,), return_lse=False))
    check_gradients(shape, attend)


def test_gradient_beyond_a_rows_length_is_zero_whatever_lies_there(attend_xla):
    shape = FlashShape(9, 60, head_dim=16, offset=(0, 20), lengths=(9, 29), return_lse=False)

    @jax.jit
    def gradients(arguments):
        return jax.grad(lambda q, k, v: shape.call("xla")(arguments | {"q": q, "k": k, "v": v}).sum(), (0, 1, 2))(
            *(arguments[name] for name in "qkv")
        )

    clean, stale = gradients(shape.arguments()), gradients(shape.arguments(stale=np.nan))
    for one, other in zip(clean, stale, strict=True):
        assert np.array_equal(one, other)
    assert not np.any(clean[1][0, 9:])


@pytest.mark.slow
def test_equals_dense_attention_with_the_blocks_of_production():
    shape = FlashShape(xla.QUERY_BLOCK + 3, head_dim=8, window=300)
    arguments = shape.arguments()
    for one, other in zip(shape.call("xla")(arguments), shape.call("reference")(arguments), strict=True):
        assert_close(one, other, tolerance(shape))


def temp_bytes(function, tokens: int) -> int:
    operands = [jax.ShapeDtypeStruct((1, tokens, heads, 16), jnp.float32) for heads in (2, 1, 1)]
    return jax.jit(function).lower(*operands).compile().memory_analysis().temp_size_in_bytes


def attend_by_xla(q, k, v):
    return flash_attention(q, k, v, implementation="xla")


@pytest.mark.slow
@pytest.mark.optimized
def test_memory_is_linear_in_the_number_of_tokens():
    tokens = 32768
    operand_bytes = 4 * tokens * 16 * 4
    size = temp_bytes(attend_by_xla, tokens)
    assert size < tokens * tokens * 4 / 200
    assert size < 4 * operand_bytes
    assert size < 2.2 * temp_bytes(attend_by_xla, tokens // 2)


@pytest.mark.slow
@pytest.mark.optimized
def test_memory_of_the_gradient_is_linear_in_the_number_of_tokens():
    tokens = 32768
    size = temp_bytes(jax.grad(lambda *x: attend_by_xla(*x).sum(), (0, 1, 2)), tokens)
    assert size < 10 * 4 * tokens * 16 * 4


def test_blocks_nobody_sees_are_not_computed(attend_xla):
    # The loop's bounds, seen through what it would read: the keys of blocks outside them are NaN and visible to none.
    shape = FlashShape(1, 160, head_dim=16, window=4, offset=(103, 140), lengths=(104, 141))
    arguments = shape.arguments()
    is_outside = (jnp.arange(160) < 96) | (jnp.arange(160) >= 144)
    for name in ("k", "v"):
        arguments[name] = jnp.where(is_outside[:, None, None], jnp.nan, arguments[name])
    assert np.isfinite(attend_xla(shape, arguments)[0]).all()
    is_outside = is_outside | (jnp.arange(160) < 112)
    arguments["v"] = jnp.where(is_outside[:, None, None], jnp.nan, arguments["v"])
    assert np.isnan(attend_xla(shape, arguments)[0]).any()


def test_features_that_are_off_leave_nothing_in_the_program():
    shape = FlashShape(1, 160, head_dim=16, offset=(100,), lengths=(101,), return_lse=False)
    text = str(jax.make_jaxpr(shape.call("xla"))(shape.arguments()))
    for operation in ("tanh", " log ", "custom_jvp"):
        assert operation not in text
    assert "tanh" in str(jax.make_jaxpr(replace(shape, soft_cap=2.0).call("xla"))(shape.arguments()))
