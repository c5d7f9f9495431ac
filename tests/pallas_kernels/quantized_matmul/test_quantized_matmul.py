"""Products with quantized weights: each form on each platform against float64 over the dequantized weight."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.quantization import RECIPES, NestedScales, QuantizedArray, Scheme, quantize
from pallas_kernels.quantized_matmul import choose, form, make_spec, quantized_matmul, xla
from pallas_kernels.quantized_matmul.xla import quantize_tokens
from tests.pallas_kernels.quick import quick

FORMATS = ["int8", "int8-g32-asym", "int4-asym", "int4-g32", "nf4", "mxfp4", "fp8", "fp8-tensor", "fp8-block"]
# Codes with minima: bits and the inputs of a group.
AFFINE = {"affine4-g32": (4, 32), "affine5-g16": (5, 16), "affine4": (4, 256), "affine5": (5, 256)}
K, N = 256, 48


def weight(name: str, inputs: int = K) -> QuantizedArray:
    if name in AFFINE:
        return affine(*AFFINE[name], inputs)
    return quantize(jax.random.normal(jax.random.key(1), (inputs, N)) * 0.02, name)


def affine(bits: int, group: int, inputs: int = K) -> QuantizedArray:
    codes, scales, minima = jax.random.split(jax.random.key(bits), 3)
    shape = (-(-inputs // group), N)
    values = jax.random.randint(codes, (inputs, N), 0, 2**bits)
    return QuantizedArray(
        (values - 8).astype(jnp.int4) if bits == 4 else values.astype(jnp.int8),
        jax.random.uniform(scales, shape) * 0.01,
        scheme=Scheme("affine", bits, (group, 1)),
        minima=-jax.random.uniform(minima, shape) * 0.1,
    )


def arrays(w: QuantizedArray):
    scales = w.scales.dequantize() if isinstance(w.scales, NestedScales) else w.scales
    return w.values, scales, w.zeros, w.codebook, w.minima


@partial(jax.jit, static_argnames="platform")
def product(x: jax.Array, w: QuantizedArray, platform: str) -> jax.Array:
    """As it is computed on a platform, here."""
    scheme = w.scheme
    spec = make_spec(x, w.values, w.zeros, w.codebook, w.minima, block=scheme.block, activations=scheme.activations)
    return xla.matmul(x, *arrays(w), spec, platform)


PLATFORMS = ("cpu", "tpu", "gpu")
PRODUCTS = [(name, platform) for name in (*FORMATS, *AFFINE) for platform in PLATFORMS]
# Each format once, and each platform's form of a product with groups.
ALWAYS = [(name, "cpu") for name in (*FORMATS, *AFFINE)]
ALWAYS += [(name, "tpu") for name in ("int4-g32", "nf4", "affine4-g32")] + [("int8-g32-asym", "gpu")]


@pytest.mark.matrix("int4-asym-cpu")
@pytest.mark.parametrize(("name", "platform"), quick(PRODUCTS, *ALWAYS))
def test_float32_products(name, platform):
    w = weight(name)
    for rows in (1, 9):
        x = jax.random.normal(jax.random.key(rows), (rows, K))
        expected = np.asarray(x, np.float64) @ np.asarray(w.dequantize(), np.float64)
        np.testing.assert_allclose(product(x, w, platform), expected, atol=3e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", quick([*FORMATS, "affine4-g32"], "int4-g32", "fp8"))
def test_bfloat16_products_round_no_more_than_a_bfloat16_weight_does(name):
    """A product of x and the weight rounded to bfloat16 errs by about 2^-9 of the size of its terms. XLA:CPU cannot
    multiply groups of bfloat16, so the TPU's form runs in float32 only."""
    w = weight(name)
    x = jax.random.normal(jax.random.key(0), (9, K)).astype(jnp.bfloat16)
    exact = np.asarray(x, np.float64) @ np.asarray(w.dequantize(), np.float64)
    terms = np.sqrt(np.square(np.asarray(x, np.float64)) @ np.square(np.asarray(w.dequantize(), np.float64)))
    assert (np.abs(product(x, w, "gpu") - exact) <= 4 * 2.0**-9 * terms).all()


@pytest.mark.matrix
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("name", [*quick(["int8-g32-asym", "nf4"], "int8-g32-asym"), "affine4-g32"])
def test_a_tied_head_with_groups_is_the_dequantized_one(name, platform):
    """[V, D] with groups along D, at few rows and at many."""
    w = weight(name)
    values, scales, zeros, codebook, minima = arrays(w)
    head = [None if one is None else one.T for one in (values, scales, zeros, minima)]
    stored = (head[0], head[1], head[2], codebook, head[3])
    for rows in (1, 4, 20):
        x = jax.random.normal(jax.random.key(rows), (rows, K)).astype(jnp.bfloat16)
        spec = make_spec(
            x, head[0], head[2], codebook, head[3], block=w.scheme.block, activations=None, is_transposed=True
        )
        found = jax.jit(lambda x, stored, spec=spec: xla.matmul(x, *stored, spec, platform))(x, stored)
        weights = np.asarray(w.dequantize(), np.float64)
        exact = np.asarray(x, np.float64) @ weights
        terms = np.sqrt(np.square(np.asarray(x, np.float64)) @ np.square(weights))
        # Up to 16 rows weights are not rounded; a GPU rounds those of more to bfloat16.
        rounding = 4 * 2.0**-9 if platform == "gpu" and rows > 16 else 1e-5
        assert (np.abs(found - exact) <= rounding * terms).all()


