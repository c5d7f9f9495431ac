"""Shared parts of the loops over packed weights: the sizes of vectors and tiles, and loads of codes and scales."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.core.registry import cpu_target

from cpu_kernels import vectors as vec
from cpu_kernels.packed_matmul.forms import CODES, LANES, STEP

_FEATURES = cpu_target.target_context.codegen()._get_host_cpu_features().split(",")  # pyright: ignore
# A vector of 16 float32 takes one of 32 registers with AVX-512, else two of 16.
HAS_AVX512 = "+avx512f" in _FEATURES
# Products of four unsigned and signed bytes, summed: AVX-512's instruction, on one register of 16 sums.
HAS_VNNI = "+avx512vnni" in _FEATURES
WIDTH = vec.LANES  # outputs of a vector
VECTORS = LANES // WIDTH  # of a panel
# Rows that are multiplied while codes are converted in registers: as many as have sums of a vector there.
FEW_ROWS = 8 if HAS_AVX512 else 5
# Rows of tiles, whose sums stay in registers: the first, and those for what is left; and vectors of a tile.
TILE_ROWS, TILE_VECTORS = ((8, 4, 2, 1), 2) if HAS_AVX512 else ((6, 4, 2, 1), 1)
INT8_TILE_ROWS = TILE_ROWS if HAS_AVX512 else (4, 3, 2, 1)  # AVX2 takes more registers for a product
VECTOR_BYTES, PANEL_BYTES = 4 * WIDTH, 4 * LANES
NIBBLES_IN_PLACE = 4 if HAS_AVX512 else 2  # of a word, that are taken from where they are
AHEAD_BYTES = 2**13  # from codes that are read to codes that are prefetched
TILE_AHEAD_BYTES = 128  # that tiles prefetch for each two inputs

WORDS = ir.VectorType(vec.INT, WIDTH)
BYTES = ir.VectorType(vec.BYTE, WIDTH)
SHORTS = ir.VectorType(vec.HALF, WIDTH)
HALVES = ir.VectorType(ir.HalfType(), WIDTH)
STEP_FLOATS = ir.VectorType(vec.FLOAT, STEP)
_SIZES = {vec.FLOATS: 4, SHORTS: 2, BYTES: 1}  # bytes of a vector's numbers


def bytes_of_step(kind: str) -> int:
    """Bytes of a panel's codes of 8 inputs."""
    return PANEL_BYTES if kind in ("nibbles", "codebook", "nibbles_int8") else STEP * LANES * CODES[kind].itemsize


def offset(builder: Any, address: Any, count: int) -> Any:
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
    halves = []
    for first in (0, 8):
        own = part(indices, first)
        is_high = builder.icmp_unsigned(">=", own, vec.splat(eights, 8))
        halves.append(builder.select(is_high, builder.call(permute, [high, own]), builder.call(permute, [low, own])))
    return builder.shuffle_vector(*halves, ir.Constant(WORDS, list(range(WIDTH))))


def load_codes(builder: Any, kind: str, address: Any, vector: int, table: Any) -> Callable[[int], Any]:
    """A function that gives the float32 vector of the codes of input j of 8, of one of a panel's vectors; nibbles times
    16^(j mod NIBBLES_IN_PLACE).

    address: of the panel's codes of the first of the inputs.
    """
    if kind in ("nibbles", "codebook"):
        words = vec.load(builder, offset(builder, address, vector * VECTOR_BYTES), WORDS)
        if kind == "codebook":
            return lambda j: _look_up(builder, _nibble(builder, words, j), table)

        def nibble(j: int) -> Any:  # by few masks, which stay in registers
            part, place = divmod(j, NIBBLES_IN_PLACE)
            own = builder.lshr(words, vec.splat(WORDS, 4 * NIBBLES_IN_PLACE * part)) if part else words
            return builder.sitofp(builder.and_(own, vec.splat(WORDS, 15 << 4 * place)), vec.FLOATS)

        return nibble
    size = CODES[kind].itemsize

    def load(j: int, of: Any) -> Any:
        return vec.load(builder, offset(builder, address, (j * LANES + vector * WIDTH) * size), of)

    if kind == "int8":
        return lambda j: vec.from_int8(builder, load(j, BYTES))
    if kind == "bfloat16":
        return lambda j: vec.from_bfloat16(builder, load(j, SHORTS))
    if kind == "float16":
        return lambda j: _from_half(builder, load(j, SHORTS))
    if kind == "float32":
        return lambda j: load(j, vec.FLOATS)
    return lambda j: _from_float8(builder, load(j, BYTES), 3 if kind == "float8_e4m3fn" else 2)


def _nibble(builder: Any, words: Any, j: int) -> Any:
    """Nibble j of words."""
    return builder.and_(builder.lshr(words, vec.splat(WORDS, 4 * j)), vec.splat(WORDS, 15))


