"""The loops over packed codes and rows that were rounded to 8 bits, as LLVM instructions.

A row is rounded in groups of 32 inputs, input = d * q with d = largest / 127 (as ggml's Q8_0 and Q8_1). Products of a
segment are sums of integers, exact in any order; then come d, the scale, and the sum of the rounded inputs times the
offset, always in that order. So a row has the same bits alone and with others.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from pallas_kernels.numba_cpu import vectors as vec
from pallas_kernels.numba_cpu.memory import intrinsic
from pallas_kernels.packed_matmul.numba_loads import (
    HAS_AVX512,
    HAS_VNNI,
    PANEL_BYTES,
    STEP_FLOATS,
    TILE_VECTORS,
    VECTOR_BYTES,
    VECTORS,
    WORDS,
    load_number,
    load_step,
    offset,
    prefetch_step,
)
from pallas_kernels.packed_matmul.specs import LANES, STEP

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
    words, found = ir.VectorType(vec.INT, _HALF), []
    for own, code, number in zip(*(_halves(builder, vector) for vector in (sums, codes, numbers)), strict=True):
        code, number = builder.bitcast(code, bytes_), builder.bitcast(number, bytes_)
        if is_signed:  # |code| times the number with the code's sign
            number = _external(builder, "llvm.x86.avx2.psign.b", bytes_, [number, code])
            code = _external(builder, "llvm.x86.avx2.psign.b", bytes_, [code, code])
        pairs = _external(builder, "llvm.x86.avx2.pmadd.ub.sw", shorts, [code, number])
        fours = _external(builder, "llvm.x86.avx2.pmadd.wd", words, [pairs, vec.splat(shorts, 1)])
        found.append(builder.add(own, fours))
    return builder.shuffle_vector(*found, ir.Constant(WORDS, list(range(2 * _HALF))))


def _load_words(builder: Any, kind: str, address: Any, vector: int) -> list[Any]:
    """Words of four bytes of the codes of 8 inputs, of one of a panel's vectors: for nibbles inputs 0, 2, 4, 6 and the
    others, else the first four and the others."""
    at_vector = offset(builder, address, vector * VECTOR_BYTES)
    if kind == "nibbles_int8":
        words, mask = vec.load(builder, at_vector, WORDS), vec.splat(WORDS, 0x0F0F0F0F)
        return [builder.and_(words, mask), builder.and_(builder.lshr(words, vec.splat(WORDS, 4)), mask)]
    found = [vec.load(builder, offset(builder, at_vector, half * PANEL_BYTES), WORDS) for half in range(HALF_WORDS)]
    sign = vec.splat(WORDS, -0x7F7F7F80)  # 0x80808080
    return [builder.xor(words, sign) for words in found] if HAS_VNNI else found


def _load_word(builder: Any, address: Any) -> Any:
    """An int32 in all lanes."""
    number = builder.load(vec.at(builder, address, vec.INT), align=4)
    undefined = ir.Constant(WORDS, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(vec.INT, 0))
    return builder.shuffle_vector(first, undefined, vec.splat(WORDS, 0))


def _scaled(builder: Any, total: Any, sums: Any, factor: Any, scale: Any) -> Any:
    return vec.multiply_add(builder, builder.fmul(builder.sitofp(sums, vec.FLOATS), factor), scale, total)


def multiplier(kind: str) -> Any:
    """An intrinsic that multiplies one row by a panel."""

    @intrinsic
    def multiply(context, totals, codes, scales, offsets, x, sums, segments, steps, left, table):
        """As `numba_float.multiplier`'s; x and sums as `preparer` leaves them."""

        def generate(context, builder, signature, arguments):
            totals, codes, scales, offsets, x, sums, segments, steps, left, _ = arguments
            places = [offset(builder, totals, VECTOR_BYTES * v) for v in range(VECTORS)]
            has_offsets = builder.icmp_signed("!=", offsets, vec.constant(0))
            own = [vec.at(builder, place, vec.FLOATS) for place in places]
            if HAS_AVX512:
                own = [cgutils.alloca_once_value(builder, vec.load(builder, place)) for place in places]
            with cgutils.for_range(builder, segments, intp=vec.LONG) as segment:
                first = builder.mul(segment.index, steps)
                rest = builder.sub(left, first)
                count = builder.select(builder.icmp_signed("<", rest, steps), rest, steps)
                planes = builder.add(sums, builder.mul(segment.index, vec.constant(4 * PLANES)))
                chains = [cgutils.alloca_once(builder, WORDS) for _ in range(VECTORS)]
                for chain in chains:
                    builder.store(_load_word(builder, offset(builder, planes, 8)), chain)
                with cgutils.for_range(builder, count, intp=vec.LONG) as step:
                    index = builder.add(first, step.index)
                    numbers = builder.add(x, builder.mul(index, vec.constant(STEP)))
                    size = PANEL_BYTES if kind == "nibbles_int8" else LANES * STEP
                    address = builder.add(codes, builder.mul(index, vec.constant(size)))
                    prefetch_step(builder, kind, address)
                    halves = [_load_word(builder, offset(builder, numbers, 4 * half)) for half in range(HALF_WORDS)]
                    for v in range(VECTORS):
                        for words, half in zip(_load_words(builder, kind, address, v), halves, strict=True):
                            is_signed = kind == "quads"
                            total = _add_dots(builder, builder.load(chains[v]), words, half, is_signed=is_signed)
                            builder.store(total, chains[v])
                at = builder.mul(segment.index, vec.constant(PANEL_BYTES))
                factor = load_number(builder, planes)
                for v in range(VECTORS):
                    scale = vec.load(builder, builder.add(scales, offset(builder, at, VECTOR_BYTES * v)))
                    total = builder.load(own[v], align=4)
                    builder.store(_scaled(builder, total, builder.load(chains[v]), factor, scale), own[v], align=4)
                with builder.if_then(has_offsets):
                    total = load_number(builder, offset(builder, planes, 4))
                    for v in range(VECTORS):
                        factor = vec.load(builder, builder.add(offsets, offset(builder, at, VECTOR_BYTES * v)))
                        found = vec.multiply_add(builder, total, factor, builder.load(own[v], align=4))
                        builder.store(found, own[v], align=4)
            if HAS_AVX512:
                for v in range(VECTORS):
                    vec.store(builder, builder.load(own[v]), places[v])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), generate

    return multiply


