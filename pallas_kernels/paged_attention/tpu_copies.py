"""Every copy of the TPU kernel between HBM and VMEM, or within HBM.

A copy is waited for by its bytes: several on one semaphore by one wait for their sum.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.layout import LANES
from pallas_kernels.paged_attention.tpu_program import Item, Program, Refs, key_range, load_item


def query_copy(refs: Refs, item: Item):
    slot = lax.rem(item.index, 2)
    buffer = refs.q_buffers.at[slot, pl.ds(0, item.count)]
    return pltpu.make_async_copy(refs.rows.at[pl.ds(item.row, item.count)], buffer, refs.q_arrived.at[slot])


def out_copy(refs: Refs, item: Item):
    buffer = refs.out_buffer.at[pl.ds(0, item.count)]
    return pltpu.make_async_copy(buffer, refs.rows.at[pl.ds(item.row, item.count)], refs.out_written)


def _kv_buffer(program: Program, refs: Refs, slot, tile: int, start, size):
    """Room for `size` tokens of a block; the buffer's last word of a token may be there only to spread memory banks."""
    return refs.kv_buffers.at[slot, tile, pl.ds(start, size), pl.ds(0, program.rows.num_words)]


def start_block(program: Program, refs: Refs, item: Item, block, slot) -> None:
    """Copies the keys of a block that are in the cache page by page, and the new ones from `new_tokens`."""
    page_size, start = program.spec.page_size, block * program.blocks.num_keys
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


def _start_scales(program: Program, refs: Refs, item: Item, block, slot) -> None:
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


def wait_for_block(program: Program, refs: Refs, item: Item, block, slot) -> None:
    first, end = key_range(program, item, block)
    for tile in range(program.num_lane_tiles):
        buffer = _kv_buffer(program, refs, slot, tile, 0, end - first)
        wait(pltpu.make_async_copy(buffer, buffer, refs.kv_arrived.at[slot]))
    if program.spec.page.has_scales:
        page_size = program.spec.page_size
        buffer = refs.scale_buffers.at[slot, pl.ds(0, pl.cdiv(end, page_size) - first // page_size)]
        wait(pltpu.make_async_copy(buffer, buffer, refs.scales_arrived.at[slot]))


def start_append(program: Program, refs: Refs, item: Item) -> None:
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


def wait_for_writes(program: Program, refs: Refs, index) -> None:
    """Waits for an item's output and for what it appended."""
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


def _scale_pages(program: Program, item: Item):
    """First and one-past-last page whose block of scales, with those of all its new tokens, this item writes."""
    page_size, position = program.spec.page_size, item.position
    first = jnp.where(position == item.first_new, position // page_size, pl.cdiv(position, page_size))
    return first, pl.cdiv(position + item.count, page_size)


def wait(copy) -> None:
    """Waits for one copy, or for several on its semaphore whose sizes add up to its own."""
    copy.wait()
