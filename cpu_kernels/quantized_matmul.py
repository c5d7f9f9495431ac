"""Products with integer and float32 weights, a kernel for each type of weights.

Few rows: 8 inputs of 32 outputs are converted in registers, and their products added to sums in the first cache. Many
rows: blocks of 128 inputs of 32 outputs are written as float32 to the first cache, and the sums of 8 rows stay in
registers (Goto and van de Geijn 2008, the inner kernel). The order of sums is the same, so a row's result does not
depend, to the bit, on how many there are. Threads share the outputs of few rows, or many rows; that changes no sum.
"""

from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cpu_kernels import vectors as vec
from cpu_kernels.frames import (
    answers_metadata,
    attribute,
    compiled,
    inlined,
    internal,
    num_operands,
    operand,
    operand_size,
    result,
    result_size,
)
from cpu_kernels.memory import allocate, free, get, put
from cpu_kernels.threads import in_parts, num_threads

# Sums of all rows that stay in the first cache while a panel of outputs passes.
PANEL_BYTES = 2**15
BLOCK, TILE = 128, 8  # inputs that are converted for all rows, and rows whose sums stay in registers
AHEAD = {4: 40, 8: 40, 32: 12}  # inputs from one that is read to one that is prefetched, by bits of a weight
AHEAD_BYTES = 2**14  # of a transposed weight
MANY = 72  # rows from which on weights are written as float32 first
STEP, UNIT = 8, 32
DOTS = 4  # outputs, and rows, whose products stay in registers where the weight is transposed
MIN_PART = 2**16  # weights of a part


