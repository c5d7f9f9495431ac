"""The loops over packed codes and float32 rows, as LLVM instructions.

The sums of an output are always taken in one order: its products of a segment in one chain of multiply-adds, then the
segment's sum times the scale, then the sum of the segment's inputs times the offset; with weights that are scaled first
(CHAINED_KERNELS) one chain over all inputs. So a row has the same bits whether it is computed with few others or alone,
with the weight converted in registers (`multiplier`), or with many, with the weight's codes written as float32 to the
first cache (`converter` and `tiler`).

Nibble j of a part of a word is taken by one AND and without a shift, as nibble * 16^j, and multiplied by an input that
was scaled by 16^-j beforehand (`preparer`): both are exact.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from cpu_kernels import vectors as vec
from cpu_kernels.memory import intrinsic
from cpu_kernels.packed_matmul.forms import CHAINED_KERNELS, STEP
from cpu_kernels.packed_matmul.loads import (
    HAS_AVX512,
    NIBBLES_IN_PLACE,
    PANEL_BYTES,
    STEP_FLOATS,
    TILE_AHEAD_BYTES,
    TILE_VECTORS,
    VECTOR_BYTES,
    VECTORS,
    add_offsets,
    bytes_of_step,
    each_segment,
    load_codes,
    load_number,
    load_step,
    offset,
    panel_totals,
    prefetch_step,
    store_totals,
    vectors_at_once,
)

SCALED_KERNELS, UNSCALED = CHAINED_KERNELS[:3], CHAINED_KERNELS[3:]  # that have scales, or none


def multiplier(kind: str, rows: int) -> Any:
    """An intrinsic that multiplies `rows` rows, few or one, by a panel, converted in registers."""

    @intrinsic
    def multiply(context, totals, codes, scales, offsets, x, sums, segments, steps, left, table):
        """totals[r, n] += the products of segments of inputs with a panel. All are int64.

        totals: address of float32 [rows, 64]. codes: address of the panel's codes. scales, offsets: addresses of
        float32 [segments, 64]; offsets may be 0. x: address of float32 [8 * left, rows], as `prepare` leaves them.
        sums: address of float32 [segments, rows], their sums. segments: of `steps` times 8 inputs, `left` times 8 in
        all. table: address of a codebook.
        """

        def generate(context, builder, signature, arguments):
            totals, codes, scales, offsets, x, sums, segments, steps, left, table = arguments
            entries = vec.load(builder, table) if kind == "codebook" else None
            own = panel_totals(builder, totals, rows)
            if kind in UNSCALED and rows > 1 and not HAS_AVX512:
                # Each vector's lines are read apart: these come from the first cache where segments are short, which
                # changes no sum of weights without scales and offsets.
                whole = builder.mul(segments, steps)
                segments = builder.select(builder.icmp_signed("<", whole, left), whole, left)
                steps = vec.constant(1)
            with each_segment(builder, segments, steps, left) as (segment, first, count):
                numbers = builder.add(x, builder.mul(first, vec.constant(4 * STEP * rows)))
                start = builder.add(codes, builder.mul(first, vec.constant(bytes_of_step(kind))))
                at = builder.add(scales, builder.mul(segment, vec.constant(PANEL_BYTES)))
                # AVX2: one row's lines are read in their order where no scales take registers, too.
                is_halved = not HAS_AVX512 and kind not in UNSCALED
                at_once = vectors_at_once(rows, VECTORS // 2 if is_halved else VECTORS)
                for v in range(0, VECTORS, at_once):
                    of = range(v, v + at_once)
                    _add_to_totals(builder, kind, rows, of, start, numbers, count, at, own, entries)
                total = builder.add(sums, builder.mul(segment, vec.constant(4 * rows)))
                add_offsets(builder, own, offsets, segment, total)
            store_totals(builder, totals, own)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), generate

    return multiply


def _add_to_totals(builder, kind: str, rows: int, of: range, codes, x, count, scales, totals, table) -> None:
    """Adds the products of `count` times 8 inputs with vectors `of` a panel to their totals."""
    is_chained, is_scaled = kind in CHAINED_KERNELS, kind in SCALED_KERNELS
    unroll = STEP
    if is_chained and rows > 1:
        unroll = 1
    elif is_chained and not HAS_AVX512:
        # Lines in their order, as memory is read fastest, and half of them where scales take registers, too. LLVM loads
        # the inputs of a step first: 8 would leave too few, and beside scales more than one.
        unroll = 1 if is_scaled else STEP // 2
    chains = {(r, v): cgutils.alloca_once(builder, vec.FLOATS) for r in range(rows) for v in of}
    for key, chain in chains.items():
        builder.store(builder.load(totals[key], align=4) if is_chained else vec.splat(vec.FLOATS, 0.0), chain)

    def load_scales() -> dict[int, Any]:
        return {v: vec.load(builder, offset(builder, scales, VECTOR_BYTES * v)) for v in of}

    factors = load_scales() if is_scaled else {}
    with cgutils.for_range(builder, builder.mul(count, vec.constant(STEP // unroll)), intp=vec.LONG) as step:
        numbers = builder.add(x, builder.mul(step.index, vec.constant(4 * unroll * rows)))
        address = builder.add(codes, builder.mul(step.index, vec.constant(bytes_of_step(kind) * unroll // STEP)))
        if of[0] == 0:
            prefetch_step(builder, kind, address, unroll, is_all=rows > 1 and not HAS_AVX512)
        code = {v: load_codes(builder, kind, address, v, table) for v in of}
        for j in range(unroll):
            weights = {v: builder.fmul(code[v](j), factors[v]) if is_scaled else code[v](j) for v in of}
            for r in range(rows):
                number = load_number(builder, offset(builder, numbers, 4 * (rows * j + r)))
                for v in of:
                    total = vec.multiply_add(builder, number, weights[v], builder.load(chains[r, v]))
                    builder.store(total, chains[r, v])
    factors = {} if is_chained else load_scales()
    for (r, v), chain in chains.items():
        total = builder.load(chain)
        if not is_chained:
            total = vec.multiply_add(builder, total, factors[v], builder.load(totals[r, v], align=4))
        builder.store(total, totals[r, v], align=4)


def converter(kind: str) -> Any:
    """An intrinsic that writes codes of a panel as float32."""

    @intrinsic
    def convert(context, target, codes, stride, segments, steps, left, table, scales):
        """Writes the codes of segments as float32 [8 * left, vectors of a tile, 16] for each tile of the panel,
        `stride` bytes apart, times the scales of kernels that are chained; nibbles times 16^(j mod NIBBLES_IN_PLACE).

        segments: of `steps` times 8 inputs, `left` times 8 in all. scales: address of float32 [segments, 64].
        """

        def generate(context, builder, signature, arguments):
            target, codes, stride, segments, steps, left, table, scales = arguments
            entries = vec.load(builder, table) if kind == "codebook" else None
            width = VECTOR_BYTES * TILE_VECTORS
            with each_segment(builder, segments, steps, left) as (segment, first, count):
                own, factors = builder.add(scales, builder.mul(segment, vec.constant(PANEL_BYTES))), []
                if kind in SCALED_KERNELS:
                    factors = [vec.load(builder, offset(builder, own, v * VECTOR_BYTES)) for v in range(VECTORS)]
                with cgutils.for_range(builder, count, intp=vec.LONG) as step:
                    index = builder.add(first, step.index)
                    address = builder.add(codes, builder.mul(index, vec.constant(bytes_of_step(kind))))
                    to = builder.add(target, builder.mul(index, vec.constant(width * STEP)))
                    for v in range(VECTORS):
                        if v and v % TILE_VECTORS == 0:
                            to = builder.add(to, stride)
                        code = load_codes(builder, kind, address, v, entries)
                        for j in range(STEP):
                            weight = builder.fmul(code(j), factors[v]) if factors else code(j)
                            vec.store(builder, weight, offset(builder, to, j * width + v % TILE_VECTORS * VECTOR_BYTES))
                    prefetch_step(builder, kind, address)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return convert


def tiler(rows: int, vectors: int, *, is_chained: bool = False) -> Any:
    """An intrinsic for the products of `rows` rows with a segment of `vectors` vectors, whose sums stay in registers.

    is_chained: weights are scaled, and may be of several segments if they have no offsets."""

    @intrinsic
    def add_tile(context, totals, codes, x, segments, steps, left, scales, offsets, sums, ahead):
        """totals[r, v, n] += the products of segments of inputs. All are int64.

        totals: address of float32 [rows, vectors, 16]. codes: address of float32 [8 * left, vectors, 16]. x: address of
        float32 [8 * left, rows]. segments: of `steps` times 8 inputs, `left` times 8 in all. scales, offsets: addresses
        of float32 [segments, 64], of the tile's first output; offsets may be 0. sums: address of float32 [segments,
        rows]. ahead: address of TILE_AHEAD_BYTES times 4 * left that are prefetched.
        """

        def generate(context, builder, signature, arguments):
            totals, codes, x, segments, steps, left, scales, offsets, sums, ahead = arguments
            chains = {(r, v): cgutils.alloca_once(builder, vec.FLOATS) for r in range(rows) for v in range(vectors)}
            place = {key: offset(builder, totals, (key[0] * vectors + key[1]) * VECTOR_BYTES) for key in chains}
            with each_segment(builder, segments, steps, left) as (segment, first, count):
                for key, chain in chains.items():
                    start = vec.load(builder, place[key]) if is_chained else vec.splat(vec.FLOATS, 0.0)
                    builder.store(start, chain)
                own_codes = builder.add(codes, builder.mul(first, vec.constant(STEP * vectors * VECTOR_BYTES)))
                own_x = builder.add(x, builder.mul(first, vec.constant(STEP * rows * 4)))
                own_ahead = builder.add(ahead, builder.mul(first, vec.constant(STEP // 2 * TILE_AHEAD_BYTES)))
                _add_products(builder, rows, vectors, chains, own_codes, own_x, count, own_ahead)
                at = builder.mul(segment, vec.constant(PANEL_BYTES))
                own = [
                    vec.load(builder, offset(builder, builder.add(scales, at), v * VECTOR_BYTES))
                    for v in range(vectors)
                    if not is_chained
                ]
                rest, own_sums = (
                    builder.add(offsets, at),
                    builder.add(sums, builder.mul(segment, vec.constant(4 * rows))),
                )

                def add_sums(others: list[Any]) -> None:
                    """Adds the segment's sums to the totals, and the sums of its inputs times the offsets, if any."""
                    for r in range(rows):
                        number = load_number(builder, offset(builder, own_sums, 4 * r)) if others else None
                        for v in range(vectors):
                            total = builder.load(chains[r, v])
                            if not is_chained:
                                total = vec.multiply_add(builder, total, own[v], vec.load(builder, place[r, v]))
                            if others:
                                total = vec.multiply_add(builder, number, others[v], total)
                            vec.store(builder, total, place[r, v])

                with builder.if_else(builder.icmp_signed("!=", offsets, vec.constant(0))) as (has_offsets, has_none):
                    with has_offsets:
                        add_sums([vec.load(builder, offset(builder, rest, v * VECTOR_BYTES)) for v in range(vectors)])
                    with has_none:
                        add_sums([])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), generate

    return add_tile


