"""The loops over packed codes and rows that were rounded to 8 bits, as LLVM instructions.

A row is rounded in groups of 32 inputs, input = d * q with d = largest / 127 (as ggml's Q8_0 and Q8_1). Products of a
segment are sums of integers, exact in any order; then come d, the scale, and the sum of the rounded inputs times the
offset, always in that order. So a row has the same bits alone and with others.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from cpu_kernels import vectors as vec
from cpu_kernels.memory import intrinsic
from cpu_kernels.packed_matmul.forms import STEP
from cpu_kernels.packed_matmul.loads import (
    HAS_VNNI,
    PANEL_BYTES,
    STEP_FLOATS,
    TILE_VECTORS,
    VECTOR_BYTES,
    VECTORS,
    WORDS,
    add_offsets,
    bytes_of_step,
    each_segment,
    load_number,
    load_step,
    offset,
    panel_totals,
    prefetch_step,
    store_totals,
    vectors_at_once,
)

ROUNDED = 32  # inputs of a row that are rounded together
HALF_WORDS = 2  # words of 4 inputs in a step
PLANES = 3  # of a segment of a row: d, d times the sum of its integers, and what its sums of integers begin with
_HALF = 8  # words of an AVX2 register


def _external(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _halves(builder: Any, vector: Any) -> list[Any]:
    undefined, order = ir.Constant(vector.type, ir.Undefined), ir.VectorType(vec.INT, _HALF)
    return [
        builder.shuffle_vector(vector, undefined, ir.Constant(order, [first + lane for lane in range(_HALF)]))
        for first in (0, _HALF)
    ]


def _add_dots(builder: Any, sums: Any, codes: Any, numbers: Any, *, is_signed: bool) -> Any:
    """sums int32 [16] += products of four bytes of codes with four of numbers, which are -127 to 127.

    With VNNI signed codes are given plus 128, and the sums begin with -128 times the sum of the numbers.
    """
    if HAS_VNNI:
        return _external(builder, "llvm.x86.avx512.vpdpbusd.512", WORDS, [sums, codes, numbers])
    bytes_, shorts = ir.VectorType(vec.BYTE, 4 * _HALF), ir.VectorType(vec.HALF, 2 * _HALF)
    words, halves = ir.VectorType(vec.INT, _HALF), []
    for own, code, number in zip(*(_halves(builder, vector) for vector in (sums, codes, numbers)), strict=True):
        code, number = builder.bitcast(code, bytes_), builder.bitcast(number, bytes_)
        if is_signed:  # |code| times the number with the code's sign
            number = _external(builder, "llvm.x86.avx2.psign.b", bytes_, [number, code])
            code = _external(builder, "llvm.x86.avx2.psign.b", bytes_, [code, code])
        pairs = _external(builder, "llvm.x86.avx2.pmadd.ub.sw", shorts, [code, number])
        fours = _external(builder, "llvm.x86.avx2.pmadd.wd", words, [pairs, vec.splat(shorts, 1)])
        halves.append(builder.add(own, fours))
    return builder.shuffle_vector(*halves, ir.Constant(WORDS, list(range(2 * _HALF))))


def _load_words(builder: Any, kind: str, address: Any, vector: int) -> list[Any]:
    """Words of four bytes of the codes of 8 inputs, of one of a panel's vectors: for nibbles inputs 0, 2, 4, 6 and the
    others, else the first four and the others."""
    at_vector = offset(builder, address, vector * VECTOR_BYTES)
    if kind == "nibbles_int8":
        words, mask = vec.load(builder, at_vector, WORDS), vec.splat(WORDS, 0x0F0F0F0F)
        return [builder.and_(words, mask), builder.and_(builder.lshr(words, vec.splat(WORDS, 4)), mask)]
    halves = [vec.load(builder, offset(builder, at_vector, half * PANEL_BYTES), WORDS) for half in range(HALF_WORDS)]
    sign = vec.splat(WORDS, -0x7F7F7F80)  # 0x80808080
    return [builder.xor(words, sign) for words in halves] if HAS_VNNI else halves


def _load_word(builder: Any, address: Any) -> Any:
    """An int32 in all lanes."""
    number = builder.load(vec.at(builder, address, vec.INT), align=4)
    undefined = ir.Constant(WORDS, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(vec.INT, 0))
    return builder.shuffle_vector(first, undefined, vec.splat(WORDS, 0))


def _scaled(builder: Any, total: Any, sums: Any, factor: Any, scale: Any) -> Any:
    return vec.multiply_add(builder, builder.fmul(builder.sitofp(sums, vec.FLOATS), factor), scale, total)


def multiplier(kind: str, rows: int) -> Any:
    """An intrinsic that multiplies `rows` rows, few or one, by a panel, whose codes are taken apart in registers."""

    @intrinsic
    def multiply(context, totals, codes, scales, offsets, x, sums, segments, steps, left, table):
        """As `float_products.multiplier`'s; x and sums as `preparer` leaves them."""

        def generate(context, builder, signature, arguments):
            totals, codes, scales, offsets, x, sums, segments, steps, left, _ = arguments
            own = panel_totals(builder, totals, rows)
            with each_segment(builder, segments, steps, left) as (segment, first, count):
                planes = builder.add(sums, builder.mul(segment, vec.constant(4 * PLANES * rows)))
                start = builder.add(codes, builder.mul(first, vec.constant(bytes_of_step(kind))))
                numbers = builder.add(x, builder.mul(first, vec.constant(STEP * rows)))
                at = builder.add(scales, builder.mul(segment, vec.constant(PANEL_BYTES)))
                at_once = vectors_at_once(rows)
                for v in range(0, VECTORS, at_once):
                    of = range(v, v + at_once)
                    _add_to_totals(builder, kind, rows, of, start, numbers, count, at, planes, own)
                add_offsets(builder, own, offsets, segment, offset(builder, planes, 4 * rows))
            store_totals(builder, totals, own)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), generate

    return multiply


