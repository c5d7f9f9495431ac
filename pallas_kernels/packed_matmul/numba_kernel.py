"""The kernel of `numba_cpu`: products of rows with several packed weights in one call.

Few rows: threads share panels, and the rows are prepared once for all. Many rows: each part takes some of
them, and all panels. That changes no sum.
"""

from typing import Any

from pallas_kernels.numba_cpu.frames import (
    answers_metadata,
    compiled,
    inlined,
    internal,
    load_word,
    operand,
    operand_size,
    result,
)
from pallas_kernels.numba_cpu.memory import allocate, free, put, store_word
from pallas_kernels.numba_cpu.threads import in_parts, num_threads
from pallas_kernels.packed_matmul import numba_panels as panels
from pallas_kernels.packed_matmul.numba_panels import (
    PANEL_BYTES,
    TILE_VECTORS,
    VECTOR_BYTES,
    VECTORS,
    WIDTH,
    clear,
    copy_lanes,
    load_int32,
)
from pallas_kernels.packed_matmul.specs import CODE_NAMES, LANES, NUMBERS, OUTER, STEP

# Columns of the plan, an int32 row for each weight.
KIND, INPUTS, STEPS, OUTPUTS, GROUP, SEGMENT, SCALES, OFFSETS, UNIT, FIELDS = range(10)
# Operands: the rows, the plan, and for each weight those of `PackedArrays`.
CODES_OPERAND, SCALES_OPERAND, OUTER_SCALES_OPERAND, OFFSETS_OPERAND, OUTER_OFFSETS_OPERAND, TABLE_OPERAND = range(6)
ARRAYS = 6
# Words of a job, then two for each weight: its prepared rows and their sums.
FRAME, ROWS_OF_PART, NUM_PANELS, NUM_PARTS, PREPARED = range(0, 40, 8)
MANY = 48  # rows from which on parts are of rows
CHUNK_ROWS = 96  # of a part of rows, at most
BLOCK_INPUTS = 512  # whose scales are written as float32 at once
PARTS_OF_THREAD = 4  # where there are few rows: a thread may begin late
NONE, FLOAT32, FLOAT16, BFLOAT16, FACTORED, UNITS, UNIT_KIND, EXPONENTS = range(len(NUMBERS))
# The last kinds of codes of 4, 8 and 16 bits.
LAST_WORDS, LAST_BYTES, LAST_SHORTS = (CODE_NAMES.index(name) for name in ("codebook", "float8_e5m2", "float16"))
_TILE_A, _TILE_B, _TILE_C, _TILE_D = (rows for rows, _ in panels.TILES)


@internal("int64(int64, int64, int64)")
def _field(frame, weight, column):
    return load_int32(operand(frame, 1), weight * FIELDS + column)


@internal("int64(int64, int64, int64)")
def _array(frame, weight, index):
    return operand(frame, 2 + ARRAYS * weight + index)


@internal("int64(int64, int64)")
def _num_panels(frame, weight):
    return (_field(frame, weight, OUTPUTS) + LANES - 1) // LANES


@internal("int64(int64)")
def _bytes_of_step(kind):
    """Bytes of a panel's codes of 8 inputs."""
    if kind <= LAST_WORDS:
        return PANEL_BYTES
    if kind <= LAST_BYTES:
        return LANES * STEP
    return LANES * STEP * (2 if kind <= LAST_SHORTS else 4)


@internal("int64(int64, int64)")
def _num_segments(frame, weight):
    segment = _field(frame, weight, SEGMENT)
    return (_field(frame, weight, INPUTS) + segment - 1) // segment


@internal("int64(int64)")
def _number_bytes(kind):
    if kind == FLOAT32:
        return 4
    return 2 if kind == FLOAT16 or kind == BFLOAT16 else 1


