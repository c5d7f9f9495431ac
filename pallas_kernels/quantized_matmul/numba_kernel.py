"""The kernel of `numba_cpu`, for each type of weights.

Few rows: 8 inputs of 32 outputs are converted in registers, and their products added to sums in the first cache. Many
rows: blocks of 128 inputs of 32 outputs are written as float32 to the first cache, and the sums of 8 rows stay in
registers (Goto and van de Geijn 2008, the inner kernel). The order of sums is the same, so a row's result does not
depend, to the bit, on how many there are. Outputs are divided among threads, which changes no sum.
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
    num_operands,
    operand,
    operand_size,
    result,
    result_size,
)
from pallas_kernels.numba_cpu.threads import in_parts, num_threads

# Sums of all rows that stay in the first cache while a panel of outputs passes.
PANEL_BYTES = 2**15
BLOCK, TILE = 128, 8  # inputs that are converted for all rows, and rows whose sums stay in registers
AHEAD = 24  # inputs from one that is read to one that is prefetched
MANY = 24  # rows from which on weights are written as float32 first
STEP, UNIT = 8, 32
DOTS = 4  # outputs, and rows, whose products stay in registers where the weight is transposed
MIN_PART, PARTS = 2**16, 1


def _load(builder: Any, address: Any, bits: int) -> list[Any]:
    """32 weights as two vectors of float32."""
    if bits == 4:
        return vec.from_int4(builder, vec.load(builder, address, vec.ir.VectorType(vec.BYTE, 16)))
    addresses = [address, builder.add(address, vec.constant(vec.LANES * bits // 8))]
    if bits == 32:
        return [vec.load(builder, each) for each in addresses]
    kind = vec.ir.VectorType(vec.BYTE, vec.LANES)
    return [vec.from_int8(builder, vec.load(builder, each, kind)) for each in addresses]


def _adder(bits: int) -> Any:
    """Adds the products of 8 inputs: an intrinsic for weights of 4, 8 or 32 bits."""

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
                    for line in range(0, UNIT * bits // 8, 64):
                        to = builder.add(place, builder.add(ahead, vec.constant(line)))
                        vec.prefetch(builder, builder.add(address, to))
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


def _converter(bits: int) -> Any:
    """An intrinsic that writes weights of 4, 8 or 32 bits as float32."""

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


def _dotter(bits: int, outputs: int, rows: int) -> Any:
    """An intrinsic for the products of `rows` rows with `outputs` outputs of a transposed weight."""

    @intrinsic
    def dot(context, out, width, weights, stride, x, inputs):
        """out[row, n] = sum of x[row, k] * weights[n, k] over the inputs, a multiple of 32. All are int64.

        out: address of float32 [rows, width]. weights: address of the first, with `stride` bytes from an output to the
        next. x: address of float32 [rows, inputs].
        """

        def generate(context, builder, signature, arguments):
            out, width, weights, stride, x, inputs = arguments
            tile = [(row, n) for row in range(rows) for n in range(outputs)]
            sums = {place: cgutils.alloca_once_value(builder, vec.splat(vec.FLOATS, 0.0)) for place in tile}
            with cgutils.for_range(builder, builder.udiv(inputs, vec.constant(UNIT)), intp=vec.LONG) as unit:
                place = builder.mul(unit.index, vec.constant(UNIT * bits // 8))
                starts = [builder.add(weights, builder.mul(stride, vec.constant(n))) for n in range(outputs)]
                loaded = [_load(builder, builder.add(start, place), bits) for start in starts]
                for row in range(rows):
                    own = builder.add(x, builder.mul(inputs, vec.constant(4 * row)))
                    at = builder.add(own, builder.mul(unit.index, vec.constant(4 * UNIT)))
                    for half in range(2):
                        numbers = vec.load(builder, builder.add(at, vec.constant(4 * vec.LANES * half)))
                        for n in range(outputs):
                            total = builder.load(sums[row, n])
                            builder.store(vec.multiply_add(builder, numbers, loaded[n][half], total), sums[row, n])
            for row, n in tile:
                own = builder.add(out, builder.mul(width, vec.constant(4 * row)))
                total = vec.total(builder, builder.load(sums[row, n]))
                builder.store(total, vec.at(builder, builder.add(own, vec.constant(4 * n)), vec.FLOAT))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return dot


_add_tile, _add_row = _tiler(TILE), _tiler(1)


@internal()
def _sums(x, rows, inputs, group):
    """The sum of the inputs of each group: float32 [rows, groups]."""
    sums = np.zeros((rows, -(-inputs // group)), np.float32)
    for row in range(rows):
        for k in range(inputs):
            sums[row, k // group] += x[row * inputs + k]
    return sums


def _kernel(bits: int) -> Any:
    """The kernel for weights [K, N] of 4, 8 or 32 bits, the last without scales: a function of the frame."""
    add_products, convert = _adder(bits), _converter(bits)

    @internal()
    def add_block(sums, weights, stride, x, x_stride, rows, inputs, converted):
        """Adds the products of up to `BLOCK` inputs of 32 outputs to float32 sums [rows, 32]."""
        convert(converted, weights, stride, inputs)
        for row in range(0, rows - TILE + 1, TILE):
            _add_tile(sums + 4 * UNIT * row, UNIT, converted, x + 4 * row * x_stride, x_stride, inputs)
        for row in range(rows // TILE * TILE, rows):
            _add_row(sums + 4 * UNIT * row, UNIT, converted, x + 4 * row * x_stride, x_stride, inputs)

    @internal()
    def multiply(x, weights, scales, offsets, out, rows, inputs, outputs, group, first, end):
        stride = outputs * bits // 8
        panel = UNIT if rows >= MANY else min(end - first, max(PANEL_BYTES // (4 * rows) // UNIT, 1) * UNIT)
        step = BLOCK if rows >= MANY else STEP
        sums_of_x = _sums(floats(x, rows * inputs), rows if offsets != 0 else 0, inputs, group)
        scratch, converted = np.empty(rows * panel, np.float32), np.empty(BLOCK * UNIT, np.float32)
        totals, sums = floats(out, rows * outputs), scratch.ctypes.data
        for start in range(first, end, panel):
            size = min(panel, end - start)
            for index in range(-(-inputs // group)):
                scratch[:] = 0
                after = min(index * group + group, inputs)
                for k in range(index * group, after, step):
                    address, numbers = weights + k * stride + start * bits // 8, x + 4 * k
                    if rows >= MANY:
                        num_inputs = min(step, after - k)
                        add_block(sums, address, stride, numbers, inputs, rows, num_inputs, converted.ctypes.data)
                    else:
                        add_products(sums, panel, address, stride, numbers, inputs, rows, size // UNIT)
                for row in range(rows):
                    total, own = totals[row * outputs + start :], scratch[row * panel :]
                    if index == 0:
                        total[:size] = 0
                    if scales == 0:
                        total[:size] = own[:size]
                        continue
                    scale = floats(scales + 4 * (index * outputs + start), size)
                    for n in range(size):
                        total[n] += own[n] * scale[n]
                    if offsets != 0:
                        offset = floats(offsets + 4 * (index * outputs + start), size)
                        factor = sums_of_x[row, index]
                        for n in range(size):
                            total[n] += factor * offset[n]

    @internal()
    def run(frame, part):
        group, num_parts = attribute(frame, 0), _num_parts(frame, UNIT)
        x, weights, out = operand(frame, 0), operand(frame, 1), result(frame, 0)
        rows, inputs, outputs = operand_size(frame, 0, 0), operand_size(frame, 0, 1), result_size(frame, 0, 1)
        units = outputs // UNIT
        first, end = UNIT * (part * units // num_parts), UNIT * ((part + 1) * units // num_parts)
        multiply(x, weights, _scales(frame), _offsets(frame), out, rows, inputs, outputs, group, first, end)

    run_parts = in_parts(run)

    @internal()
    def start(frame):
        run_parts(frame, _num_parts(frame, UNIT))

    return start


def _transposed_kernel(bits: int) -> Any:
    """The kernel for weights [N, K] with one scale for each output, or none: a function of the frame."""
    dots, dots_of_row, dot = _dotter(bits, DOTS, DOTS), _dotter(bits, DOTS, 1), _dotter(bits, 1, 1)

    @internal()
    def multiply(x, weights, scales, offsets, out, rows, inputs, outputs, first, end):
        stride, whole = inputs * bits // 8, rows // DOTS * DOTS
        for n in range(first, end, DOTS):
            address, to = weights + n * stride, out + 4 * n
            if n + DOTS > end:
                for left in range(end - n):
                    for row in range(rows):
                        place = to + 4 * (row * outputs + left)
                        dot(place, outputs, address + left * stride, stride, x + 4 * row * inputs, inputs)
                continue
            for row in range(0, whole, DOTS):
                dots(to + 4 * row * outputs, outputs, address, stride, x + 4 * row * inputs, inputs)
            for row in range(whole, rows):
                dots_of_row(to + 4 * row * outputs, outputs, address, stride, x + 4 * row * inputs, inputs)
        if scales == 0:
            return
        totals, scale = floats(out, rows * outputs), floats(scales, outputs)
        sums_of_x = _sums(floats(x, rows * inputs), rows if offsets != 0 else 0, inputs, inputs)
        for row in range(rows):
            for n in range(first, end):
                totals[row * outputs + n] *= scale[n]
                if offsets != 0:
                    totals[row * outputs + n] += sums_of_x[row, 0] * floats(offsets, outputs)[n]

    @internal()
    def run(frame, part):
        num_parts = _num_parts(frame, DOTS)
        x, weights, out = operand(frame, 0), operand(frame, 1), result(frame, 0)
        rows, inputs, outputs = operand_size(frame, 0, 0), operand_size(frame, 0, 1), result_size(frame, 0, 1)
        units = -(-outputs // DOTS)
        first, end = DOTS * (part * units // num_parts), min(DOTS * ((part + 1) * units // num_parts), outputs)
        multiply(x, weights, _scales(frame), _offsets(frame), out, rows, inputs, outputs, first, end)

    run_parts = in_parts(run)

    @internal()
    def start(frame):
        run_parts(frame, _num_parts(frame, DOTS))

    return start


@internal("int64(int64, int64)")
def _num_parts(frame, unit):
    """Into how many parts the outputs are divided, whole units each."""
    inputs, outputs = operand_size(frame, 0, 1), result_size(frame, 0, 1)
    return max(min(PARTS * num_threads(frame), outputs // unit, inputs * outputs // MIN_PART), 1)


@internal("int64(int64)")
def _scales(frame):
    """The address of the scales, or 0."""
    return operand(frame, 2) if num_operands(frame) > 2 else 0


@internal("int64(int64)")
def _offsets(frame):
    """The address of what a weight is where the stored value is 0, or 0."""
    return operand(frame, 3) if num_operands(frame) > 3 else 0


_int8, _int4, _float32 = _kernel(8), _kernel(4), _kernel(32)
_transposed_int8, _transposed_int4, _transposed_float32 = (_transposed_kernel(bits) for bits in (8, 4, 32))


@compiled
def int8(frame):
    if not answers_metadata(frame):
        _int8(frame)
    return 0


@compiled
def int4(frame):
    if not answers_metadata(frame):
        _int4(frame)
    return 0


@compiled
def float32(frame):
    if not answers_metadata(frame):
        _float32(frame)
    return 0


@compiled
def transposed_int8(frame):
    if not answers_metadata(frame):
        _transposed_int8(frame)
    return 0


@compiled
def transposed_int4(frame):
    if not answers_metadata(frame):
        _transposed_int4(frame)
    return 0


@compiled
def transposed_float32(frame):
    if not answers_metadata(frame):
        _transposed_float32(frame)
    return 0