def _add_to_totals(builder, kind: str, rows: int, of: range, codes, x, count, scales, planes, totals) -> None:
    """Adds the products of `count` times 8 inputs with vectors `of` a panel to their totals."""
    chains = {(r, v): cgutils.alloca_once(builder, WORDS) for r in range(rows) for v in of}
    for (r, _), chain in chains.items():
        builder.store(_load_word(builder, offset(builder, planes, 4 * (2 * rows + r))), chain)
    with cgutils.for_range(builder, count, intp=vec.LONG) as step:
        numbers = builder.add(x, builder.mul(step.index, vec.constant(STEP * rows)))
        address = builder.add(codes, builder.mul(step.index, vec.constant(bytes_of_step(kind))))
        if of[0] == 0:
            prefetch_step(builder, kind, address)
        for v in of:
            for half, words in enumerate(_load_words(builder, kind, address, v)):
                for r in range(rows):
                    number = _load_word(builder, offset(builder, numbers, 4 * (rows * half + r)))
                    total = _add_dots(builder, builder.load(chains[r, v]), words, number, is_signed=kind == "quads")
                    builder.store(total, chains[r, v])
    for (r, v), chain in chains.items():
        scale, factor = vec.load(builder, offset(builder, scales, VECTOR_BYTES * v)), offset(builder, planes, 4 * r)
        total = builder.load(totals[r, v], align=4)
        total = _scaled(builder, total, builder.load(chain), load_number(builder, factor), scale)
        builder.store(total, totals[r, v], align=4)


def converter(kind: str) -> Any:
    """An intrinsic that writes codes of a panel as words of four bytes."""

    @intrinsic
    def convert(context, target, codes, stride, segments, steps, left, table, scales):
        """As `float_products.converter`'s, as words [2 * left, vectors of a tile, 16]."""

        def generate(context, builder, signature, arguments):
            target, codes, stride, _, _, left, *_ = arguments
            with cgutils.for_range(builder, left, intp=vec.LONG) as step:
                address = builder.add(codes, builder.mul(step.index, vec.constant(bytes_of_step(kind))))
                width = VECTOR_BYTES * TILE_VECTORS
                to = builder.add(target, builder.mul(step.index, vec.constant(width * HALF_WORDS)))
                for v in range(VECTORS):
                    if v and v % TILE_VECTORS == 0:
                        to = builder.add(to, stride)
                    for half, words in enumerate(_load_words(builder, kind, address, v)):
                        at = offset(builder, to, half * width + v % TILE_VECTORS * VECTOR_BYTES)
                        vec.store(builder, words, at)
                prefetch_step(builder, kind, address)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return convert


