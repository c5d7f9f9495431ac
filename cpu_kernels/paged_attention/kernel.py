"""Attention of new tokens to keys in pages, on CPUs: compiled by Numba, called from XLA programs.

An item is up to `queries` new tokens of one sequence; a unit is an item and some of the query heads that share a key
head. A unit reads each of its keys once, where it lies, in blocks of 64 from position 0 on. What a query adds up, and
in which order, depends on its own keys alone.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import carray  # pyright: ignore[reportPrivateImportUsage]

from cpu_kernels import frames
from cpu_kernels.frames import as_pointer, floats, integers, internal
from cpu_kernels.memory import allocate, free
from cpu_kernels.paged_attention import vectors
from cpu_kernels.paged_attention.masks import MASKED, MAX_TREE_TOKENS
from cpu_kernels.paged_attention.vectors import FLOAT32, NIBBLES, VECTOR
from cpu_kernels.threads import in_parts
from cpu_kernels.vectors import LANES

BLOCK = 64  # keys
# Operands, in order.
Q, K, V, K_SCALES, V_SCALES, TABLE, STARTS, LENGTHS, KV_LENGTHS, SINKS, ANCESTORS, BOUNDS, SIZES, NUMBERS = range(14)
# Elements of the operands `SIZES`, int32, and `NUMBERS`, float32.
QUERIES, GROUPS, WINDOW, HAS_SCALES, HAS_SINKS, HAS_ANCESTORS = range(6)
KEY_KIND, VALUE_KIND, KEY_SIZE, VALUE_SIZE, VALUE_WIDTH, MAX_ROWS = range(6, 12)
SOFT_CAP, KEY_FACTOR, VALUE_FACTOR = range(3)

_compiled = internal()
# Into its caller: a call with the tuples below as arguments takes longer than what it does.
_inlined = internal(is_inlined=True)


class Rows(NamedTuple):
    """Stored keys or values.

    start: the address of the first row. stride: bytes from a token to the next. head_stride: from a head to the next.
    scales: the address of the scales, or 0. factor: of all numbers.
    kind, size: how numbers are stored, and bytes of one. width, vecs: numbers of a row, and vectors.
    """

    start: int
    stride: int
    head_stride: int
    scales: int
    factor: float
    kind: int
    size: int
    width: int
    vecs: int


class Call(NamedTuple):
    """Facts of all units: addresses of q, sinks (or 0), ancestors, and the result; tokens of a page, heads of queries
    and of keys, and query heads of a key head."""

    q: int
    sinks: int
    ancestors: int
    out: int
    page_size: int
    num_heads: int
    num_kv_heads: int
    window: int
    soft_cap: float


class Item(NamedTuple):
    """Units of the same queries.

    table: the address of the sequence's page ids.
    token, count: the first query's row of q, and how many.
    kv_head, num_kv_heads: the first key head, and how many. head, groups: the first query head, and how many of each
    key head.
    position, first_new: of the first query, and of the sequence's first new token.
    tree: bits of ancestors that count, 0 for causal attention.
    first_key, end_key: the keys that any of the queries sees.
    """

    table: int
    token: int
    count: int
    kv_head: int
    num_kv_heads: int
    head: int
    groups: int
    position: int
    first_new: int
    tree: int
    first_key: int
    end_key: int


class Scratch(NamedTuple):
    """Addresses of working memory: rows of queries, of scores and weights of a block, and of sums of values; the
    highest score and the sum of weights of each row; converted keys or values; a padded vector; factors of a block's
    keys and values."""

    q: int
    scores: int
    sums: int
    highest: int
    total: int
    converted: int
    padded: int
    key_factors: int
    value_factors: int


@_compiled
def _scratch_floats(rows, vecs, value_vecs):
    """Numbers of working memory with units of up to `rows` rows."""
    return rows * (vecs * LANES + BLOCK + value_vecs * LANES + 2 * LANES) + LANES * vecs * LANES + LANES + 2 * BLOCK


@_compiled
def _scratch(start, rows, vecs, value_vecs):
    scores = start + rows * vecs * VECTOR
    sums = scores + rows * BLOCK * 4
    highest = sums + rows * value_vecs * VECTOR
    total = highest + rows * VECTOR
    converted = total + rows * VECTOR
    padded = converted + LANES * vecs * VECTOR
    key_factors = padded + VECTOR
    return Scratch(start, scores, sums, highest, total, converted, padded, key_factors, key_factors + BLOCK * 4)


@_inlined
def _bytes(address, size):
    return carray(as_pointer(address), (size,), np.uint8)


@_compiled
def _convert_rows(out, stored, stride, num_rows, kind, size, width, vecs, padded):
    """Rows as float32 vectors, padded with zeros."""
    if kind == NIBBLES:
        vectors.convert(out, vecs * VECTOR, stored, stride, num_rows, vecs // 2, kind)
        return
    whole = width // LANES
    vectors.convert(out, vecs * VECTOR, stored, stride, num_rows, whole, kind)
    if whole < vecs:
        num_bytes = (width - whole * LANES) * size
        tail = _bytes(padded, VECTOR)
        for index in range(VECTOR):
            tail[index] = 0
        for row in range(num_rows):
            source = _bytes(stored + row * stride + whole * LANES * size, num_bytes)
            for index in range(num_bytes):
                tail[index] = source[index]
            vectors.convert(out + (row * vecs + whole) * VECTOR, 0, padded, 0, 1, 1, kind)


@_inlined
def _page(call, item, position):
    """The id of the page of a position."""
    index = position // call.page_size
    return np.int64(integers(item.table, index + 1)[index])


@_inlined
def _row(call, item, rows, head, position):
    """The address of a row."""
    token = _page(call, item, position) * call.page_size + position % call.page_size
    return rows.start + token * rows.stride + head * rows.head_stride


@_inlined
def _scales(call, item, rows, head, position):
    """The address of a row's scale; those of its page follow."""
    of_head = _page(call, item, position) * call.num_kv_heads + head
    return rows.scales + (of_head * call.page_size + position % call.page_size) * 4