def _load(builder: Any, address: Any, bits: int, count: Any = None) -> list[Any]:
    """32 weights as two vectors of float32; the first `count`, and zeros."""

    def load(start: int, kind: Any) -> Any:
        place = builder.add(address, vec.constant(start * bits // 8))
        if count is None:
            return vec.load(builder, place, kind)
        left = builder.sub(count, vec.constant(start))
        return vec.load_first(builder, place, kind, builder.udiv(left, vec.constant(2)) if bits == 4 else left)

    numbers = vec.ir.VectorType(vec.BYTE, vec.LANES)
    if bits == 4:
        return vec.from_int4(builder, load(0, numbers))
    if bits == 32:
        return [load(start, vec.FLOATS) for start in (0, vec.LANES)]
    return [vec.from_int8(builder, load(start, numbers)) for start in (0, vec.LANES)]


def _adder(bits: int, *, is_part: bool = False) -> Any:
    """Adds the products of 8 inputs: an intrinsic for weights of 4, 8 or 32 bits.

    is_part: it takes one unit, of which `units` outputs are real.
    """

    @intrinsic
    def add_products(context, totals, width, weights, stride, x, x_stride, rows, units):
        """totals[row, n] += sum of x[row, k] * weights[k, n] over 8 inputs k, for 32 * units outputs n.

        All are int64. totals: address of float32 [rows, width]. weights: address of the first weight, with `stride`
        bytes from an input to the next. x: address of float32 [rows, x_stride], of the first input.
        """

        def generate(context, builder, signature, arguments):
            totals, width, weights, stride, x, x_stride, rows, units = arguments
            inputs = [builder.add(weights, builder.mul(stride, vec.constant(k))) for k in range(STEP)]
            ahead = builder.mul(stride, vec.constant(AHEAD[bits]))
            count, times = (units, vec.constant(1)) if is_part else (None, units)
            with cgutils.for_range(builder, times, intp=vec.LONG) as unit:
                place = builder.mul(unit.index, vec.constant(UNIT * bits // 8))
                loaded = [_load(builder, builder.add(address, place), bits, count) for address in inputs]
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


def _converter(bits: int, *, is_part: bool = False) -> Any:
    """An intrinsic that writes weights of 4, 8 or 32 bits as float32."""

    @intrinsic
    def convert(context, target, weights, stride, inputs, outputs):
        """Writes 32 outputs of `inputs` inputs, `stride` bytes apart, as float32 [inputs, 32]; `is_part`: of which
        `outputs` are real."""

        def generate(context, builder, signature, arguments):
            target, weights, stride, inputs, outputs = arguments
            with cgutils.for_range(builder, inputs, intp=vec.LONG) as k:
                source = builder.add(weights, builder.mul(k.index, stride))
                loaded = _load(builder, source, bits, outputs if is_part else None)
                for line in range(0, UNIT * bits // 8, 64):
                    ahead = builder.add(builder.mul(stride, vec.constant(AHEAD[bits])), vec.constant(line))
                    vec.prefetch(builder, builder.add(source, ahead))
                own = builder.add(target, builder.mul(k.index, vec.constant(4 * UNIT)))
                for half in range(2):
                    vec.store(builder, loaded[half], builder.add(own, vec.constant(4 * vec.LANES * half)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

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
                for start in starts:
                    for line in range(0, UNIT * bits // 8, 64):
                        ahead = builder.add(place, vec.constant(AHEAD_BYTES + line))
                        vec.prefetch(builder, builder.add(start, ahead))
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


@internal("int64(int64, int64, int64, int64)")
def _sums(x, rows, inputs, group):
    """The sum of the inputs of each group: the address of float32 [rows, groups], to be freed."""
    groups = (inputs + group - 1) // group
    sums = allocate(4 * rows * groups)
    for row in range(rows):
        for index in range(groups):
            total = np.float32(0)
            for k in range(index * group, min(index * group + group, inputs)):
                total += get(x, row * inputs + k)
            put(sums, row * groups + index, total)
    return sums


@internal("void(int64, int64, int64, int64, int64, int64, boolean)")
def _add_scaled(totals, sums, scales, offsets, factors, size, is_first):
    """totals[n] += sums[n] * scales[n] + factor * offsets[n] for `size` outputs; `is_first`: totals are set.

    All are addresses of float32, or 0: scales of 1, offsets of 0. The factor is the first at `factors`.
    """
    for n in range(size):
        own = get(sums, n)
        if scales != 0:
            own *= get(scales, n)
        total = own if is_first else get(totals, n) + own
        if offsets != 0:
            total += get(factors, 0) * get(offsets, n)
        put(totals, n, total)


@internal("void(int64, int64)")
def _clear(address, size):
    for index in range(size):
        put(address, index, np.float32(0))


@internal("int64(int64, int64)")
def _num_parts(frame, unit):
    """Into how many parts the outputs are divided, whole units each: one for each thread, since wider rows of weights
    are read faster."""
    inputs, outputs = operand_size(frame, 0, 1), result_size(frame, 0, 1)
    return max(min(num_threads(frame), outputs // unit, inputs * outputs // MIN_PART), 1)


@internal("int64(int64)")
def _rows_of_part(frame):
    """An equal share of the rows for each thread, of whole tiles."""
    return -(-operand_size(frame, 0, 0) // (TILE * num_threads(frame))) * TILE


@internal("int64(int64)")
def _num_row_parts(frame):
    """Into how many parts the work is divided: rows where there are many, else outputs."""
    rows = operand_size(frame, 0, 0)
    return -(-rows // _rows_of_part(frame)) if rows >= MANY else _num_parts(frame, UNIT)


@internal("int64(int64)")
def _scales(frame):
    """The address of the scales, or 0."""
    return operand(frame, 2) if num_operands(frame) > 2 else 0


@internal("int64(int64)")
def _offsets(frame):
    """The address of what a weight is where the stored value is 0, or 0."""
    return operand(frame, 3) if num_operands(frame) > 3 else 0


@internal("UniTuple(int64, 2)(int64, int64, int64)")
def _outputs(frame, part, unit):
    """The first output of a part, and the end."""
    outputs, num_parts = result_size(frame, 0, 1), _num_parts(frame, unit)
    units = (outputs + unit - 1) // unit
    return unit * (part * units // num_parts), min(unit * ((part + 1) * units // num_parts), outputs)


def _kernel(bits: int) -> Any:
    """The kernel for weights [K, N] of 4, 8 or 32 bits, the last without scales, as `in_parts` returns it."""
    add_products, add_last = _adder(bits), _adder(bits, is_part=True)
    convert, convert_last = _converter(bits), _converter(bits, is_part=True)

    @internal(suffix=f"_{bits}")
    def add_block(sums, weights, stride, x, x_stride, rows, inputs, outputs, converted):
        """Adds the products of up to `BLOCK` inputs of up to 32 outputs to float32 sums [rows, 32]."""
        if outputs == UNIT:
            convert(converted, weights, stride, inputs, outputs)
        else:
            convert_last(converted, weights, stride, inputs, outputs)
        for row in range(0, rows - TILE + 1, TILE):
            _add_tile(sums + 4 * UNIT * row, UNIT, converted, x + 4 * row * x_stride, x_stride, inputs)
        for row in range(rows // TILE * TILE, rows):
            _add_row(sums + 4 * UNIT * row, UNIT, converted, x + 4 * row * x_stride, x_stride, inputs)

    def run(frame, part):
        x, weights, out = operand(frame, 0), operand(frame, 1), result(frame, 0)
        scales, offsets = _scales(frame), _offsets(frame)
        rows, inputs, outputs = operand_size(frame, 0, 0), operand_size(frame, 0, 1), result_size(frame, 0, 1)
        group, has_many = attribute(frame, 0), rows >= MANY
        first, end = (0, outputs) if has_many else _outputs(frame, part, UNIT)
        if has_many:
            most = _rows_of_part(frame)
            x, out = x + 4 * part * most * inputs, out + 4 * part * most * outputs
            rows = min(most, rows - part * most)
        stride, groups = outputs * bits // 8, (inputs + group - 1) // group
        panel = UNIT if has_many else max(min(end - first, PANEL_BYTES // (4 * rows)) // UNIT, 1) * UNIT
        sums, converted = allocate(4 * rows * panel), allocate(4 * BLOCK * UNIT)
        factors = _sums(x, rows, inputs, group) if offsets != 0 else 0
        start = first
        while start < end:
            size = min(panel, end - start)
            if size > UNIT:
                size -= size % UNIT
            step = BLOCK if has_many else STEP
            for index in range(groups):
                _clear(sums, rows * panel)
                after = min(index * group + group, inputs)
                for k in range(index * group, after, step):
                    address, numbers = weights + k * stride + start * bits // 8, x + 4 * k
                    if has_many:
                        add_block(sums, address, stride, numbers, inputs, rows, min(step, after - k), size, converted)
                    elif size < UNIT:
                        add_last(sums, panel, address, stride, numbers, inputs, rows, size)
                    else:
                        add_products(sums, panel, address, stride, numbers, inputs, rows, size // UNIT)
                place = 4 * (index * outputs + start)
                scale, offset = scales + place if scales != 0 else 0, offsets + place if offsets != 0 else 0
                for row in range(rows):
                    own, factor = sums + 4 * row * panel, factors + 4 * (row * groups + index)
                    _add_scaled(out + 4 * (row * outputs + start), own, scale, offset, factor, size, index == 0)
            start += size
        free(sums)
        free(converted)
        if offsets != 0:
            free(factors)

    return in_parts(inlined(run, suffix=f"_{bits}"))


def _transposed_kernel(bits: int) -> Any:
    """The kernel for weights [N, K] with one scale for each output, or none, as `in_parts` returns it."""
    dots, dots_of_row, dot = _dotter(bits, DOTS, DOTS), _dotter(bits, DOTS, 1), _dotter(bits, 1, 1)

    def run(frame, part):
        x, weights, out = operand(frame, 0), operand(frame, 1), result(frame, 0)
        scales, offsets = _scales(frame), _offsets(frame)
        rows, inputs, outputs = operand_size(frame, 0, 0), operand_size(frame, 0, 1), result_size(frame, 0, 1)
        first, end = _outputs(frame, part, DOTS)
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
        factors = _sums(x, rows, inputs, inputs) if offsets != 0 else 0
        offset = offsets + 4 * first if offsets != 0 else 0
        for row in range(rows):
            to = out + 4 * (row * outputs + first)
            _add_scaled(to, to, scales + 4 * first, offset, factors + 4 * row, end - first, True)
        if offsets != 0:
            free(factors)

    return in_parts(inlined(run, suffix=f"_{bits}"))


def _handlers(bits: int) -> tuple[Any, Any]:
    """The handlers for weights [K, N] and for weights [N, K]."""
    by_inputs, by_outputs = _kernel(bits), _transposed_kernel(bits)

    def handler(frame):
        if not answers_metadata(frame):
            by_inputs(frame, frame, _num_row_parts(frame))
        return 0

    def transposed_handler(frame):
        if not answers_metadata(frame):
            by_outputs(frame, frame, _num_parts(frame, DOTS))
        return 0

    for function in (handler, transposed_handler):
        function.__qualname__ += f"_{bits}"
    return compiled(handler), compiled(transposed_handler)


(int8, transposed_int8), (int4, transposed_int4), (float32, transposed_float32) = map(_handlers, (8, 4, 32))
