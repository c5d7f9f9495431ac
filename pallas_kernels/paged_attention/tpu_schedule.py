"""What the TPU kernel does in one step, worked out once and shared by its layers: block sizes, work items, page ids.

A step runs one or two programs. Sequences with at most `SHORT_QUERIES` new tokens (decode, verify) are one item each
of the first; the others (prefill) are cut into items of `Blocks.num_queries` tokens of the second. Items are compacted:
an empty slot is no item, so it costs no iteration.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.layout import LANES, SUBLANES
from pallas_kernels.paged_attention.specs import MAX_TREE_TOKENS, SHORT_QUERIES, PagedSpec
from pallas_kernels.tuning import tuned

# The tuner's names of the programs of few and of many queries.
NAMES = ("paged_attention pallas_tpu short", "paged_attention pallas_tpu long")
# Rows (queries times heads of a group) of a prefill item: enough to keep the matrix unit busy.
LONG_ROWS = 512
# Bytes of keys and values that one block of a decode item reads; two more are in flight while it is computed. Half of
# it takes more than half of the time: the heads of a block fill each other's waits (compiled, v5e to tpu7x).
SHORT_BLOCK_BYTES = 2 << 20
# Scalar memory is 1 MiB on every generation; the compiler keeps some of it.
SMEM_BYTES = 1 << 20
SMEM_RESERVED_BYTES = 1 << 16
# Of 128 MiB (v5e, v6e) or 64 MiB (tpu7x) of vector memory.
VMEM_BYTES = 48 << 20

# Fields of an item in scalar memory, in the order of `tpu_kernel.Item`.
ITEM_FIELDS = 9


@dataclass(frozen=True)
class Blocks:
    """Sizes of one program: queries of an item, keys of a block (a multiple of the page), and blocks in vector memory.

    unroll: words of a token whose heads are computed in one straight line of code.
    """

    num_queries: int
    num_keys: int
    num_buffers: int
    unroll: int


class Items(NamedTuple):
    """Work items: their fields one after the other [capacity * ITEM_FIELDS] and how many there are [1] (int32)."""

    fields: jax.Array
    count: jax.Array


class ScaleBlocks(NamedTuple):
    """The pages that receive tokens, whose blocks of scales are written whole (int8).

    pages: their ids [blocks]; rows: the row of k_new whose scale goes to each lane [blocks, lanes], -1 for none.
    """

    pages: jax.Array
    rows: jax.Array


class TpuSchedule(NamedTuple):
    """Page ids [S * P] and the items of each program, of few queries first; scale_blocks with int8 only."""

    page_ids: jax.Array
    items: tuple[Items, ...]
    scale_blocks: ScaleBlocks | None


def rows_of_group(spec: PagedSpec) -> int:
    """Query heads of a key head, padded to a power of two that fills 32-bit words."""
    smallest = 4 // jnp.dtype(spec.q_dtype).itemsize
    return max(smallest, 1 << (spec.num_groups - 1).bit_length())


def tunable(spec: PagedSpec) -> dict[str, Blocks]:
    """The sizes of each program of a call, by the tuner's name for it."""
    return {NAMES[is_long]: choose_blocks(spec, is_long) for is_long in kinds(spec)}


