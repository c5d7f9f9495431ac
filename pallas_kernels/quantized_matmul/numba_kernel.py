"""The kernel of `numba_cpu`.

Few rows: 8 inputs of 32 outputs are converted in registers, and their products added to sums in the first cache. Many
rows: blocks of 128 inputs of 32 outputs are written as float32 to the first cache, and the sums of 8 rows stay in
registers (Goto and van de Geijn 2008, the inner kernel). The order of sums is the same, so a row's result does not
depend, to the bit, on how many there are.
"""

from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pallas_kernels.numba_cpu import vectors as vec
from pallas_kernels.numba_cpu.frames import (
    answers_metadata,
    attribute,
    compiled,
    floats,
    internal,
    operand,
    operand_size,
    result,
    result_size,
)

# Sums of all rows that stay in the first cache while a panel of outputs passes.
PANEL_BYTES = 2**15
BLOCK, TILE = 128, 8  # inputs that are converted for all rows, and rows whose sums stay in registers
AHEAD = 24  # inputs from one that is read to one that is prefetched
MANY = 12  # rows from which on weights are written as float32 first
STEP, UNIT = 8, 32


def _adder(bits: int) -> Any:
    """Adds the products of 8 inputs: an intrinsic for weights of 4 or 8 bits."""

    @intrinsic
    def add_products(context, totals, width, weights, stride, x, x_stride, rows, units):
        """totals[row, n] += sum of x[row, k] * weights[k, n] over 8 inputs k, for 32 * units outputs n.

        All are int64. totals: address of float32 [rows, width]. weights: address of the first weight, with `stride`
        bytes from an input to the next. x: address of float32 [rows, x_stride], of the first input.
        """

        def generate(context, builder, signature, arguments):
            totals, width, weights, stride, x, x_stride, rows, units = arguments
            inputs = [builder.add(weights, builder.mul(stride, vec.constant(k))) for k in range(STEP)]
            ahead = builder.mul(stride, vec.constant(AHEAD))
            with cgutils.for_range(builder, units, intp=vec.LONG) as unit:
                place = builder.mul(unit.index, vec.constant(UNIT * bits // 8))
                loaded = [_load(builder, builder.add(address, place), bits) for address in inputs]
                for address in inputs:
                    vec.prefetch(builder, builder.add(address, builder.add(place, ahead)))
                outputs = builder.add(totals, builder.mul(unit.index, vec.constant(4 * UNIT)))
                with cgutils.for_range(builder, rows, intp=vec.LONG) as row:
                    own = builder.add(outputs, builder.mul(row.index, builder.mul(width, vec.constant(4))))
                    at = builder.add(x, builder.mul(row.index, builder.mul(x_stride, vec.constant(4))))
                    numbers = [
                        vec.broadcast(builder, vec.load(builder, builder.add(at, vec.constant(4 * k)), vec.FLOAT))
                        for k in range(STEP)
                    ]
                    for half in range(2):
                        address = builder.add(own, vec.constant(4 * vec.LANES * half))
                        total = vec.load(builder, address)
                        for k in range(STEP):
                            total = vec.multiply_add(builder, numbers[k], loaded[k][half], total)
                        vec.store(builder, total, address)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return add_products


def _load(builder: Any, address: Any, bits: int) -> list[Any]:
    """32 weights as two vectors of float32."""
    if bits == 4:
        return vec.from_int4(builder, vec.load(builder, address, vec.ir.VectorType(vec.BYTE, 16)))
    addresses = [address, builder.add(address, vec.constant(vec.LANES))]
    kind = vec.ir.VectorType(vec.BYTE, vec.LANES)
    return [vec.from_int8(builder, vec.load(builder, each, kind)) for each in addresses]


def _dotter(bits: int) -> Any:
    """A product of two vectors: an intrinsic for weights of 4 or 8 bits."""

    @intrinsic
    def dot(context, weights, x, units):
        """The sum of weights[k] * x[k] over 32 * units inputs k: float32. All are int64, the first two addresses."""

        def generate(context, builder, signature, arguments):
            weights, x, units = arguments
            sums = [cgutils.alloca_once_value(builder, vec.splat(vec.FLOATS, 0.0)) for _ in range(2)]
            with cgutils.for_range(builder, units, intp=vec.LONG) as unit:
                place = builder.mul(unit.index, vec.constant(UNIT * bits // 8))
                loaded = _load(builder, builder.add(weights, place), bits)
                for half in range(2):
                    place = builder.mul(unit.index, vec.constant(4 * UNIT))
                    at = builder.add(builder.add(x, place), vec.constant(4 * vec.LANES * half))
                    numbers, total = vec.load(builder, at), builder.load(sums[half])
                    builder.store(vec.multiply_add(builder, numbers, loaded[half], total), sums[half])
            return vec.total(builder, builder.fadd(builder.load(sums[0]), builder.load(sums[1])))

        return types.float32(*[types.int64] * 3), generate

    return dot


_add_int4, _add_int8, _dot_int4, _dot_int8 = _adder(4), _adder(8), _dotter(4), _dotter(8)


def _converter(bits: int) -> Any:
    """An intrinsic that writes weights of 4 or 8 bits as float32."""

    @intrinsic
    def convert(context, target, weights, stride, inputs):
        """Writes 32 outputs of `inputs` inputs, `stride` bytes apart, as float32 [inputs, 32]."""

        def generate(context, builder, signature, arguments):
            target, weights, stride, inputs = arguments
            with cgutils.for_range(builder, inputs, intp=vec.LONG) as k:
                loaded = _load(builder, builder.add(weights, builder.mul(k.index, stride)), bits)
                own = builder.add(target, builder.mul(k.index, vec.constant(4 * UNIT)))
                for half in range(2):
                    vec.store(builder, loaded[half], builder.add(own, vec.constant(4 * vec.LANES * half)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), generate

    return convert


def _tiler(rows: int) -> Any:
    """An intrinsic for the products of `rows` rows with 32 outputs, whose sums stay in registers."""

    @intrinsic
    def add_tile(context, totals, width, weights, x, x_stride, inputs):
        """totals[row, n] += sum of x[row, k] * weights[k, n], for float32 weights [inputs, 32]. The others are as in
        `add_products`, with the same order of sums."""

        def generate(context, builder, signature, arguments):
            totals, width, weights, x, x_stride, inputs = arguments

            def row_of(address, stride, row):
                return builder.add(address, builder.mul(stride, vec.constant(4 * row)))

            places = [
                builder.add(row_of(totals, width, row), vec.constant(4 * vec.LANES * half))
                for row in range(rows)
                for half in range(2)
            ]
            sums = [cgutils.alloca_once_value(builder, vec.load(builder, place)) for place in places]
            sources = [row_of(x, x_stride, row) for row in range(rows)]
            with cgutils.for_range(builder, inputs, intp=vec.LONG) as k:
                own = builder.add(weights, builder.mul(k.index, vec.constant(4 * UNIT)))
                loaded = [vec.load(builder, builder.add(own, vec.constant(4 * vec.LANES * half))) for half in range(2)]
                at = builder.mul(k.index, vec.constant(4))
                for row in range(rows):
                    number = vec.broadcast(builder, vec.load(builder, builder.add(sources[row], at), vec.FLOAT))
                    for half in range(2):
                        place = sums[2 * row + half]
                        builder.store(vec.multiply_add(builder, number, loaded[half], builder.load(place)), place)
            for place, total in zip(places, sums, strict=True):
                vec.store(builder, builder.load(total), place)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return add_tile


_convert_int4, _convert_int8 = _converter(4), _converter(8)
_add_tile, _add_row = _tiler(TILE), _tiler(1)


@internal()
def _multiply(x, weights, scales, offsets, out, rows, inputs, first, width, outputs, group, bits):
    stride = outputs * bits // 8
    panel = UNIT if rows >= MANY else min(width, PANEL_BYTES // (4 * rows) // UNIT * UNIT)
    sums_of_x = _sums(floats(x, rows * inputs), rows if offsets != 0 else 0, inputs, group)
    scratch, converted = np.empty(rows * panel, np.float32), np.empty(BLOCK * UNIT, np.float32)
    totals, sums = floats(out, rows * width), scratch.ctypes.data
    totals[:] = 0
    for start in range(0, width, panel):
        size = min(panel, width - start)
        for index in range(-(-inputs // group)):
            scratch[:] = 0
            step = BLOCK if rows >= MANY else STEP
            end = min(index * group + group, inputs)
            for k in range(index * group, end, step):
                address, numbers = weights + k * stride + (first + start) * bits // 8, x + 4 * k
                if rows >= MANY:
                    _add_block(
                        sums, address, stride, numbers, inputs, rows, min(step, end - k), converted.ctypes.data, bits
                    )
                elif bits == 8:
                    _add_int8(sums, panel, address, stride, numbers, inputs, rows, size // UNIT)
                else:
                    _add_int4(sums, panel, address, stride, numbers, inputs, rows, size // UNIT)
            for row in range(rows):
                total, own = totals[row * width + start :], scratch[row * panel :]
                scale = floats(scales + 4 * (index * outputs + first + start), size)
                for n in range(size):
                    total[n] += own[n] * scale[n]
                if offsets != 0:
                    offset = floats(offsets + 4 * (index * outputs + first + start), size)
                    factor = sums_of_x[row, index]
                    for n in range(size):
                        total[n] += factor * offset[n]


@internal()
def _add_block(sums, weights, stride, x, x_stride, rows, inputs, converted, bits):
    """Adds the products of up to `BLOCK` inputs of 32 outputs to float32 sums [rows, 32]."""
    if bits == 8:
        _convert_int8(converted, weights, stride, inputs)
    else:
        _convert_int4(converted, weights, stride, inputs)
    for row in range(0, rows - TILE + 1, TILE):
        _add_tile(sums + 4 * UNIT * row, UNIT, converted, x + 4 * row * x_stride, x_stride, inputs)
    for row in range(rows // TILE * TILE, rows):
        _add_row(sums + 4 * UNIT * row, UNIT, converted, x + 4 * row * x_stride, x_stride, inputs)


@internal()
def _multiply_transposed(x, weights, scales, offsets, out, rows, inputs, first, width, bits):
    totals = floats(out, rows * width)
    sums_of_x = _sums(floats(x, rows * inputs), rows if offsets != 0 else 0, inputs, inputs)
    for n in range(width):
        address = weights + (first + n) * inputs * bits // 8
        for row in range(rows):
            if bits == 8:
                total = _dot_int8(address, x + 4 * row * inputs, inputs // UNIT)
            else:
                total = _dot_int4(address, x + 4 * row * inputs, inputs // UNIT)
            totals[row * width + n] = total * floats(scales + 4 * first, width)[n]
            if offsets != 0:
                totals[row * width + n] += sums_of_x[row, 0] * floats(offsets + 4 * first, width)[n]


@internal()
def _sums(x, rows, inputs, group):
    """The sum of the inputs of each group: float32 [rows, groups]."""
    sums = np.zeros((rows, -(-inputs // group)), np.float32)
    for row in range(rows):
        for k in range(inputs):
            sums[row, k // group] += x[row * inputs + k]
    return sums


@compiled
def matmul_handler(frame):
    if answers_metadata(frame):
        return 0
    bits, first, group = attribute(frame, 0), attribute(frame, 1), attribute(frame, 2)
    has_offsets, is_transposed, outputs = attribute(frame, 3), attribute(frame, 4), attribute(frame, 5)
    x, weights, scales, out = operand(frame, 0), operand(frame, 1), operand(frame, 2), result(frame, 0)
    offsets = operand(frame, 3) if has_offsets else 0
    rows, inputs, width = operand_size(frame, 0, 0), operand_size(frame, 0, 1), result_size(frame, 0, 1)
    if is_transposed:
        _multiply_transposed(x, weights, scales, offsets, out, rows, inputs, first, width, bits)
    else:
        _multiply(x, weights, scales, offsets, out, rows, inputs, first, width, outputs, group, bits)
    return 0
