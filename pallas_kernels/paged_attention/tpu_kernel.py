"""The TPU kernel of paged attention: one loop over work items, with every copy between HBM and VMEM under its control.

Of the class of Ragged Paged Attention v3 (arXiv 2604.15464). Blocks of keys and values go through a ring of buffers
that runs ahead of the computation across items and sequences, so the memory never waits for a sequence to begin. New
tokens are read from where they were computed while they are being written to the cache, so nothing waits for that
write either. A block starts at a multiple of its size and reads exactly the keys its item may see.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.layout import LANES, SUBLANES
from pallas_kernels.paged_attention.specs import MAX_TREE_TOKENS, PagedSpec
from pallas_kernels.paged_attention.tpu_schedule import ITEM_FIELDS, Blocks, rows_of_group
from pallas_kernels.paged_attention.tpu_words import Rows
from pallas_kernels.platform import is_tpu_interpreted

# The score of a key that is not visible; finite, so that no NaN arises while a query has seen only masked keys. What
# such a block adds is multiplied by exp(MASKED - score) = 0 when the first visible key arrives.
MASKED = -1e30


@dataclass(frozen=True)
class Program:
    """Static facts of one Pallas call."""

    spec: PagedSpec
    blocks: Blocks

    @cached_property
    def rows(self) -> Rows:
        return Rows(self.spec.page, self.spec.q_dtype)

    @property
    def group_rows(self) -> int:
        return rows_of_group(self.spec)

    @property
    def num_rows(self) -> int:
        """Query rows of an item and key head: token-major, the heads of the group within."""
        return self.blocks.num_queries * self.group_rows

    @property
    def num_lanes(self) -> int:
        return self.spec.page.num_lanes

    @property
    def num_lane_tiles(self) -> int:
        return self.num_lanes // LANES

    @property
    def pages_per_block(self) -> int:
        return self.blocks.num_keys // self.spec.page_size

    def buffers(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each buffer in vector memory, by the names of `Refs`."""
        spec, blocks, rows = self.spec, self.blocks, self.rows
        item = (blocks.num_queries, spec.num_kv_heads, self.group_rows, self.num_lanes)
        kv = (blocks.num_buffers, self.num_lane_tiles, blocks.num_keys, rows.buffer_words, rows.pack, LANES)
        by_head = (rows.num_heads, self.num_rows)
        buffers = {
            "q_buffers": ((2, *item), spec.q_dtype),
            "out_buffer": (item, spec.q_dtype),
            "kv_buffers": (kv, spec.page.dtype),
            "queries": ((*by_head, self.num_lanes), spec.q_dtype),
            "highest": ((*by_head, LANES), "float32"),
            "total": ((*by_head, LANES), "float32"),
            "weighted": ((*by_head, self.num_lanes), "float32"),
        }
        if spec.page.has_scales:
            block = spec.page.abstract("interleaved").scales.shape[1:]
            buffers["scale_buffers"] = (blocks.num_buffers, self.pages_per_block, *block), "float32"
            buffers["scales"] = (block[0], blocks.num_keys), "float32"
        if spec.has_ancestors:
            buffers["ancestor_rows"] = (2, self.num_rows, LANES), "int32"
        return buffers

    def scratch(self) -> dict[str, Any]:
        """Buffers and semaphores, by the names of `Refs`."""
        dma, ring = pltpu.SemaphoreType.DMA, (self.blocks.num_buffers,)
        scratch = {name: pltpu.VMEM(shape, jnp.dtype(dtype)) for name, (shape, dtype) in self.buffers().items()}
        scratch |= {"q_arrived": dma((2,)), "out_written": dma, "kv_arrived": dma(ring), "appended": dma}
        if self.spec.page.has_scales:
            scratch |= {"scales_arrived": dma(ring), "scales_appended": dma}
        return scratch

    def vmem_bytes(self) -> int:
        """Upper estimate of the vector memory of the kernel: buffers, and values of one head between registers."""
        total = 3 * 4 * self.num_rows * max(self.blocks.num_keys, LANES)
        for shape, dtype in self.buffers().values():
            total += math.prod(shape) * jnp.dtype(dtype).itemsize
        if self.spec.has_sinks:
            total += 2 * 4 * self.spec.num_kv_heads * max(SUBLANES, self.group_rows) * LANES
        return total