def converter(kind: str) -> Any:
    """An intrinsic that writes codes of a panel as words of four bytes."""

    @intrinsic
    def convert(context, target, codes, first, steps, table, scales):
        """Writes the codes of 8 * steps inputs of a tile's vectors, from the first on, as words [2 * steps, vectors,
        16]."""

        def generate(context, builder, signature, arguments):
            target, codes, first, steps, *_ = arguments
            codes = builder.add(codes, builder.mul(first, vec.constant(VECTOR_BYTES)))
            with cgutils.for_range(builder, steps, intp=vec.LONG) as step:
                size = PANEL_BYTES if kind == "nibbles_int8" else LANES * STEP
                address = builder.add(codes, builder.mul(step.index, vec.constant(size)))
                width = VECTOR_BYTES * TILE_VECTORS
                to = builder.add(target, builder.mul(step.index, vec.constant(width * HALF_WORDS)))
                for v in range(TILE_VECTORS):
                    for half, words in enumerate(_load_words(builder, kind, address, v)):
                        vec.store(builder, words, offset(builder, to, half * width + v * VECTOR_BYTES))
                prefetch_step(builder, kind, address)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return convert


def tiler(rows: int, vectors: int) -> Any:
    """An intrinsic for the products of `rows` rows with a segment of `vectors` vectors, whose sums stay in registers."""

    @intrinsic
    def add_tile(context, totals, codes, x, steps, scales, offsets, sums):
        """As `numba_float.tiler`'s; codes are words [2 * steps, vectors, 16], x words [2 * steps, rows], sums planes
        [3, rows]."""

        def generate(context, builder, signature, arguments):
            totals, codes, x, steps, scales, offsets, sums = arguments
            chains = {(r, v): cgutils.alloca_once(builder, WORDS) for r in range(rows) for v in range(vectors)}
            for (r, _), chain in chains.items():
                builder.store(_load_word(builder, offset(builder, sums, 4 * (2 * rows + r))), chain)
            count = builder.mul(steps, vec.constant(HALF_WORDS))
            with cgutils.for_range(builder, count, intp=vec.LONG) as word:
                at_codes = builder.add(codes, builder.mul(word.index, vec.constant(vectors * VECTOR_BYTES)))
                at_x = builder.add(x, builder.mul(word.index, vec.constant(rows * 4)))
                loaded = [vec.load(builder, offset(builder, at_codes, v * VECTOR_BYTES), WORDS) for v in range(vectors)]
                for r in range(rows):
                    numbers = _load_word(builder, offset(builder, at_x, 4 * r))
                    for v in range(vectors):
                        chain = chains[r, v]
                        total = _add_dots(builder, builder.load(chain), loaded[v], numbers, is_signed=True)
                        builder.store(total, chain)
            own = [vec.load(builder, offset(builder, scales, v * VECTOR_BYTES)) for v in range(vectors)]
            place = {key: offset(builder, totals, (key[0] * vectors + key[1]) * VECTOR_BYTES) for key in chains}
            for (r, v), chain in chains.items():
                factor = load_number(builder, offset(builder, sums, 4 * r))
                total = vec.load(builder, place[r, v])
                vec.store(builder, _scaled(builder, total, builder.load(chain), factor, own[v]), place[r, v])
            with builder.if_then(builder.icmp_signed("!=", offsets, vec.constant(0))):
                own = [vec.load(builder, offset(builder, offsets, v * VECTOR_BYTES)) for v in range(vectors)]
                for r in range(rows):
                    total = load_number(builder, offset(builder, sums, 4 * (rows + r)))
                    for v in range(vectors):
                        found = vec.multiply_add(builder, total, own[v], vec.load(builder, place[r, v]))
                        vec.store(builder, found, place[r, v])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return add_tile


