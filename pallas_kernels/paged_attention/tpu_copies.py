"""DMAs of the TPU kernel between HBM and VMEM, and within HBM.

A DMA semaphore counts bytes: one wait for the sum of bytes waits for all copies on a semaphore.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.layout import LANES
from pallas_kernels.paged_attention.tpu_program import KernelProgram, Refs, WorkItem, key_range, load_item


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