class Refs(NamedTuple):
    """Everything the kernel sees. In HBM: queries, replaced row by row by the output [T, Hkv, G, lanes]; the stored
    new tokens [T, words, pack, lanes]; the cache; and, with int8, the blocks of scales with the new tokens' in them
    [blocks, 2 Hkv, lanes]."""

    items: Any
    count: Any
    page_ids: Any
    scale_pages: Any
    ancestors: Any
    depths: Any
    new_tokens: Any
    new_scales: Any
    sinks: Any
    rows: Any
    cache: Any
    cache_scales: Any
    q_buffers: Any
    out_buffer: Any
    kv_buffers: Any
    queries: Any
    highest: Any
    total: Any
    weighted: Any
    q_arrived: Any
    out_written: Any
    kv_arrived: Any
    appended: Any
    scale_buffers: Any = None
    scales: Any = None
    scales_arrived: Any = None
    scales_appended: Any = None
    ancestor_rows: Any = None


class Item(NamedTuple):
    """One work item: `count` queries of a sequence, in rows `row` onward.

    Its first query has place `position` among the keys, and the sequence's first new token has place `first_new`. It
    sees keys `first_key` to `end_key` - 1. The sequence's page p has id `page_ids[table + p]`, and, when it receives
    tokens, block of scales `scales + p`. The sequence has `num_new` new tokens.
    """

    index: Any
    table: Any
    row: Any
    count: Any
    position: Any
    first_new: Any
    first_key: Any
    end_key: Any
    scales: Any
    num_new: Any