def preparer(is_for_nibbles: bool) -> Any:
    """An intrinsic that rounds a row to 8 bits in the order in which the loops read it."""
    order = [0, 2, 4, 6, 1, 3, 5, 7] if is_for_nibbles else list(range(STEP))
    per_round = ROUNDED // STEP

    @intrinsic
    def prepare(context, target, rows, source, steps, inputs, of_segment, sums):
        """As `numba_float.preparer`'s; target: words [2 * steps, rows], sums: planes [segments, 3, rows]. A row with a
        number that is not finite has factors that are NaN."""

        def generate(context, builder, signature, arguments):
            target, rows, source, steps, inputs, of_segment, sums = arguments
            stride = builder.mul(rows, vec.constant(4))
            ints = ir.VectorType(vec.INT, STEP)
            absolute = lambda x: _external(builder, "llvm.fabs.v8f32", STEP_FLOATS, [x])  # noqa: E731
            rounds = builder.udiv(builder.add(steps, vec.constant(per_round - 1)), vec.constant(per_round))
            with cgutils.for_range(builder, rounds, intp=vec.LONG) as part:
                start = builder.mul(part.index, vec.constant(per_round))
                rest = builder.sub(steps, start)
                four = vec.constant(per_round)
                count = builder.select(builder.icmp_signed("<", rest, four), rest, four)
                largest = cgutils.alloca_once(builder, STEP_FLOATS)
                broken = cgutils.alloca_once(builder, STEP_FLOATS)  # 0, or NaN
                for place in (largest, broken):
                    builder.store(vec.splat(STEP_FLOATS, 0.0), place)
                with cgutils.for_range(builder, count, intp=vec.LONG) as step:
                    first = builder.mul(builder.add(start, step.index), vec.constant(STEP))
                    numbers = load_step(builder, source, first, inputs)
                    size, most = absolute(numbers), builder.load(largest)
                    builder.store(builder.select(builder.fcmp_ordered(">", size, most), size, most), largest)
                    nothing = builder.fmul(numbers, vec.splat(STEP_FLOATS, 0.0))
                    builder.store(builder.fadd(builder.load(broken), nothing), broken)
                most, parts = cgutils.alloca_once_value(builder, ir.Constant(vec.FLOAT, 0.0)), builder.load(largest)
                for j in range(STEP):
                    one, found = builder.extract_element(parts, ir.Constant(vec.INT, j)), builder.load(most)
                    builder.store(builder.select(builder.fcmp_ordered(">", one, found), one, found), most)
                factor = builder.fdiv(builder.load(most), ir.Constant(vec.FLOAT, 127.0))
                is_zero = builder.fcmp_ordered("==", factor, ir.Constant(vec.FLOAT, 0.0))
                one = ir.Constant(vec.FLOAT, 1.0)
                inverse = builder.select(
                    is_zero, ir.Constant(vec.FLOAT, 0.0), builder.fdiv(one, builder.select(is_zero, one, factor))
                )
                factor = builder.fadd(factor, vec.total(builder, builder.load(broken)))
                spread = ir.Constant(STEP_FLOATS, ir.Undefined)
                for j in range(STEP):
                    spread = builder.insert_element(spread, inverse, ir.Constant(vec.INT, j))
                total = cgutils.alloca_once(builder, vec.INT)
                builder.store(ir.Constant(vec.INT, 0), total)
                with cgutils.for_range(builder, count, intp=vec.LONG) as step:
                    index = builder.add(start, step.index)
                    with builder.if_then(builder.icmp_signed("==", builder.urem(index, of_segment), vec.constant(0))):
                        builder.store(ir.Constant(vec.INT, 0), total)
                    numbers = load_step(builder, source, builder.mul(index, vec.constant(STEP)), inputs)
                    scaled = _external(builder, "llvm.rint.v8f32", STEP_FLOATS, [builder.fmul(numbers, spread)])
                    integers = builder.fptosi(scaled, ints)
                    own = builder.load(total)
                    for j in range(STEP):
                        own = builder.add(own, builder.extract_element(integers, ir.Constant(vec.INT, j)))
                    builder.store(own, total)
                    integers = builder.shuffle_vector(integers, integers, ir.Constant(ints, order))
                    bytes_ = builder.trunc(integers, ir.VectorType(vec.BYTE, STEP))
                    words = builder.bitcast(bytes_, ir.VectorType(vec.INT, HALF_WORDS))
                    to = builder.add(target, builder.mul(builder.mul(index, vec.constant(HALF_WORDS)), stride))
                    for half in range(HALF_WORDS):
                        word = builder.extract_element(words, ir.Constant(vec.INT, half))
                        builder.store(word, vec.at(builder, to, vec.INT), align=4)
                        to = builder.add(to, stride)
                    # Written anew with each step of the segment, the last time in full.
                    segment = builder.mul(builder.udiv(index, of_segment), vec.constant(PLANES))
                    to = builder.add(sums, builder.mul(segment, stride))
                    builder.store(factor, vec.at(builder, to, vec.FLOAT), align=4)
                    to = builder.add(to, stride)
                    product = builder.fmul(factor, builder.sitofp(own, vec.FLOAT))
                    builder.store(product, vec.at(builder, to, vec.FLOAT), align=4)
                    to = builder.add(to, stride)
                    begin = 0 if is_for_nibbles or not HAS_VNNI else -128
                    begin = builder.mul(own, ir.Constant(vec.INT, begin))
                    builder.store(begin, vec.at(builder, to, vec.INT), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return prepare
