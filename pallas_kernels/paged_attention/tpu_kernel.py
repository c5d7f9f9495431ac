"""The TPU kernel of paged attention: one loop over work items, which starts and awaits all copies itself.

After Ragged Paged Attention v3 (arXiv 2604.15464). A ring of buffers prefetches blocks of keys and values across items
and sequences, so that memory is never idle between sequences. New tokens are read from the operands while they are
written to the cache, so that no block waits for these writes. Blocks start at multiples of their size and read exactly
the keys that the item may see.

A DMA semaphore counts bytes: one wait for the sum of bytes waits for all copies on a semaphore.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.layout import LANES
from pallas_kernels.paged_attention.specs import MASKED, MAX_TREE_TOKENS
from pallas_kernels.paged_attention.tpu_program import (
    KernelProgram,
    Refs,
    WorkItem,
    key_range,
    load_item,
    load_words,
    load_words_interpreted,
    store_words,
    store_words_interpreted,
)
from pallas_kernels.platform import is_tpu_interpreted


def run(program: KernelProgram, refs: Refs) -> None:
    """Processes all work items of this core."""
    ring, num_keys = program.sizes.num_buffers, program.sizes.num_keys
    count = refs.count[0]
    if program.num_cores > 1:
        count = (count - refs.core + program.num_cores - 1) // program.num_cores

    def fetch_and_advance(cursor, slot):
        """Starts the copies of the block at `cursor`, (item, block or -1 for its first); returns the next cursor."""
        index, block = cursor
        item = load_item(refs, index)
        block = jnp.where(block < 0, item.first_key // num_keys, block)

        @pl.when(index < count)
        def _():
            start_block(program, refs, item, block, slot)

        is_last = block + 1 >= pl.cdiv(item.end_key, num_keys)
        return jnp.where(is_last, index + 1, index), jnp.where(is_last, -1, block + 1)

    @pl.when(count > 0)
    def _():
        query_copy(refs, load_item(refs, 0, "row", "count")).start()

    cursor = (jnp.int32(0), jnp.int32(-1))
    cursor = lax.fori_loop(0, ring - 1, lambda slot, cursor: fetch_and_advance(cursor, slot), cursor)

    def one_item(index, carry):
        item = load_item(refs, index)

        @pl.when(index + 1 < count)
        def _():
            query_copy(refs, load_item(refs, index + 1, "row", "count")).start()

        start_append(program, refs, item)
        wait(query_copy(refs, item))
        _begin(program, refs, item)

        def one_block(block, carry):
            step, cursor = carry
            cursor = fetch_and_advance(cursor, lax.rem(step + ring - 1, ring))
            slot = lax.rem(step, ring)
            _attend(program, refs, item, block, slot)
            return step + 1, cursor

        carry = lax.fori_loop(item.first_key // num_keys, pl.cdiv(item.end_key, num_keys), one_block, carry)

        @pl.when(index > 0)
        def _():
            wait_for_writes(program, refs, index - 1)

        _finish(program, refs, item)
        out_copy(refs, item).start()
        return carry

    lax.fori_loop(0, count, one_item, (jnp.int32(0), cursor))

    @pl.when(count > 0)
    def _():
        wait_for_writes(program, refs, count - 1)


class Part(NamedTuple):
    """Rows of an item that are computed at once: the `rows` of buffers by row, and the `queries` of those by query;
    `first` is the number of its first row."""

    rows: Any
    queries: Any
    first: Any


def _for_each_part(
    program: KernelProgram, item: WorkItem, call: Callable[[Part], None], first_block: Any = None
) -> None:
    """Calls with the parts of an item that have queries, or that see keys of a block or of later ones. All of it may be
    one."""
    size = program.part_rows
    if size == program.num_rows:
        return call(Part(slice(None), slice(None), 0))
    queries = size // program.group_rows

    def one(index, _):
        call(Part(pl.ds(pl.multiple_of(index * size, size), size), pl.ds(index * queries, queries), index * size))

    first = 0
    if first_block is not None:
        first = jnp.maximum(first_block * program.sizes.num_keys - item.position, 0) // queries
    lax.fori_loop(first, pl.cdiv(item.count, queries), one, None)


def _begin(program: KernelProgram, refs: Refs, item: WorkItem) -> None:
    """Groups an item's queries by key head and resets its running sums."""
    _for_each_part(program, item, partial(_begin_part, program, refs, item))
    if program.spec.has_ancestors:
        _spread_ancestors(program, refs, item)


