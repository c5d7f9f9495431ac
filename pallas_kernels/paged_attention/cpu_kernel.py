"""Attention of new tokens to keys in pages, on CPUs: compiled by Numba, called from XLA programs.

An item is up to `queries` new tokens of one sequence; a unit is an item and some of the query heads that share a key
head. A unit reads each of its keys once, where it lies, in blocks of 64 from position 0 on. What a query adds up, and
in which order, depends on its own keys alone.
"""

from typing import NamedTuple

import numpy as np
from numba import carray, cfunc, njit

from pallas_kernels.numba_cpu import frames
from pallas_kernels.numba_cpu.frames import as_pointer, floats, integers
from pallas_kernels.numba_cpu.vectors import LANES
from pallas_kernels.paged_attention import cpu_vectors
from pallas_kernels.paged_attention.cpu_vectors import FLOAT32, NIBBLES, VECTOR
from pallas_kernels.paged_attention.specs import MASKED, MAX_TREE_TOKENS

TARGET = "pallas_kernels.paged_attention"
BLOCK = 64  # keys
# Operands, in order.
Q, K, V, K_SCALES, V_SCALES, TABLE, STARTS, LENGTHS, KV_LENGTHS, SINKS, ANCESTORS, BOUNDS, SIZES, NUMBERS = range(14)
# Elements of the operands `SIZES`, int32, and `NUMBERS`, float32.
PART, QUERIES, GROUPS, WINDOW, HAS_SCALES, HAS_SINKS, HAS_ANCESTORS, KEY_KIND, VALUE_KIND, KEY_SIZE, VALUE_SIZE, VALUE_WIDTH = range(12)
SOFT_CAP, KEY_FACTOR, VALUE_FACTOR = range(3)


class Rows(NamedTuple):
    """Stored keys or values.

    start: the address of the head's first row. stride: bytes from one row to the next.
    scales: the address of the head's scales, or 0. factor: of all numbers.
    kind, size: how numbers are stored, and bytes of one. width, vecs: numbers of a row, and vectors.
    """

    start: int
    stride: int
    scales: int
    factor: float
    kind: int
    size: int
    width: int
    vecs: int


class Pages(NamedTuple):
    """The pages of a sequence: the address of its ids, tokens of a page, and key heads."""

    table: int
    page_size: int
    num_heads: int


class Item(NamedTuple):
    """Queries of a unit.

    token, count: the first one's row of q, and how many. head, groups: the first query head, and how many.
    position, first_new: of the first query, and of the sequence's first new token.
    tree: bits of ancestors that count, 0 for causal attention. window: keys, 0 for all.
    first_key, end_key: the keys that any of the queries sees.
    """

    token: int
    count: int
    head: int
    groups: int
    position: int
    first_new: int
    tree: int
    window: int
    first_key: int
    end_key: int


class Scratch(NamedTuple):
    """Addresses of working memory: rows of queries, of scores and weights of a block, and of sums of values; the highest
    score and the sum of weights of each row; converted keys or values; a padded vector; factors of a block's keys and
    values."""

    q: int
    scores: int
    sums: int
    highest: int
    total: int
    converted: int
    padded: int
    key_factors: int
    value_factors: int


def scratch_floats(rows: int, vecs: int, value_vecs: int) -> int:
    """Working memory of a call with units of up to `rows` rows, in float32 numbers."""
    return rows * (vecs * LANES + BLOCK + value_vecs * LANES + 2 * LANES) + LANES * vecs * LANES + LANES + 2 * BLOCK


@njit(error_model="numpy")
def _scratch(start, rows, vecs, value_vecs):
    scores = start + rows * vecs * VECTOR
    sums = scores + rows * BLOCK * 4
    highest = sums + rows * value_vecs * VECTOR
    total = highest + rows * VECTOR
    converted = total + rows * VECTOR
    padded = converted + LANES * vecs * VECTOR
    key_factors = padded + VECTOR
    return Scratch(start, scores, sums, highest, total, converted, padded, key_factors, key_factors + BLOCK * 4)


@njit(error_model="numpy")
def _bytes(address, size):
    return carray(as_pointer(address), (size,), np.uint8)


