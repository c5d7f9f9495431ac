"""Work items of the GPU kernel, computed once for each step: rows, ranges of keys, and where results are written.

The query heads of a key head are rows of a tile: row r of a sequence is query token r // G, head r % G of the group. A
tile is at most 64 rows of one sequence. Its keys are split at absolute places, by a length that depends on static
shapes only, and doubles after every few splits (long sequences have many already), so sums depend neither on other
sequences nor on how a prompt is cut into chunks.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic_gpu_compat import num_multiprocessors
from pallas_kernels.paged_attention.specs import MAX_TREE_TOKENS, SHORT_QUERIES, PagedSpec
from pallas_kernels.tuning import tuned

# Rows of a warpgroup's matrix product, and keys of a block.
TILE_ROWS = 64
BLOCK_KEYS = 64
# Tiles of at most this many rows are columns of the products (`gpu_blocks`); with more, registers are spilled.
MAX_COLUMNS = 32
# Keys of a split if there is enough work, at least, and the largest size of partial results in bytes.
LONGEST_SPLIT = 4096
SHORTEST_SPLIT = 256
MAX_PARTIAL_BYTES = 128 * 2**20
# Splits of a length before those of twice the length. With a window all are equal: only the last ones have work.
SPLITS_OF_A_LENGTH = 16
# Partial results over the keys and values that they are of, in bytes: more only where multiprocessors would be idle.
MAX_PARTIAL_SHARE = 0.1

# Names of the two programs in tables, and the largest number of blocks of keys and values in flight.
SHORT_NAME, LONG_NAME = "paged_attention pallas_gpu short", "paged_attention pallas_gpu long"
MAX_STAGES = 4

# Columns of `SplitPlan.work`.
COLUMNS = (
    "first_row",
    "sequence",
    "tile",
    "slot",
    "block_begin",
    "block_end",
    "key_begin",
    "key_end",
    "first_new",
    "num_new",
    "query_start",
    "first_slot",
    "num_items",
)


@dataclass(frozen=True)
class SplitSizes:
    """Tunable sizes: keys of a split, and the largest number of blocks of keys and values in flight."""

    split_keys: int
    stages: int


@dataclass(frozen=True)
class SplitPlanShape:
    """Static sizes of one program, for sequences of `min_queries` to `max_queries` new tokens, of which a tile has
    `out_rows` rows. The first split has `split_keys` keys."""

    min_queries: int
    max_queries: int
    num_tiles: int
    split_starts: tuple[int, ...]
    split_keys: int
    max_stages: int
    out_rows: int

    @property
    def num_splits(self) -> int:
        return len(self.split_starts)

    @property
    def rows(self) -> int:
        """Rows of a tile with padding."""
        return padded_rows(self.out_rows)


class SplitPlan(NamedTuple):
    """Work items of one program.

    work: int32 [num_tiles * num_splits, 13]; the first `count` rows are items (`COLUMNS`). Rows and keys are numbered
      within the sequence; slot is tile * num_splits + split. The `num_items` of a tile have slots from `first_slot`.
    count: int32 [1]. row_token, row_group: int32 [num_tiles, out_rows], token and head of the group of each row of a
      tile; arbitrary beyond the sequence.
    is_padding: int32 [T], 1 for tokens of no sequence.
    arrivals: int32 [num_tiles, Hkv, 1], zero; kernels count in it the items that are done, and leave it zero.
    """

    work: jax.Array
    count: jax.Array
    row_token: jax.Array
    row_group: jax.Array
    is_padding: jax.Array
    arrivals: jax.Array


def split_plan_shapes(spec: PagedSpec) -> tuple[SplitPlanShape, ...]:
    """The programs of a step: one for decode and verify and, if there may be longer sequences, another for them."""
    if spec.is_uniform:
        return (_split_plan_shape(spec, 1, spec.max_query_length),)
    short = min(SHORT_QUERIES, spec.max_query_length)
    shapes = [_split_plan_shape(spec, 1, short)]
    if spec.has_long:
        shapes.append(_split_plan_shape(spec, SHORT_QUERIES + 1, spec.max_query_length))
    return tuple(shapes)


def padded_rows(out_rows: int) -> int:
    """Rows of a tile that the kernel computes: a multiple of 8 as columns of its products, or 64."""
    return out_rows if out_rows <= MAX_COLUMNS else TILE_ROWS


def num_resident() -> int:
    """Thread blocks that are resident on the chip, two on each multiprocessor."""
    return 2 * num_multiprocessors()


def tunable(spec: PagedSpec) -> dict[str, SplitSizes]:
    """The sizes of each program of a call, by its name in tables."""
    names = (SHORT_NAME, LONG_NAME)
    shapes = split_plan_shapes(spec)
    return {name: SplitSizes(shape.split_keys, shape.max_stages) for name, shape in zip(names, shapes, strict=False)}


def candidates(spec: PagedSpec) -> dict[str, list[SplitSizes]]:
    """Sizes that the tuner measures for the program of this call."""
    name = SHORT_NAME if spec.max_query_length <= SHORT_QUERIES else LONG_NAME
    return {name: [SplitSizes(keys, stages) for keys in (256, 512, 1024, 2048, 4096, 8192) for stages in (2, 3, 4)]}


def _split_plan_shape(spec: PagedSpec, min_queries: int, max_queries: int) -> SplitPlanShape:
    num_rows = max_queries * spec.num_groups
    out_rows = min(TILE_ROWS, -(-num_rows // 8) * 8)
    if max_queries <= SHORT_QUERIES:  # in equal tiles: partial results have no rows that are none
        out_rows = -(-num_rows // (8 * -(-num_rows // TILE_ROWS))) * 8
    num_sequences = min(spec.num_sequences, max(spec.num_tokens // min_queries, 1))
    num_tiles = min(
        num_sequences * -(-num_rows // out_rows),
        spec.num_tokens * spec.num_groups // out_rows + num_sequences,
    )
    split = SHORTEST_SPLIT
    if min_queries > SHORT_QUERIES and num_tiles * spec.num_kv_heads >= num_resident():
        split = -(-spec.max_kv_length // BLOCK_KEYS) * BLOCK_KEYS
    while split < LONGEST_SPLIT and split * num_resident() * 2 < LONGEST_SPLIT * num_tiles * spec.num_kv_heads:
        split *= 2
    if max_queries <= SHORT_QUERIES:
        split = _worthwhile_split(spec, num_sequences, num_tiles, out_rows, split)
    size = tuned(SplitSizes(split, MAX_STAGES), SHORT_NAME if min_queries == 1 else LONG_NAME, spec.facts)
    split = -(-size.split_keys // BLOCK_KEYS) * BLOCK_KEYS
    slot_bytes = 4 * num_tiles * spec.num_kv_heads * padded_rows(out_rows) * spec.head_dim
    while split < spec.max_kv_length and len(_split_starts(spec, split)) * slot_bytes > MAX_PARTIAL_BYTES:
        split *= 2
    starts = _split_starts(spec, split)
    return SplitPlanShape(min_queries, max_queries, num_tiles, starts, split, size.stages, out_rows)


def _split_starts(spec: PagedSpec, split: int) -> tuple[int, ...]:
    """The first key of each split, for the longest sequence. The first one has `split` keys."""
    starts = [0]
    while starts[-1] + split < spec.max_kv_length:
        starts.append(starts[-1] + split)
        if spec.window is None and (len(starts) - 1) % SPLITS_OF_A_LENGTH == 0:
            split *= 2
    return tuple(starts)


def _worthwhile_split(spec: PagedSpec, num_sequences: int, num_tiles: int, out_rows: int, split: int) -> int:
    """Keys of a split: `split`, doubled while partial results exceed `MAX_PARTIAL_SHARE` and fewer take less time.

    Time in bytes: keys and values, over the share of multiprocessors that are at work, and partial results, which are
    written and read; of sequences of `LONGEST_SPLIT` keys, or the longest.
    """
    length = min(spec.max_kv_length, LONGEST_SPLIT)
    pages = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(spec.page.abstract("separate")))
    cache_bytes = num_sequences * length * pages / (spec.page.num_pages * spec.page_size)

    multiprocessors = num_multiprocessors()

    def partial_bytes(split: int) -> int:
        num_splits = -(-length // split)
        row_bytes = 4 * (spec.head_dim + 2)
        return num_tiles * spec.num_kv_heads * num_splits * padded_rows(out_rows) * row_bytes if num_splits > 1 else 0

    def time(split: int) -> float:
        num_items = num_tiles * spec.num_kv_heads * -(-length // split)
        at_work = num_items / (-(-num_items // multiprocessors) * multiprocessors)
        return cache_bytes / at_work + 2 * partial_bytes(split)

    while partial_bytes(split) > MAX_PARTIAL_SHARE * cache_bytes and time(2 * split) <= time(split):
        split *= 2
    return split


def make_split_plan(spec: PagedSpec, shape: SplitPlanShape, query_starts, query_lengths, kv_lengths) -> SplitPlan:
    """The work items of one program; arrays are int32 [S]."""
    groups = spec.num_groups
    is_selected = (query_lengths >= shape.min_queries) & (query_lengths <= shape.max_queries)
    tiles = jnp.where(is_selected, -(-query_lengths * groups // shape.out_rows), 0)
    ends = jnp.cumsum(tiles)
    first_tile = ends - tiles

    tile = jnp.arange(shape.num_tiles, dtype=jnp.int32)
    sequence = jnp.searchsorted(ends, tile, side="right", method="compare_all").astype(jnp.int32)
    sequence = jnp.minimum(sequence, spec.num_sequences - 1)
    first_row = (tile - first_tile[sequence]) * shape.out_rows
    first_token = first_row // groups
    last_token = jnp.minimum((first_row + shape.out_rows - 1) // groups, query_lengths[sequence] - 1)
    first_new = (kv_lengths - query_lengths)[sequence]
    begin, end = jnp.zeros_like(first_new), first_new + last_token + 1
    lowest = first_new + first_token
    if spec.has_ancestors:
        is_tree = query_lengths[sequence] <= MAX_TREE_TOKENS
        end, lowest = jnp.where(is_tree, kv_lengths[sequence], end), jnp.where(is_tree, first_new, lowest)
    if spec.window is not None:
        begin = jnp.maximum(lowest + 1 - spec.window, 0)

    starts = jnp.array(shape.split_starts, jnp.int32)
    # Splits with keys of a tile are neighbours: those that start before its last key, from the one with its first on.
    first_split, end_split = ((starts < key[:, None]).sum(axis=1, dtype=jnp.int32) for key in (begin + 1, end))
    first_split -= 1
    num_items = jnp.where((tile < ends[-1]) & (begin < end), end_split - first_split, 0)
    # Items by tile; rows beyond them are arbitrary.
    item, item_ends = jnp.arange(shape.num_tiles * shape.num_splits, dtype=jnp.int32), jnp.cumsum(num_items)
    of_tile = jnp.searchsorted(item_ends, item, side="right", method="compare_all").astype(jnp.int32)
    of_tile = jnp.minimum(of_tile, shape.num_tiles - 1)
    split = first_split[of_tile] + item - (item_ends - num_items)[of_tile]
    split = jnp.clip(split, 0, shape.num_splits - 1)
    key_begin = jnp.maximum(begin[of_tile], starts[split])
    key_end = jnp.minimum(end[of_tile], jnp.append(starts[1:], spec.max_kv_length)[split])
    columns = {
        "first_row": first_row[of_tile],
        "sequence": sequence[of_tile],
        "tile": of_tile,
        "slot": of_tile * shape.num_splits + split,
        "block_begin": key_begin // BLOCK_KEYS,
        "block_end": -(-key_end // BLOCK_KEYS),
        "key_begin": key_begin,
        "key_end": key_end,
        "first_new": first_new[of_tile],
        "num_new": query_lengths[sequence][of_tile],
        "query_start": query_starts[sequence][of_tile],
        "first_slot": of_tile * shape.num_splits + first_split[of_tile],
        "num_items": num_items[of_tile],
    }
    work = jnp.stack([columns[name].astype(jnp.int32) for name in COLUMNS], axis=1)
    row = first_row[:, None] + jnp.arange(shape.out_rows, dtype=jnp.int32)
    row_token = query_starts[sequence][:, None] + row // groups
    return SplitPlan(
        work=work,
        count=item_ends[-1:],
        row_token=jnp.clip(row_token, 0, spec.num_tokens - 1),
        row_group=row % groups,
        is_padding=_is_padding(spec, query_starts, query_lengths),
        arrivals=jnp.zeros((shape.num_tiles, spec.num_kv_heads, 1), jnp.int32),
    )


def _is_padding(spec: PagedSpec, query_starts, query_lengths):
    tokens = jnp.arange(spec.num_tokens, dtype=jnp.int32)[:, None]
    inside = (tokens >= query_starts) & (tokens < query_starts + query_lengths)
    return jnp.logical_not(inside.any(axis=1)).astype(jnp.int32)