def candidates(spec: PagedSpec) -> dict[str, list[Blocks]]:
    """What the tuner tries for the program that this call runs."""
    is_long = spec.has_long
    preferred = _preferred_blocks(spec, is_long)
    queries = (preferred.num_queries // 2, preferred.num_queries) if is_long else (preferred.num_queries,)
    tried = [
        Blocks(num_queries, num_keys, num_buffers, unroll)
        for num_queries in queries
        for num_keys in (128, 256, 512, 1024)
        for num_buffers in (2, 3, 4)
        for unroll in ((1,) if is_long else (4, 8))
    ]
    return {NAMES[is_long]: [blocks for blocks in tried if blocks.num_keys % spec.page_size == 0]}


def choose_blocks(spec: PagedSpec, is_long: bool) -> Blocks:
    """The sizes of the program of many (`is_long`) or few queries: the chip's table or a guess, made to fit."""
    blocks = tuned(_preferred_blocks(spec, is_long), NAMES[is_long], spec.facts)
    most = spec.max_query_length if is_long else min(spec.max_query_length, SHORT_QUERIES)
    # Whole registers: rows of an item are a multiple of 8.
    multiple = max(1, SUBLANES // rows_of_group(spec))
    num_queries = min(blocks.num_queries, most) if is_long else most
    # No more keys than the table can hold, in whole lanes.
    num_keys = min(blocks.num_keys, -(-spec.max_kv_length // LANES) * LANES)
    return replace(
        blocks,
        num_queries=-(-num_queries // multiple) * multiple,
        num_keys=max(num_keys // spec.page_size, 1) * spec.page_size,
    )


def _preferred_blocks(spec: PagedSpec, is_long: bool) -> Blocks:
    if is_long:
        return Blocks(max(SUBLANES, LONG_ROWS // rows_of_group(spec)), 512, 2, 1)
    token_bytes = spec.page.num_rows * spec.page.num_lanes * jnp.dtype(spec.page.dtype).itemsize
    num_keys = 1 << (max(SHORT_BLOCK_BYTES // token_bytes, 1).bit_length() - 1)
    return Blocks(SHORT_QUERIES, min(max(num_keys, LANES), 512), 3, 8)


def kinds(spec: PagedSpec) -> tuple[bool, ...]:
    """The programs of a call: `is_long` of each."""
    return (False,) * spec.has_short + (True,) * spec.has_long


def num_scale_blocks(spec: PagedSpec) -> int:
    """Upper bound of the pages that receive tokens."""
    per_sequence = 1 if spec.max_query_length == 1 else (spec.max_query_length - 2) // spec.page_size + 2
    in_all = spec.num_tokens // spec.page_size + 2 * spec.num_sequences
    return max(1, min(spec.num_tokens, per_sequence * spec.num_sequences, in_all))


def smem_bytes(spec: PagedSpec) -> int:
    """Bytes of scalar memory that a program's control takes."""
    words = spec.num_sequences * spec.pages_per_sequence
    words += ITEM_FIELDS * max(_capacity(spec, is_long) for is_long in kinds(spec))
    words += num_scale_blocks(spec) if spec.page.has_scales else 0
    words += 2 * spec.num_tokens if spec.has_ancestors else 0
    return 4 * words


def make_schedule(spec: PagedSpec, page_table, query_starts, query_lengths, kv_lengths) -> TpuSchedule:
    """The items of a step; operands as in `paged_attention`."""
    first_new = kv_lengths - query_lengths
    blocks_of_sequence = jnp.where(
        query_lengths > 0, (kv_lengths - 1) // spec.page_size - first_new // spec.page_size + 1, 0
    )
    block_starts = jnp.cumsum(blocks_of_sequence) - blocks_of_sequence
    lengths = (query_starts, query_lengths, kv_lengths, block_starts - first_new // spec.page_size)
    is_short = (query_lengths <= SHORT_QUERIES) & spec.has_short
    owned = {False: is_short & (query_lengths > 0), True: ~is_short}
    items = [_items(spec, is_long, owned[is_long], *lengths) for is_long in kinds(spec)]
    scale_blocks = None
    if spec.page.has_scales:
        scale_blocks = _scale_blocks(
            spec, page_table, query_starts, first_new, kv_lengths, block_starts, blocks_of_sequence
        )
    return TpuSchedule(page_table.reshape(-1), tuple(items), scale_blocks)


def _capacity(spec: PagedSpec, is_long: bool) -> int:
    if not is_long:
        return spec.num_sequences
    num_queries = choose_blocks(spec, True).num_queries
    per_sequence = -(-spec.max_query_length // num_queries)
    return min(spec.num_tokens // num_queries + spec.num_sequences, per_sequence * spec.num_sequences)


def _items(spec: PagedSpec, is_long: bool, is_owned, query_starts, query_lengths, kv_lengths, scale_starts) -> Items:
    num_queries = choose_blocks(spec, is_long).num_queries
    count_of_sequence = jnp.where(is_owned, -(-query_lengths // num_queries), 0)
    ends = jnp.cumsum(count_of_sequence)
    item = jnp.arange(_capacity(spec, is_long), dtype=jnp.int32)
    # The sequence whose items end beyond this one; comparing all is cheaper on a TPU than a search.
    sequence = jnp.minimum(jnp.sum(ends <= item[:, None], axis=1), spec.num_sequences - 1)
    offset = (item - (ends - count_of_sequence)[sequence]) * num_queries
    length = query_lengths[sequence]
    count = jnp.clip(length - offset, 0, num_queries)
    first_new = kv_lengths[sequence] - length
    position = first_new + offset
    first_key, end_key = jnp.zeros_like(position), position + count
    if spec.window is not None:
        first_key = jnp.maximum(position + 1 - spec.window, 0)
    if spec.has_ancestors:
        # A branch may see any new token; the first of a tree is the one that sees furthest back.
        is_tree = length <= MAX_TREE_TOKENS
        end_key = jnp.where(is_tree, first_new + length, end_key)
        if spec.window is not None:
            first_key = jnp.where(is_tree, jnp.maximum(first_new + 1 - spec.window, 0), first_key)
    fields = [
        sequence * spec.pages_per_sequence,
        query_starts[sequence] + offset,
        count,
        position,
        first_new,
        first_key,
        end_key,
        scale_starts[sequence],
        length,
    ]
    return Items(jnp.stack(fields, axis=1).astype(jnp.int32).reshape(-1), ends[-1:].astype(jnp.int32))


def _scale_blocks(spec: PagedSpec, page_table, query_starts, first_new, kv_lengths, starts, counts) -> ScaleBlocks:
    block = jnp.arange(num_scale_blocks(spec), dtype=jnp.int32)
    sequence = jnp.minimum(jnp.sum(starts + counts <= block[:, None], axis=1), spec.num_sequences - 1)
    page = first_new[sequence] // spec.page_size + block - starts[sequence]
    is_real = block < starts[-1] + counts[-1]
    page = jnp.where(is_real, page, 0)
    ids = jnp.where(is_real, page_table[sequence, jnp.clip(page, 0, spec.pages_per_sequence - 1)], 0)
    lane = jnp.arange(-(-spec.page_size // LANES) * LANES)
    position = page[:, None] * spec.page_size + lane
    new_index = position - first_new[sequence][:, None]
    is_new = (new_index >= 0) & (position < kv_lengths[sequence][:, None]) & (lane < spec.page_size)
    rows = jnp.where(is_new & is_real[:, None], query_starts[sequence][:, None] + new_index, -1)
    return ScaleBlocks(ids.astype(jnp.int32), rows.astype(jnp.int32))
