"""The inner loops of products with packed weights, as LLVM instructions.

The sums of an output are always taken in one order: its products of a group in one chain of multiply-adds, then the
group's sum times the scale, then the sum of the group's inputs times the offset. So a row has the same bits whether it
is computed alone, with the weight converted in registers (`multiply`), or with others, with the weight's codes written
as float32 to the first cache (`convert` and `add_tile`).

A nibble is taken from its word by one AND and without a shift, as nibble * 16^j, and multiplied by an input that was
scaled by 16^-j beforehand (`prepare`): both are exact.
"""

import ctypes
from types import FunctionType
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target

from pallas_kernels.numba_cpu import vectors as vec
from pallas_kernels.numba_cpu.frames import compiled
from pallas_kernels.numba_cpu.memory import intrinsic
from pallas_kernels.packed_matmul.specs import CODE_NAMES, CODES, LANES, STEP

# A vector of 16 float32 takes one of 32 registers with AVX-512, else two of 16.
HAS_AVX512 = "+avx512f" in cpu_target.target_context.codegen()._get_host_cpu_features()
WIDTH = vec.LANES  # outputs of a vector
VECTORS = LANES // WIDTH  # of a panel, computed at once where there is one row: four chains of sums
# Rows and vectors of a tile, whose sums stay in registers: the first, and for what is left.
TILES = ((8, 2), (4, 2), (2, 2), (1, 2)) if HAS_AVX512 else ((6, 1), (4, 1), (2, 1), (1, 1))
TILE_ROWS, TILE_VECTORS = TILES[0]
VECTOR_BYTES, PANEL_BYTES = 4 * WIDTH, 4 * LANES
AHEAD_BYTES = 2**12  # from codes that are read to codes that are prefetched

WORDS = ir.VectorType(vec.INT, WIDTH)
BYTES = ir.VectorType(vec.BYTE, WIDTH)
SHORTS = ir.VectorType(vec.HALF, WIDTH)
HALVES = ir.VectorType(ir.HalfType(), WIDTH)
STEP_FLOATS = ir.VectorType(vec.FLOAT, STEP)
SIZES = {vec.FLOATS: 4, SHORTS: 2, BYTES: 1}  # bytes of a vector's numbers


def bytes_of_step(kind: str) -> int:
    """Bytes of a panel's codes of 8 inputs."""
    return PANEL_BYTES if kind in ("nibbles", "codebook") else STEP * LANES * CODES[kind].itemsize


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
    return builder.shuffle_vector(*found, ir.Constant(WORDS, list(range(WIDTH))))


def load_codes(builder: Any, kind: str, address: Any, vector: int, table: Any) -> list[Any]:
    """float32 vectors of the codes of 8 inputs, of one of a panel's vectors; nibbles times 16^j.

    address: of the panel's codes of the first of the inputs.
    """
    if kind in ("nibbles", "codebook"):
        address = _offset(builder, address, vector * VECTOR_BYTES)
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
    size = CODES[kind].itemsize

    def load(index: int, of: Any) -> Any:
        return vec.load(builder, _offset(builder, address, (index * LANES + vector * WIDTH) * size), of)

    if kind == "int8":
        return [vec.from_int8(builder, load(j, BYTES)) for j in range(STEP)]
    if kind == "bfloat16":
        return [vec.from_bfloat16(builder, load(j, SHORTS)) for j in range(STEP)]
    if kind == "float16":
        return [_from_half(builder, load(j, SHORTS)) for j in range(STEP)]
    if kind == "float32":
        return [load(j, vec.FLOATS) for j in range(STEP)]
    return [_from_float8(builder, load(j, BYTES), 3 if kind == "float8_e4m3fn" else 2) for j in range(STEP)]


def _prefetch_step(builder: Any, kind: str, address: Any) -> None:
    to = _offset(builder, address, AHEAD_BYTES)
    for line in range(0, bytes_of_step(kind), 64):
        vec.prefetch(builder, _offset(builder, to, line))


def _load_number(builder: Any, address: Any) -> Any:
    return vec.broadcast(builder, builder.load(vec.at(builder, address, vec.FLOAT), align=4))


