"""The inner loops of products with packed weights, as LLVM instructions.

The sums of an output are always taken in one order: its products of a group in one chain of multiply-adds, then the
group's sum times the scale, then the sum of the group's inputs times the offset. So a row has the same bits whether it
is computed alone, with the weight converted in registers (`multiply`), or with others, with the weight's codes written
as float32 to the first cache (`convert` and `add_tile`).

A nibble is taken from its word by one AND and without a shift, as nibble * 16^j, and multiplied by an input that was
scaled by 16^-j beforehand (`prepare`): both are exact.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target

from pallas_kernels.numba_cpu import vectors as vec
from pallas_kernels.numba_cpu.memory import intrinsic
from pallas_kernels.packed_matmul.specs import CODES, LANES, STEP

# A vector of 16 float32 takes one of 32 registers with AVX-512, else two of 16.
HAS_AVX512 = "+avx512f" in cpu_target.target_context.codegen()._get_host_cpu_features()
PANELS = 4  # panels of a unit, computed at once where there is one row: four chains of sums
# Rows of a tile, whose sums stay in registers, and panels of a tile.
TILES = ((8, 2), (4, 2), (2, 2), (1, 2)) if HAS_AVX512 else ((6, 1), (4, 1), (2, 1), (1, 1))
TILE_ROWS, TILE_PANELS = TILES[0]
WORD_BYTES = 4 * LANES

WORDS = ir.VectorType(vec.INT, LANES)
BYTES = ir.VectorType(vec.BYTE, LANES)
SHORTS = ir.VectorType(vec.HALF, LANES)
HALVES = ir.VectorType(ir.HalfType(), LANES)
STEP_FLOATS = ir.VectorType(vec.FLOAT, STEP)


def bytes_of_step(kind: str) -> int:
    """Bytes of a panel's codes of 8 inputs."""
    return WORD_BYTES if kind in ("nibbles", "codebook") else STEP * LANES * CODES[kind].itemsize


def _offset(builder: Any, address: Any, count: int) -> Any:
    return builder.add(address, vec.constant(count)) if count else address


def _from_half(builder: Any, bits: Any) -> Any:
    return builder.fpext(builder.bitcast(bits, HALVES), vec.FLOATS)


def _from_float8(builder: Any, bits: Any, mantissa: int) -> Any:
    """float32 of E4M3 or E5M2, whose bits are those of a float16 with another exponent; E4M3's NaN becomes 480."""
    wide = builder.zext(bits, SHORTS)
    if mantissa == 2:
        return _from_half(builder, builder.shl(wide, vec.splat(SHORTS, 8)))
    sign = builder.shl(builder.and_(wide, vec.splat(SHORTS, 0x80)), vec.splat(SHORTS, 8))
    rest = builder.shl(builder.and_(wide, vec.splat(SHORTS, 0x7F)), vec.splat(SHORTS, 7))
    return builder.fmul(_from_half(builder, builder.or_(sign, rest)), vec.splat(vec.FLOATS, 256.0))


def _look_up(builder: Any, indices: Any, table: Any) -> Any:
    """Numbers of a table of 16 by indices of 0 to 15."""
    if HAS_AVX512:
        kind = ir.FunctionType(vec.FLOATS, [vec.FLOATS, WORDS])
        permute = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.sf.512")
        return builder.call(permute, [table, indices])
    eight, eights = ir.VectorType(vec.FLOAT, 8), ir.VectorType(vec.INT, 8)
    kind = ir.FunctionType(eight, [eight, eights])
    permute = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.permps")

    def part(vector: Any, first: int) -> Any:
        order = ir.Constant(eights, [first + lane for lane in range(8)])
        return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), order)

    low, high = part(table, 0), part(table, 8)
    found = []
    for first in (0, 8):
        own = part(indices, first)
        is_high = builder.icmp_unsigned(">=", own, vec.splat(eights, 8))
        found.append(builder.select(is_high, builder.call(permute, [high, own]), builder.call(permute, [low, own])))
    return builder.shuffle_vector(*found, ir.Constant(WORDS, list(range(LANES))))