@_inlined
def _rows(call, item, rows, head, first, begin, end, scratch):
    """Rows `begin` to `end` of the 16 from position `first` on as float32 vectors: the address of the 16, and the bytes
    from one to the next. Others are undefined. Rows that are float32 vectors are not copied."""
    if rows.kind == FLOAT32 and rows.width % LANES == 0 and call.page_size % LANES == 0:
        return _row(call, item, rows, head, first), rows.stride
    while begin < end:
        run = min(end - begin, call.page_size - (first + begin) % call.page_size)
        stored = _row(call, item, rows, head, first + begin)
        out = scratch.converted + begin * rows.vecs * VECTOR
        _convert_rows(out, stored, rows.stride, run, rows.kind, rows.size, rows.width, rows.vecs, scratch.padded)
        begin += run
    return scratch.converted, rows.vecs * VECTOR


@_inlined
def _prefetch(call, item, rows, head, first):
    """Prefetches rows of the 16 from position `first` on: those in its page."""
    if first < item.end_key:
        size = rows.width // 2 if rows.kind == NIBBLES else rows.width * rows.size
        run = min(LANES, call.page_size - first % call.page_size)
        vectors.prefetch(_row(call, item, rows, head, first), rows.stride, run, size)
        if rows.scales != 0:
            vectors.prefetch(_scales(call, item, rows, head, first), 0, 1, run * 4)


@_inlined
def _fill_factors(call, item, rows, head, out, first, begin, end):
    """The factors of rows `begin` to `end` of the 16 from position `first` on."""
    factors, factor = floats(out, LANES), np.float32(rows.factor)
    while begin < end:
        run = min(end - begin, call.page_size - (first + begin) % call.page_size)
        scales = floats(_scales(call, item, rows, head, first + begin), run)
        for index in range(run):
            factors[begin + index] = scales[index] * factor
        begin += run


@_inlined
def _count_bits(bits):
    count = 0
    while bits != 0:
        bits &= bits - 1
        count += 1
    return count


@_inlined
def _start_rows(call, item, keys, values, scratch):
    """Copies the queries, and clears what is summed. Rows are in the order of heads, queries and groups."""
    row, zero = 0, np.int64(0)
    for head in range(item.num_kv_heads):
        for query in range(item.count):
            for group in range(item.groups):
                q_head = item.head + head * item.groups + group
                source = call.q + ((item.token + query) * call.num_heads + q_head) * keys.width * 4
                to = scratch.q + row * keys.vecs * VECTOR
                _convert_rows(
                    to, source, zero, zero + 1, zero + FLOAT32, zero + 4, keys.width, keys.vecs, scratch.padded
                )
                sink = floats(call.sinks + q_head * 4, 1)[0] if call.sinks != 0 else np.float32(MASKED)
                highest = floats(scratch.highest + row * VECTOR, LANES)
                total = floats(scratch.total + row * VECTOR, LANES)
                for lane in range(LANES):
                    highest[lane], total[lane] = sink, 0
                if call.sinks != 0:
                    total[0] = 1
                sums = floats(scratch.sums + row * values.vecs * VECTOR, values.vecs * LANES)
                for index in range(sums.size):
                    sums[index] = 0
                row += 1


