"""Four bits by rotation: a dense form written from the paper, the bits' independence of how they are computed."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import flash_attention
from pallas_kernels.paged_attention import paged_attention, rotation
from pallas_kernels.paged_attention.layout import from_stored, key_dtype, to_stored, value_dtype
from tests.pallas_kernels.paged_attention.exact import dense_rotation
from tests.pallas_kernels.paged_attention.shapes import FOUR_BITS

WIDTHS = (8, 64, 80, 96, 112, 128, 256)


def normal(count, width, seed=0):
    return np.random.default_rng(seed).standard_normal((count, width), np.float32)


def lloyd_max_error():
    """Mean squared error of the best quantizer of a unit normal to 16 levels: Lloyd's iteration, in float64."""
    levels = np.linspace(-3, 3, 16)
    for _ in range(6000):
        cuts = [-math.inf, *((levels[1:] + levels[:-1]) / 2), math.inf]
        below = np.diff([math.erf(cut / math.sqrt(2)) / 2 for cut in cuts])
        density = np.diff([math.exp(-(cut**2) / 2) / math.sqrt(2 * math.pi) for cut in cuts])
        levels = -density / below
    return 1 - (levels**2 * below).sum()


def dense_stored(x):
    """float64 vectors as they are stored: norm, rotation, nearest level, the scale of the least error, and back."""
    x, matrix = np.asarray(x, np.float64), dense_rotation(x.shape[-1])
    levels = rotation.LEVEL_STEP * np.array([sign * level for sign in (1, -1) for level in rotation.LEVELS])
    unit = x / np.sqrt((x**2).mean(-1, keepdims=True)) @ matrix.T
    nearest = levels[np.abs(unit[..., None] - levels).argmin(-1)]
    rotated = x @ matrix.T
    scale = (rotated * nearest).sum(-1, keepdims=True) / (nearest**2).sum(-1, keepdims=True)
    return (nearest * scale) @ matrix


def stored(x):
    codes, scales = rotation.quantize(jnp.asarray(x))
    return rotation.rotate_back(rotation.levels_of(codes) * scales[..., None])


@pytest.mark.matrix
@pytest.mark.parametrize("width", WIDTHS)
def test_rotations_are_those_of_the_definition(width):
    matrix = dense_rotation(width)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(width), atol=1e-12)
    x = normal(5, width)
    np.testing.assert_allclose(rotation.rotate(jnp.asarray(x)), x @ matrix.T, atol=1e-5)
    np.testing.assert_allclose(rotation.rotate_back(jnp.asarray(x)), x @ matrix, atol=1e-5)
    # What TPUs and GPUs multiply by is what the CPU's sums compute.
    np.testing.assert_allclose(rotation._mix(jnp.asarray(x)), x @ rotation._matrix(width), rtol=1e-4, atol=1e-3)
    # No number stays alone: of a vector with one number each part is small.
    assert np.abs(matrix).max() <= 2 / math.sqrt(width)


def test_levels():
    levels = np.float32(rotation.LEVEL_STEP) * np.array([*rotation.LEVELS, *(-level for level in rotation.LEVELS)])
    np.testing.assert_allclose(rotation.levels_of(jnp.arange(16, dtype=jnp.uint8)), levels, rtol=1e-6)
    # Numbers of float8_e4m3 in any unit that is a power of two.
    assert (np.asarray(rotation.LEVELS).astype(jnp.float8_e4m3fn).astype(np.int64) == rotation.LEVELS).all()


@pytest.mark.matrix
@pytest.mark.parametrize("width", [96, 128])
def test_the_error_is_the_papers(width):
    """Mean squared error at unit variance (arXiv 2504.19874, theorem 1), and the same numbers as the dense form."""
    x = normal(1000, width)
    found = stored(x)
    error = float(jnp.mean((found - x) ** 2))
    print(f"mean squared error of width {width}: {error:.5f}; of Lloyd-Max levels of a normal: {lloyd_max_error():.5f}")
    assert error == pytest.approx(0.009, rel=0.05)
    differs = np.abs(np.asarray(found) - dense_stored(x)).max(-1) > 1e-3
    assert differs.mean() < 0.02  # a number at the border of two levels may be rounded to either