@internal("void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def _fill(kind, target, source, outer, scales, first, count, segment, group, ahead):
    """Writes a panel's scales or offsets of `count` segments from the first on as float32 [count, 64].

    source, outer: addresses of the panel's numbers. scales: address of the float32 scales, for those in their units.
    """
    for index in range(count):
        number = (first + index) * segment // group * LANES
        panels.prefetch(source + ahead + _number_bytes(kind) * number)
        to, scale = target + index * PANEL_BYTES, scales + index * PANEL_BYTES
        if kind == FLOAT16:
            panels.put_float16(to, source + 2 * number, 0)
        elif kind == FACTORED:
            panels.put_factored(to, source + number, outer + (first + index) * segment // OUTER * LANES * 2)
        elif kind == UNIT_KIND:
            panels.put_unit(to, source, scale)
        elif kind == UNITS:
            panels.put_units(to, source + number, scale)
        elif kind == FLOAT32:
            panels.put_float32(to, source + 4 * number, 0)
        elif kind == BFLOAT16:
            panels.put_bfloat16(to, source + 2 * number, 0)
        elif kind == EXPONENTS:
            panels.put_exponents(to, source + number, 0)
        else:
            panels.put_ones(to, 0, 0)


@internal("void(int64, int64, int64, int64, int64, int64, int64)")
def _fill_panel(frame, weight, panel, first, count, scales, offsets):
    """Writes a panel's scales of `count` segments, and the offsets unless their address is 0."""
    segment, group, inputs = _field(frame, weight, SEGMENT), _field(frame, weight, GROUP), _field(frame, weight, INPUTS)
    numbers = panel * ((inputs + group - 1) // group) * LANES
    outers = panel * ((inputs + OUTER - 1) // OUTER) * LANES * 2
    kind = _field(frame, weight, SCALES)
    source = _array(frame, weight, SCALES_OPERAND) + numbers * _number_bytes(kind)
    outer = _array(frame, weight, OUTER_SCALES_OPERAND) + outers
    ahead = (inputs + group - 1) // group * LANES * _number_bytes(kind)
    _fill(kind, scales, source, outer, 0, first, count, segment, group, ahead)
    if offsets != 0:
        kind = _field(frame, weight, OFFSETS)
        source = _array(frame, weight, OFFSETS_OPERAND) + numbers * _number_bytes(kind)
        source = _field(frame, weight, UNIT) if kind == UNIT_KIND else source
        outer = _array(frame, weight, OUTER_OFFSETS_OPERAND) + outers
        ahead = (inputs + group - 1) // group * LANES * _number_bytes(kind)
        _fill(kind, offsets, source, outer, scales, first, count, segment, group, ahead)


@internal("int64(int64)")
def _tile_rows(rows):
    """Rows of the next tile."""
    if rows >= _TILE_A:
        return _TILE_A
    if rows >= _TILE_B:
        return _TILE_B
    return _TILE_C if rows >= _TILE_C else _TILE_D


@internal("void(int64, int64, int64, int64, int64, int64)")
def _prepare(frame, weight, first, rows, target, sums):
    """Copies rows as the kernel reads them: tiles of [inputs, rows of the tile], and their sums [segments, rows of the
    tile]."""
    steps, inputs = _field(frame, weight, STEPS), _field(frame, weight, INPUTS)
    segment, segments = _field(frame, weight, SEGMENT), _num_segments(frame, weight)
    is_scaled = _field(frame, weight, KIND) == 0
    row = 0
    while row < rows:
        size = _tile_rows(rows - row)
        for r in range(size):
            source = operand(frame, 0) + 4 * (first + row + r) * inputs
            to = target + 4 * (row * steps * STEP + r)
            for index in range(segments):
                start = index * segment
                count = min(segment // STEP, steps - start // STEP)
                at = to + 4 * start * size
                if is_scaled:
                    total = panels.prepare_scaled(at, 4 * size, source + 4 * start, count, inputs - start)
                else:
                    total = panels.prepare(at, 4 * size, source + 4 * start, count, inputs - start)
                put(sums, row * segments + index * size + r, total)
        row += size


@internal("int64(int64, int64, int64)")
def _prepared_as(frame, weight, other):
    """Whether a weight's rows are prepared as another's."""
    is_alike = (_field(frame, weight, KIND) == 0) == (_field(frame, other, KIND) == 0)
    return is_alike and _field(frame, weight, SEGMENT) == _field(frame, other, SEGMENT)


_add_a, _add_b, _add_c, _add_d = (panels.tiler(*tile) for tile in panels.TILES)


@internal("void(int64, int64, int64, int64, int64, int64, int64)")
def _run_row(frame, weight, first, last, x, sums, out):
    """The outputs of one row of the panels from the first to the last."""
    steps, segment = _field(frame, weight, STEPS), _field(frame, weight, SEGMENT)
    kind = _field(frame, weight, KIND)
    bytes_of_step = _bytes_of_step(kind)
    segments, outputs = _num_segments(frame, weight), _field(frame, weight, OUTPUTS)
    table, of_segment = _array(frame, weight, TABLE_OPERAND), segment // STEP
    block = max(BLOCK_INPUTS // segment, 1)
    totals = allocate((1 + 2 * block) * PANEL_BYTES)
    scales = totals + PANEL_BYTES
    offsets = scales + block * PANEL_BYTES if _field(frame, weight, OFFSETS) != NONE else 0
    for panel in range(first, last):
        clear(totals, VECTORS)
        for start in range(0, segments, block):
            count = min(block, segments - start)
            _fill_panel(frame, weight, panel, start, count, scales, offsets)
            step = start * of_segment
            codes = _array(frame, weight, CODES_OPERAND) + (panel * steps + step) * bytes_of_step
            numbers, own, left = x + 4 * STEP * step, sums + 4 * start, steps - step
            panels.call_multiply(kind, totals, codes, scales, offsets, numbers, own, count, of_segment, left, table)
        for v in range(VECTORS):
            output = panel * LANES + v * WIDTH
            copy_lanes(out + 4 * output, totals + v * VECTOR_BYTES, outputs - output)
    free(totals)

@internal("void(int64, int64, int64, int64, int64, int64, int64, int64)")
def _run_rows(frame, weight, first, last, rows, x, sums, out):
    """The outputs of several rows of the panels from the first to the last."""
    steps, segment = _field(frame, weight, STEPS), _field(frame, weight, SEGMENT)
    kind = _field(frame, weight, KIND)
    bytes_of_step = _bytes_of_step(kind)
    segments, outputs = _num_segments(frame, weight), _field(frame, weight, OUTPUTS)
    table, of_segment = _array(frame, weight, TABLE_OPERAND), segment // STEP
    width = TILE_VECTORS * VECTOR_BYTES
    totals = allocate(width * (rows + segment) + 2 * segments * PANEL_BYTES)
    codes = totals + rows * width
    scales = codes + segment * width
    offsets = scales + segments * PANEL_BYTES if _field(frame, weight, OFFSETS) != NONE else 0
    for panel in range(first, last):
        _fill_panel(frame, weight, panel, 0, segments, scales, offsets)
        for vector in range(0, VECTORS, TILE_VECTORS):
            output = panel * LANES + vector * WIDTH
            if output >= outputs:
                break
            clear(totals, rows * TILE_VECTORS)
            for index in range(segments):
                step = index * of_segment
                count = min(of_segment, steps - step)
                source = _array(frame, weight, CODES_OPERAND) + (panel * steps + step) * bytes_of_step
                panels.call_convert(kind, codes, source, vector, count, table)
                scale = scales + index * PANEL_BYTES + vector * VECTOR_BYTES
                offset = offsets + index * PANEL_BYTES + vector * VECTOR_BYTES if offsets != 0 else 0
                row = 0
                while row < rows:
                    size = _tile_rows(rows - row)
                    numbers = x + 4 * (row * steps + step * size) * STEP
                    total = sums + 4 * (row * segments + index * size)
                    to = totals + row * width
                    if size == _TILE_A:
                        _add_a(to, codes, numbers, count, scale, offset, total)
                    elif size == _TILE_B:
                        _add_b(to, codes, numbers, count, scale, offset, total)
                    elif size == _TILE_C:
                        _add_c(to, codes, numbers, count, scale, offset, total)
                    else:
                        _add_d(to, codes, numbers, count, scale, offset, total)
                    row += size
            for v in range(TILE_VECTORS):
                own = output + v * WIDTH
                for row in range(rows):
                    to = out + 4 * (row * outputs + own)
                    copy_lanes(to, totals + row * width + v * VECTOR_BYTES, outputs - own)
    free(totals)


@internal("void(int64, int64, int64, int64, int64, int64, int64, int64)")
def _run_panels(frame, weight, first, last, rows, x, sums, out):
    if rows == 1:
        _run_row(frame, weight, first, last, x, sums, out)
    else:
        _run_rows(frame, weight, first, last, rows, x, sums, out)


@internal("void(int64, int64)")
def _run_some_panels(job, part):
    """A part of few rows."""
    frame = load_word(job + FRAME)
    rows, num_weights = operand_size(frame, 0, 0), operand_size(frame, 1, 0)
    num_panels, num_parts = load_word(job + NUM_PANELS), load_word(job + NUM_PARTS)
    first, last = part * num_panels // num_parts, (part + 1) * num_panels // num_parts
    for weight in range(num_weights):
        units = _num_panels(frame, weight)
        if first < units and last > 0:
            x, sums = load_word(job + PREPARED + 16 * weight), load_word(job + PREPARED + 16 * weight + 8)
            _run_panels(frame, weight, max(first, 0), min(last, units), rows, x, sums, result(frame, weight))
        first, last = first - units, last - units

@internal("void(int64, int64)")
def _run_some_rows(job, part):
    """A part of many rows."""
    frame, most = load_word(job + FRAME), load_word(job + ROWS_OF_PART)
    first = part * most
    rows, num_weights = min(most, operand_size(frame, 0, 0) - first), operand_size(frame, 1, 0)
    x, sums = 0, 0
    for weight in range(num_weights):
        if weight == 0 or not _prepared_as(frame, weight, weight - 1):
            if weight > 0:
                free(x)
                free(sums)
            x = allocate(4 * rows * STEP * _field(frame, weight, STEPS))
            sums = allocate(4 * rows * _num_segments(frame, weight))
            _prepare(frame, weight, first, rows, x, sums)
        out = result(frame, weight) + 4 * first * _field(frame, weight, OUTPUTS)
        _run_panels(frame, weight, 0, _num_panels(frame, weight), rows, x, sums, out)
    free(x)
    free(sums)

def _run_packed_part(job, part):
    if load_word(job + ROWS_OF_PART) == 0:
        _run_some_panels(job, part)
    else:
        _run_some_rows(job, part)

_run_parts = in_parts(inlined(_run_packed_part))

@inlined
def _multiply(frame):
    rows, num_weights, threads = operand_size(frame, 0, 0), operand_size(frame, 1, 0), num_threads(frame)
    job = allocate(PREPARED + 16 * num_weights)
    store_word(job + FRAME, frame)
    if rows >= MANY:
        most = min(-(-rows // (threads * _TILE_A)) * _TILE_A, CHUNK_ROWS)
        store_word(job + ROWS_OF_PART, most)
        _run_parts(frame, job, -(-rows // most))
        free(job)
        return
    num_panels = 0
    for weight in range(num_weights):
        num_panels += _num_panels(frame, weight)
        to = job + PREPARED + 16 * weight
        if weight > 0 and _prepared_as(frame, weight, weight - 1):
            store_word(to, load_word(to - 16))
            store_word(to + 8, load_word(to - 8))
        else:
            x = allocate(4 * rows * STEP * _field(frame, weight, STEPS))
            sums = allocate(4 * rows * _num_segments(frame, weight))
            _prepare(frame, weight, 0, rows, x, sums)
            store_word(to, x)
            store_word(to + 8, sums)
    num_parts = min(num_panels, threads * PARTS_OF_THREAD)
    store_word(job + ROWS_OF_PART, 0)
    store_word(job + NUM_PANELS, num_panels)
    store_word(job + NUM_PARTS, num_parts)
    _run_parts(frame, job, num_parts)
    for weight in range(num_weights):
        to = job + PREPARED + 16 * weight
        if weight == 0 or load_word(to) != load_word(to - 16):
            free(load_word(to))
            free(load_word(to + 8))
    free(job)



@compiled
def packed_matmul(frame):
    if not answers_metadata(frame):
        _multiply(frame)
    return 0


def register_kinds(kinds: frozenset[str]) -> None:
    """Makes the loops over codes of these kinds ready."""
    for kind in kinds:
        panels.register_kind(kind)
