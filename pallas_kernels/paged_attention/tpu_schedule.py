"""Work items of the TPU kernel, computed once for each step and shared by its layers, and block sizes.

A step runs one or two programs. Sequences with at most `SHORT_QUERIES` new tokens (decode, verify) are one item each of
the first; others (prefill) are cut into items of `TpuProgramSizes.num_queries` tokens of the second. Empty slots have
no item and cost nothing.

Page ids and items of a call lie in scalar memory. Where those of all sequences do not fit, a program has several calls,
each of as many sequences as fit.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tpu_parameters
from pallas_kernels.paged_attention.layout import LANES, SUBLANES
from pallas_kernels.paged_attention.specs import MAX_TREE_TOKENS, SHORT_QUERIES, PagedSpec
from pallas_kernels.tuning import tuned

# Names in tables of the programs of few and of many queries, and of that of uniform calls.
NAMES = tuple(f"paged_attention pallas_tpu {kind}" for kind in ("short", "long", "uniform"))
# Rows (queries times heads of a group) of a prefill item: enough for full use of the matrix unit.
LONG_ROWS = 512
# Rows that an item of a uniform call computes at once: it has as many such parts as its queries fill, and a row's
# result does not depend on the others. With 32 a decode item takes less time than its copies (bfloat16, v5e and v6e).
PART_ROWS = 32
# Bytes of keys and values of one block of a decode item; two more blocks are in flight during its computation. A block
# of half the size takes more than half the time, because heads overlap less (compiled programs, v5e to tpu7x).
SHORT_BLOCK_BYTES = 2 << 20
# Scalar memory is 1 MiB on every generation; the compiler reserves some of it.
SMEM_BYTES = 1 << 20
SMEM_RESERVED_BYTES = 1 << 16
# VMEM of the kernel, of 128 MiB (v5e, v6e) or 64 MiB (v5p, tpu7x); all but 1 MiB where there is less.
VMEM_BYTES, VMEM_RESERVED_BYTES = 48 << 20, 1 << 20
# Where there is less, items have this share of the rows and keys.
SMALL_VMEM_SHARE = 2

# Fields of an item in scalar memory, in the order of `tpu_program.WorkItem`.
ITEM_FIELDS = 9


@dataclass(frozen=True)
class TpuProgramSizes:
    """Sizes of one program: queries of an item, keys of a block (a multiple of the page), and blocks in VMEM.

    unroll: words of a token whose heads are computed without a loop.
    """

    num_queries: int
    num_keys: int
    num_buffers: int
    unroll: int


class WorkItems(NamedTuple):
    """Work items: flattened fields [capacity * ITEM_FIELDS] and the number of items [1], int32."""

    fields: jax.Array
    count: jax.Array


class ScaleBlocks(NamedTuple):
    """Pages of an int8 cache that receive tokens; their blocks of scales are written whole.

    pages: page ids [blocks]. rows: the row of k_new whose scale belongs in each lane [blocks, lanes], -1 for none.
    """

    pages: jax.Array
    rows: jax.Array


class TpuSchedule(NamedTuple):
    """Page ids of each call's sequences, flattened; the items of each program (few queries first) and call; and
    scale_blocks for int8 and int4."""

    page_ids: tuple[jax.Array, ...]
    items: tuple[tuple[WorkItems, ...], ...]
    scale_blocks: ScaleBlocks | None


def rows_of_group(spec: PagedSpec) -> int:
    """Query heads of a key head, padded to a power of two and to whole 32-bit words."""
    smallest = 4 // jnp.dtype(spec.q_dtype).itemsize
    return max(smallest, 1 << (spec.num_groups - 1).bit_length())


def tunable(spec: PagedSpec) -> dict[str, TpuProgramSizes]:
    """The sizes of each program of a call, by its name in tables."""
    return {_name(spec, is_long): program_sizes(spec, is_long) for is_long in kinds(spec)}


def candidates(spec: PagedSpec) -> dict[str, list[TpuProgramSizes]]:
    """Sizes that the tuner measures for the program of this call."""
    is_long = spec.has_long
    preferred = _default_sizes(spec, is_long)
    queries = (preferred.num_queries // 2, preferred.num_queries) if is_long else (preferred.num_queries,)
    tried = [
        TpuProgramSizes(num_queries, num_keys, num_buffers, unroll)
        for num_queries in queries
        for num_keys in (128, 256, 512, 1024)
        for num_buffers in (2, 3, 4)
        for unroll in ((1,) if is_long else (4, 8))
    ]
    return {NAMES[is_long]: [sizes for sizes in tried if sizes.num_keys % spec.page_size == 0]}


def program_sizes(spec: PagedSpec, is_long: bool) -> TpuProgramSizes:
    """Sizes of the program of many (`is_long`) or few queries, from the chip's table or the heuristic, made to fit."""
    sizes = tuned(_default_sizes(spec, is_long), _name(spec, is_long), spec.facts)
    most = spec.max_query_length if is_long else min(spec.max_query_length, SHORT_QUERIES)
    # Rows of an item are a multiple of 8, for whole registers, or of whole parts.
    multiple = max(1, (PART_ROWS if is_in_parts(spec) else SUBLANES) // rows_of_group(spec))
    num_queries = min(sizes.num_queries, most) if is_long else most
    # At most the keys of the whole table, rounded up to whole lanes.
    num_keys = min(sizes.num_keys, -(-spec.max_kv_length // LANES) * LANES)
    return replace(
        sizes,
        num_queries=-(-num_queries // multiple) * multiple,
        num_keys=max(num_keys // spec.page_size, 1) * spec.page_size,
    )


def is_in_parts(spec: PagedSpec) -> bool:
    """True if items compute their rows in parts: where one program has single tokens and long prompts."""
    return spec.is_uniform and not spec.has_ancestors


def _name(spec: PagedSpec, is_long: bool) -> str:
    return NAMES[2 if is_in_parts(spec) else is_long]


def _default_sizes(spec: PagedSpec, is_long: bool) -> TpuProgramSizes:
    share = 1 if vmem_limit() == VMEM_BYTES else SMALL_VMEM_SHARE
    num_queries, most_keys = max(SUBLANES, LONG_ROWS // share // rows_of_group(spec)), 512 // share
    if is_long and not is_in_parts(spec):
        return TpuProgramSizes(num_queries, most_keys, 2, 1)
    token_bytes = spec.page.num_rows * spec.page.num_lanes * jnp.dtype(spec.page.element_dtype).itemsize
    num_keys = 1 << (max(SHORT_BLOCK_BYTES // share // token_bytes, 1).bit_length() - 1)
    return TpuProgramSizes(num_queries if is_long else SHORT_QUERIES, min(max(num_keys, LANES), most_keys), 3, 8)


def vmem_limit() -> int:
    """VMEM of the kernel in bytes, on the chip that it is traced for."""
    return min(VMEM_BYTES, tpu_parameters.vmem_bytes() - VMEM_RESERVED_BYTES)


def kinds(spec: PagedSpec) -> tuple[bool, ...]:
    """The programs of a call: `is_long` of each."""
    return (False,) * spec.has_short + (True,) * spec.has_long


def num_scale_blocks(spec: PagedSpec) -> int:
    """Upper bound of the number of pages that receive tokens."""
    per_sequence = 1 if spec.max_query_length == 1 else (spec.max_query_length - 2) // spec.page_size + 2
    in_all = spec.num_tokens // spec.page_size + 2 * spec.num_sequences
    return max(1, min(spec.num_tokens, per_sequence * spec.num_sequences, in_all))


def smem_bytes(spec: PagedSpec, num_sequences: int) -> int:
    """Bytes of scalar memory for page ids and work items of some sequences, and for scales and ancestors of all."""
    words = num_sequences * spec.pages_per_sequence
    words += ITEM_FIELDS * max(_capacity(spec, is_long, num_sequences) for is_long in kinds(spec))
    words += num_scale_blocks(spec) if spec.page.has_scales else 0
    words += 2 * spec.num_tokens if spec.has_ancestors else 0
    return 4 * words


def groups(spec: PagedSpec) -> tuple[range, ...]:
    """The sequences of each call: all in one if they fit in scalar memory, else groups of one size. Empty if not even
    one sequence fits."""
    available, total = SMEM_BYTES - SMEM_RESERVED_BYTES, spec.num_sequences
    sizes = (-(-total // num_calls) for num_calls in range(1, total + 1))
    size = next((size for size in sizes if smem_bytes(spec, size) <= available), None)
    return () if size is None else tuple(range(start, min(start + size, total)) for start in range(0, total, size))


def make_schedule(spec: PagedSpec, page_table, query_starts, query_lengths, kv_lengths) -> TpuSchedule:
    """The work items of a step; operands as in `paged_attention`."""
    first_new = kv_lengths - query_lengths
    blocks_of_sequence = jnp.where(
        query_lengths > 0, (kv_lengths - 1) // spec.page_size - first_new // spec.page_size + 1, 0
    )
    block_starts = jnp.cumsum(blocks_of_sequence) - blocks_of_sequence
    lengths = (query_starts, query_lengths, kv_lengths, block_starts - first_new // spec.page_size)
    is_short = (query_lengths <= SHORT_QUERIES) & spec.has_short
    owned = {False: is_short & (query_lengths > 0), True: ~is_short}
    calls = groups(spec)
    items = tuple(
        tuple(_items(spec, is_long, own, owned[is_long], *lengths) for own in calls) for is_long in kinds(spec)
    )
    scale_blocks = None
    if spec.page.has_scales:
        scale_blocks = _scale_blocks(
            spec, page_table, query_starts, first_new, kv_lengths, block_starts, blocks_of_sequence
        )
    return TpuSchedule(tuple(page_table[own.start : own.stop].reshape(-1) for own in calls), items, scale_blocks)


def _capacity(spec: PagedSpec, is_long: bool, num_sequences: int) -> int:
    if not is_long:
        return num_sequences
    num_queries = program_sizes(spec, True).num_queries
    per_sequence = -(-spec.max_query_length // num_queries)
    return min(spec.num_tokens // num_queries + num_sequences, per_sequence * num_sequences)


def _items(
    spec: PagedSpec, is_long: bool, own: range, is_owned, query_starts, query_lengths, kv_lengths, scale_starts
) -> WorkItems:
    """The items of those sequences `own` that are `is_owned`."""
    num_queries = program_sizes(spec, is_long).num_queries
    if len(own) < spec.num_sequences:
        index = jnp.arange(spec.num_sequences)
        is_owned &= (index >= own.start) & (index < own.stop)
    count_of_sequence = jnp.where(is_owned, -(-query_lengths // num_queries), 0)
    ends = jnp.cumsum(count_of_sequence)
    item = jnp.arange(_capacity(spec, is_long, len(own)), dtype=jnp.int32)
    # The first sequence whose items end after this one; on a TPU comparing with all is cheaper than a search.
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
        # A token of a tree may see any new token; the first one sees the oldest key.
        is_tree = length <= MAX_TREE_TOKENS
        end_key = jnp.where(is_tree, first_new + length, end_key)
        if spec.window is not None:
            first_key = jnp.where(is_tree, jnp.maximum(first_new + 1 - spec.window, 0), first_key)
    fields = [
        (sequence - own.start) * spec.pages_per_sequence,
        query_starts[sequence] + offset,
        count,
        position,
        first_new,
        first_key,
        end_key,
        scale_starts[sequence],
        length,
    ]
    return WorkItems(jnp.stack(fields, axis=1).astype(jnp.int32).reshape(-1), ends[-1:].astype(jnp.int32))


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