def load_codes(builder: Any, kind: str, address: Any, table: Any) -> list[Any]:
    """float32 vectors of the codes of 8 inputs of a panel; nibbles times 16^j."""
    if kind in ("nibbles", "codebook"):
        words, found = vec.load(builder, address, WORDS), []
        for j in range(STEP):
            shift = vec.splat(WORDS, 4 * j)
            if kind == "codebook":
                index = builder.and_(builder.lshr(words, shift), vec.splat(WORDS, 15))
                found.append(_look_up(builder, index, table))
            elif j == STEP - 1:  # not times 16^7, which would be negative
                found.append(builder.sitofp(builder.lshr(words, shift), vec.FLOATS))
            else:
                found.append(builder.sitofp(builder.and_(words, vec.splat(WORDS, 15 << 4 * j)), vec.FLOATS))
        return found
    size = LANES * CODES[kind].itemsize

    def load(index: int, of: Any) -> Any:
        return vec.load(builder, _offset(builder, address, index * size), of)

    if kind == "int8":
        return [vec.from_int8(builder, load(j, BYTES)) for j in range(STEP)]
    if kind == "bfloat16":
        return [vec.from_bfloat16(builder, load(j, SHORTS)) for j in range(STEP)]
    if kind == "float16":
        return [_from_half(builder, load(j, SHORTS)) for j in range(STEP)]
    if kind == "float32":
        return [load(j, vec.FLOATS) for j in range(STEP)]
    return [_from_float8(builder, load(j, BYTES), 3 if kind == "float8_e4m3fn" else 2) for j in range(STEP)]


def _prefetch_step(builder: Any, kind: str, address: Any, ahead: Any) -> None:
    to = builder.add(address, ahead)
    for line in range(0, bytes_of_step(kind), 64):
        vec.prefetch(builder, _offset(builder, to, line))


def _load_number(builder: Any, address: Any) -> Any:
    return vec.broadcast(builder, builder.load(vec.at(builder, address, vec.FLOAT), align=4))


def multiplier(kind: str, panels: int) -> Any:
    """An intrinsic that multiplies one row by `panels` panels, converted in registers."""

    @intrinsic
    def multiply(context, totals, codes, stride, scales, offsets, x, sums, groups, steps, left, ahead, table):
        """totals[p, n] += the products of groups of inputs with panel p. All are int64.

        totals: address of float32 [panels, 16]. codes: address of the first panel's codes, with `stride` bytes from
        panel to panel. scales, offsets: addresses of float32 [groups, panels, 16]; offsets may be 0. x: address of
        float32 inputs, as `prepare` leaves them. sums: address of float32 [groups], their sums. groups: of `steps`
        times 8 inputs, `left` times 8 in all. ahead: bytes from codes that are read to codes that are prefetched.
        table: address of a codebook.
        """

        def generate(context, builder, signature, arguments):
            totals, codes, stride, scales, offsets, x, sums, groups, steps, left, ahead, table = arguments
            entries = vec.load(builder, table) if kind == "codebook" else None
            places = [_offset(builder, totals, WORD_BYTES * p) for p in range(panels)]
            has_offsets = builder.icmp_signed("!=", offsets, vec.constant(0))
            # With 16 registers the totals stay in memory, so that no chain has to.
            own = [vec.at(builder, place, vec.FLOATS) for place in places]
            if HAS_AVX512:
                own = [cgutils.alloca_once_value(builder, vec.load(builder, place)) for place in places]
            starts = [codes]
            for _ in range(1, panels):
                starts.append(builder.add(starts[-1], stride))
            with cgutils.for_range(builder, groups, intp=vec.LONG) as group:
                first = builder.mul(group.index, steps)
                rest = builder.sub(left, first)
                count = builder.select(builder.icmp_signed("<", rest, steps), rest, steps)
                chains = [cgutils.alloca_once(builder, vec.FLOATS) for _ in range(panels)]
                for chain in chains:
                    builder.store(vec.splat(vec.FLOATS, 0.0), chain)
                with cgutils.for_range(builder, count, intp=vec.LONG) as step:
                    index = builder.add(first, step.index)
                    place = builder.mul(index, vec.constant(bytes_of_step(kind)))
                    numbers = builder.add(x, builder.mul(index, vec.constant(4 * STEP)))
                    addresses = [builder.add(start, place) for start in starts]
                    loaded = [load_codes(builder, kind, address, entries) for address in addresses]
                    for address in addresses:
                        _prefetch_step(builder, kind, address, ahead)
                    for j in range(STEP):
                        number = _load_number(builder, _offset(builder, numbers, 4 * j))
                        for p in range(panels):
                            total = vec.multiply_add(builder, number, loaded[p][j], builder.load(chains[p]))
                            builder.store(total, chains[p])
                at = builder.mul(group.index, vec.constant(WORD_BYTES * panels))
                for p in range(panels):
                    scale = vec.load(builder, builder.add(scales, _offset(builder, at, WORD_BYTES * p)))
                    total = builder.load(own[p], align=4)
                    builder.store(vec.multiply_add(builder, builder.load(chains[p]), scale, total), own[p], align=4)
                with builder.if_then(has_offsets):
                    total = _load_number(builder, builder.add(sums, builder.mul(group.index, vec.constant(4))))
                    for p in range(panels):
                        offset = vec.load(builder, builder.add(offsets, _offset(builder, at, WORD_BYTES * p)))
                        found = vec.multiply_add(builder, total, offset, builder.load(own[p], align=4))
                        builder.store(found, own[p], align=4)
            if HAS_AVX512:
                for p in range(panels):
                    vec.store(builder, builder.load(own[p]), places[p])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 12), generate

    return multiply