def run(program: Program, refs: Refs) -> None:
    """The kernel: all items, one after the other."""
    count, ring, num_keys = refs.count[0], program.blocks.num_buffers, program.blocks.num_keys

    def fetch_and_advance(cursor, slot):
        """Starts the block at `cursor` (item, block or -1 for the item's first) and returns the cursor after it."""
        index, block = cursor
        item = _load_item(refs, index)
        block = jnp.where(block < 0, item.first_key // num_keys, block)

        @pl.when(index < count)
        def _():
            _start_block(program, refs, item, block, slot)

        is_last = block + 1 >= pl.cdiv(item.end_key, num_keys)
        return jnp.where(is_last, index + 1, index), jnp.where(is_last, -1, block + 1)

    @pl.when(count > 0)
    def _():
        _query_copy(refs, _load_item(refs, 0, "row", "count")).start()

    cursor = (jnp.int32(0), jnp.int32(-1))
    cursor = lax.fori_loop(0, ring - 1, lambda slot, cursor: fetch_and_advance(cursor, slot), cursor)

    def one_item(index, carry):
        item = _load_item(refs, index)

        @pl.when(index + 1 < count)
        def _():
            _query_copy(refs, _load_item(refs, index + 1, "row", "count")).start()

        _start_append(program, refs, item)
        _wait(_query_copy(refs, item))
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
            _wait_for_writes(program, refs, index - 1)

        _finish(program, refs, item)
        _out_copy(refs, item).start()
        return carry

    lax.fori_loop(0, count, one_item, (jnp.int32(0), cursor))

    @pl.when(count > 0)
    def _():
        _wait_for_writes(program, refs, count - 1)


def _load_item(refs: Refs, index, *names: str) -> Item:
    """Item `index`, with the fields `names`, or all of them."""
    # One past the last item is asked for, and not used, when the ring runs out of work.
    start = jnp.minimum(index, refs.items.shape[0] // ITEM_FIELDS - 1) * ITEM_FIELDS
    fields = enumerate(Item._fields[1:])
    return Item(index, *(refs.items[start + at] if not names or name in names else None for at, name in fields))


def _wait(copy) -> None:
    """Waits for one copy, or for several on its semaphore whose sizes add up to its own."""
    copy.wait()


def _key_range(program: Program, item: Item, block):
    """First and one-past-last key of a block that its item may see."""
    start = block * program.blocks.num_keys
    return jnp.maximum(item.first_key, start), jnp.minimum(item.end_key, start + program.blocks.num_keys)


# Copies


def _query_copy(refs: Refs, item: Item):
    slot = lax.rem(item.index, 2)
    buffer = refs.q_buffers.at[slot, pl.ds(0, item.count)]
    return pltpu.make_async_copy(refs.rows.at[pl.ds(item.row, item.count)], buffer, refs.q_arrived.at[slot])


def _out_copy(refs: Refs, item: Item):
    buffer = refs.out_buffer.at[pl.ds(0, item.count)]
    return pltpu.make_async_copy(buffer, refs.rows.at[pl.ds(item.row, item.count)], refs.out_written)


def _kv_buffer(program: Program, refs: Refs, slot, tile: int, start, size):
    """Room for `size` tokens of a block; the buffer's last word of a token may be there only to spread memory banks."""
    return refs.kv_buffers.at[slot, tile, pl.ds(start, size), pl.ds(0, program.rows.num_words)]


def _start_block(program: Program, refs: Refs, item: Item, block, slot) -> None:
    """Copies the keys of a block that are in the cache page by page, and the new ones from `new_tokens`."""
    page_size, start = program.spec.page_size, block * program.blocks.num_keys
    first, end = _key_range(program, item, block)
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


def _start_scales(program: Program, refs: Refs, item: Item, block, slot) -> None:
    page_size, arrived = program.spec.page_size, refs.scales_arrived.at[slot]
    first, end = _key_range(program, item, block)
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


def _wait_for_block(program: Program, refs: Refs, item: Item, block, slot) -> None:
    first, end = _key_range(program, item, block)
    for tile in range(program.num_lane_tiles):
        buffer = _kv_buffer(program, refs, slot, tile, 0, end - first)
        _wait(pltpu.make_async_copy(buffer, buffer, refs.kv_arrived.at[slot]))
    if program.spec.page.has_scales:
        page_size = program.spec.page_size
        buffer = refs.scale_buffers.at[slot, pl.ds(0, pl.cdiv(end, page_size) - first // page_size)]
        _wait(pltpu.make_async_copy(buffer, buffer, refs.scales_arrived.at[slot]))


def _start_append(program: Program, refs: Refs, item: Item) -> None:
    """Copies an item's new tokens to the cache, and the blocks of scales of the pages whose first new token it has."""
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


def _wait_for_writes(program: Program, refs: Refs, index) -> None:
    """Waits for an item's output and for what it appended."""
    names = ("position", "first_new") if program.spec.page.has_scales else ()
    item = _load_item(refs, index, "row", "count", *names)
    _wait(_out_copy(refs, item))
    source = refs.new_tokens.at[pl.ds(item.row, item.count)]
    _wait(pltpu.make_async_copy(source, source, refs.appended))
    if program.spec.page.has_scales:
        first, end = _scale_pages(program, item)

        @pl.when(first < end)
        def _():
            source = refs.new_scales.at[pl.ds(0, end - first)]
            _wait(pltpu.make_async_copy(source, source, refs.scales_appended))


def _scale_pages(program: Program, item: Item):
    """First and one-past-last page whose block of scales, with those of all its new tokens, this item writes."""
    page_size, position = program.spec.page_size, item.position
    first = jnp.where(position == item.first_new, position // page_size, pl.cdiv(position, page_size))
    return first, pl.cdiv(position + item.count, page_size)


# Computation


def _begin(program: Program, refs: Refs, item: Item) -> None:
    """Lays out an item's queries by key head and empties its sums."""
    slot = lax.rem(item.index, 2)
    for head in range(program.spec.num_kv_heads):
        queries = refs.q_buffers[slot, :, head]
        refs.queries[head] = queries.reshape(program.num_rows, program.num_lanes)
        if program.spec.has_sinks:
            sinks = refs.sinks[head]
            refs.highest[head] = jnp.concatenate([sinks] * (program.num_rows // sinks.shape[0]), axis=0)
    if not program.spec.has_sinks:
        refs.highest[...] = jnp.full(refs.highest.shape, MASKED, jnp.float32)
    refs.total[...] = jnp.full(refs.total.shape, float(program.spec.has_sinks), jnp.float32)
    refs.weighted[...] = jnp.zeros(refs.weighted.shape, jnp.float32)
    if program.spec.has_ancestors:
        _spread_ancestors(program, refs, item)


def _spread_ancestors(program: Program, refs: Refs, item: Item) -> None:
    """Each token's bits and depth on its rows; no bits stand for a causal sequence, as a tree's token has its own."""
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


def _visible(program: Program, refs: Refs, item: Item, block):
    """Whether each query row sees each key of the block: bool [rows, keys]."""
    shape, window = (program.num_rows, program.blocks.num_keys), program.spec.window
    keys = block * program.blocks.num_keys + lax.broadcasted_iota(jnp.int32, shape, 1)
    positions = item.position + lax.broadcasted_iota(jnp.int32, shape, 0) // program.group_rows
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


def _gather_scales(program: Program, refs: Refs, slot, live) -> None:
    """Scales [2 Hkv, keys] of a block, zero where no key is: what was never read may be NaN."""
    page_size = program.spec.page_size
    pages = [refs.scale_buffers[slot, page][:, :page_size] for page in range(program.pages_per_block)]
    scales = jnp.concatenate(pages, axis=1) if len(pages) > 1 else pages[0]
    keys = lax.broadcasted_iota(jnp.int32, scales.shape, 1)
    refs.scales[...] = jnp.where((keys >= live[0]) & (keys < live[1]), scales, 0.0)


def _attend(program: Program, refs: Refs, item: Item, block, slot) -> None:
    """One block of online softmax for every head (Dao 2023, FlashAttention-2, section 3.1)."""
    rows = program.rows
    _wait_for_block(program, refs, item, block, slot)
    first, end = _key_range(program, item, block)
    live = (first - block * program.blocks.num_keys, end - block * program.blocks.num_keys)
    if program.spec.page.has_scales:
        _gather_scales(program, refs, slot, live)
    buffers = [refs.kv_buffers.at[slot, tile] for tile in range(program.num_lane_tiles)]
    is_interpreted = is_tpu_interpreted()

    def one_unit(unit, _):
        tiles = [rows.load(buffer, unit, live, is_interpreted) for buffer in buffers]
        for index in range(rows.heads_per_unit):
            keys, values = (
                jnp.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
                for parts in zip(*(tile[index] for tile in tiles), strict=True)
            )
            visible = _visible(program, refs, item, block)
            _attend_head(program, refs, unit * rows.heads_per_unit + index, keys, values, visible)

    lax.fori_loop(0, rows.num_units, one_unit, None, unroll=min(program.blocks.unroll, rows.num_units))


def _attend_head(program: Program, refs: Refs, head, keys, values, visible) -> None:
    """Queries of one head with keys, values [keys, lanes]."""
    spec = program.spec
    precision = lax.Precision.HIGHEST if spec.q_dtype == "float32" else None

    def product(a, b, b_axis):
        dimensions = (((1,), (b_axis,)), ((), ()))
        return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)

    scores = product(refs.queries[head], keys, 1) * spec.scale
    if spec.page.has_scales:
        scores *= refs.scales[pl.ds(2 * head, 1)]
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    scores = jnp.where(visible, scores, MASKED)
    highest = refs.highest[head][:, :1]
    new_highest = jnp.maximum(highest, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp(scores - new_highest)
    decay = jnp.exp(highest - new_highest)
    refs.highest[head] = jnp.broadcast_to(new_highest, (program.num_rows, LANES))
    refs.total[head] = refs.total[head] * decay + jnp.sum(weights, axis=1, keepdims=True)
    if spec.page.has_scales:
        weights *= refs.scales[pl.ds(2 * head + 1, 1)]
    update = product(weights.astype(values.dtype), values, 0)
    refs.weighted[head] = refs.weighted[head] * decay + update


def _finish(program: Program, refs: Refs, item: Item) -> None:
    """Rounds an item's output into its buffer."""
    shape = (program.blocks.num_queries, program.group_rows, program.num_lanes)
    for head in range(program.spec.num_kv_heads):
        out = refs.weighted[head] / refs.total[head][:, :1]
        refs.out_buffer[:, head] = out.astype(refs.out_buffer.dtype).reshape(shape)