def _add_products(
    builder: Any, rows: int, vectors: int, chains: dict[tuple[int, int], Any], codes, x, steps, ahead
) -> None:
    """Adds the products of `steps` times 8 inputs to the chains of a tile."""
    unroll = 2
    with cgutils.for_range(builder, builder.mul(steps, vec.constant(STEP // unroll)), intp=vec.LONG) as step:
        at_codes = builder.add(codes, builder.mul(step.index, vec.constant(unroll * vectors * VECTOR_BYTES)))
        at_x = builder.add(x, builder.mul(step.index, vec.constant(unroll * rows * 4)))
        at_ahead = builder.add(ahead, builder.mul(step.index, vec.constant(TILE_AHEAD_BYTES)))
        for line in range(0, TILE_AHEAD_BYTES, 64):
            vec.prefetch(builder, offset(builder, at_ahead, line))
        for k in range(unroll):
            loaded = [
                vec.load(builder, offset(builder, at_codes, (k * vectors + v) * VECTOR_BYTES)) for v in range(vectors)
            ]
            for r in range(rows):
                number = load_number(builder, offset(builder, at_x, 4 * (k * rows + r)))
                for v in range(vectors):
                    chain = chains[r, v]
                    builder.store(vec.multiply_add(builder, number, loaded[v], builder.load(chain)), chain)


def preparer(is_scaled: bool) -> Any:
    """An intrinsic that copies a row as the loops read it: for nibbles, input j times 16^-(j mod NIBBLES_IN_PLACE)."""
    factors = [16.0 ** -(j % NIBBLES_IN_PLACE) if is_scaled else 1.0 for j in range(STEP)]

    @intrinsic
    def prepare(context, target, rows, source, steps, inputs, of_segment, sums):
        """All are int64.

        target: address of the row's first input in float32 [8 * steps, rows]; inputs beyond the last are 0. source:
        address of float32 [inputs]. sums: address of the row's first sum in float32 [segments, rows]; a segment has
        `of_segment` times 8 inputs.
        """

        def generate(context, builder, signature, arguments):
            target, rows, source, steps, inputs, of_segment, sums = arguments
            stride = builder.mul(rows, vec.constant(4))
            segments = builder.udiv(builder.sub(builder.add(steps, of_segment), vec.constant(1)), of_segment)
            with cgutils.for_range(builder, segments, intp=vec.LONG) as segment:
                total = cgutils.alloca_once(builder, STEP_FLOATS)
                builder.store(vec.splat(STEP_FLOATS, 0.0), total)
                start = builder.mul(segment.index, of_segment)
                rest = builder.sub(steps, start)
                count = builder.select(builder.icmp_signed("<", rest, of_segment), rest, of_segment)
                with cgutils.for_range(builder, count, intp=vec.LONG) as step:
                    first = builder.mul(builder.add(start, step.index), vec.constant(STEP))
                    numbers = load_step(builder, source, first, inputs)
                    builder.store(builder.fadd(builder.load(total), numbers), total)
                    numbers = builder.fmul(numbers, ir.Constant(STEP_FLOATS, factors))
                    to = builder.add(target, builder.mul(first, stride))
                    for j in range(STEP):
                        number = builder.extract_element(numbers, ir.Constant(vec.INT, j))
                        builder.store(number, vec.at(builder, to, vec.FLOAT), align=4)
                        to = builder.add(to, stride)
                to = builder.add(sums, builder.mul(segment.index, stride))
                builder.store(vec.total(builder, builder.load(total)), vec.at(builder, to, vec.FLOAT), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return prepare