def _begin_part(program: KernelProgram, refs: Refs, item: WorkItem, part: Part) -> None:
    slot, num_rows = lax.rem(item.index, 2), program.part_rows
    for head in range(program.spec.num_kv_heads):
        queries = refs.q_buffers[slot, part.queries, head]
        refs.queries[head, part.rows] = queries.reshape(num_rows, program.num_lanes)
        if program.spec.has_sinks:
            sinks = refs.sinks[head]
            refs.highest[head, part.rows] = jnp.concatenate([sinks] * (num_rows // sinks.shape[0]), axis=0)

    def fill(ref, value: float) -> None:
        ref[:, part.rows] = jnp.full((ref.shape[0], num_rows, ref.shape[2]), value, jnp.float32)

    if not program.spec.has_sinks:
        fill(refs.highest, MASKED)
    fill(refs.total, float(program.spec.has_sinks))
    fill(refs.weighted, 0.0)


def _spread_ancestors(program: KernelProgram, refs: Refs, item: WorkItem) -> None:
    """Broadcasts each token's ancestor bits and depth to its rows; bits are 0 for causal sequences."""
    shape = (program.num_rows, LANES)
    tokens = lax.broadcasted_iota(jnp.int32, shape, 0) // program.group_rows

    def one_token(token, carry):
        bits, depths = carry
        row, is_row = item.row + token, tokens == token
        return jnp.where(is_row, refs.ancestors[row], bits), jnp.where(is_row, refs.depths[row], depths)

    is_tree = item.num_new <= MAX_TREE_TOKENS
    zeros = jnp.zeros(shape, jnp.int32)
    bits, depths = lax.fori_loop(0, jnp.where(is_tree, item.count, 0), one_token, (zeros, zeros))
    refs.ancestor_rows[0] = bits
    refs.ancestor_rows[1] = depths


def _visible(program: KernelProgram, refs: Refs, item: WorkItem, block, part: Part):
    """True if each query row of a part sees each key of the block: bool [rows, keys]."""
    shape, window = (program.part_rows, program.sizes.num_keys), program.spec.window
    keys = block * program.sizes.num_keys + lax.broadcasted_iota(jnp.int32, shape, 1)
    positions = item.position + lax.broadcasted_iota(jnp.int32, shape, 0) // program.group_rows
    if program.part_rows < program.num_rows:
        positions += part.first // program.group_rows
    visible = keys <= positions
    if window is not None:
        visible &= keys > positions - window
    if program.spec.has_ancestors:
        bits, depths = (jnp.broadcast_to(refs.ancestor_rows[i][:, :1], shape) for i in range(2))
        new_index = keys - item.first_new
        bit = lax.shift_right_logical(bits, jnp.clip(new_index, 0, MAX_TREE_TOKENS - 1)) & 1
        is_old = new_index < 0
        if window is not None:
            is_old &= new_index > depths - window
        in_tree = is_old | ((new_index >= 0) & (bit == 1) & (keys < item.end_key))
        is_tree = bits != 0
        visible = (is_tree & in_tree) | (jnp.logical_not(is_tree) & visible)
    return visible


def _gather_scales(program: KernelProgram, refs: Refs, slot, live) -> None:
    """Joins the scales [2 Hkv, keys] of a block; those outside `live` may be NaN and become zero."""
    page_size = program.spec.page_size
    pages = [refs.scale_buffers[slot, page][:, :page_size] for page in range(program.pages_per_block)]
    scales = _join_lanes(pages)
    keys = lax.broadcasted_iota(jnp.int32, scales.shape, 1)
    refs.scales[...] = jnp.where((keys >= live[0]) & (keys < live[1]), scales, 0.0)


def _attend(program: KernelProgram, refs: Refs, item: WorkItem, block, slot) -> None:
    """One block of the online softmax, for every head (Dao 2023, FlashAttention-2, section 3.1)."""
    rows = program.rows
    wait_for_block(program, refs, item, block, slot)
    first, end = key_range(program, item, block)
    live = (first - block * program.sizes.num_keys, end - block * program.sizes.num_keys)
    if program.spec.page.has_scales:
        _gather_scales(program, refs, slot, live)
    is_interpreted = is_tpu_interpreted()
    if not program.spec.page.has_scales:

        @pl.when((live[0] > 0) | (live[1] < program.sizes.num_keys))
        def _():
            _clear_unread(program, refs, slot, live, is_interpreted)

    buffers = [refs.kv_buffers.at[slot, tile] for tile in range(program.num_lane_tiles)]

    def one_part(part: Part) -> None:
        visible = _visible(program, refs, item, block, part)

        def one_unit(unit, _):
            tiles = [rows.load(buffer, unit, is_interpreted) for buffer in buffers]
            for index in range(rows.heads_per_unit):
                keys, values = (_join_lanes([tile[index][which] for tile in tiles]) for which in range(2))
                _attend_head(program, refs, unit * rows.heads_per_unit + index, keys, values, visible, part)

        lax.fori_loop(0, rows.num_units, one_unit, None, unroll=min(program.sizes.unroll, rows.num_units))

    _for_each_part(program, item, one_part, block)


def _clear_unread(program: KernelProgram, refs: Refs, slot, live, is_interpreted: bool) -> None:
    """Zeroes a block's keys outside `live`: no copy wrote them, and memory may hold the bits of a NaN."""
    load, store = load_words, store_words
    if is_interpreted:
        load, store = load_words_interpreted, store_words_interpreted
    for tile in range(program.num_lane_tiles):
        buffer = refs.kv_buffers.at[slot, tile]

        def one_word(word, _, buffer=buffer):
            words = load(buffer, word)
            key = lax.broadcasted_iota(jnp.int32, words.shape, 0)
            store(buffer, word, jnp.where((key >= live[0]) & (key < live[1]), words, jnp.uint32(0)))

        lax.fori_loop(0, program.rows.num_words, one_word, None)


def _join_lanes(tiles: list):
    return tiles[0] if len(tiles) == 1 else jnp.concatenate(tiles, axis=1)


def _attend_head(program: KernelProgram, refs: Refs, head, keys, values, visible, part: Part) -> None:
    """One block of the online softmax of one head; keys and values are [keys, lanes]."""
    spec, rows = program.spec, part.rows
    precision = lax.Precision.HIGHEST if spec.q_dtype == "float32" else None

    def product(a, b, b_axis):
        dimensions = (((1,), (b_axis,)), ((), ()))
        return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)

    scores = product(refs.queries[head, rows], keys, 1) * (spec.scale * program.rows.factor)
    if spec.page.has_scales:
        scores *= refs.scales[pl.ds(2 * head, 1)]
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    scores = jnp.where(visible, scores, MASKED)
    highest = refs.highest[head, rows][:, :1]
    new_highest = jnp.maximum(highest, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp(scores - new_highest)
    decay = jnp.exp(highest - new_highest)
    refs.highest[head, rows] = jnp.broadcast_to(new_highest, (program.part_rows, LANES))
    refs.total[head, rows] = refs.total[head, rows] * decay + jnp.sum(weights, axis=1, keepdims=True)
    if spec.page.has_scales:
        weights *= refs.scales[pl.ds(2 * head + 1, 1)]
    update = product(weights.astype(spec.q_dtype), values, 0)
    if program.rows.factor != 1:
        update *= program.rows.factor
    refs.weighted[head, rows] = refs.weighted[head, rows] * decay + update


def _finish(program: KernelProgram, refs: Refs, item: WorkItem) -> None:
    """Writes an item's normalised output to its buffer."""
    shape = (program.part_rows // program.group_rows, program.group_rows, program.num_lanes)

    def one_part(part: Part) -> None:
        for head in range(program.spec.num_kv_heads):
            out = refs.weighted[head, part.rows] / refs.total[head, part.rows][:, :1]
            refs.out_buffer[part.queries, head] = out.astype(refs.out_buffer.dtype).reshape(shape)

    _for_each_part(program, item, one_part)


def query_copy(refs: Refs, item: WorkItem):
    slot = lax.rem(item.index, 2)
    buffer = refs.q_buffers.at[slot, pl.ds(0, item.count)]
    return pltpu.make_async_copy(refs.rows.at[pl.ds(item.row, item.count)], buffer, refs.q_arrived.at[slot])


def out_copy(refs: Refs, item: WorkItem):
    buffer = refs.out_buffer.at[pl.ds(0, item.count)]
    return pltpu.make_async_copy(buffer, refs.rows.at[pl.ds(item.row, item.count)], refs.out_written)


def _kv_buffer(program: KernelProgram, refs: Refs, slot, tile: int, start, size):
    """The buffer of `size` tokens of a block, without the padding word that spreads tokens over memory banks."""
    return refs.kv_buffers.at[slot, tile, pl.ds(start, size), pl.ds(0, program.rows.num_words)]


def start_block(program: KernelProgram, refs: Refs, item: WorkItem, block, slot) -> None:
    """Starts the copies of a block's keys: old ones from the cache page by page, new ones from `new_tokens`."""
    page_size, start = program.spec.page_size, block * program.sizes.num_keys
    first, end = key_range(program, item, block)
    end_old = jnp.minimum(end, item.first_new)

    def copy(source, rows, to, size):
        for tile in range(program.num_lane_tiles):
            lanes = pl.ds(tile * LANES, LANES)
            buffer = _kv_buffer(program, refs, slot, tile, to - start, size)
            pltpu.make_async_copy(source.at[rows, :, :, lanes], buffer, refs.kv_arrived.at[slot]).start()

    def one_page(page, _):
        low = jnp.maximum(first, page * page_size)
        size = jnp.minimum(end_old, (page + 1) * page_size) - low
        copy(refs.cache.at[refs.page_ids[item.table + page]], pl.ds(low - page * page_size, size), low, size)

    lax.fori_loop(first // page_size, pl.cdiv(end_old, page_size), one_page, None)
    low = jnp.maximum(first, item.first_new)

    @pl.when(low < end)
    def _():
        copy(refs.new_tokens, pl.ds(item.row + low - item.position, end - low), low, end - low)

    if program.spec.page.has_scales:
        _start_scales(program, refs, item, block, slot)


def _start_scales(program: KernelProgram, refs: Refs, item: WorkItem, block, slot) -> None:
    page_size, arrived = program.spec.page_size, refs.scales_arrived.at[slot]
    first, end = key_range(program, item, block)
    first_new_page = item.first_new // page_size

    def one_page(source, page):
        buffer = refs.scale_buffers.at[slot, page - block * program.pages_per_block]
        pltpu.make_async_copy(source, buffer, arrived).start()

    def old(page, _):
        one_page(refs.cache_scales.at[refs.page_ids[item.table + page]], page)

    def new(page, _):
        one_page(refs.new_scales.at[item.scales + page], page)

    first_page, end_page = first // page_size, pl.cdiv(end, page_size)
    lax.fori_loop(first_page, jnp.minimum(end_page, first_new_page), old, None)
    lax.fori_loop(jnp.maximum(first_page, first_new_page), end_page, new, None)


def wait_for_block(program: KernelProgram, refs: Refs, item: WorkItem, block, slot) -> None:
    first, end = key_range(program, item, block)
    for tile in range(program.num_lane_tiles):
        buffer = _kv_buffer(program, refs, slot, tile, 0, end - first)
        wait(pltpu.make_async_copy(buffer, buffer, refs.kv_arrived.at[slot]))
    if program.spec.page.has_scales:
        page_size = program.spec.page_size
        buffer = refs.scale_buffers.at[slot, pl.ds(0, pl.cdiv(end, page_size) - first // page_size)]
        wait(pltpu.make_async_copy(buffer, buffer, refs.scales_arrived.at[slot]))


def start_append(program: KernelProgram, refs: Refs, item: WorkItem) -> None:
    """Starts the copies of an item's new tokens to the cache, and of scales for pages whose first new token it has."""
    page_size, end = program.spec.page_size, item.position + item.count

    def one_page(page, _):
        low = jnp.maximum(item.position, page * page_size)
        size = jnp.minimum(end, (page + 1) * page_size) - low
        target = refs.cache.at[refs.page_ids[item.table + page], pl.ds(low - page * page_size, size)]
        source = refs.new_tokens.at[pl.ds(item.row + low - item.position, size)]
        pltpu.make_async_copy(source, target, refs.appended).start()

    lax.fori_loop(item.position // page_size, pl.cdiv(end, page_size), one_page, None)
    if program.spec.page.has_scales:

        def scales_of_page(page, _):
            block = item.scales + page
            target = refs.cache_scales.at[refs.scale_pages[block]]
            pltpu.make_async_copy(refs.new_scales.at[block], target, refs.scales_appended).start()

        lax.fori_loop(*_scale_pages(program, item), scales_of_page, None)


def wait_for_writes(program: KernelProgram, refs: Refs, index) -> None:
    """Waits for the copies of an item's output and of its new tokens."""
    names = ("position", "first_new") if program.spec.page.has_scales else ()
    item = load_item(refs, index, "row", "count", *names)
    wait(out_copy(refs, item))
    source = refs.new_tokens.at[pl.ds(item.row, item.count)]
    wait(pltpu.make_async_copy(source, source, refs.appended))
    if program.spec.page.has_scales:
        first, end = _scale_pages(program, item)

        @pl.when(first < end)
        def _():
            source = refs.new_scales.at[pl.ds(0, end - first)]
            wait(pltpu.make_async_copy(source, source, refs.scales_appended))


def _scale_pages(program: KernelProgram, item: WorkItem):
    """First and one-past-last page whose scales this item writes, for all new tokens of the page."""
    page_size, position = program.spec.page_size, item.position
    first = jnp.where(position == item.first_new, position // page_size, pl.cdiv(position, page_size))
    return first, pl.cdiv(position + item.count, page_size)


def wait(copy) -> None:
    """Waits for as many bytes on the copy's semaphore as the copy has."""
    copy.wait()
