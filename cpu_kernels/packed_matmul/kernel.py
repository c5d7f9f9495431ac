"""Products of rows with several packed weights in one call.

A weight may be a stack of experts; then the rows are sorted by expert. Experts, and rows that are not many: threads
share panels, and the rows are prepared once for all; few rows are multiplied while a panel is read, others by tiles of
what was converted before. Many rows: each part takes some of them, and all panels. That changes no sum.
"""

from cpu_kernels.frames import (
    answers_metadata,
    compiled,
    inlined,
    internal,
    load_word,
    operand,
    operand_size,
    result,
)
from cpu_kernels.memory import allocate, free, store_word
from cpu_kernels.packed_matmul.forms import KERNELS, LANES, NUMBERS, OUTER, STEP
from cpu_kernels.packed_matmul.loads import (
    AHEAD_BYTES,
    FEW_ROWS,
    INT8_TILE_ROWS,
    PANEL_BYTES,
    TILE_AHEAD_BYTES,
    TILE_ROWS,
    TILE_VECTORS,
    VECTOR_BYTES,
    VECTORS,
    WIDTH,
)
from cpu_kernels.packed_matmul.memory import clear, copy_lanes, load_int32, prefetch_line
from cpu_kernels.packed_matmul.table import (
    PLACES,
    call_convert,
    call_fill,
    call_multiply,
    call_prepare,
    call_tile,
)
from cpu_kernels.threads import in_parts, num_threads

# Columns of the plan, an int32 row for each weight.
KIND, INPUTS, STEPS, OUTPUTS, GROUP, SEGMENT, SCALES, OFFSETS, UNIT, FIELDS = range(10)
# Operands: the rows, the plan, how many rows each expert has, and for each weight those of `PackedArrays`.
CODES_OPERAND, SCALES_OPERAND, OUTER_SCALES_OPERAND, OFFSETS_OPERAND, OUTER_OFFSETS_OPERAND, TABLE_OPERAND = range(6)
ARRAYS = 6
# Words of a job, then two for each weight: its prepared rows and their sums.
FRAME, ROWS_OF_PART, NUM_PANELS, NUM_PARTS, PREPARED = range(0, 40, 8)
MANY = 48  # rows from which on parts are of rows
TILE_INPUTS = 128  # that tiles take at once: their float32 weights stay in the first cache
CHUNK_ROWS = 96  # of a part of rows, at most; each thread has as many
BLOCK_INPUTS = 512  # whose scales are written as float32 at once
PARTS_OF_THREAD = 2  # where there are few rows: a thread may begin late
NONE, FLOAT32, FLOAT16, BFLOAT16, UNIT_KIND = map(NUMBERS.index, ("none", "float32", "float16", "bfloat16", "unit"))
# The last kinds of codes of 4, 8 and 16 bits.
LAST_WORDS, LAST_BYTES, LAST_SHORTS = (KERNELS.index(name) for name in ("nibbles_int8", "float8_e5m2", "float16"))
NIBBLES, NIBBLES_INT8, INT8, QUADS = map(KERNELS.index, ("nibbles", "nibbles_int8", "int8", "quads"))
# Places of the first loops of their sorts.
MULTIPLY, CONVERT, FILL = (PLACES[name] for name in ("multiply_nibbles_1", "convert_nibbles", f"fill_{NUMBERS[0]}"))
TILE_FLOAT, TILE_CHAINED = (PLACES[f"tile_{name}_{TILE_ROWS[0]}"] for name in ("float", "chained"))
TILE_INT8 = PLACES[f"tile_int8_{INT8_TILE_ROWS[0]}"]
PREPARE_FLOAT, PREPARE_SCALED, PREPARE_INT8, PREPARE_NIBBLES_INT8 = (
    PLACES[f"prepare_{name}"] for name in ("float", "scaled", "int8", "nibbles_int8")
)
_FLOAT_A, _FLOAT_B, _FLOAT_C, _FLOAT_D = TILE_ROWS
_INT8_A, _INT8_B, _INT8_C, _INT8_D = INT8_TILE_ROWS


@internal("int64(int64, int64, int64)")
def _field(frame, weight, column):
    return load_int32(operand(frame, 1), weight * FIELDS + column)