def tiler(rows: int, vectors: int) -> Any:
    """An intrinsic for the products of `rows` rows with a segment of `vectors` vectors; the sums stay in registers."""

    @intrinsic
    def add_tile(context, totals, codes, x, segments, steps, left, scales, offsets, sums, ahead):
        """As `float_products.tiler`'s; codes are words [2 * left, vectors, 16], x words [2 * left, rows], sums planes
        [segments, 3, rows]."""

        def generate(context, builder, signature, arguments):
            totals, codes, x, segments, steps, left, scales, offsets, sums, _ = arguments
            chains = {(r, v): cgutils.alloca_once(builder, WORDS) for r in range(rows) for v in range(vectors)}
            place = {key: offset(builder, totals, (key[0] * vectors + key[1]) * VECTOR_BYTES) for key in chains}
            with each_segment(builder, segments, steps, left) as (segment, first, count):
                planes = builder.add(sums, builder.mul(segment, vec.constant(PLANES * 4 * rows)))
                for (r, _), chain in chains.items():
                    builder.store(_load_word(builder, offset(builder, planes, 4 * (2 * rows + r))), chain)
                own_codes = builder.add(codes, builder.mul(first, vec.constant(HALF_WORDS * vectors * VECTOR_BYTES)))
                own_x = builder.add(x, builder.mul(first, vec.constant(HALF_WORDS * rows * 4)))
                _add_dots_of_tile(builder, rows, vectors, chains, own_codes, own_x, count)
                at = builder.mul(segment, vec.constant(PANEL_BYTES))

                def numbers_at(address: Any, at: Any = at) -> list[Any]:
                    address = builder.add(address, at)
                    return [vec.load(builder, offset(builder, address, v * VECTOR_BYTES)) for v in range(vectors)]

                own = numbers_at(scales)

                def add_sums(others: list[Any], planes: Any = planes, own: list[Any] = own) -> None:
                    for r in range(rows):
                        factor = load_number(builder, offset(builder, planes, 4 * r))
                        number = load_number(builder, offset(builder, planes, 4 * (rows + r))) if others else None
                        for v in range(vectors):
                            total, dots = vec.load(builder, place[r, v]), builder.load(chains[r, v])
                            total = _scaled(builder, total, dots, factor, own[v])
                            if others:
                                total = vec.multiply_add(builder, number, others[v], total)
                            vec.store(builder, total, place[r, v])

                with builder.if_else(builder.icmp_signed("!=", offsets, vec.constant(0))) as (has_offsets, has_none):
                    with has_offsets:
                        add_sums(numbers_at(offsets))
                    with has_none:
                        add_sums([])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), generate

    return add_tile


def _add_dots_of_tile(
    builder: Any, rows: int, vectors: int, chains: dict[tuple[int, int], Any], codes, x, steps
) -> None:
    """Adds the products of `steps` times 8 inputs to the chains of a tile."""
    with cgutils.for_range(builder, builder.mul(steps, vec.constant(HALF_WORDS)), intp=vec.LONG) as word:
        at_codes = builder.add(codes, builder.mul(word.index, vec.constant(vectors * VECTOR_BYTES)))
        at_x = builder.add(x, builder.mul(word.index, vec.constant(rows * 4)))
        loaded = [vec.load(builder, offset(builder, at_codes, v * VECTOR_BYTES), WORDS) for v in range(vectors)]
        for r in range(rows):
            numbers = _load_word(builder, offset(builder, at_x, 4 * r))
            for v in range(vectors):
                chain = chains[r, v]
                builder.store(_add_dots(builder, builder.load(chain), loaded[v], numbers, is_signed=True), chain)


def _absolute(builder: Any, numbers: Any) -> Any:
    return _external(builder, "llvm.fabs.v8f32", STEP_FLOATS, [numbers])


def _factors(builder: Any, source: Any, start: Any, count: Any, inputs: Any) -> tuple[Any, Any]:
    """d of `count` times 8 inputs, NaN if one of them is not finite, and its inverse, 0 of 0."""
    largest, broken = (cgutils.alloca_once(builder, STEP_FLOATS) for _ in range(2))
    for place in (largest, broken):
        builder.store(vec.splat(STEP_FLOATS, 0.0), place)
    with cgutils.for_range(builder, count, intp=vec.LONG) as step:
        first = builder.mul(builder.add(start, step.index), vec.constant(STEP))
        numbers = load_step(builder, source, first, inputs)
        size, most = _absolute(builder, numbers), builder.load(largest)
        builder.store(builder.select(builder.fcmp_ordered(">", size, most), size, most), largest)
        nothing = builder.fmul(numbers, vec.splat(STEP_FLOATS, 0.0))  # 0, or NaN
        builder.store(builder.fadd(builder.load(broken), nothing), broken)
    zero, one, parts = ir.Constant(vec.FLOAT, 0.0), ir.Constant(vec.FLOAT, 1.0), builder.load(largest)
    most = zero
    for j in range(STEP):
        part = builder.extract_element(parts, ir.Constant(vec.INT, j))
        most = builder.select(builder.fcmp_ordered(">", part, most), part, most)
    factor = builder.fdiv(most, ir.Constant(vec.FLOAT, 127.0))
    is_zero = builder.fcmp_ordered("==", factor, zero)
    inverse = builder.select(is_zero, zero, builder.fdiv(one, builder.select(is_zero, one, factor)))
    return builder.fadd(factor, vec.total(builder, builder.load(broken))), inverse


