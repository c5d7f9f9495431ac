"""Vector code of paged attention on CPUs: each function against float64, each conversion for every stored number."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import rotation

pytest.importorskip("numba", reason="kernels for CPUs need Numba")

from numba import njit, types
from numba.extending import intrinsic

from cpu_kernels import vectors
from cpu_kernels.paged_attention import vectors as attention_vectors
from cpu_kernels.paged_attention.vectors import BFLOAT16, E4M3, E5M2, FLOAT16, FLOAT32, INT8, NIBBLES

LANES = 16


def of_vectors(write):
    """A function of float32 numbers, from one that writes the instructions for 16 of them."""

    @intrinsic
    def apply(context, out, numbers):
        def generate(context, builder, signature, arguments):
            out, numbers = arguments
            vectors.store(builder, write(builder, vectors.load(builder, numbers)), out)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    @njit
    def run(out, numbers, count):
        for index in range(count):
            apply(out + 64 * index, numbers + 64 * index)

    def call(numbers: np.ndarray) -> np.ndarray:
        padded = np.zeros(-(-numbers.size // LANES) * LANES, np.float32)
        padded[: numbers.size] = numbers
        out = np.zeros_like(padded)
        run(out.ctypes.data, padded.ctypes.data, padded.size // LANES)
        return out[: numbers.size]

    return call


@njit
def convert(out, out_stride, stored, stride, rows, vecs, kind):
    attention_vectors.convert(out, out_stride, stored, stride, rows, vecs, kind)


@njit
def score(out, out_stride, q, q_stride, rows, k, k_stride, vecs, factors):
    attention_vectors.score(out, out_stride, q, q_stride, rows, k, k_stride, vecs, factors)


@njit
def add_weighted(sums, sum_stride, weights, weight_stride, rows, v, v_stride, count, vecs):
    attention_vectors.add_weighted(sums, sum_stride, weights, weight_stride, rows, v, v_stride, count, vecs)


def test_exponentials():
    """Within 1 unit in the last place, exactly 1 for 0, and 0 where float32 has no normal number."""
    exp = of_vectors(attention_vectors._exp)
    x = np.concatenate([np.linspace(-87, 0, 400_003), -np.logspace(-30, 0, 5000)]).astype(np.float32)
    expected = np.exp(x.astype(np.float64))
    error = np.abs(exp(x) - expected) / np.spacing(expected.astype(np.float32))
    assert error.max() < 1.01
    special = np.array([0, -0.0, -87.5, -1e30, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(exp(special), np.array([1, 1, 0, 0, 0, np.nan], np.float32))


def test_hyperbolic_tangents():
    tanh = of_vectors(attention_vectors._tanh)
    x = np.concatenate([np.linspace(-12, 12, 100_003), np.logspace(-20, 0, 2000)]).astype(np.float32)
    np.testing.assert_allclose(tanh(x), np.tanh(x.astype(np.float64)), rtol=5e-7)
    assert np.isnan(tanh(np.array([np.nan], np.float32))).all()


@pytest.mark.parametrize(
    ("kind", "dtype", "factor"),
    [
        (FLOAT32, "float32", 1),
        (BFLOAT16, "bfloat16", 1),
        (FLOAT16, "float16", 1),
        (E4M3, "float8_e4m3fn", 256),
        (E5M2, "float8_e5m2", 1),
        (INT8, "int8", 1),
    ],
)
def test_conversions(kind, dtype, factor):
    """Of all stored numbers, subnormal ones, infinities and NaN among them."""
    size = jnp.dtype(dtype).itemsize
    bits = np.arange(2 ** min(8 * size, 16), dtype=np.uint16)
    stored = np.ascontiguousarray(bits.astype(np.uint32) << 16 if size == 4 else bits.astype(f"uint{8 * size}"))
    stored = stored.view(jnp.dtype(dtype))
    found = np.zeros(stored.size, np.float32)
    vecs = 4
    rows = stored.size // (LANES * vecs)
    convert(found.ctypes.data, 256, stored.ctypes.data, 64 * size, rows, vecs, kind)
    with np.errstate(invalid="ignore"):  # signaling NaN
        np.testing.assert_array_equal(found * np.float32(factor), stored.astype(np.float32))


def test_levels_of_four_bits():
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    found = np.zeros((16, 32), np.float32)
    convert(found.ctypes.data, 128, codes.ctypes.data, 16, 16, 1, NIBBLES)
    expected = rotation.levels_of(rotation.unpack_nibbles(jnp.asarray(codes)))
    np.testing.assert_allclose(found * np.float32(rotation.LEVEL_STEP), expected, rtol=1e-7)


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_scores(rows):
    """Of 16 keys that are not next to one another."""
    numbers = np.random.default_rng(rows)
    q, k = (numbers.standard_normal(shape, np.float32) for shape in ((rows, 48), (16, 80)))
    factors, out = numbers.standard_normal(16, np.float32), np.full((rows, 32), np.nan, np.float32)
    score(out.ctypes.data, 128, q.ctypes.data, 192, rows, k.ctypes.data, 320, 3, factors.ctypes.data)
    expected = q.astype(np.float64) @ k[:, :48].astype(np.float64).T * factors
    np.testing.assert_allclose(out[:, :16], expected, atol=3e-6 * math.sqrt(48))
    assert np.isnan(out[:, 16:]).all()


@pytest.mark.parametrize("vecs", [1, 2, 3, 4, 5, 8])
def test_weighted_sums(vecs):
    """A row's sums have the same bits whatever the number of rows is."""
    numbers, width = np.random.default_rng(vecs), LANES * vecs
    weights, v = numbers.standard_normal((7, 16), np.float32), numbers.standard_normal((13, width), np.float32)
    before = numbers.standard_normal((7, width), np.float32)

    def added(first: int, rows: int) -> np.ndarray:
        sums = before[first : first + rows].copy()
        places = sums.ctypes.data, 4 * width, weights[first:].ctypes.data, 64, rows, v.ctypes.data, 4 * width
        add_weighted(*places, 13, vecs)
        return sums

    together = added(0, 7)
    expected = before + weights[:, :13].astype(np.float64) @ v
    np.testing.assert_allclose(together, expected, atol=1e-5)
    for row in range(7):
        np.testing.assert_array_equal(added(row, 1)[0], together[row])