@internal("int64(int64, int64, int64)")
def _array(frame, weight, index):
    return operand(frame, 3 + ARRAYS * weight + index)


@internal("int64(int64, int64)")
def _rows_of_expert(frame, expert):
    return load_int32(operand(frame, 2), expert)


@internal("int64(int64, int64)")
def _num_panels(frame, weight):
    """Panels of a weight, or of each expert's."""
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
    if kind == FLOAT16:
        return 2
    return 2 if kind == BFLOAT16 else 1


@internal("void(int64, int64, int64, int64, int64, int64, int64)")
def _fill_panel(frame, weight, panel, first, count, scales, offsets):
    """Writes a panel's scales of `count` segments, and the offsets unless their address is 0."""
    segment, group, inputs = _field(frame, weight, SEGMENT), _field(frame, weight, GROUP), _field(frame, weight, INPUTS)
    numbers = panel * ((inputs + group - 1) // group) * LANES
    outers = panel * ((inputs + OUTER - 1) // OUTER) * LANES * 2
    kind = _field(frame, weight, SCALES)
    source = _array(frame, weight, SCALES_OPERAND) + numbers * _number_bytes(kind)
    outer = _array(frame, weight, OUTER_SCALES_OPERAND) + outers
    call_fill(FILL + kind, scales, source, outer, 0, first, count, segment, group)
    if offsets != 0:
        kind = _field(frame, weight, OFFSETS)
        source = _array(frame, weight, OFFSETS_OPERAND) + numbers * _number_bytes(kind)
        source = _field(frame, weight, UNIT) if kind == UNIT_KIND else source
        outer = _array(frame, weight, OUTER_OFFSETS_OPERAND) + outers
        call_fill(FILL + kind, offsets, source, outer, scales, first, count, segment, group)


@internal("int64(int64)")
def _is_int8(kind):
    if kind == NIBBLES_INT8:
        return 1
    return 1 if kind == QUADS else 0


@internal("int64(int64, int64)")
def _tile(kind, rows):
    """Which tile the next rows take."""
    if _is_int8(kind):
        if rows >= _INT8_A:
            return 0
        if rows >= _INT8_B:
            return 1
        return 2 if rows >= _INT8_C else 3
    if rows >= _FLOAT_A:
        return 0
    if rows >= _FLOAT_B:
        return 1
    return 2 if rows >= _FLOAT_C else 3


@internal("int64(int64, int64)")
def _rows_of_tile(kind, tile):
    if tile == 0:
        return _INT8_A if _is_int8(kind) else _FLOAT_A
    if tile == 1:
        return _INT8_B if _is_int8(kind) else _FLOAT_B
    if tile == 2:
        return _INT8_C if _is_int8(kind) else _FLOAT_C
    return _INT8_D if _is_int8(kind) else _FLOAT_D


@internal("int64(int64)")
def _is_chained(kind):
    return 1 if kind >= INT8 and kind != QUADS else 0


@internal("int64(int64)")
def _step_bytes(kind):
    """Bytes of 8 prepared inputs of a row."""
    return STEP if _is_int8(kind) else 4 * STEP


@internal("int64(int64)")
def _sum_bytes(kind):
    """Bytes of what is kept of a segment of a row."""
    return 12 if _is_int8(kind) else 4


@internal("int64(int64)")
def _place_of_prepare(kind):
    if kind == NIBBLES:
        return PREPARE_SCALED
    if kind == NIBBLES_INT8:
        return PREPARE_NIBBLES_INT8
    return PREPARE_INT8 if kind == QUADS else PREPARE_FLOAT


@internal("void(int64, int64, int64, int64, int64, int64)")
def _prepare_tile(frame, weight, first, size, target, sums):
    """Copies rows as the loops read them, [inputs, rows], and their sums [segments, rows]."""
    steps, inputs, kind = _field(frame, weight, STEPS), _field(frame, weight, INPUTS), _field(frame, weight, KIND)
    of_segment = _field(frame, weight, SEGMENT) // STEP
    for r in range(size):
        source, to, own = operand(frame, 0) + 4 * (first + r) * inputs, target + 4 * r, sums + 4 * r
        call_prepare(_place_of_prepare(kind), to, size, source, steps, inputs, of_segment, own)


@internal("void(int64, int64, int64, int64, int64, int64)")
def _prepare_tiles(frame, weight, first, rows, target, sums):
    steps, segments, kind = _field(frame, weight, STEPS), _num_segments(frame, weight), _field(frame, weight, KIND)
    row = 0
    while row < rows:
        size = _rows_of_tile(kind, _tile(kind, rows - row))
        to, own = target + row * steps * _step_bytes(kind), sums + row * segments * _sum_bytes(kind)
        _prepare_tile(frame, weight, first + row, size, to, own)
        row += size


@internal("int64(int64, int64, int64)")
def _is_prepared_as(frame, weight, other):
    """Tells whether a weight's rows are prepared as another's."""
    place, own = _place_of_prepare(_field(frame, weight, KIND)), _place_of_prepare(_field(frame, other, KIND))
    return place == own and _field(frame, weight, SEGMENT) == _field(frame, other, SEGMENT)


@internal("int64(int64, int64, int64)")
def _allocate_rows(frame, weight, rows):
    return allocate(rows * _field(frame, weight, STEPS) * _step_bytes(_field(frame, weight, KIND)))


@internal("int64(int64, int64, int64)")
def _allocate_sums(frame, weight, rows):
    return allocate(rows * _num_segments(frame, weight) * _sum_bytes(_field(frame, weight, KIND)))


@internal("void(int64, int64)")
def _prefetch(address, size):
    for place in range(0, size, 64):
        prefetch_line(address + place)


@internal("void(int64, int64, int64)")
def _prefetch_start(frame, weight, panel):
    """Prefetches what loops do not, since they prefetch what lies ahead: the first codes and scales of a panel."""
    inputs, group = _field(frame, weight, INPUTS), _field(frame, weight, GROUP)
    size = _field(frame, weight, STEPS) * _bytes_of_step(_field(frame, weight, KIND))
    _prefetch(_array(frame, weight, CODES_OPERAND) + panel * size, min(size, AHEAD_BYTES))
    for column, operand_index in ((SCALES, SCALES_OPERAND), (OFFSETS, OFFSETS_OPERAND)):
        kind = _field(frame, weight, column)
        if kind != NONE and kind != UNIT_KIND:
            size = (inputs + group - 1) // group * LANES * _number_bytes(kind)
            _prefetch(_array(frame, weight, operand_index) + panel * size, min(size, AHEAD_BYTES))


@internal("void(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def _run_few_rows(frame, weight, stack, first, last, rows, x, sums, out):
    """The outputs of few rows of the panels from the first to the last; `stack`: the expert's first one in a stack."""
    steps, segment = _field(frame, weight, STEPS), _field(frame, weight, SEGMENT)
    kind = _field(frame, weight, KIND)
    bytes_of_step = _bytes_of_step(kind)
    segments, outputs = _num_segments(frame, weight), _field(frame, weight, OUTPUTS)
    table, of_segment = _array(frame, weight, TABLE_OPERAND), segment // STEP
    block = max(BLOCK_INPUTS // segment, 1)
    totals = allocate((rows + 2 * block) * PANEL_BYTES)
    scales = totals + rows * PANEL_BYTES
    offsets = scales + block * PANEL_BYTES if _field(frame, weight, OFFSETS) != NONE else 0
    place = MULTIPLY + (rows - 1) * len(KERNELS) + kind
    _prefetch_start(frame, weight, stack + first)
    for panel in range(first, last):
        clear(totals, rows * VECTORS)
        for start in range(0, segments, block):
            count = min(block, segments - start)
            _fill_panel(frame, weight, stack + panel, start, count, scales, offsets)
            step = start * of_segment
            codes = _array(frame, weight, CODES_OPERAND) + ((stack + panel) * steps + step) * bytes_of_step
            numbers, own = x + _step_bytes(kind) * rows * step, sums + _sum_bytes(kind) * rows * start
            call_multiply(place, totals, codes, scales, offsets, numbers, own, count, of_segment, steps - step, table)
        for row in range(rows):
            for v in range(VECTORS):
                output = panel * LANES + v * WIDTH
                own = totals + row * PANEL_BYTES + v * VECTOR_BYTES
                copy_lanes(out + 4 * (row * outputs + output), own, outputs - output)
    free(totals)


@internal("void(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def _run_rows(frame, weight, stack, first, last, rows, x, sums, out):
    """The outputs of rows in tiles of the panels from the first to the last; `stack` is as in `_run_few_rows`."""
    steps, segment = _field(frame, weight, STEPS), _field(frame, weight, SEGMENT)
    kind = _field(frame, weight, KIND)
    bytes_of_step = _bytes_of_step(kind)
    segments, outputs = _num_segments(frame, weight), _field(frame, weight, OUTPUTS)
    table, of_segment = _array(frame, weight, TABLE_OPERAND), segment // STEP
    width, tiles = TILE_VECTORS * VECTOR_BYTES, TILE_INT8 if _is_int8(kind) else TILE_FLOAT
    tiles = TILE_CHAINED if _is_chained(kind) else tiles
    is_one_chain = _is_chained(kind) == 1 and _field(frame, weight, OFFSETS) == NONE
    together = max(TILE_INPUTS // segment, 1)  # segments that a tile takes at once
    stride = together * segment * width  # of the weights of a tile
    totals = allocate(PANEL_BYTES * (rows + together * segment) + 2 * segments * PANEL_BYTES)
    codes = totals + rows * PANEL_BYTES
    scales = codes + together * segment * PANEL_BYTES
    offsets = scales + segments * PANEL_BYTES if _field(frame, weight, OFFSETS) != NONE else 0
    for panel in range(first, last):
        _fill_panel(frame, weight, stack + panel, 0, segments, scales, offsets)
        clear(totals, rows * VECTORS)
        used = min(-(-(outputs - panel * LANES) // WIDTH), VECTORS)  # vectors that have outputs
        for index in range(0, segments, together):
            step = index * of_segment
            count = min(together * of_segment, steps - step)
            source = _array(frame, weight, CODES_OPERAND) + ((stack + panel) * steps + step) * bytes_of_step
            many = (count + of_segment - 1) // of_segment
            call_convert(
                CONVERT + kind, codes, source, stride, many, of_segment, count, table, scales + index * PANEL_BYTES
            )
            chain = count if is_one_chain else of_segment
            many = 1 if is_one_chain else many
            # Tiles prefetch what is converted next: there, memory alone would be busy, and in tiles arithmetic alone.
            ahead, end = source + count * bytes_of_step, source + 2 * count * bytes_of_step
            for vector in range(0, used, TILE_VECTORS):
                at = index * PANEL_BYTES + vector * VECTOR_BYTES
                offset = offsets + at if offsets != 0 else 0
                weights, own = codes + vector // TILE_VECTORS * stride, totals + vector * VECTOR_BYTES * rows
                row = 0
                while row < rows:
                    tile = _tile(kind, rows - row)
                    size = _rows_of_tile(kind, tile)
                    numbers = x + (row * steps + step * size) * _step_bytes(kind)
                    total = sums + (row * segments + index * size) * _sum_bytes(kind)
                    place, scale, lines = own + row * width, scales + at, ahead if ahead < end else weights
                    call_tile(tiles + tile, place, weights, numbers, many, chain, count, scale, offset, total, lines)
                    ahead += count * STEP // 2 * TILE_AHEAD_BYTES
                    row += size
        for vector in range(used):
            output = panel * LANES + vector * WIDTH
            own = totals + vector // TILE_VECTORS * rows * width + vector % TILE_VECTORS * VECTOR_BYTES
            for row in range(rows):
                copy_lanes(out + 4 * (row * outputs + output), own + row * width, outputs - output)
    free(totals)


@internal("void(int64, int64)")
def _run_some_panels(job, part):
    """A part of the panels of all weights, of the experts that have rows."""
    frame = load_word(job + FRAME)
    num_panels, num_parts = load_word(job + NUM_PANELS), load_word(job + NUM_PARTS)
    first, last = part * num_panels // num_parts, (part + 1) * num_panels // num_parts
    row = 0
    for expert in range(operand_size(frame, 2, 0)):
        rows = _rows_of_expert(frame, expert)
        if rows == 0:
            continue
        for weight in range(operand_size(frame, 1, 0)):
            panels = _num_panels(frame, weight)
            if first < panels and last > 0:
                kind, steps = _field(frame, weight, KIND), _field(frame, weight, STEPS)
                x = load_word(job + PREPARED + 16 * weight) + row * steps * _step_bytes(kind)
                sums = load_word(job + PREPARED + 16 * weight + 8)
                sums += row * _num_segments(frame, weight) * _sum_bytes(kind)
                out = result(frame, weight) + 4 * row * _field(frame, weight, OUTPUTS)
                start, end = max(first, 0), min(last, panels)
                if rows <= FEW_ROWS:
                    _run_few_rows(frame, weight, expert * panels, start, end, rows, x, sums, out)
                else:
                    _run_rows(frame, weight, expert * panels, start, end, rows, x, sums, out)
            first, last = first - panels, last - panels
        row += rows


@internal("void(int64, int64)")
def _run_some_rows(job, part):
    """A part of many rows."""
    frame, most = load_word(job + FRAME), load_word(job + ROWS_OF_PART)
    first = part * most
    rows, num_weights = min(most, operand_size(frame, 0, 0) - first), operand_size(frame, 1, 0)
    x, sums = 0, 0
    for weight in range(num_weights):
        if weight == 0 or not _is_prepared_as(frame, weight, weight - 1):
            if weight > 0:
                free(x)
                free(sums)
            x = _allocate_rows(frame, weight, rows)
            sums = _allocate_sums(frame, weight, rows)
            _prepare_tiles(frame, weight, first, rows, x, sums)
        out = result(frame, weight) + 4 * first * _field(frame, weight, OUTPUTS)
        _run_rows(frame, weight, 0, 0, _num_panels(frame, weight), rows, x, sums, out)
    free(x)
    free(sums)


def _run_packed_part(job, part):
    if load_word(job + ROWS_OF_PART) == 0:
        _run_some_panels(job, part)
    else:
        _run_some_rows(job, part)


_run_parts = in_parts(inlined(_run_packed_part))


@internal("void(int64, int64, int64, int64)")
def _prepare_experts(frame, weight, x, sums):
    """Prepares the rows of each expert."""
    kind, steps, segments = _field(frame, weight, KIND), _field(frame, weight, STEPS), _num_segments(frame, weight)
    row = 0
    for expert in range(operand_size(frame, 2, 0)):
        rows = _rows_of_expert(frame, expert)
        to, own = x + row * steps * _step_bytes(kind), sums + row * segments * _sum_bytes(kind)
        if rows <= FEW_ROWS:
            _prepare_tile(frame, weight, row, rows, to, own)
        else:
            _prepare_tiles(frame, weight, row, rows, to, own)
        row += rows


@inlined
def _multiply(frame):
    rows, num_weights, threads = operand_size(frame, 0, 0), operand_size(frame, 1, 0), num_threads(frame)
    num_experts = operand_size(frame, 2, 0)
    job = allocate(PREPARED + 16 * num_weights)
    store_word(job + FRAME, frame)
    if rows >= MANY and num_experts == 1:
        num_parts = -(-rows // (CHUNK_ROWS * threads)) * threads
        most = -(-rows // (num_parts * _FLOAT_A)) * _FLOAT_A
        store_word(job + ROWS_OF_PART, most)
        _run_parts(frame, job, -(-rows // most))
        free(job)
        return
    num_panels, num_active = 0, 0
    for weight in range(num_weights):
        num_panels += _num_panels(frame, weight)
        to = job + PREPARED + 16 * weight
        if weight > 0 and _is_prepared_as(frame, weight, weight - 1):
            store_word(to, load_word(to - 16))
            store_word(to + 8, load_word(to - 8))
        else:
            x = _allocate_rows(frame, weight, rows)
            sums = _allocate_sums(frame, weight, rows)
            _prepare_experts(frame, weight, x, sums)
            store_word(to, x)
            store_word(to + 8, sums)
    for expert in range(num_experts):
        num_active += 1 if _rows_of_expert(frame, expert) > 0 else 0
    num_panels *= num_active
    num_parts = min(num_panels, threads * PARTS_OF_THREAD * (1 if num_experts == 1 else 4))
    store_word(job + ROWS_OF_PART, 0)
    store_word(job + NUM_PANELS, num_panels)
    store_word(job + NUM_PARTS, num_parts)
    if num_parts > 0:
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