@njit(error_model="numpy")
def _convert_rows(out, stored, stride, num_rows, kind, size, width, vecs, padded):
    """Rows as float32 vectors, padded with zeros."""
    if kind == NIBBLES:
        cpu_vectors.convert(out, vecs * VECTOR, stored, stride, num_rows, vecs // 2, kind)
        return
    whole = width // LANES
    cpu_vectors.convert(out, vecs * VECTOR, stored, stride, num_rows, whole, kind)
    if whole < vecs:
        num_bytes = (width - whole * LANES) * size
        tail = _bytes(padded, VECTOR)
        for index in range(VECTOR):
            tail[index] = 0
        for row in range(num_rows):
            source = _bytes(stored + row * stride + whole * LANES * size, num_bytes)
            for index in range(num_bytes):
                tail[index] = source[index]
            cpu_vectors.convert(out + (row * vecs + whole) * VECTOR, 0, padded, 0, 1, 1, kind)


@njit(error_model="numpy")
def _page(pages, position):
    """The id of the page of a position."""
    index = position // pages.page_size
    return np.int64(integers(pages.table, index + 1)[index])


@njit(error_model="numpy")
def _rows(rows, pages, first, begin, end, scratch):
    """Rows `begin` to `end` of the 16 from position `first` on as float32 vectors: the address of the 16, and the bytes
    from one to the next. Others are undefined. Rows that are float32 vectors are not copied."""
    if rows.kind == FLOAT32 and rows.width % LANES == 0 and pages.page_size % LANES == 0:
        slot = first % pages.page_size
        return rows.start + (_page(pages, first) * pages.page_size + slot) * rows.stride, rows.stride
    while begin < end:
        slot = (first + begin) % pages.page_size
        run = min(end - begin, pages.page_size - slot)
        stored = rows.start + (_page(pages, first + begin) * pages.page_size + slot) * rows.stride
        out = scratch.converted + begin * rows.vecs * VECTOR
        _convert_rows(out, stored, rows.stride, run, rows.kind, rows.size, rows.width, rows.vecs, scratch.padded)
        begin += run
    return scratch.converted, rows.vecs * VECTOR


@njit(error_model="numpy")
def _prefetch_rows(rows, pages, first, end):
    """Asks for the 16 rows from position `first` on, of which those before `end` exist."""
    if first >= end:
        return
    slot = first % pages.page_size
    start = rows.start + (_page(pages, first) * pages.page_size + slot) * rows.stride
    size = rows.width // 2 if rows.kind == NIBBLES else rows.width * rows.size
    cpu_vectors.prefetch(start, rows.stride, min(LANES, pages.page_size - slot), size)


@njit(error_model="numpy")
def _fill_factors(out, rows, pages, first, begin, end):
    """The factors of rows `begin` to `end` of the 16 from position `first` on."""
    factors, factor = floats(out, LANES), np.float32(rows.factor)
    while begin < end:
        slot = (first + begin) % pages.page_size
        run = min(end - begin, pages.page_size - slot)
        at = rows.scales + (_page(pages, first + begin) * pages.num_heads * pages.page_size + slot) * 4
        scales = floats(at, run)
        for index in range(run):
            factors[begin + index] = scales[index] * factor
        begin += run


@njit(error_model="numpy")
def _count_bits(bits):
    count = 0
    while bits != 0:
        bits &= bits - 1
        count += 1
    return count


@njit(error_model="numpy")
def _start_rows(item, q, num_heads, sinks, keys, values, scratch):
    """Copies the queries of a unit, and clears what is summed."""
    for query in range(item.count):
        for group in range(item.groups):
            row = query * item.groups + group
            source = q + ((item.token + query) * num_heads + item.head + group) * keys.width * 4
            to = scratch.q + row * keys.vecs * VECTOR
            _convert_rows(to, source, 0, 1, FLOAT32, 4, keys.width, keys.vecs, scratch.padded)
            highest, total = floats(scratch.highest + row * VECTOR, LANES), floats(scratch.total + row * VECTOR, LANES)
            sink = floats(sinks + (item.head + group) * 4, 1)[0] if sinks != 0 else np.float32(MASKED)
            for lane in range(LANES):
                highest[lane] = sink
                total[lane] = 0
            if sinks != 0:
                total[0] = 1
            sums = floats(scratch.sums + row * values.vecs * VECTOR, values.vecs * LANES)
            for index in range(sums.size):
                sums[index] = 0


@njit(error_model="numpy")
def _weigh(item, ancestors, base, first_vec, end_vec, soft_cap, values, scratch):
    """Replaces scores of a block by weights."""
    for query in range(item.count):
        position = item.position + query
        high, bits, newest = position + 1, np.int64(0), position
        if item.tree != 0:
            bits = np.int64(integers(ancestors, item.token + query + 1)[item.token + query]) & item.tree
            high, newest = item.first_new, item.first_new + _count_bits(bits) - 1
        low = newest + 1 - item.window if item.window > 0 else 0
        for group in range(item.groups):
            row = query * item.groups + group
            scores = scratch.scores + row * BLOCK * 4 + first_vec * VECTOR
            if soft_cap > 0:
                cpu_vectors.cap(scores, end_vec - first_vec, soft_cap)
            cpu_vectors.soften(
                scores,
                end_vec - first_vec,
                base + first_vec * LANES,
                low,
                high,
                item.first_new,
                bits,
                scratch.value_factors + first_vec * VECTOR,
                scratch.highest + row * VECTOR,
                scratch.total + row * VECTOR,
                scratch.sums + row * values.vecs * VECTOR,
                values.vecs,
            )


@njit(error_model="numpy")
def _attend(item, pages, keys, values, ancestors, soft_cap, scratch):
    """The weighted sums of a unit, block by block of keys."""
    num_rows = item.count * item.groups
    for block in range(item.first_key // BLOCK, (item.end_key + BLOCK - 1) // BLOCK):
        base = block * BLOCK
        first_vec = max(item.first_key - base, 0) // LANES
        end_vec = (min(item.end_key - base, BLOCK) + LANES - 1) // LANES
        for vec in range(first_vec, end_vec):
            first = base + vec * LANES
            begin, end = max(item.first_key - first, 0), min(item.end_key - first, LANES)
            if keys.scales != 0:
                _fill_factors(scratch.key_factors + vec * VECTOR, keys, pages, first, begin, end)
                _fill_factors(scratch.value_factors + vec * VECTOR, values, pages, first, begin, end)
            address, stride = _rows(keys, pages, first, begin, end, scratch)
            _prefetch_rows(values, pages, first + begin, item.end_key)
            cpu_vectors.score(
                scratch.scores + vec * VECTOR,
                BLOCK * 4,
                scratch.q,
                keys.vecs * VECTOR,
                num_rows,
                address,
                stride,
                keys.vecs,
                scratch.key_factors + vec * VECTOR,
            )
        _weigh(item, ancestors, base, first_vec, end_vec, soft_cap, values, scratch)
        for vec in range(first_vec, end_vec):
            first = base + vec * LANES
            begin, end = max(item.first_key - first, 0), min(item.end_key - first, LANES)
            address, stride = _rows(values, pages, first, begin, end, scratch)
            _prefetch_rows(keys, pages, first + BLOCK, item.end_key)
            cpu_vectors.add_weighted(
                scratch.sums,
                values.vecs * VECTOR,
                scratch.scores + vec * VECTOR + begin * 4,
                BLOCK * 4,
                num_rows,
                address + begin * stride,
                stride,
                end - begin,
                values.vecs,
            )


@njit(error_model="numpy")
def _finish_rows(item, out, num_heads, values, scratch):
    """Writes the results of a unit."""
    for query in range(item.count):
        for group in range(item.groups):
            row = query * item.groups + group
            at = out + ((item.token + query) * num_heads + item.head + group) * values.width * 4
            sums, total = scratch.sums + row * values.vecs * VECTOR, scratch.total + row * VECTOR
            if values.width % LANES == 0:
                cpu_vectors.divide(at, sums, values.vecs, total)
            else:
                cpu_vectors.divide(sums, sums, values.vecs, total)
                quotients, results = floats(sums, values.width), floats(at, values.width)
                for index in range(values.width):
                    results[index] = quotients[index]


@njit(error_model="numpy")
def _run_item(item, frame, pages, head, keys, values, num_heads, scratch):
    """One unit: its rows of `keys` and `values` are those of key head `head`."""
    sizes = integers(frames.operand(frame, SIZES), VALUE_WIDTH + 1)
    numbers = floats(frames.operand(frame, NUMBERS), VALUE_FACTOR + 1)
    sinks = frames.operand(frame, SINKS) if sizes[HAS_SINKS] else 0
    _start_rows(item, frames.operand(frame, Q), num_heads, sinks, keys, values, scratch)
    _attend(item, pages, keys, values, frames.operand(frame, ANCESTORS), numbers[SOFT_CAP], scratch)
    _finish_rows(item, frames.result(frame, 0), num_heads, values, scratch)


@njit(error_model="numpy")
def _rows_of_head(frame, operand, scales, head, kind, size, factor, width, has_scales, page_size):
    stride = frames.operand_size(frame, operand, 3) * size
    start = frames.operand(frame, operand) + head * stride
    at = frames.operand(frame, scales) + head * page_size * 4 if has_scales else 0
    vecs = (width + LANES - 1) // LANES
    return Rows(start, stride * frames.operand_size(frame, operand, 2), at, factor, kind, size, width, vecs)


@njit(error_model="numpy")
def _run(frame):
    sizes = integers(frames.operand(frame, SIZES), VALUE_WIDTH + 1)
    numbers = floats(frames.operand(frame, NUMBERS), VALUE_FACTOR + 1)
    num_sequences, table_width = frames.operand_size(frame, TABLE, 0), frames.operand_size(frame, TABLE, 1)
    num_heads, width = frames.operand_size(frame, Q, 1), frames.operand_size(frame, Q, 2)
    page_size, num_kv_heads = frames.operand_size(frame, K, 1), frames.operand_size(frame, K, 2)
    value_width = np.int64(sizes[VALUE_WIDTH])
    starts = integers(frames.operand(frame, STARTS), num_sequences)
    lengths = integers(frames.operand(frame, LENGTHS), num_sequences)
    kv_lengths = integers(frames.operand(frame, KV_LENGTHS), num_sequences)
    bounds = integers(frames.operand(frame, BOUNDS), sizes[PART] + 2)
    first_unit, end_unit = np.int64(bounds[sizes[PART]]), np.int64(bounds[sizes[PART] + 1])
    queries, groups, window = np.int64(sizes[QUERIES]), np.int64(sizes[GROUPS]), np.int64(sizes[WINDOW])
    all_groups = num_heads // num_kv_heads
    tiles = (all_groups + groups - 1) // groups
    vecs, value_vecs = (width + LANES - 1) // LANES, (value_width + LANES - 1) // LANES
    working = frames.result(frame, 0) + frames.operand_size(frame, Q, 0) * num_heads * value_width * 4
    scratch = _scratch(working, queries * groups, vecs, value_vecs)
    key_factors, value_factors = floats(scratch.key_factors, BLOCK), floats(scratch.value_factors, BLOCK)
    for index in range(BLOCK):
        key_factors[index], value_factors[index] = numbers[KEY_FACTOR], numbers[VALUE_FACTOR]
    unit = 0
    for sequence in range(num_sequences):
        length = np.int64(lengths[sequence])
        num_items = (length + queries - 1) // queries
        if unit + num_items * num_kv_heads * tiles <= first_unit:
            unit += num_items * num_kv_heads * tiles
            continue
        first_new = np.int64(kv_lengths[sequence]) - length
        pages = Pages(frames.operand(frame, TABLE) + sequence * table_width * 4, page_size, num_kv_heads)
        is_tree = sizes[HAS_ANCESTORS] != 0 and length <= MAX_TREE_TOKENS
        tree = (np.int64(1) << length) - 1 if is_tree else np.int64(0)
        for offset in range(0, length, queries):
            position, count = first_new + offset, min(queries, length - offset)
            lowest = first_new if is_tree else position
            first_key = max(lowest + 1 - window, 0) if window > 0 else 0
            for head in range(num_kv_heads):
                for tile in range(tiles):
                    if unit >= end_unit:
                        return
                    unit += 1
                    if unit <= first_unit:
                        continue
                    item = Item(
                        starts[sequence] + offset,
                        count,
                        head * all_groups + tile * groups,
                        min(groups, all_groups - tile * groups),
                        position,
                        first_new,
                        tree,
                        window,
                        first_key,
                        position + count,
                    )
                    keys = _rows_of_head(
                        frame,
                        K,
                        K_SCALES,
                        head,
                        sizes[KEY_KIND],
                        sizes[KEY_SIZE],
                        numbers[KEY_FACTOR],
                        width,
                        sizes[HAS_SCALES],
                        page_size,
                    )
                    values = _rows_of_head(
                        frame,
                        V,
                        V_SCALES,
                        head,
                        sizes[VALUE_KIND],
                        sizes[VALUE_SIZE],
                        numbers[VALUE_FACTOR],
                        value_width,
                        sizes[HAS_SCALES],
                        page_size,
                    )
                    _run_item(item, frame, pages, head, keys, values, num_heads, scratch)


@cfunc(frames.HANDLER, cache=True, error_model="numpy")
def handler(frame):
    if frames.answers_metadata(frame):
        return 0
    _run(frame)
    return 0


def target() -> str:
    """Registers the kernel; returns its name."""
    return frames.register(TARGET, handler)
