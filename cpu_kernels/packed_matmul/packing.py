"""Kernels that pack weights: codes into panels, and scales into factors. Python calls them by their addresses."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from cpu_kernels import vectors as vec
from cpu_kernels.frames import compiled, internal
from cpu_kernels.memory import get, intrinsic
from cpu_kernels.packed_matmul.forms import LANES, OUTER

LARGEST = (63, -128, 15, -32, 31, 127)  # inner numbers that quantizers give the largest of a block, most frequent first


def _loader(kind: Any) -> Any:
    """An intrinsic that loads an integer, without its sign."""

    @intrinsic
    def load(context, address):
        def generate(context, builder, signature, arguments):
            number = builder.load(vec.at(builder, arguments[0], kind), align=1)
            return number if kind == vec.LONG else builder.zext(number, vec.LONG)

        return types.int64(types.int64), generate

    return load


def _storer(kind: Any) -> Any:
    """An intrinsic that stores an integer's low bits."""

    @intrinsic
    def store(context, address, number):
        def generate(context, builder, signature, arguments):
            number = arguments[1] if kind == vec.LONG else builder.trunc(arguments[1], kind)
            builder.store(number, vec.at(builder, arguments[0], kind), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return store


load_byte, load_half, load_int, load_long = map(_loader, (vec.BYTE, vec.HALF, vec.INT, vec.LONG))
store_byte, store_half, store_int = map(_storer, (vec.BYTE, vec.HALF, vec.INT))


@intrinsic
def _as_half(context, number):
    """The bits of a float32 rounded to float16."""

    def generate(context, builder, signature, arguments):
        half = builder.fptrunc(arguments[0], ir.HalfType())
        return builder.zext(builder.bitcast(half, vec.HALF), vec.LONG)

    return types.int64(types.float32), generate


@intrinsic
def _from_half(context, bits):
    """float32 of the bits of a float16."""

    def generate(context, builder, signature, arguments):
        half = builder.bitcast(builder.trunc(arguments[0], vec.HALF), ir.HalfType())
        return builder.fpext(half, vec.FLOAT)

    return types.float32(types.int64), generate


@internal("int64(int64)")
def _joined(eight):
    """The low halves of eight bytes, as 32 bits."""
    eight &= 0x0F0F0F0F0F0F0F0F
    eight = (eight | (eight >> 4)) & 0x00FF00FF00FF00FF
    eight = (eight | (eight >> 8)) & 0x0000FFFF0000FFFF
    return (eight | (eight >> 16)) & 0xFFFFFFFF


def pack_words(source, target, inputs, padded, outputs, input_stride, output_stride, first, last):
    """int4, a byte each, as uint32 [panels, padded / 8, 64] of codes less 8, panels `first` to `last`. Strides are in
    bytes."""
    steps = padded // 8
    for panel in range(first, last):
        of_panel = target + panel * steps * LANES * 4
        lanes = min(LANES, outputs - panel * LANES)
        start = source + panel * LANES * output_stride
        for step in range(steps):
            row, place = start + 8 * step * input_stride, of_panel + step * LANES * 4
            if input_stride == 1 and 8 * step + 8 <= inputs:
                for lane in range(lanes):
                    word = load_long(row + lane * output_stride) ^ 0x0808080808080808
                    store_int(place + 4 * lane, _joined(word))
            else:
                for lane in range(lanes):
                    word = 0
                    for number in range(min(8, inputs - 8 * step)):
                        code = load_byte(row + lane * output_stride + number * input_stride)
                        word |= ((code & 15) ^ 8) << (4 * number)
                    store_int(place + 4 * lane, word)
    return 0


def pack_quads(source, target, inputs, padded, outputs, input_stride, output_stride, first, last):
    """int8 as [panels, padded / 4, 64, 4]; else as `pack_words`."""
    quads = padded // 4
    for panel in range(first, last):
        start = source + panel * LANES * output_stride
        for lane in range(min(LANES, outputs - panel * LANES)):
            place = target + (panel * quads * LANES + lane) * 4
            for k in range(inputs):
                code = load_byte(start + lane * output_stride + k * input_stride)
                store_byte(place + k // 4 * LANES * 4 + k % 4, code)
    return 0


BLOCK = 64  # inputs that are copied at once: their lines stay in the first cache while lanes are read


def _copier(name: str, size: int, load: Any, store: Any) -> Any:
    """A function that copies numbers of `size` bytes to panels; its arguments are those of `pack_words`."""

    @internal("void(int64, int64, int64, int64, int64, int64)", suffix=f"_{name}")
    def copy_block(source, target, inputs, lanes, input_stride, output_stride):
        for k in range(inputs):
            row, place = source + k * input_stride, target + k * LANES * size
            for lane in range(lanes):
                store(place + lane * size, load(row + lane * output_stride))

    @internal(f"void({', '.join(['int64'] * 9)})", suffix=f"_{name}")
    def copy_panels(source, target, inputs, padded, outputs, input_stride, output_stride, first, last):
        for panel in range(first, last):
            start, of_panel = source + panel * LANES * output_stride, target + panel * padded * LANES * size
            lanes = min(LANES, outputs - panel * LANES)
            for k in range(0, inputs, BLOCK):
                rows, place = min(BLOCK, inputs - k), of_panel + k * LANES * size
                copy_block(start + k * input_stride, place, rows, lanes, input_stride, output_stride)

    return copy_panels


_copy_bytes = _copier("bytes", 1, load_byte, store_byte)
_copy_halves = _copier("halves", 2, load_half, store_half)
_copy_ints = _copier("ints", 4, load_int, store_int)


def pack_bytes(source, target, inputs, padded, outputs, input_stride, output_stride, first, last):
    """8-bit numbers as [panels, padded, 64]; else as `pack_words`."""
    _copy_bytes(source, target, inputs, padded, outputs, input_stride, output_stride, first, last)
    return 0


def pack_halves(source, target, inputs, padded, outputs, input_stride, output_stride, first, last):
    """16-bit numbers, as `pack_bytes`."""
    _copy_halves(source, target, inputs, padded, outputs, input_stride, output_stride, first, last)
    return 0


def pack_ints(source, target, inputs, padded, outputs, input_stride, output_stride, first, last):
    """32-bit numbers, as `pack_bytes`."""
    _copy_ints(source, target, inputs, padded, outputs, input_stride, output_stride, first, last)
    return 0


@internal("float32(int64, int64)")
def _largest(numbers, count):
    """The first of `count` float32, a panel's row apart, whose absolute value is largest; NaN if one is."""
    largest = np.float32(0)
    for index in range(count):
        number = get(numbers, index * LANES)
        if number != number:
            return number
        if abs(number) > abs(largest):
            largest = number
    return largest


@internal("boolean(int64, int64, float32, int64)")
def _divide(numbers, count, factor, inner):
    """Tells whether the numbers are a factor times int8; these are then at `inner`, a panel's row apart."""
    for index in range(count):
        number = get(numbers, index * LANES)
        quotient = np.float32(np.rint(number / factor))
        if not (quotient >= -128 and quotient <= 127 and quotient * factor == number):
            return False
        store_byte(inner + index * LANES, np.int64(quotient))
    return True


@internal("boolean(int64, int64, float32, int64, int64, int64)")
def _takes(numbers, count, largest, candidate, outer, inner):
    """Tells whether the largest number divided by a candidate is a factor; it is then at `outer`."""
    bits = _as_half(np.float32(largest / np.float32(candidate)))
    if bits & 0x7FFF == 0 or bits & 0x7FFF >= 0x7C00 or not _divide(numbers, count, _from_half(bits), inner):
        return False
    store_half(outer, bits)
    return True


def factor(numbers, panels, groups, group, outer, inner, a, b, c):
    """Factors of float32 [panels, groups, 64]: float16 [panels, ceil(groups * group / 256), 64] at `outer` and int8
    [panels, groups, 64] at `inner`, whose products are the numbers. Returns 1, or 0 where there are none. All kernels
    here have nine arguments: the last three are not used.

    An outer number is the largest of its block divided by what a quantizer makes of the largest.
    """
    per_outer = OUTER // group
    blocks = (groups + per_outer - 1) // per_outer
    for panel in range(panels):
        for block in range(blocks):
            count = min(per_outer, groups - block * per_outer)
            for lane in range(LANES):
                first = (panel * groups + block * per_outer) * LANES + lane
                own, place = numbers + 4 * first, outer + 2 * ((panel * blocks + block) * LANES + lane)
                largest = _largest(own, count)
                if largest == 0:
                    continue
                if largest != largest:
                    return 0
                is_found = False
                for candidate in LARGEST:
                    is_found = is_found or _takes(own, count, largest, candidate, place, inner + first)
                candidate = 1
                while not is_found and candidate < 128:
                    is_found = _takes(own, count, largest, candidate, place, inner + first)
                    candidate += 1
                if not is_found:
                    return 0
    return 1


KERNELS = {
    function.__name__: compiled(function, types.int64(*[types.int64] * 9))
    for function in (pack_words, pack_quads, pack_bytes, pack_halves, pack_ints, factor)
}
