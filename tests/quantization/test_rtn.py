"""Round-to-nearest: what is stored is the nearest that each format has, by brute force over all its values."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.quantization import (
    RECIPES,
    NestedScales,
    QuantizedArray,
    Recipe,
    check,
    quantize,
    quantize_params,
    recipe,
)
from jaxinfer.quantization.rtn import E2M1, FP4, NF4, dynamic_map

SHAPES = [pytest.param((256, 24), marks=pytest.mark.slow), (130, 33)]  # of the second, the last blocks are cut off
FORMATS = ["int8", "int4-asym", "int4-g64", "int3-g64-asym", "int2-g32", "nf4", "nf4-dq", "fp4", "mxfp4"]
FORMATS += ["fp8", "fp8-tensor", "fp8-block"]


def weight(shape, seed=0, scale=0.02) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale))


@jax.jit
def dequantized(array: QuantizedArray) -> jax.Array:
    return array.dequantize()


def blocks_of(array: QuantizedArray):
    """(rows, columns, scale, zero) of every block."""
    scales = array.scales.dequantize() if isinstance(array.scales, NestedScales) else array.scales
    (height, width), (inputs, outputs) = array.scheme.block, array.shape
    for k in range(scales.shape[0]):
        for n in range(scales.shape[1]):
            rows = slice(k * height, min((k + 1) * height, inputs))
            columns = slice(n * width, min((n + 1) * width, outputs))
            zero = 0 if array.zeros is None else int(array.zeros[k, n])
            yield rows, columns, np.float32(scales[k, n]), zero


def representable(array: QuantizedArray, zero: int) -> np.ndarray:
    """All values of the format, in units of the scale."""
    scheme = array.scheme
    if scheme.kind == "codebook":
        return np.asarray(array.codebook)
    if scheme.kind == "int":
        return np.arange(-(2 ** (scheme.bits - 1)), 2 ** (scheme.bits - 1), dtype=np.float32) - zero
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return every[np.isfinite(every)]


@pytest.mark.matrix("int4-g64-(130, 33)")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_each_value_is_the_nearest_of_the_format(name, shape):
    original = weight(shape)
    array = quantize(original, name)
    check(array, name)
    stored, w = np.asarray(dequantized(array)), np.asarray(original)
    for rows, columns, scale, zero in blocks_of(array):
        values = np.sort(representable(array, zero) * scale)
        part = w[rows, columns].reshape(-1, 1)
        nearest = np.abs(part - values).min(axis=1)
        error = np.abs(stored[rows, columns].reshape(-1) - part[:, 0])
        # Nested scales are rounded after the codes were chosen by exact ones.
        slack = 0.02 * scale if RECIPES[name].has_nested_scales else 2e-6 * np.abs(values).max()
        assert (error <= nearest + slack).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_integer_scales_are_those_of_compressed_tensors(bits):
    w = weight((128, 16))
    symmetric, asymmetric = quantize(w, Recipe("int", bits, (64, 1))), quantize(w, Recipe("int", bits, (64, 1), False))
    groups = np.asarray(w).reshape(2, 64, 16)
    np.testing.assert_allclose(symmetric.scales, np.abs(groups).max(1) * 2 / (2**bits - 1), rtol=1e-6)
    low, high = groups.min(1), groups.max(1)
    np.testing.assert_allclose(asymmetric.scales, (high - low) / (2**bits - 1), rtol=1e-6)
    zeros = np.round(-(2 ** (bits - 1)) - low / np.asarray(asymmetric.scales))
    np.testing.assert_array_equal(asymmetric.zeros, zeros)
    # With one sign only, 0 stays representable.
    positive = quantize(jnp.abs(w) + 1, Recipe("int", bits, (64, 1), False))
    assert (positive.zeros == -(2 ** (bits - 1))).all()


def test_mxfp4_scales_are_powers_of_two_that_bring_the_largest_below_eight():
    w = weight((64, 32))
    scales = np.asarray(quantize(w, "mxfp4").scales, np.float32)
    mantissas, _ = np.frexp(scales)
    assert (mantissas == 0.5).all()
    largest = np.abs(np.asarray(w)).reshape(2, 32, 32).max(1) / scales
    assert largest.min() >= 4
    assert largest.max() < 8
    # Halfway between two magnitudes, the even code: 2.5 becomes 2, 3.5 becomes 4, 5 becomes 4.
    row = jnp.array([6, 2.5, 3.5, 5, 0.25, 0.75, 7, -2.5])[:, None]
    assert quantize(row, "mxfp4").dequantize()[:, 0].tolist() == [6, 2, 4, 4, 0, 1, 6, -2]


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["fp8", "mxfp4", "nf4", "int4-g32"])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_nothing_becomes_nan(name, scale):
    """float8 makes NaN of what is too large for it; a group of zeros has no scale of its own."""
    w = weight((64, 8), scale=scale)
    array = quantize(w, name)
    check(array, name)
    found = np.asarray(dequantized(array))
    assert np.isfinite(found).all()
    if scale == 0:
        assert (found == 0).all()


def test_the_codebooks():
    assert np.diff(NF4).min() > 0
    assert (NF4[0], NF4[7], NF4[-1]) == (-1, 0, 1)
    assert np.abs(FP4).max() == 1
    table = dynamic_map()
    assert table.shape == (256,)
    assert np.diff(table).min() > 0
    assert {0.0, 1.0} <= set(table.tolist())
    fp4 = np.arange(16, dtype=np.uint8).astype(ml_dtypes.uint4).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(E2M1, fp4)


def test_experts_are_quantized_each_by_itself():
    w = weight((2, 64, 16))
    for name in ("int4-g32-asym", "nf4-dq", "fp8-block"):
        every = quantize(w, name)
        check(every, name)
        for expert in range(2):
            np.testing.assert_array_equal(dequantized(every)[expert], dequantized(quantize(w[expert], name)))


@pytest.mark.parametrize(
    ("name", "share"), [("int4-g128", 0.27), ("int4-g128-asym", 0.27), ("int8", 0.51), ("w8a8", 0.51), ("fp8", 0.51)]
)
def test_memory_of_the_layers_of_llama_3_8b(name, share):
    """Counted from the arrays, scales and zeros included."""
    shapes = [(4096, 4096), (4096, 1024), (4096, 14_336), (14_336, 4096)]
    arrays = [
        jax.eval_shape(partial(quantize, how=name), jax.ShapeDtypeStruct(shape, jnp.bfloat16)) for shape in shapes
    ]
    stored = sum(array.num_bytes for array in arrays)
    whole = sum(2 * inputs * outputs for inputs, outputs in shapes)
    print(f"{name}: {stored:,} bytes of {whole:,}, {100 * stored / whole:.2f} %")
    assert stored <= share * whole


def test_what_is_quantized_of_a_model():
    layer = {
        "attention": {"q_proj": {"weight": weight((64, 64)), "bias": jnp.zeros(64)}},
        "norm": {"weight": jnp.ones(64)},
    }
    params = {"embed": weight((32, 64)), "layers": {"0": layer, "1": layer}, "final_norm": {"weight": jnp.ones(64)}}
    found = quantize_params(params, "int8")
    assert isinstance(found["layers"]["1"]["attention"]["q_proj"]["weight"], QuantizedArray)
    assert found["embed"] is params["embed"]
    assert found["layers"]["0"]["norm"] == layer["norm"]
    found = quantize_params(params, "int4-g32", keep=["layers.0.*"], also=["embed"])
    assert found["layers"]["0"] == layer
    assert found["embed"].scheme.block == (1, 32)
    assert found["embed"].scales.shape == (32, 2)
    check(found["embed"], "embed")
    np.testing.assert_array_equal(found["embed"].dequantize(), quantize(params["embed"].T, "int4-g32").dequantize().T)
    with pytest.raises(ValueError, match=r"no weight fits layers\.7\.\*"):
        quantize_params(params, "int8", keep=["layers.7.*"])
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.q_proj\.weight is quantized already"):
        quantize_params(found | {"layers": {"0": found["layers"]["1"]}}, "int8")
    with pytest.raises(ValueError, match="also='norm'"):
        quantize_params(params, "int8", also=["norm"])


def test_unknown_names_and_shapes():
    with pytest.raises(ValueError, match="did you mean 'int4-g128'"):
        recipe("int4g128")
    for name, message in (
        ("awq", "quantize='awq' .*: `jaxinfer quantize SRC DST --method awq` calibrates on texts"),
        ("Q4_K_M", "types of a GGUF file are kept"),
        ("bitsandbytes", "did you mean 'nf4'"),
        ("zzz", "; the usual ones are int8, int4-g128, nf4, fp8 and w8a8$"),
    ):
        with pytest.raises(ValueError, match=message):
            recipe(name)
    with pytest.raises(ValueError, match=r"inputs and outputs, got shape \(4,\)"):
        quantize(jnp.ones(4), "int8")


@pytest.mark.optimized
def test_nested_scales_are_those_of_the_formula_in_a_program_too():
    """Where compilers make one operation of a product and a sum, the last bit differs."""
    random = np.random.default_rng(0)

    def fill(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(random.integers(0, jnp.iinfo(leaf.dtype).max + 1, leaf.shape).astype(leaf.dtype))
        return jnp.asarray(random.standard_normal(leaf.shape, np.float32))

    weight = jax.ShapeDtypeStruct((256, 128), jnp.float32)
    array = jax.tree.map(fill, jax.eval_shape(partial(quantize, how="nf4-dq"), weight))
    scales = array.scales
    index = (np.arange(128) * 4 + np.arange(4)[:, None]) // scales.inner
    products = np.asarray(scales.table)[np.asarray(scales.codes)] * np.asarray(scales.outer)[index]
    expected = products + np.asarray(scales.offset)
    assert np.array_equal(jax.jit(lambda scales: scales.dequantize())(scales), expected)
    assert np.array_equal(jax.jit(lambda array: array.dequantize())(array), array.dequantize())


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["int4-g32", "int4-g32-asym", "int3", "int8"])
def test_weights_of_the_error_lower_the_weighted_error(name):
    """More than any other weights do; equal ones still search, and lower the plain error."""
    random = np.random.default_rng(0)
    weight = jnp.asarray(random.standard_normal((128, 24)), jnp.float32)
    importance = jnp.asarray(np.exp(1.5 * random.standard_normal(128)), jnp.float32)

    def error(by, **options):
        found = quantize(weight, name, **options)
        check(found, name)
        return float(jnp.sum(by[:, None] * (found.dequantize() - weight) ** 2))

    equal = jnp.ones(128)
    assert error(importance, importance=importance) < 0.97 * error(importance)
    assert error(importance, importance=importance) < error(importance, importance=equal)
    assert error(equal, importance=equal) < error(equal)
    # Experts have weights of their own.
    stacked = quantize(jnp.stack([weight, weight]), name, importance=jnp.stack([importance, equal]))
    for number, weights in enumerate((importance, equal)):
        alone = quantize(weight, name, importance=weights)
        np.testing.assert_allclose(stacked.dequantize()[number], alone.dequantize(), rtol=1e-6)


def test_weights_of_the_error_that_do_not_fit_are_refused():
    weight = jnp.ones((128, 24))
    with pytest.raises(
        ValueError, match=r"importances of shape \(24,\) weigh the inputs of integers, not int \(128, 24\)"
    ):
        quantize(weight, "int4", importance=jnp.ones(24))
    with pytest.raises(ValueError, match="weigh the inputs of integers, not nf4"):
        quantize(weight, "nf4", importance=jnp.ones(128))