def test_the_error_does_not_depend_on_the_vector():
    """Large channels cost no more than a normal vector's, however large they are."""
    x = normal(500, 128)
    x[:, 7] *= 100
    x[:, 40:44] += 30
    for scale in (1e-20, 1.0, 1e20):
        error = jnp.mean(((stored(x * np.float32(scale)) / scale - x) ** 2).sum(-1) / (x**2).sum(-1))
        assert 0.002 < float(error) < 0.0125


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.optimized
@pytest.mark.parametrize("width", [pytest.param(64, marks=pytest.mark.slow), 96])
def test_bits_are_of_the_vector_alone(width):
    """Whatever the number of rows, their axes, and what the program computes besides."""
    x = jnp.asarray(normal(37, width, seed=3))
    expected = jax.tree.map(np.asarray, rotation.quantize(x))
    whole = jax.jit(rotation.quantize)(x)
    fused = jax.jit(lambda x: rotation.quantize((x * 2.0).reshape(1, 37, 1, width) / 2.0))(x)
    alone = [jax.jit(rotation.quantize)(x[row : row + 1]) for row in range(37)]
    rotated = jax.jit(rotation.rotate)
    np.testing.assert_array_equal(np.concatenate([rotated(x[row : row + 1]) for row in range(37)]), rotated(x))
    for index, wanted in enumerate(expected):
        np.testing.assert_array_equal(whole[index], wanted)
        np.testing.assert_array_equal(fused[index].reshape(wanted.shape), wanted)
        np.testing.assert_array_equal(np.concatenate([one[index] for one in alone]), wanted)


@pytest.mark.slow
def test_what_is_no_number_stays_visible():
    x = jnp.asarray(normal(4, 64)).at[1, 3].set(jnp.nan).at[2, 5].set(-jnp.inf).at[3].set(0)
    back = stored(x)
    assert jnp.isnan(back[1:3]).all()
    assert jnp.isfinite(back[0]).all()
    assert (back[3] == 0).all()
    assert jnp.isfinite(stored(jnp.full((1, 8), 1e30))).all()


def test_nibbles():
    codes = jnp.asarray(np.random.default_rng(0).integers(0, 16, (3, 5, 24)), jnp.uint8)
    packed = rotation.pack_nibbles(codes)
    assert (packed.shape, packed.dtype) == ((3, 5, 12), jnp.uint8)
    np.testing.assert_array_equal(rotation.unpack_nibbles(packed), codes)


@pytest.mark.parametrize("width", [7, 34, 4096])
def test_other_widths_are_refused(width):
    for function in (rotation.rotate, rotation.rotate_back, rotation.quantize):
        with pytest.raises(ValueError, match=f"head_dim is {width}"):
            function(jnp.zeros((2, width)))


@pytest.mark.matrix("int8_int4-xla")
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("cache_dtype", ["int4", "int8_int4"])
def test_attention_is_to_the_vectors_as_stored(implementation, cache_dtype):
    """Against attention to keys and values that are rotated back, which no implementation does."""
    shape = FOUR_BITS[f"prefill_{cache_dtype}"]
    length, _ = shape.lengths[0]  # a prompt of its own
    arguments = shape.arguments("separate")
    options = {**shape.options, "implementation": implementation}
    out, _ = jax.jit(lambda arrays: paged_attention(**arrays, **options))(arguments)
    rows = slice(int(arguments["query_starts"][0]), int(arguments["query_starts"][0]) + length)
    k, v = (
        from_stored(*to_stored(arguments[name][rows], dtype))
        for name, dtype in (("k_new", key_dtype(cache_dtype)), ("v_new", value_dtype(cache_dtype)))
    )
    k, v = (rotation.rotate_back(k) if cache_dtype == "int4" else k), rotation.rotate_back(v)
    options = {"soft_cap": shape.soft_cap, "sinks": arguments.get("sinks")}
    expected = flash_attention(arguments["q"][None, rows], k[None], v[None], **options)[0]
    np.testing.assert_allclose(out[rows], expected, atol=5e-6)
