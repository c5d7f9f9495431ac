"""Vectors of 16 numbers, each conversion against NumPy for every stored number."""

import numpy as np
import pytest

pytest.importorskip("numba", reason="kernels for CPUs need Numba")

from numba import njit, types
from numba.extending import intrinsic

from cpu_kernels import vectors as vec


def converter(kind, convert):
    """A function that writes the float32 numbers of the vector at the first address to the second."""

    @intrinsic
    def convert_at(context, source, target):
        def generate(context, builder, signature, arguments):
            source, target = arguments
            found = convert(builder, vec.load(builder, source, kind))
            for index, vector in enumerate(found if isinstance(found, list) else [found]):
                vec.store(builder, vector, builder.add(target, vec.constant(4 * vec.LANES * index)))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    @njit
    def run(source, target):
        convert_at(source, target)

    return run


BYTES = vec.ir.VectorType(vec.BYTE, 16)


def test_int8():
    run, stored = converter(BYTES, vec.from_int8), np.arange(-128, 128, dtype=np.int8)
    found = np.zeros(256, np.float32)
    for first in range(0, 256, 16):
        run(stored[first:].ctypes.data, found[first:].ctypes.data)
    np.testing.assert_array_equal(found, stored.astype(np.float32))


def test_int4_has_the_first_number_in_the_low_bits():
    run, stored = converter(BYTES, vec.from_int4), np.arange(256, dtype=np.uint8)
    found = np.zeros(512, np.float32)
    for first in range(0, 256, 16):
        run(stored[first:].ctypes.data, found[2 * first :].ctypes.data)
    numbers = np.stack([stored & 15, stored >> 4], axis=1).reshape(-1).astype(np.int32)
    np.testing.assert_array_equal(found, np.where(numbers < 8, numbers, numbers - 16))


def test_bfloat16():
    halves = vec.ir.VectorType(vec.HALF, 16)
    run, stored = converter(halves, vec.from_bfloat16), np.arange(2**16, dtype=np.uint16)
    found = np.zeros(2**16, np.float32)
    for first in range(0, 2**16, 16):
        run(stored[first:].ctypes.data, found[first:].ctypes.data)
    np.testing.assert_array_equal(found.view(np.uint32), stored.astype(np.uint32) << 16)


def test_a_total_adds_halves():
    @intrinsic
    def total_at(context, source):
        def generate(context, builder, signature, arguments):
            return vec.total(builder, vec.load(builder, arguments[0]))

        return types.float32(types.int64), generate

    @njit
    def run(source):
        return total_at(source)

    numbers = np.random.default_rng(0).normal(size=16).astype(np.float32)
    expected = numbers
    while len(expected) > 1:
        expected = expected[: len(expected) // 2] + expected[len(expected) // 2 :]
    assert run(numbers.ctypes.data) == expected[0]