def multiplier(kind: str) -> Any:
    """An intrinsic that multiplies one row by a panel, converted in registers."""

    @intrinsic
    def multiply(context, totals, codes, scales, offsets, x, sums, segments, steps, left, table):
        """totals[n] += the products of segments of inputs with a panel. All are int64.

        totals: address of float32 [64]. codes: address of the panel's codes. scales, offsets: addresses of float32
        [segments, 64]; offsets may be 0. x: address of float32 inputs, as `prepare` leaves them. sums: address of
        float32 [segments], their sums. segments: of `steps` times 8 inputs, `left` times 8 in all. table: address of a
        codebook.
        """

        def generate(context, builder, signature, arguments):
            totals, codes, scales, offsets, x, sums, segments, steps, left, table = arguments
            entries = vec.load(builder, table) if kind == "codebook" else None
            places = [_offset(builder, totals, VECTOR_BYTES * v) for v in range(VECTORS)]
            has_offsets = builder.icmp_signed("!=", offsets, vec.constant(0))
            # With 16 registers the totals stay in memory, so that no chain has to.
            own = [vec.at(builder, place, vec.FLOATS) for place in places]
            if HAS_AVX512:
                own = [cgutils.alloca_once_value(builder, vec.load(builder, place)) for place in places]
            with cgutils.for_range(builder, segments, intp=vec.LONG) as segment:
                first = builder.mul(segment.index, steps)
                rest = builder.sub(left, first)
                count = builder.select(builder.icmp_signed("<", rest, steps), rest, steps)
                chains = [cgutils.alloca_once(builder, vec.FLOATS) for _ in range(VECTORS)]
                for chain in chains:
                    builder.store(vec.splat(vec.FLOATS, 0.0), chain)
                with cgutils.for_range(builder, count, intp=vec.LONG) as step:
                    index = builder.add(first, step.index)
                    numbers = builder.add(x, builder.mul(index, vec.constant(4 * STEP)))
                    address = builder.add(codes, builder.mul(index, vec.constant(bytes_of_step(kind))))
                    loaded = [load_codes(builder, kind, address, v, entries) for v in range(VECTORS)]
                    _prefetch_step(builder, kind, address)
                    for j in range(STEP):
                        number = _load_number(builder, _offset(builder, numbers, 4 * j))
                        for v in range(VECTORS):
                            total = vec.multiply_add(builder, number, loaded[v][j], builder.load(chains[v]))
                            builder.store(total, chains[v])
                at = builder.mul(segment.index, vec.constant(PANEL_BYTES))
                for v in range(VECTORS):
                    scale = vec.load(builder, builder.add(scales, _offset(builder, at, VECTOR_BYTES * v)))
                    total = builder.load(own[v], align=4)
                    builder.store(vec.multiply_add(builder, builder.load(chains[v]), scale, total), own[v], align=4)
                with builder.if_then(has_offsets):
                    total = _load_number(builder, builder.add(sums, builder.mul(segment.index, vec.constant(4))))
                    for v in range(VECTORS):
                        offset = vec.load(builder, builder.add(offsets, _offset(builder, at, VECTOR_BYTES * v)))
                        found = vec.multiply_add(builder, total, offset, builder.load(own[v], align=4))
                        builder.store(found, own[v], align=4)
            if HAS_AVX512:
                for v in range(VECTORS):
                    vec.store(builder, builder.load(own[v]), places[v])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), generate

    return multiply


def converter(kind: str) -> Any:
    """An intrinsic that writes codes of a panel as float32."""

    @intrinsic
    def convert(context, target, codes, first, steps, table):
        """Writes the codes of 8 * steps inputs of a tile's vectors, from the first on, as float32 [8 * steps, vectors,
        16]; nibbles times 16^j."""

        def generate(context, builder, signature, arguments):
            target, codes, first, steps, table = arguments
            entries = vec.load(builder, table) if kind == "codebook" else None
            size = 4 if kind in ("nibbles", "codebook") else CODES[kind].itemsize
            codes = builder.add(codes, builder.mul(first, vec.constant(WIDTH * size)))
            with cgutils.for_range(builder, steps, intp=vec.LONG) as step:
                address = builder.add(codes, builder.mul(step.index, vec.constant(bytes_of_step(kind))))
                width = VECTOR_BYTES * TILE_VECTORS
                to = builder.add(target, builder.mul(step.index, vec.constant(width * STEP)))
                for v in range(TILE_VECTORS):
                    for j, vector in enumerate(load_codes(builder, kind, address, v, entries)):
                        vec.store(builder, vector, _offset(builder, to, j * width + v * VECTOR_BYTES))
                _prefetch_step(builder, kind, address)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return convert


