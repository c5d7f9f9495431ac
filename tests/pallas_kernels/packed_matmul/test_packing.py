"""Packing loses nothing, and takes the bytes of the file's formats."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.packed_matmul import PackedArrays, dequantize, pack, take_outputs, unpack, why_not
from pallas_kernels.quantized_matmul import dequantize as canonical
from tests.pallas_kernels.packed_matmul.weights import NAMES, make

# Bits of a weight, which are the file's for 4-bit forms; Q4_K's 6-bit numbers are kept in 8 (4.5 in the file).
BITS = {
    "q4_1": 5.0,
    "int4-g32": 4.5,
    "mxfp4": 4.25,
    "q4_k": 4.625,
    "q6_k": 8.5625,
    "int8-g32": 8.5,
    "bfloat16": 16.0,
    "e4m3": 8.03125,
}


@pytest.mark.parametrize("name", BITS)
def test_bits_of_a_weight(name):
    form, arrays, _ = make(name, 512, 128)
    num_bytes = sum(array.size * array.dtype.itemsize for array in arrays[:-1])
    assert 8 * num_bytes / (512 * 128) == BITS[name], form


@pytest.mark.parametrize("name", ["q4_1", "q4_k", "q6_k", "int4-g128-asym", "int8-asym", "mxfp4", "e4m3", "bfloat16"])
def test_what_was_packed_is_unpacked(name):
    form, arrays, weight = make(name)
    values, scales, offsets = unpack(form, PackedArrays(*map(np.asarray, arrays)))
    assert values.shape == weight.shape
    numbers = np.asarray(arrays.codebook)[values.astype(np.int8) + 8] if form.codes == "codebook" else values
    found = np.asarray(numbers, np.float64) + (8 if form.codes == "nibbles" else 0)
    if scales is not None:
        group = min(form.group, form.inputs)
        found = found * np.repeat(scales, group, 0)[: form.inputs]
        if offsets is not None:
            found = found + np.repeat(offsets, group, 0)[: form.inputs]
    np.testing.assert_allclose(found, weight, rtol=1e-6)


def test_values_equal_the_formula_of_quantized_weights():
    rng = np.random.default_rng(0)
    values = rng.integers(-8, 8, (96, 70)).astype(np.int8).astype(ml_dtypes.int4)
    scales = rng.uniform(0.001, 0.01, (3, 70)).astype(np.float16).astype(np.float32)
    zeros = rng.integers(-8, 8, (3, 70)).astype(np.int8)
    packed = pack(values, scales, zeros, block=(32, 1))
    expected = canonical(jnp.asarray(values), jnp.asarray(scales), jnp.asarray(zeros), block=(32, 1))
    np.testing.assert_allclose(dequantize(*packed), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_taken_as_rows_of_an_embedding(name):
    form, arrays, weight = make(name)
    indices = jnp.array([[0, 99, 63], [64, 5, 5]])
    found = jax.jit(lambda arrays, indices: take_outputs(form, arrays, indices))(arrays, indices)
    np.testing.assert_allclose(found, weight.T[np.asarray(indices)], rtol=1e-6, atol=1e-7)


def test_what_cannot_be_packed_has_a_reason():
    values = np.zeros((64, 32), np.int8)
    assert why_not(values, (64, 1)) is None
    assert why_not(values, (64, 4)) == "4 outputs share a scale"
    assert why_not(values, (4, 1)) == "groups of 4 inputs are no multiple of 8"
    with pytest.raises(ValueError, match="cannot pack: 4 outputs share a scale"):
        pack(values, np.ones((1, 8), np.float32), block=(64, 4))