ACTIVATIONS = [
    (name, platform) for name in ("w8a8", "w8a8-fp8", "w8a8-fp8-block") for platform in ("cpu", "tpu", "gpu")
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "platform"), quick(ACTIVATIONS, ("w8a8", "cpu"), ("w8a8-fp8-block", "tpu")))
def test_quantized_activations(name, platform):
    """Exactly the product of what both sides were quantized to."""
    w = weight(name)
    for rows in (1, 9):
        x = jax.random.normal(jax.random.key(rows), (rows, K)) * jnp.arange(1, rows + 1)[:, None]
        codes, scales = quantize_tokens(x, RECIPES[name].activations)
        expected = (np.asarray(codes, np.float64) * np.asarray(scales)) @ np.asarray(w.dequantize(), np.float64)
        tolerance = 1e-5 if platform != "gpu" or "block" not in name else 2.0**-7  # the weight in bfloat16 there
        np.testing.assert_allclose(product(x, w, platform), expected, atol=tolerance * np.abs(expected).max())


def test_int8_sums_are_exact():
    """4,096 products of 127 * 127 are beyond what float32 counts in ones."""
    inputs = 4096
    x = jnp.full((2, inputs), 1.0).at[:, ::2].set(126 / 127)
    scheme = jax.eval_shape(lambda: weight("w8a8", inputs)).scheme
    w = QuantizedArray(jnp.full((inputs, N), 127, jnp.int8), jnp.ones((1, N)), scheme=scheme)
    whole = 127 * (inputs // 2) * (127 + 126)
    assert (product(x, w, "cpu") == np.float32(whole) * np.float32(1 / 127)).all()


def test_tokens_are_quantized_each_by_itself():
    x = jnp.array([[1.0, -2.0, 0.5], [1e6, 3e5, 0.0], [0.0, 0.0, 0.0], [jnp.nan, 1.0, 2.0]])
    codes, scales = quantize_tokens(x, "int8")
    np.testing.assert_array_equal(codes[:3], [[64, -127, 32], [127, 38, 0], [0, 0, 0]])
    np.testing.assert_allclose(scales[:3, 0], [2 / 127, 1e6 / 127, 1e-5 / 127], rtol=1e-6)
    assert np.isnan(scales[3])  # and so is the token's product, which the engine reports
    codes, scales = quantize_tokens(x[:3], "fp8")
    assert np.isfinite(codes.astype(jnp.float32)).all()
    assert np.abs(codes.astype(jnp.float32)).max() == 448


def test_a_last_group_that_is_cut_off_is_dequantized():
    w = weight("int4-g64", 100)
    x = jax.random.normal(jax.random.key(0), (3, 100))
    for platform in ("cpu", "tpu", "gpu"):
        np.testing.assert_allclose(product(x, w, platform), x @ w.dequantize(), atol=1e-5)


@pytest.mark.parametrize(("bits", "dtype"), [(4, jnp.int4), (5, jnp.int8)])
def test_minima_are_added_to_scaled_codes(bits, dtype):
    """Codes from 0 on: int4 holds them less 8, int8 as they are."""
    stored = jnp.array([[0, 15], [3, 8]]) - (8 if bits == 4 else 0)
    w = QuantizedArray(
        stored.astype(dtype),
        jnp.array([[0.5, 0.25]]),
        scheme=Scheme("affine", bits, (2, 1)),
        minima=jnp.array([[-0.3, 0.1]]),
    )
    expected = np.float32([[0, 15], [3, 8]]) * np.float32([0.5, 0.25]) + np.float32([-0.3, 0.1])
    np.testing.assert_array_equal(w.dequantize(), expected)


def test_the_entry_point():
    w = weight("int4-g32")
    x = jax.random.normal(jax.random.key(0), (2, 3, K))
    found = quantized_matmul(x, *arrays(w), block=w.scheme.block)
    np.testing.assert_allclose(found, x @ w.dequantize(), atol=1e-5)
    assert found.dtype == x.dtype
    assert quantized_matmul(x, *arrays(w), block=w.scheme.block, out_dtype=jnp.bfloat16).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"x \(2, 3, 200\) @ values \(256, 48\)"):
        quantized_matmul(x[..., :200], *arrays(w), block=w.scheme.block)
    with pytest.raises(ValueError, match="implementation='cutlass' is not one of xla"):
        quantized_matmul(x, *arrays(w), block=w.scheme.block, implementation="cutlass")
    with pytest.raises(ValueError, match="activations='fp8' cannot multiply int4 values"):
        quantized_matmul(x, *arrays(w), block=w.scheme.block, activations="fp8")


def test_what_it_says_of_itself():
    def said(name, platform, rows=64):
        w = weight(name)
        x = jax.ShapeDtypeStruct((rows, K), jnp.bfloat16)
        spec = make_spec(x, w.values, w.zeros, w.codebook, block=w.scheme.block, activations=w.scheme.activations)
        assert choose(spec, platform=platform).implementation == "xla"
        return form(spec, platform)

    assert said("int8", "tpu") == "xla, product, then scale"
    assert said("int4-g32", "tpu") == "xla, a product per group, then scale and sum"
    assert said("nf4", "cpu") == "xla, weights to float32, then product"
    assert said("w8a8", "gpu") == "xla, tokens to int8, product, then scale"