def tiler(rows: int, vectors: int) -> Any:
    """An intrinsic for the products of `rows` rows with a segment of `vectors` vectors, whose sums stay in registers."""

    @intrinsic
    def add_tile(context, totals, codes, x, steps, scales, offsets, sums):
        """totals[r, v, n] += the products of a segment. All are int64.

        totals: address of float32 [rows, vectors, 16]. codes: address of float32 [8 * steps, vectors, 16]. x: address
        of float32 [8 * steps, rows]. scales, offsets: addresses of float32 [vectors, 16]; offsets may be 0. sums:
        address of float32 [rows].
        """

        def generate(context, builder, signature, arguments):
            totals, codes, x, steps, scales, offsets, sums = arguments
            chains = {(r, v): cgutils.alloca_once(builder, vec.FLOATS) for r in range(rows) for v in range(vectors)}
            for chain in chains.values():
                builder.store(vec.splat(vec.FLOATS, 0.0), chain)
            unroll = 2
            with cgutils.for_range(builder, builder.mul(steps, vec.constant(STEP // unroll)), intp=vec.LONG) as step:
                at_codes = builder.add(codes, builder.mul(step.index, vec.constant(unroll * vectors * VECTOR_BYTES)))
                at_x = builder.add(x, builder.mul(step.index, vec.constant(unroll * rows * 4)))
                for k in range(unroll):
                    loaded = [
                        vec.load(builder, _offset(builder, at_codes, (k * vectors + v) * VECTOR_BYTES))
                        for v in range(vectors)
                    ]
                    for r in range(rows):
                        number = _load_number(builder, _offset(builder, at_x, 4 * (k * rows + r)))
                        for v in range(vectors):
                            chain = chains[r, v]
                            builder.store(vec.multiply_add(builder, number, loaded[v], builder.load(chain)), chain)
            own = [vec.load(builder, _offset(builder, scales, v * VECTOR_BYTES)) for v in range(vectors)]
            place = {key: _offset(builder, totals, (key[0] * vectors + key[1]) * VECTOR_BYTES) for key in chains}
            for (r, v), chain in chains.items():
                total = vec.multiply_add(builder, builder.load(chain), own[v], vec.load(builder, place[r, v]))
                vec.store(builder, total, place[r, v])
            with builder.if_then(builder.icmp_signed("!=", offsets, vec.constant(0))):
                own = [vec.load(builder, _offset(builder, offsets, v * VECTOR_BYTES)) for v in range(vectors)]
                for r in range(rows):
                    total = _load_number(builder, _offset(builder, sums, 4 * r))
                    for v in range(vectors):
                        found = vec.multiply_add(builder, total, own[v], vec.load(builder, place[r, v]))
                        vec.store(builder, found, place[r, v])
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


def _number_vector(builder: Any, kind: str, source: Any, other: Any, first: int) -> Any:
    """16 of the numbers of `_numbers`, from the first on."""

    def load(address: Any, of: Any) -> Any:
        return vec.load(builder, _offset(builder, address, first * SIZES[of]), of)

    if kind == "none":
        return vec.splat(vec.FLOATS, 1.0)
    if kind == "float32":
        return load(source, vec.FLOATS)
    if kind == "float16":
        return _from_half(builder, load(source, SHORTS))
    if kind == "bfloat16":
        return vec.from_bfloat16(builder, load(source, SHORTS))
    if kind == "exponents":
        wide = builder.zext(load(source, BYTES), WORDS)
        return builder.bitcast(builder.shl(wide, vec.splat(WORDS, 23)), vec.FLOATS)
    if kind == "unit":
        number = vec.broadcast(builder, builder.sitofp(source, vec.FLOAT))
        return builder.fmul(number, load(other, vec.FLOATS))
    inner = vec.from_int8(builder, load(source, BYTES))
    outer = load(other, vec.FLOATS) if kind == "units" else _from_half(builder, load(other, SHORTS))
    return builder.fmul(inner, outer)


def _numbers(kind: str) -> Any:
    """An intrinsic that writes a panel's packed scales or offsets as float32."""

    @intrinsic
    def put(context, target, source, other):
        """target: address of float32 [64]. source: address of the numbers. other: address of the outer numbers of
        "factored", or the float32 scales of "units" and "unit"; `source` is the number of the latter."""

        def generate(context, builder, signature, arguments):
            target, source, other = arguments
            for v in range(VECTORS):
                own, to = v * WIDTH, _offset(builder, target, v * VECTOR_BYTES)
                vec.store(builder, _number_vector(builder, kind, source, other, own), to)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), generate

    return put


put_ones, put_float32, put_float16, put_bfloat16, put_factored, put_units, put_unit, put_exponents = map(
    _numbers, ("none", "float32", "float16", "bfloat16", "factored", "units", "unit", "exponents")
)


@intrinsic
def prefetch(context, address):
    """Loads two cache lines that are read soon into the second cache."""

    def generate(context, builder, signature, arguments):
        vec.prefetch(builder, arguments[0])
        vec.prefetch(builder, _offset(builder, arguments[0], 64))
        return context.get_dummy_value()

    return types.void(types.int64), generate


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
        with builder.if_else(builder.icmp_signed(">=", count, vec.constant(WIDTH))) as (is_whole, is_part):
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
                builder.add(arguments[0], builder.mul(index.index, vec.constant(VECTOR_BYTES))),
            )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


# The address of a loop over the codes of each kind: `multiplier`'s, and then `converter`'s.
_loops = (ctypes.c_int64 * (2 * len(CODE_NAMES)))()
_kept: dict[str, Any] = {}
llvmlite.binding.add_symbol("jaxinfer_packed_loops", ctypes.addressof(_loops))


def _caller(first: int, num_arguments: int) -> Any:
    """An intrinsic that calls the loop of a kind, the first argument, with `num_arguments` others."""

    @intrinsic
    def call(context, kind, *rest):
        def generate(context, builder, signature, arguments):
            loops = builder.module.globals.get("jaxinfer_packed_loops")
            if loops is None:
                loops = ir.GlobalVariable(builder.module, vec.LONG, "jaxinfer_packed_loops")
                loops.linkage = "external"
            index = builder.add(arguments[0], vec.constant(first))
            place = builder.add(builder.ptrtoint(loops, vec.LONG), builder.mul(index, vec.constant(8)))
            kind = ir.FunctionType(vec.LONG, [vec.LONG] * num_arguments)
            loop = builder.inttoptr(builder.load(vec.at(builder, place, vec.LONG)), kind.as_pointer())
            rest = [builder.extract_value(arguments[1], i) for i in range(num_arguments)]
            builder.call(loop, rest)
            return context.get_dummy_value()

        return types.void(types.int64, types.StarArgTuple.from_types([types.int64] * num_arguments)), generate

    return call


call_multiply, call_convert = _caller(0, 10), _caller(len(CODE_NAMES), 5)


def _multiply(totals, codes, scales, offsets, x, sums, segments, steps, left, table):
    _loop(totals, codes, scales, offsets, x, sums, segments, steps, left, table)  # noqa: F821
    return 0


def _convert(target, codes, first, steps, table):
    _loop(target, codes, first, steps, table)  # noqa: F821
    return 0


def register_kind(kind: str) -> None:
    """Compiles the loops over codes of a kind, or reads them from Numba's cache, once a process."""
    if kind in _kept:
        return
    found = []
    for first, function, make in ((0, _multiply, multiplier), (len(CODE_NAMES), _convert, converter)):
        # A function of its own for each kind, with its loop as a global: Numba caches no closures.
        own = FunctionType(function.__code__, {"_loop": make(kind)}, f"{function.__name__}_{kind}")
        own.__module__, own.__qualname__ = __name__, own.__name__
        signature = types.int64(*[types.int64] * function.__code__.co_argcount)
        found.append(compiled(own, signature)())
        _loops[first + CODE_NAMES.index(kind)] = found[-1].address
    _kept[kind] = found