def converter(kind: str) -> Any:
    """An intrinsic that writes a panel's codes as float32."""

    @intrinsic
    def convert(context, target, stride, codes, steps, ahead, table):
        """Writes the codes of 8 * steps inputs as float32 vectors, `stride` bytes apart; nibbles times 16^j."""

        def generate(context, builder, signature, arguments):
            target, stride, codes, steps, ahead, table = arguments
            entries = vec.load(builder, table) if kind == "codebook" else None
            with cgutils.for_range(builder, steps, intp=vec.LONG) as step:
                address = builder.add(codes, builder.mul(step.index, vec.constant(bytes_of_step(kind))))
                to = builder.add(target, builder.mul(step.index, builder.mul(stride, vec.constant(STEP))))
                for vector in load_codes(builder, kind, address, entries):
                    vec.store(builder, vector, to)
                    to = builder.add(to, stride)
                _prefetch_step(builder, kind, address, ahead)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return convert


def tiler(rows: int, panels: int) -> Any:
    """An intrinsic for the products of `rows` rows with one group of `panels` panels, whose sums stay in registers."""

    @intrinsic
    def add_tile(context, totals, codes, x, steps, scales, offsets, sums):
        """totals[r, p, n] += the products of a group. All are int64.

        totals: address of float32 [rows, panels, 16]. codes: address of float32 [8 * steps, panels, 16]. x: address of
        float32 [8 * steps, rows]. scales, offsets: addresses of float32 [panels, 16]; offsets may be 0. sums: address
        of float32 [rows].
        """

        def generate(context, builder, signature, arguments):
            totals, codes, x, steps, scales, offsets, sums = arguments
            chains = {(r, p): cgutils.alloca_once(builder, vec.FLOATS) for r in range(rows) for p in range(panels)}
            for chain in chains.values():
                builder.store(vec.splat(vec.FLOATS, 0.0), chain)
            unroll = 2
            with cgutils.for_range(builder, builder.mul(steps, vec.constant(STEP // unroll)), intp=vec.LONG) as step:
                at_codes = builder.add(codes, builder.mul(step.index, vec.constant(unroll * panels * WORD_BYTES)))
                at_x = builder.add(x, builder.mul(step.index, vec.constant(unroll * rows * 4)))
                for k in range(unroll):
                    vectors = [
                        vec.load(builder, _offset(builder, at_codes, (k * panels + p) * WORD_BYTES))
                        for p in range(panels)
                    ]
                    for r in range(rows):
                        number = _load_number(builder, _offset(builder, at_x, 4 * (k * rows + r)))
                        for p in range(panels):
                            chain = chains[r, p]
                            builder.store(vec.multiply_add(builder, number, vectors[p], builder.load(chain)), chain)
            own = [vec.load(builder, _offset(builder, scales, p * WORD_BYTES)) for p in range(panels)]
            place = {key: _offset(builder, totals, (key[0] * panels + key[1]) * WORD_BYTES) for key in chains}
            for (r, p), chain in chains.items():
                total = vec.multiply_add(builder, builder.load(chain), own[p], vec.load(builder, place[r, p]))
                vec.store(builder, total, place[r, p])
            with builder.if_then(builder.icmp_signed("!=", offsets, vec.constant(0))):
                own = [vec.load(builder, _offset(builder, offsets, p * WORD_BYTES)) for p in range(panels)]
                for r in range(rows):
                    total = _load_number(builder, _offset(builder, sums, 4 * r))
                    for p in range(panels):
                        found = vec.multiply_add(builder, total, own[p], vec.load(builder, place[r, p]))
                        vec.store(builder, found, place[r, p])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return add_tile


def _preparer(is_scaled: bool) -> Any:
    factors = [16.0**-j if is_scaled and j < STEP - 1 else 1.0 for j in range(STEP)]

    @intrinsic
    def prepare(context, target, stride, source, steps, left):
        """Copies 8 * steps inputs, of which `left` are real and the others 0, to float32 `stride` bytes apart, for
        nibbles times 16^-j; returns their sum. All are int64."""

        def generate(context, builder, signature, arguments):
            target, stride, source, steps, left = arguments
            sums = cgutils.alloca_once_value(builder, vec.splat(STEP_FLOATS, 0.0))
            with cgutils.for_range(builder, steps, intp=vec.LONG) as step:
                first = builder.mul(step.index, vec.constant(STEP))
                address = builder.add(source, builder.mul(first, vec.constant(4)))
                rest = builder.sub(left, first)
                loaded = cgutils.alloca_once(builder, STEP_FLOATS)
                with builder.if_else(builder.icmp_signed(">=", rest, vec.constant(STEP))) as (is_whole, is_part):
                    with is_whole:
                        builder.store(vec.load(builder, address, STEP_FLOATS), loaded)
                    with is_part:
                        builder.store(vec.load_first(builder, address, STEP_FLOATS, rest), loaded)
                numbers = builder.load(loaded)
                builder.store(builder.fadd(builder.load(sums), numbers), sums)
                numbers = builder.fmul(numbers, ir.Constant(STEP_FLOATS, factors))
                to = builder.add(target, builder.mul(first, stride))
                with builder.if_else(builder.icmp_signed("==", stride, vec.constant(4))) as (is_close, is_apart):
                    with is_close:
                        vec.store(builder, numbers, to)
                    with is_apart:
                        for j in range(STEP):
                            number = builder.extract_element(numbers, ir.Constant(vec.INT, j))
                            builder.store(number, vec.at(builder, to, vec.FLOAT), align=4)
                            to = builder.add(to, stride)
            parts = builder.load(sums)
            size = STEP
            while size > 1:
                size //= 2
                kind = ir.VectorType(vec.INT, size)
                low, high = (ir.Constant(kind, [start + lane for lane in range(size)]) for start in (0, size))
                parts = builder.fadd(
                    builder.shuffle_vector(parts, parts, low), builder.shuffle_vector(parts, parts, high)
                )
            return builder.extract_element(parts, ir.Constant(vec.INT, 0))

        return types.float32(*[types.int64] * 5), generate

    return prepare


prepare, prepare_scaled = _preparer(False), _preparer(True)


def _numbers(kind: str) -> Any:
    """An intrinsic that writes 16 packed scales or offsets as float32."""

    @intrinsic
    def put(context, target, source, other):
        """target: address of float32 [16]. source: address of the numbers. other: address of the outer numbers of
        "factored", or the float32 scales of "units" and "unit"; `source` is the number of the latter."""

        def generate(context, builder, signature, arguments):
            target, source, other = arguments
            if kind == "float32":
                found = vec.load(builder, source)
            elif kind == "float16":
                found = _from_half(builder, vec.load(builder, source, SHORTS))
            elif kind == "bfloat16":
                found = vec.from_bfloat16(builder, vec.load(builder, source, SHORTS))
            elif kind == "exponents":
                wide = builder.zext(vec.load(builder, source, BYTES), WORDS)
                found = builder.bitcast(builder.shl(wide, vec.splat(WORDS, 23)), vec.FLOATS)
            elif kind == "none":
                found = vec.splat(vec.FLOATS, 1.0)
            elif kind == "unit":
                found = builder.fmul(vec.broadcast(builder, builder.sitofp(source, vec.FLOAT)), vec.load(builder, other))
            else:
                inner = vec.from_int8(builder, vec.load(builder, source, BYTES))
                outer = vec.load(builder, other) if kind == "units" else _from_half(
                    builder, vec.load(builder, other, SHORTS)
                )
                found = builder.fmul(inner, outer)
            vec.store(builder, found, target)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), generate

    return put


put_ones, put_float32, put_float16, put_bfloat16, put_factored, put_units, put_unit, put_exponents = map(
    _numbers, ("none", "float32", "float16", "bfloat16", "factored", "units", "unit", "exponents")
)


@intrinsic
def load_int32(context, address, index):
    """The int32 at an index of the array at an address, as int64."""

    def generate(context, builder, signature, arguments):
        place = builder.add(arguments[0], builder.mul(arguments[1], vec.constant(4)))
        return builder.sext(builder.load(vec.at(builder, place, vec.INT), align=4), vec.LONG)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def copy_lanes(context, target, source, count):
    """Copies the first `count` of 16 float32."""

    def generate(context, builder, signature, arguments):
        target, source, count = arguments
        with builder.if_else(builder.icmp_signed(">=", count, vec.constant(LANES))) as (is_whole, is_part):
            with is_whole:
                vec.store(builder, vec.load(builder, source), target)
            with is_part, cgutils.for_range(builder, count, intp=vec.LONG) as lane:
                at = builder.mul(lane.index, vec.constant(4))
                number = builder.load(vec.at(builder, builder.add(source, at), vec.FLOAT), align=4)
                builder.store(number, vec.at(builder, builder.add(target, at), vec.FLOAT), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic
def clear(context, address, count):
    """Sets `count` vectors of 16 float32 to 0."""

    def generate(context, builder, signature, arguments):
        with cgutils.for_range(builder, arguments[1], intp=vec.LONG) as index:
            vec.store(
                builder,
                vec.splat(vec.FLOATS, 0.0),
                builder.add(arguments[0], builder.mul(index.index, vec.constant(WORD_BYTES))),
            )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate
