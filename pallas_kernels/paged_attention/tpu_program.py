"""Static facts of one Pallas call of the TPU kernel, and the names of everything that it sees."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.layout import LANES, SUBLANES
from pallas_kernels.paged_attention.specs import PagedSpec
from pallas_kernels.paged_attention.tpu_schedule import ITEM_FIELDS, Blocks, rows_of_group
from pallas_kernels.paged_attention.tpu_words import WordRows


@dataclass(frozen=True)
class Program:
    """Static facts of one Pallas call."""

    spec: PagedSpec
    blocks: Blocks

    @cached_property
    def rows(self) -> WordRows:
        return WordRows(self.spec.page, self.spec.q_dtype)

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


def load_item(refs: Refs, index, *names: str) -> Item:
    """Item `index`, with the fields `names`, or all of them."""
    # One past the last item is asked for, and not used, when the ring runs out of work.
    start = jnp.minimum(index, refs.items.shape[0] // ITEM_FIELDS - 1) * ITEM_FIELDS
    fields = enumerate(Item._fields[1:])
    return Item(index, *(refs.items[start + at] if not names or name in names else None for at, name in fields))


def key_range(program: Program, item: Item, block):
    """First and one-past-last key of a block that its item may see."""
    start = block * program.blocks.num_keys
    return jnp.maximum(item.first_key, start), jnp.minimum(item.end_key, start + program.blocks.num_keys)
