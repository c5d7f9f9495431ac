"""Paged attention in plain JAX, for every platform; reads only the pages in use.

An item is a block of queries of one sequence. Items run in tiles, sorted by length, so that short sequences do not read
as many keys as long ones. Key blocks start at absolute positions and masked keys add exactly zero, so a query's result
does not depend, to the bit, on other sequences.

On a CPU, caches of 16 or 8 bit floats should be `BitPages`: XLA:CPU converts a whole cache of such floats before it
gathers or scatters.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention import layout
from pallas_kernels.paged_attention.parts import PagePart
from pallas_kernels.paged_attention.reference import token_places, visible_keys, write_places
from pallas_kernels.paged_attention.specs import MASKED, MAX_TREE_TOKENS, SHORT_QUERIES, PagedOperands, PagedSpec
from pallas_kernels.tuning import tuned

LAYOUT = "separate"
SHORT_NAME, LONG_NAME = "paged_attention xla short", "paged_attention xla long"


@dataclass(frozen=True)
class XlaTileSizes:
    """Items of a tile, queries of an item, and keys of a block."""

    tile: int
    queries: int
    keys: int


# On a CPU, items of 16 queries are up to 5 times as fast as larger ones for short prompts. Steps that may have a long
# prompt use items of 64, which read its keys a quarter as often; uniform steps, which also have single tokens, do not.
SIZES = XlaTileSizes(tile=8, queries=SHORT_QUERIES, keys=128)
LONG_SIZES, LONG_QUERIES = XlaTileSizes(tile=2, queries=64, keys=128), 256


def tunable(spec: PagedSpec) -> dict[str, XlaTileSizes]:
    """The sizes of each program of a call, by its name in tables.

    Unless the call is uniform, single new tokens run in a program of their own beside longer sequences, with items of
    one query (16 times less computation).
    """
    names = [SHORT_NAME] * (spec.has_short or not spec.has_long) + [LONG_NAME] * spec.has_long
    sizes = LONG_SIZES if spec.has_short and spec.max_query_length >= LONG_QUERIES else SIZES
    return {name: tuned(sizes if name == LONG_NAME else SIZES, name, spec.facts) for name in names}


def candidates(spec: PagedSpec) -> dict[str, list[XlaTileSizes]]:
    """Sizes that the tuner measures for the program of this call."""
    if spec.has_long:
        sizes = [(8, 16), (4, 32), (2, 64), (1, 128)]
        return {LONG_NAME: [XlaTileSizes(tile, queries, keys) for tile, queries in sizes for keys in (128, 256)]}
    return {SHORT_NAME: [replace(SIZES, tile=tile, keys=keys) for tile in (1, 4, 8, 16) for keys in (64, 128, 256)]}


def _programs(spec: PagedSpec) -> list[XlaTileSizes]:
    """The sizes of each program, with items no larger than the longest sequence."""
    sizes = tunable(spec)
    longest = {SHORT_NAME: 1 if spec.has_long else spec.max_query_length, LONG_NAME: spec.max_query_length}
    return [replace(blocks, queries=min(blocks.queries, longest[name])) for name, blocks in sizes.items()]


class TileItems(NamedTuple):
    """The items of A tiles, C in each, with Q queries: the longest sequences first; int32.

    Attributes:
      tokens: [A, C, Q], the row of q of each query; any row for padding.
      positions: [A, C, Q], of each query in its sequence; -1 for padding.
      sequence: [A, C], of each item.
      pages: [A, C, P], page ids by position, 0 where the item sees no key; P is whole blocks of keys.
      first_key, end_key: [A, C], the keys that any query of the item sees; empty for padding items.
      first_block, end_block: [A], the blocks of keys that a tile reads.
    """

    tokens: jax.Array
    positions: jax.Array
    sequence: jax.Array
    pages: jax.Array
    first_key: jax.Array
    end_key: jax.Array
    first_block: jax.Array
    end_block: jax.Array


class QueryItems(NamedTuple):
    """The work of one program: its tiles, of which the first `count` (int32) have queries."""

    tiles: TileItems
    count: jax.Array

    @property
    def num_rows(self) -> int:
        """Queries, padding included."""
        return math.prod(self.tiles.tokens.shape)


class StepSchedule(NamedTuple):
    """Everything of a step that is the same in all layers: its index arithmetic is compiled and computed once.

    Attributes:
      items: of each program.
      rows: int32 [T], each token's row among the results of all items; one past the last for padding.
      page, slot: int32 [T], where each token's key and value go; padding has a page beyond the last.
    """

    items: tuple[QueryItems, ...]
    rows: jax.Array
    page: jax.Array
    slot: jax.Array


def unsupported(spec: PagedSpec, platform: str) -> str | None:
    """None: every layout, dtype and option is supported."""
    return None


def make_schedule(
    spec: PagedSpec, page_table, query_starts, query_lengths, kv_lengths, part: PagePart | None = None
) -> StepSchedule:
    """The items of each program, and where each token's keys and result go."""
    lengths = (query_starts, query_lengths, kv_lengths)
    places = token_places(spec, *lengths)
    page, slot = write_places(spec, page_table, places, part)
    items, rows, num_rows = [], jnp.int32(0), 0
    for sizes in _programs(spec):
        is_taken = query_lengths > 0
        if spec.has_short and spec.has_long:
            is_taken &= (query_lengths == 1) == (sizes.queries == 1)
        counts = jnp.where(is_taken, -(-query_lengths // sizes.queries), 0)
        first = _first_items(counts, kv_lengths)
        items.append(_items(spec, sizes, counts, first, page_table, *lengths, part))
        own = num_rows + first[places.sequence] * sizes.queries + places.index
        rows = jnp.where(is_taken[places.sequence], own, rows)
        num_rows += items[-1].num_rows
    return StepSchedule(tuple(items), jnp.where(places.is_real, rows, num_rows), page, slot)


def attention(operands: PagedOperands, spec: PagedSpec, schedule: StepSchedule) -> tuple[jax.Array, layout.Pages]:
    return _attention(operands, schedule, spec, tuple(_programs(spec)))


# jit with inline=True: traced once for all layers of a model, and the program is the same as without.
@partial(jax.jit, static_argnums=(2, 3))
def _attention(operands: PagedOperands, schedule: StepSchedule, spec: PagedSpec, programs: tuple[XlaTileSizes, ...]):
    pages = layout.append(operands.pages, operands.k_new, operands.v_new, schedule.page, schedule.slot)
    operands, start = operands._replace(pages=pages), 0
    num_rows = sum(items.num_rows for items in schedule.items) + 1  # the last stays zero: the result of padding
    if operands.part is None:
        out: Any = jnp.zeros((num_rows, spec.num_q_heads, spec.value_dim), operands.q.dtype)
    else:
        out = (
            jnp.zeros((num_rows, spec.num_q_heads, spec.value_dim), jnp.float32),
            jnp.full((num_rows, spec.num_q_heads), -jnp.inf, jnp.float32),
        )
    for sizes, items in zip(programs, schedule.items, strict=True):
        out = _run(out, start, items, sizes, operands, spec)
        start += items.num_rows
    return jax.tree.map(lambda rows: _take(rows, schedule.rows), out), pages


def _first_items(counts: jax.Array, kv_lengths: jax.Array) -> jax.Array:
    """The first item of each sequence [S], if sequences of more keys come first and have `counts` items each.

    Comparisons of all pairs: sorts, searches and running sums take longer to compile.
    """
    number = jnp.arange(counts.shape[0])
    longer = kv_lengths[:, None] > kv_lengths
    is_before = longer | ((kv_lengths[:, None] == kv_lengths) & (number[:, None] < number))
    return jnp.sum(jnp.where(is_before, counts[:, None], 0), axis=0, dtype=jnp.int32)


def _items(
    spec: PagedSpec,
    sizes: XlaTileSizes,
    counts: jax.Array,
    first: jax.Array,
    page_table: jax.Array,
    query_starts: jax.Array,
    query_lengths: jax.Array,
    kv_lengths: jax.Array,
    part: PagePart | None,
) -> QueryItems:
    """The items of a program: `counts` of each sequence, from its `first` on."""
    num_queries = sizes.queries
    capacity = min(
        -(-spec.num_tokens // num_queries) + spec.num_sequences,
        spec.num_sequences * (1 if num_queries == 1 else -(-spec.max_query_length // num_queries)),
    )
    tile = min(sizes.tile, capacity)
    num_tiles = -(-capacity // tile)
    item = jnp.arange(num_tiles * tile, dtype=jnp.int32)
    is_owner = (item[:, None] >= first) & (item[:, None] < first + counts)
    sequence = jnp.argmax(is_owner, axis=1).astype(jnp.int32)
    offset = (item - first[sequence]) * num_queries
    length = jnp.where(is_owner.any(axis=1), query_lengths[sequence] - offset, 0)

    query = jnp.arange(num_queries, dtype=jnp.int32)
    tokens = jnp.minimum((query_starts[sequence] + offset)[:, None] + query, spec.num_tokens - 1)
    position = (kv_lengths - query_lengths)[sequence] + offset
    end_key = jnp.where(length > 0, position + jnp.minimum(length, num_queries), 0)
    if spec.has_ancestors:  # a token may see any new one
        is_tree = (length > 0) & (query_lengths[sequence] <= MAX_TREE_TOKENS)
        end_key = jnp.where(is_tree, kv_lengths[sequence], end_key)
    first_key = jnp.zeros_like(end_key)
    if spec.window is not None:
        lowest = (kv_lengths - query_lengths)[sequence] if spec.has_ancestors else position
        first_key = jnp.minimum(jnp.maximum(lowest + 1 - spec.window, 0), end_key)

    if part is not None:  # keys are counted as this device has them
        first_key, end_key = (part.num_before(keys, spec.page_size) for keys in (first_key, end_key))
    pages_per_block, key_block = _block(sizes, spec)
    # Looked up here: in its loop over keys, XLA:CPU would compute the id again for every number that it copies.
    page = jnp.arange(-(-spec.pages_per_sequence // pages_per_block) * pages_per_block)
    ids = page_table.at[sequence[:, None], page].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    # Outside the range the table may have any ids.
    is_read = (page >= first_key[:, None] // spec.page_size) & (page < -(-end_key[:, None] // spec.page_size))

    def tiled(a: jax.Array) -> jax.Array:
        return a.reshape(num_tiles, tile, *a.shape[1:])

    first_block = jnp.where(end_key > first_key, first_key // key_block, spec.max_kv_length)
    tiles = TileItems(
        tokens=tiled(tokens),
        positions=tiled(jnp.where(query < length[:, None], position[:, None] + query, -1)),
        sequence=tiled(sequence),
        pages=tiled(jnp.where(is_read, ids, 0)),
        first_key=tiled(first_key),
        end_key=tiled(end_key),
        first_block=tiled(first_block).min(axis=1),
        end_block=tiled(-(-end_key // key_block)).max(axis=1),
    )
    return QueryItems(tiles, (jnp.sum(counts, dtype=jnp.int32) + tile - 1) // tile)


def _block(sizes: XlaTileSizes, spec: PagedSpec) -> tuple[int, int]:
    """Pages and keys of a block."""
    num_pages = max(1, sizes.keys // spec.page_size)
    return num_pages, num_pages * spec.page_size


def _take(rows: jax.Array, index: jax.Array) -> jax.Array:
    return rows.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _run(out, start: int, items: QueryItems, sizes: XlaTileSizes, operands: PagedOperands, spec: PagedSpec):
    """Computes the items, one tile at a time, and writes their results to `out` from row `start` on."""
    num_tiles = items.tiles.tokens.shape[0]
    tile_rows = items.num_rows // num_tiles

    def one(index, out):
        tile = jax.tree.map(partial(_index, index=index), items.tiles)
        at = start + index * tile_rows

        def write(out: jax.Array, outputs: jax.Array) -> jax.Array:
            rows = outputs.reshape(tile_rows, *out.shape[1:]).astype(out.dtype)
            return lax.dynamic_update_slice_in_dim(out, rows, at, 0, allow_negative_indices=False)

        return jax.tree.map(write, out, _tile(tile, sizes, operands, spec))

    if num_tiles == 1:  # without queries it reads no key: no loop to compile
        return one(0, out)
    return lax.fori_loop(0, items.count, one, out)


def _index(array: jax.Array, index: Any) -> jax.Array:
    if array.shape[0] == 1:
        return array.reshape(array.shape[1:])
    return lax.dynamic_index_in_dim(array, index, keepdims=False, allow_negative_indices=False)


def _tile(items: TileItems, sizes: XlaTileSizes, operands: PagedOperands, spec: PagedSpec) -> Any:
    """Attention of one tile's queries: float32 [C, Q, Hkv, G, K]; of a part with its log-sum-exp [C, Q, Hkv, G]."""
    tile, num_queries = items.tokens.shape
    compute_dtype = operands.q.dtype
    q = _take(operands.q, items.tokens)
    q = q.reshape(tile, num_queries, spec.num_kv_heads, spec.num_groups, spec.head_dim)
    flat = operands
    if operands.ancestors is not None:
        flat = operands._replace(ancestors=_take(operands.ancestors, items.tokens.reshape(-1)))
    flat_sequence = jnp.repeat(items.sequence, num_queries) if spec.has_ancestors else None
    positions = items.positions.reshape(-1)
    pages_per_block, key_block = _block(sizes, spec)
    first_key, end_key = items.first_key[:, None], items.end_key[:, None]
    part = operands.part

    def step(block, carry):
        at = block * pages_per_block
        ids = lax.dynamic_slice_in_dim(items.pages, at, pages_per_block, 1, allow_negative_indices=False)
        stored = layout.gather(operands.pages, ids, spec.page)
        k, v, k_scales, v_scales = _merge_pages(stored, compute_dtype, spec)
        keys = block * key_block + jnp.arange(key_block)
        places = keys if part is None else part.position_of(keys, spec.page_size)
        visible = visible_keys(flat, spec, flat_sequence, positions, places).reshape(tile, num_queries, key_block)
        # Values outside the range may be NaN, and 0 * NaN is NaN.
        exists = keys < end_key
        if spec.window is not None:
            exists &= keys >= first_key
        v = jnp.where(exists[:, :, None, None], v, 0)
        if v_scales is not None:
            v_scales = jnp.where(exists[:, None], v_scales, 0)
        return _accumulate(carry, q, k, v, k_scales, v_scales, visible[:, None, None], spec)

    shape = (tile, spec.num_kv_heads, spec.num_groups, num_queries)
    if operands.sinks is None:
        highest, total = jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
    else:
        sinks = operands.sinks.reshape(1, spec.num_kv_heads, spec.num_groups, 1)
        highest, total = jnp.broadcast_to(sinks, shape), jnp.ones(shape, jnp.float32)
        if part is not None:  # once for all parts
            highest, total = jnp.where(part.index == 0, highest, MASKED), jnp.where(part.index == 0, total, 0.0)
    weighted = jnp.zeros((*shape, spec.value_dim), jnp.float32)
    carry = highest, total, weighted
    highest, total, weighted = lax.fori_loop(items.first_block, items.end_block, step, carry)
    if part is not None:
        has_seen = highest > MASKED
        out = jnp.where(has_seen[..., None], weighted / jnp.where(has_seen, total, 1.0)[..., None], 0.0)
        lse = jnp.where(has_seen, highest + jnp.log(total), -jnp.inf)
        return out.transpose(0, 3, 1, 2, 4), lse.transpose(0, 3, 1, 2)
    # A query of no key gives NaN here; it is padding, since tokens see themselves, and nothing takes its row.
    return (weighted / total[..., None]).transpose(0, 3, 1, 2, 4)


def _merge_pages(stored: layout.SeparatePages, dtype, spec: PagedSpec):
    """k, v [C, keys, Hkv, K] in `dtype` and scales [C, Hkv, keys] or None, from gathered pages [C, pages, ...]."""

    def merged(a: Any) -> Any:
        return None if a is None else layout.to_numbers(a.reshape(a.shape[0], -1, *a.shape[3:]), dtype)

    def of_tokens(a: Any) -> Any:
        return None if a is None else a.swapaxes(1, 2).reshape(a.shape[0], a.shape[2], -1)

    k, k_scales = merged(stored.k), of_tokens(stored.k_scales)
    if not spec.page.has_values:
        return k, k[..., : spec.value_dim], k_scales, k_scales
    return k, merged(stored.v), k_scales, of_tokens(stored.v_scales)


def _products(q, k, precision) -> jax.Array:
    """Products of queries [C, Q, Hkv, G, K] and keys [C, keys, Hkv, K]: float32 [C, Hkv, G, Q, keys].

    The order of axes decides what XLA:CPU transposes: the keys for many queries, the products for few.
    """
    tile, num_queries, num_heads, num_groups, head_dim = q.shape
    if num_queries < SHORT_QUERIES:
        return jnp.einsum("cqhgk,cshk->chgqs", q, k, preferred_element_type=jnp.float32, precision=precision)
    rows = q.transpose(0, 2, 3, 1, 4).reshape(tile, num_heads, num_groups * num_queries, head_dim)
    dimensions = ((3,), (3,)), ((0, 1), (0, 2))
    products = lax.dot_general(rows, k, dimensions, precision=precision, preferred_element_type=jnp.float32)
    return products.reshape(tile, num_heads, num_groups, num_queries, -1)


def _accumulate(carry, q, k, v, k_scales, v_scales, visible, spec: PagedSpec):
    """One block of the online softmax (Dao 2023, FlashAttention-2, section 3.1), with int8 scales after products."""
    highest, total, weighted = carry
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    scores = _products(q, k, precision) * spec.scale
    if k_scales is not None:
        scores *= k_scales[:, :, None, None]
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    scores = jnp.where(visible, scores, MASKED)
    new_highest = jnp.maximum(highest, scores.max(-1))
    weights = jnp.exp(scores - new_highest[..., None])
    decay = jnp.exp(highest - new_highest)
    total = total * decay + weights.sum(-1)
    if v_scales is not None:
        weights *= v_scales[:, :, None, None]
    update = jnp.einsum(
        "chgqs,cshk->chgqk", weights.astype(v.dtype), v, preferred_element_type=jnp.float32, precision=precision
    )
    return new_highest, total, weighted * decay[..., None] + update