def _round(builder: Any, numbers: Any, inverse: Any, order: list[int]) -> tuple[Any, Any]:
    """8 inputs as words of four bytes, int32 [2], in an order, and the sum of their integers."""
    spread, ints = ir.Constant(STEP_FLOATS, ir.Undefined), ir.VectorType(vec.INT, STEP)
    for j in range(STEP):
        spread = builder.insert_element(spread, inverse, ir.Constant(vec.INT, j))
    scaled = _external(builder, "llvm.rint.v8f32", STEP_FLOATS, [builder.fmul(numbers, spread)])
    integers, total = builder.fptosi(scaled, ints), ir.Constant(vec.INT, 0)
    for j in range(STEP):
        total = builder.add(total, builder.extract_element(integers, ir.Constant(vec.INT, j)))
    integers = builder.shuffle_vector(integers, integers, ir.Constant(ints, order))
    packed = builder.trunc(integers, ir.VectorType(vec.BYTE, STEP))
    return builder.bitcast(packed, ir.VectorType(vec.INT, HALF_WORDS)), total


def preparer(is_for_nibbles: bool) -> Any:
    """An intrinsic that rounds a row to 8 bits in the order in which the loops read it."""
    order = [0, 2, 4, 6, 1, 3, 5, 7] if is_for_nibbles else list(range(STEP))
    per_round, begin = ROUNDED // STEP, 0 if is_for_nibbles or not HAS_VNNI else -128

    @intrinsic
    def prepare(context, target, rows, source, steps, inputs, of_segment, sums):
        """As `float_products.preparer`'s; target: words [2 * steps, rows], sums: planes [segments, 3, rows]. A row with
        a number that is not finite has factors that are NaN."""

        def generate(context, builder, signature, arguments):
            target, rows, source, steps, inputs, of_segment, sums = arguments
            stride, four = builder.mul(rows, vec.constant(4)), vec.constant(per_round)
            total = cgutils.alloca_once(builder, vec.INT)
            rounds = builder.udiv(builder.add(steps, vec.constant(per_round - 1)), four)
            with cgutils.for_range(builder, rounds, intp=vec.LONG) as part:
                start = builder.mul(part.index, four)
                rest = builder.sub(steps, start)
                count = builder.select(builder.icmp_signed("<", rest, four), rest, four)
                factor, inverse = _factors(builder, source, start, count, inputs)
                with cgutils.for_range(builder, count, intp=vec.LONG) as step:
                    index = builder.add(start, step.index)
                    is_first = builder.icmp_signed("==", builder.urem(index, of_segment), vec.constant(0))
                    before = builder.select(is_first, ir.Constant(vec.INT, 0), builder.load(total))
                    numbers = load_step(builder, source, builder.mul(index, vec.constant(STEP)), inputs)
                    words, sum_of_step = _round(builder, numbers, inverse, order)
                    own = builder.add(before, sum_of_step)
                    builder.store(own, total)
                    to = builder.add(target, builder.mul(builder.mul(index, vec.constant(HALF_WORDS)), stride))
                    for half in range(HALF_WORDS):
                        word = builder.extract_element(words, ir.Constant(vec.INT, half))
                        builder.store(word, vec.at(builder, to, vec.INT), align=4)
                        to = builder.add(to, stride)
                    # Planes are written anew with each step of the segment, the last time in full.
                    segment = builder.mul(builder.udiv(index, of_segment), vec.constant(PLANES))
                    to = builder.add(sums, builder.mul(segment, stride))
                    product = builder.fmul(factor, builder.sitofp(own, vec.FLOAT))
                    for plane in (factor, product, builder.mul(own, ir.Constant(vec.INT, begin))):
                        builder.store(plane, vec.at(builder, to, plane.type), align=4)
                        to = builder.add(to, stride)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return prepare