@_inlined
def _finish_rows(call, item, values, scratch):
    """Writes the results."""
    row = 0
    for head in range(item.num_kv_heads):
        for query in range(item.count):
            for group in range(item.groups):
                q_head = item.head + head * item.groups + group
                at = call.out + ((item.token + query) * call.num_heads + q_head) * values.width * 4
                sums, total = scratch.sums + row * values.vecs * VECTOR, scratch.total + row * VECTOR
                row += 1
                if values.width % LANES == 0:
                    vectors.divide(at, sums, values.vecs, total)
                    continue
                vectors.divide(sums, sums, values.vecs, total)
                quotients, results = floats(sums, values.width), floats(at, values.width)
                for index in range(values.width):
                    results[index] = quotients[index]


@_inlined
def _weigh(call, item, base, first_vec, end_vec, first_row, values, scratch):
    """Replaces the scores of a block by weights, of the rows of one key head."""
    for query in range(item.count):
        position = item.position + query
        high, bits, newest = position + 1, np.int64(0), position
        if item.tree != 0:
            token = item.token + query
            bits = np.int64(integers(call.ancestors, token + 1)[token]) & 0xFFFFFFFF
            high, newest = item.first_new, item.first_new + _count_bits(bits) - 1  # of a block that is cut, all bits
            bits &= item.tree
        low = newest + 1 - call.window if call.window > 0 else 0
        for group in range(item.groups):
            row = first_row + query * item.groups + group
            scores = scratch.scores + (row - first_row) * BLOCK * 4 + first_vec * VECTOR
            if call.soft_cap > 0:
                vectors.cap(scores, end_vec - first_vec, call.soft_cap)
            vectors.soften(
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


@frames.inlined
def _attend_block(call, item, head, base, keys, values, scratch):
    """Adds a block of keys to the sums of the item's queries of one key head, `head` of the item."""
    num_rows = item.count * item.groups
    first_row, head = head * num_rows, item.kv_head + head
    first_vec = max(item.first_key - base, 0) // LANES
    end_vec = (min(item.end_key - base, BLOCK) + LANES - 1) // LANES
    for vec in range(first_vec, end_vec):
        first = base + vec * LANES
        begin, end = max(item.first_key - first, 0), min(item.end_key - first, LANES)
        if keys.scales != 0:
            _fill_factors(call, item, keys, head, scratch.key_factors + vec * VECTOR, first, begin, end)
            _fill_factors(call, item, values, head, scratch.value_factors + vec * VECTOR, first, begin, end)
        address, stride = _rows(call, item, keys, head, first, begin, end, scratch)
        if base <= item.first_key:
            _prefetch(call, item, values, head, first + begin)
        _prefetch(call, item, values, head, first + BLOCK)
        vectors.score(
            scratch.scores + vec * VECTOR,
            BLOCK * 4,
            scratch.q + first_row * keys.vecs * VECTOR,
            keys.vecs * VECTOR,
            num_rows,
            address,
            stride,
            keys.vecs,
            scratch.key_factors + vec * VECTOR,
        )
    _weigh(call, item, base, first_vec, end_vec, first_row, values, scratch)
    for vec in range(first_vec, end_vec):
        first = base + vec * LANES
        begin, end = max(item.first_key - first, 0), min(item.end_key - first, LANES)
        address, stride = _rows(call, item, values, head, first, begin, end, scratch)
        _prefetch(call, item, keys, head, first + BLOCK)
        vectors.add_weighted(
            scratch.sums + first_row * values.vecs * VECTOR,
            values.vecs * VECTOR,
            scratch.scores + vec * VECTOR + begin * 4,
            BLOCK * 4,
            num_rows,
            address + begin * stride,
            stride,
            end - begin,
            values.vecs,
        )


@frames.inlined
def _attend(call, item, keys, values, scratch):
    """The results of some units of an item, whose key heads share each block."""
    _start_rows(call, item, keys, values, scratch)
    for block in range(item.first_key // BLOCK, (item.end_key + BLOCK - 1) // BLOCK):
        for head in range(item.num_kv_heads):
            _attend_block(call, item, head, block * BLOCK, keys, values, scratch)
    _finish_rows(call, item, values, scratch)


@internal("int64(int32[::1], int64)")
def _size(sizes, index) -> Any:
    return np.int64(sizes[index])


@_compiled
def _stored(frame, sizes, operand, scales, kind, size, factor, width):
    head_stride = frames.operand_size(frame, operand, 3) * sizes[size]
    return Rows(
        frames.operand(frame, operand),
        head_stride * frames.operand_size(frame, operand, 2),
        head_stride,
        frames.operand(frame, scales) if sizes[HAS_SCALES] else 0,
        factor,
        _size(sizes, kind),
        _size(sizes, size),
        width,
        (width + LANES - 1) // LANES,
    )


@frames.inlined
def _run_sequence(call, keys, values, scratch, sizes, table, start, length, kv_length, first_unit, end_unit):
    """Those of a sequence's units, counted from its first, that are in a range."""
    queries, groups = _size(sizes, QUERIES), _size(sizes, GROUPS)
    all_groups = call.num_heads // call.num_kv_heads
    tiles = (all_groups + groups - 1) // groups
    units = call.num_kv_heads * tiles
    first_new = kv_length - length
    is_tree = sizes[HAS_ANCESTORS] != 0 and length <= MAX_TREE_TOKENS
    tree: Any = (np.int64(1) << length) - 1 if is_tree else np.int64(0)
    unit = max(first_unit, 0)
    while unit < end_unit:
        offset, unit_of_item = unit // units * queries, unit % units
        position, count = first_new + offset, min(queries, length - offset)
        lowest = first_new if is_tree else position
        first_key = max(lowest + 1 - call.window, 0) if call.window > 0 else 0
        kv_head, tile = unit_of_item // tiles, unit_of_item % tiles
        num_kv_heads = 1
        if tiles == 1:
            most = max(_size(sizes, MAX_ROWS) // (count * groups), 1)
            num_kv_heads = min(end_unit - unit, units - unit_of_item, most)
        item = Item(
            table,
            start + offset,
            count,
            kv_head,
            num_kv_heads,
            kv_head * all_groups + tile * groups,
            min(groups, all_groups - tile * groups),
            position,
            first_new,
            tree,
            first_key,
            kv_length if is_tree else position + count,  # of a tree, any new token may be seen
        )
        _attend(call, item, keys, values, scratch)
        unit += num_kv_heads


@frames.inlined
def _run_part(frame, part):
    sizes = integers(frames.operand(frame, SIZES), MAX_ROWS + 1)
    numbers = floats(frames.operand(frame, NUMBERS), VALUE_FACTOR + 1)
    num_sequences, table_width = frames.operand_size(frame, TABLE, 0), frames.operand_size(frame, TABLE, 1)
    call = Call(
        frames.operand(frame, Q),
        frames.operand(frame, SINKS) if sizes[HAS_SINKS] else 0,
        frames.operand(frame, ANCESTORS),
        frames.result(frame, 0),
        frames.operand_size(frame, K, 1),
        frames.operand_size(frame, Q, 1),
        frames.operand_size(frame, K, 2),
        _size(sizes, WINDOW),
        numbers[SOFT_CAP],
    )
    width, value_width = frames.operand_size(frame, Q, 2), _size(sizes, VALUE_WIDTH)
    keys = _stored(frame, sizes, K, K_SCALES, KEY_KIND, KEY_SIZE, numbers[KEY_FACTOR], width)
    values = _stored(frame, sizes, V, V_SCALES, VALUE_KIND, VALUE_SIZE, numbers[VALUE_FACTOR], value_width)
    max_rows = _size(sizes, MAX_ROWS)
    working = allocate(4 * _scratch_floats(max_rows, keys.vecs, values.vecs))
    scratch = _scratch(working, max_rows, keys.vecs, values.vecs)
    key_factors, value_factors = floats(scratch.key_factors, BLOCK), floats(scratch.value_factors, BLOCK)
    for index in range(BLOCK):
        key_factors[index], value_factors[index] = keys.factor, values.factor
    starts = integers(frames.operand(frame, STARTS), num_sequences)
    lengths = integers(frames.operand(frame, LENGTHS), num_sequences)
    kv_lengths = integers(frames.operand(frame, KV_LENGTHS), num_sequences)
    bounds = integers(frames.operand(frame, BOUNDS), part + 2)
    first_unit, end_unit = np.int64(bounds[part]), np.int64(bounds[part + 1])
    units_of_item = call.num_kv_heads * ((call.num_heads // call.num_kv_heads + sizes[GROUPS] - 1) // sizes[GROUPS])
    for sequence in range(num_sequences):
        length = np.int64(lengths[sequence])
        units = (length + sizes[QUERIES] - 1) // sizes[QUERIES] * units_of_item
        if first_unit < units and end_unit > 0:
            table = frames.operand(frame, TABLE) + sequence * table_width * 4
            start, kv_length = np.int64(starts[sequence]), np.int64(kv_lengths[sequence])
            end = min(end_unit, units)
            _run_sequence(call, keys, values, scratch, sizes, table, start, length, kv_length, first_unit, end)
        first_unit -= units
        end_unit -= units
    free(working)


_run_parts = in_parts(_run_part)


@frames.compiled
def attention_handler(frame):
    if not frames.answers_metadata(frame):
        _run_parts(frame, frame, frames.operand_size(frame, BOUNDS, 0) - 1)
    return 0
