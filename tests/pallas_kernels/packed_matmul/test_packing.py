"""Packing loses nothing, and takes the bytes of the file's formats."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.packed_matmul import PackedArrays, dequantize, pack, packing, take_outputs, unpack, why_not
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


@pytest.mark.matrix
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


@pytest.mark.matrix
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


KINDS = {
    "nibbles": ml_dtypes.int4,
    "codebook": ml_dtypes.int4,
    "int8": np.int8,
    "quads": np.int8,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
}
SIZES = st.integers(1, 150)
STEPS = st.sampled_from((1, 1, 2, 3, -1))
VIEWS = st.tuples(SIZES, SIZES, STEPS, STEPS, st.sampled_from("CF"), st.integers(0, 2**32 - 1))


def view(inputs, outputs, input_step, output_step, order, seed, dtype):
    """Numbers [inputs, outputs] of all bits, that lie in memory in either order and with gaps."""
    shape = inputs * abs(input_step), outputs * abs(output_step)
    size = np.dtype(dtype).itemsize
    bits = np.random.default_rng(seed).integers(0, 256, (shape[0], shape[1] * size), np.uint8)
    numbers = bits.view(np.int8).astype(dtype) if dtype is ml_dtypes.int4 else bits.view(dtype)
    return np.array(numbers, order=order)[::input_step, ::output_step]


def padded_panels(numbers, multiple):
    """[panels, inputs, 64], with zeros up to a multiple of inputs and a whole panel."""
    inputs, outputs = numbers.shape
    numbers = np.pad(numbers, ((0, -inputs % multiple), (0, -outputs % 64)))
    return np.stack(np.split(numbers, numbers.shape[1] // 64, axis=1))


def plain_codes(values, kind):
    """`packing._pack_codes` by NumPy."""
    if kind in ("nibbles", "codebook"):
        numbers = padded_panels(values.astype(np.int8).astype(np.int64) + 8, 8)
        numbers = numbers.reshape(len(numbers), -1, 8, 64)
        return sum(numbers[:, :, place] << 4 * place for place in range(8)).astype(np.uint32)
    numbers = padded_panels(values.view(f"i{values.itemsize}"), 8)
    if kind == "quads":
        return numbers.reshape(len(numbers), -1, 4, 64).swapaxes(2, 3)
    return numbers


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(KINDS)), VIEWS, st.integers(0, 5))
@example("nibbles", (8, 64, 1, 1, "F", 0), 0)
@example("quads", (9, 65, 2, 1, "C", 0), 3)
def test_codes_are_those_of_plain_numpy(kind, of_view, num_threads):
    """In both orders of memory, with gaps, and divided over threads, of which some have no panel."""
    values = view(*of_view, KINDS[kind])
    with pytest.MonkeyPatch.context() as patch:
        if num_threads:
            patch.setattr(packing, "_SHARED_SIZE", 0)
            patch.setattr(packing, "num_cores", lambda: num_threads)
        found = packing._pack_codes(values, kind)
    expected = plain_codes(values, kind)
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found.view(f"u{found.itemsize}"), expected.view(f"u{found.itemsize}"))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from((np.int8, np.int16, np.float16, ml_dtypes.bfloat16, np.float32)), VIEWS, st.booleans())
def test_panels_are_those_of_plain_numpy(dtype, of_view, is_shared):
    """Also of one row that stands for all."""
    numbers = view(*of_view, dtype)
    numbers = np.broadcast_to(numbers[:1], numbers.shape) if is_shared else numbers
    found, bits = packing._panels(numbers), f"u{numbers.itemsize}"
    assert found.dtype == numbers.dtype
    np.testing.assert_array_equal(found.view(bits), padded_panels(numbers.view(bits), 1))


def plain_factors(numbers, group):
    """`packing._factored` by NumPy: of each block and lane, the first factor that gives all its numbers."""
    panels, groups, lanes = numbers.shape
    per_outer = 256 // group
    inner = np.zeros(numbers.shape, np.int8)
    outer = np.zeros((panels, -(-groups // per_outer), lanes), np.float16)
    for panel, block, lane in np.ndindex(outer.shape):
        rows = slice(block * per_outer, (block + 1) * per_outer)
        own = numbers[panel, rows, lane]
        if not own.any():
            continue
        largest = own[np.argmax(np.abs(own))]
        for candidate in (63, -128, 15, -32, 31, 127, *range(1, 128)):
            with np.errstate(all="ignore"):
                factor = np.float16(largest / np.float32(candidate))
                quotients = np.rint(own / np.float32(factor))
                is_exact = np.isfinite(factor) and factor and np.all(quotients * np.float32(factor) == own)
            if is_exact and quotients.min() >= -128 and quotients.max() <= 127:
                outer[panel, block, lane], inner[panel, rows, lane] = factor, quotients
                break
        else:
            return None
    return inner, outer.view(np.uint16)


def factored_numbers(groups, group, largest, seed):
    """float32 [2, groups, 64]: products of float16 and int8, of which one in each block is the largest."""
    rng = np.random.default_rng(seed)
    per_outer = 256 // group
    limit = abs(largest) - 1
    inner = rng.integers(-limit, limit + 1, (2, groups, 64))
    inner[:, ::per_outer] = largest
    inner[:, :, 7] = 0
    outer = rng.uniform(1e-4, 1, (2, -(-groups // per_outer), 64)).astype(np.float16).astype(np.float32)
    return (inner * np.repeat(outer, per_outer, axis=1)[:, :groups]).astype(np.float32)


def assert_factors(numbers, group, *, has_factors=None):
    expected, found = plain_factors(numbers, group), packing._factored(numbers, group)
    assert (found is None) == (expected is None)
    if has_factors is not None:
        assert (found is not None) == has_factors
    if found is not None and expected is not None:
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(packing._values_of("factored", *found, group), numbers)


@pytest.mark.parametrize("largest", [77, -128, 63, 15, -32, 127, 1])
@pytest.mark.parametrize(("groups", "group"), [(8, 32), (19, 16), (1, 8), (5, 64)])
def test_factors_are_those_of_plain_numpy(groups, group, largest):
    """Whole blocks, and the rest at the end; 77 is none of the numbers that quantizers give the largest."""
    assert_factors(factored_numbers(groups, group, largest, groups), group, has_factors=True)


@pytest.mark.matrix
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 1e30, 1e-30, 0.1, 0.0])
@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize("place", [(0, 0, 0), (1, 8, 63), (0, 3, 7)])
def test_numbers_without_factors_have_none(number, is_alone, place):
    """Numbers that are no multiple of a float16, also in a block of zeros; lane 7 has zeros only."""
    numbers = factored_numbers(9, 32, 63, 0)
    if is_alone:
        numbers[place[0], place[1] // 8 * 8 :][:8, place[2]] = 0
    numbers[place] = number
    assert_factors(numbers, 32, has_factors=None if np.isfinite(number) else False)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.sampled_from((8, 16, 32, 64)), st.integers(1, 128), st.integers(0, 2**32 - 1))
def test_any_largest_number_has_the_factors_of_plain_numpy(groups, group, largest, seed):
    assert_factors(factored_numbers(groups, group, -128 if largest == 128 else largest, seed), group)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_scales_that_are_no_numbers_stay(number):
    scales = np.full((4, 64), 3.25, np.float32)
    scales[1] = 0
    scales[1, 5] = number
    scales[0, 5] = scales[2:, 5] = 0
    _, found, _ = unpack(*pack(np.ones((128, 64), np.int8), scales, block=(32, 1)))
    np.testing.assert_array_equal(found, scales)