def load_step(builder: Any, source: Any, first: Any, inputs: Any) -> Any:
    """8 float32 of a row of `inputs`, from the first on; those beyond the last are 0."""
    address = builder.add(source, builder.mul(first, vec.constant(4)))
    rest, loaded = builder.sub(inputs, first), cgutils.alloca_once(builder, STEP_FLOATS)
    with builder.if_else(builder.icmp_signed(">=", rest, vec.constant(STEP))) as (is_whole, is_part):
        with is_whole:
            builder.store(vec.load(builder, address, STEP_FLOATS), loaded)
        with is_part:
            builder.store(vec.load_first(builder, address, STEP_FLOATS, rest), loaded)
    return builder.load(loaded)


def prefetch_step(builder: Any, kind: str, address: Any, inputs: int = STEP, *, is_all: bool = False) -> None:
    """Prefetches codes that are read AHEAD_BYTES later. Of codes of 16 bits and more a line of each KiB: the processor
    follows these by itself, and prefetches of all lines, which wait in the first cache's few miss buffers, hold it up:
    on one core of a Zen 4, 576 x 49,152 float16 weights took 3.3 ms instead of 2.1; int8 ones need every line (1.5 ms
    instead of 1.9), and so do weights that are not read in order (is_all)."""
    size, to = bytes_of_step(kind), offset(builder, address, AHEAD_BYTES)
    for line in range(0, size * inputs // STEP, 64 if is_all or size < 2**10 else 2**10):
        vec.prefetch(builder, offset(builder, to, line))


@contextmanager
def each_segment(builder: Any, segments: Any, steps: Any, left: Any) -> Iterator[tuple[Any, Any, Any]]:
    """A loop over segments of `steps` times 8 inputs, `left` times 8 in all: the segment, its first step, its steps."""
    with cgutils.for_range(builder, segments, intp=vec.LONG) as segment:
        first = builder.mul(segment.index, steps)
        rest = builder.sub(left, first)
        yield segment.index, first, builder.select(builder.icmp_signed("<", rest, steps), rest, steps)


def load_number(builder: Any, address: Any) -> Any:
    return vec.broadcast(builder, builder.load(vec.at(builder, address, vec.FLOAT), align=4))


def vectors_at_once(rows: int, most: int = VECTORS) -> int:
    """Vectors of a panel whose sums are in registers at once: as many as there is room for beside codes, and `most`."""
    num_sums = 20 if HAS_AVX512 else 4
    return next(count for count in (VECTORS, 2, 1) if count == 1 or count <= min(num_sums // rows, most))


def panel_totals(builder: Any, totals: Any, rows: int) -> dict[tuple[int, int], Any]:
    """The place of a panel's totals [rows, 64] by row and vector while a loop runs: one row's in registers, or in
    memory where there are 16, so that no chain of sums has to be there."""
    keys = [(r, v) for r in range(rows) for v in range(VECTORS)]
    places = {(r, v): offset(builder, totals, PANEL_BYTES * r + VECTOR_BYTES * v) for r, v in keys}
    if not HAS_AVX512 or rows > 1:
        return {key: vec.at(builder, place, vec.FLOATS) for key, place in places.items()}
    return {key: cgutils.alloca_once_value(builder, vec.load(builder, place)) for key, place in places.items()}


def store_totals(builder: Any, totals: Any, own: dict[tuple[int, int], Any]) -> None:
    """Stores what `panel_totals` loaded."""
    if HAS_AVX512 and len(own) == VECTORS:
        for (_, v), place in own.items():
            vec.store(builder, builder.load(place), offset(builder, totals, VECTOR_BYTES * v))


def add_offsets(builder: Any, totals: dict[tuple[int, int], Any], offsets: Any, segment: Any, sums: Any) -> None:
    """Adds a segment's offsets [64], unless the address of all is 0, times the sums of its inputs [rows] at `sums`."""
    with builder.if_then(builder.icmp_signed("!=", offsets, vec.constant(0))):
        at = builder.add(offsets, builder.mul(segment, vec.constant(PANEL_BYTES)))
        factors = [vec.load(builder, offset(builder, at, VECTOR_BYTES * v)) for v in range(VECTORS)]
        for (r, v), place in totals.items():
            number = load_number(builder, offset(builder, sums, 4 * r))
            builder.store(vec.multiply_add(builder, number, factors[v], builder.load(place, align=4)), place, align=4)


def number_vector(builder: Any, kind: str, source: Any, other: Any, first: int) -> Any:
    """16 of a panel's packed scales or offsets as float32, from the first on.

    source: address of the numbers. other: address of the outer numbers of "factored", or the float32 scales of "units"
    and "unit"; `source` is the number of the latter.
    """

    def load(address: Any, of: Any) -> Any:
        return vec.load(builder, offset(builder, address, first * _SIZES[of]), of)

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
