"""Paged attention in plain JAX, for every platform; reads only the pages in use.

An item is a block of queries of one sequence. Items run in tiles, sorted by length, so that short sequences do not read
as many keys as long ones. Key blocks start at absolute positions and masked keys add exactly zero, so a query's result
does not depend, to the bit, on other sequences.

On a CPU, caches of 16 or 8 bit floats should be `BitPages`: XLA:CPU converts a whole cache of such floats before it
gathers or scatters.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention import layout
from pallas_kernels.paged_attention.reference import append_new_tokens, visible_keys
from pallas_kernels.paged_attention.specs import MASKED, SHORT_QUERIES, PagedOperands, PagedSpec
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


class QueryItems(NamedTuple):
    """Blocks of queries: the sequence and block index of each, and their number, int32."""

    sequence: jax.Array
    block: jax.Array
    count: jax.Array


def unsupported(spec: PagedSpec, platform: str) -> str | None:
    """None: every layout, dtype and option is supported."""
    return None


def make_schedule(spec: PagedSpec, page_table, query_starts, query_lengths, kv_lengths) -> tuple[QueryItems, ...]:
    """The items of each program."""
    programs = _programs(spec)
    if len(programs) == 1:
        return (_items(spec, programs[0].queries, query_lengths, kv_lengths),)
    singles = jnp.where(query_lengths == 1, 1, 0)
    split = zip(programs, (singles, query_lengths - singles), strict=True)
    return tuple(_items(spec, blocks.queries, lengths, kv_lengths) for blocks, lengths in split)


def attention(
    operands: PagedOperands, spec: PagedSpec, schedule: tuple[QueryItems, ...]
) -> tuple[jax.Array, layout.Pages]:
    return _attention(operands, schedule, spec, tuple(_programs(spec)))


# jit with inline=True: traced once for all layers of a model, and the program is the same as without.
@partial(jax.jit, static_argnums=(2, 3), inline=True)
def _attention(
    operands: PagedOperands, schedule: tuple[QueryItems, ...], spec: PagedSpec, programs: tuple[XlaTileSizes, ...]
):
    operands = operands._replace(pages=append_new_tokens(operands, spec))
    out = jnp.zeros((spec.num_tokens, spec.num_q_heads, spec.value_dim), operands.q.dtype)
    for blocks, items in zip(programs, schedule, strict=True):
        out = _run(out, items, blocks, operands, spec)
    return out, operands.pages


def _items(spec: PagedSpec, num_queries: int, query_lengths, kv_lengths) -> QueryItems:
    """The blocks of queries, those of the longest sequences first."""
    order = jnp.argsort(jnp.where(query_lengths > 0, -kv_lengths, 1))
    counts = -(-query_lengths // num_queries)[order]
    ends = jnp.cumsum(counts)
    capacity = min(
        -(-spec.num_tokens // num_queries) + spec.num_sequences,
        spec.num_sequences * (1 if num_queries == 1 else -(-spec.max_query_length // num_queries)),
    )
    item = jnp.arange(capacity, dtype=jnp.int32)
    rank = jnp.minimum(jnp.searchsorted(ends, item, side="right"), spec.num_sequences - 1)
    return QueryItems(order[rank].astype(jnp.int32), item - (ends - counts)[rank], ends[-1].astype(jnp.int32))


def _run(out, items: QueryItems, sizes: XlaTileSizes, operands: PagedOperands, spec: PagedSpec) -> jax.Array:
    """Computes all `items`, one tile at a time, and writes their rows of `out` [T, Hq, K]."""
    tile, num_queries = min(sizes.tile, items.sequence.shape[0]), sizes.queries
    padding = -items.sequence.shape[0] % tile
    sequences, indices = jnp.pad(items.sequence, (0, padding)), jnp.pad(items.block, (0, padding))

    def one(index, out):
        start = index * tile
        sequence = lax.dynamic_slice_in_dim(sequences, start, tile)
        offset = lax.dynamic_slice_in_dim(indices, start, tile) * num_queries
        length = jnp.where(start + jnp.arange(tile) < items.count, operands.query_lengths[sequence] - offset, 0)
        tokens = operands.query_starts[sequence][:, None] + offset[:, None] + jnp.arange(num_queries)
        tokens = jnp.where(jnp.arange(num_queries) < length[:, None], tokens, spec.num_tokens)
        rows = _tile(tokens, sequence, offset, sizes.keys, operands, spec)
        return out.at[tokens].set(rows.reshape(tile, num_queries, *out.shape[1:]).astype(out.dtype), mode="drop")

    return lax.fori_loop(0, (items.count + tile - 1) // tile, one, out)


def _tile(tokens, sequence, offset, num_keys: int, operands: PagedOperands, spec: PagedSpec) -> jax.Array:
    """Attention of the queries `tokens` [C, Q] of `sequence` [C]: float32 [C, Q, Hkv, G, K].

    tokens[c, q] is the new token `offset[c]` + q of its sequence, or spec.num_tokens for padding.
    """
    is_real = tokens < spec.num_tokens
    tile, num_queries = tokens.shape
    compute_dtype = operands.q.dtype
    q = operands.q.at[tokens].get(mode="fill", fill_value=0)
    q = q.reshape(tile, num_queries, spec.num_kv_heads, spec.num_groups, spec.head_dim)
    ancestors = operands.ancestors
    flat = operands._replace(
        ancestors=None if ancestors is None else ancestors.at[tokens.reshape(-1)].get(mode="fill", fill_value=0)
    )
    index = offset[:, None] + jnp.arange(num_queries)
    position = (operands.kv_lengths - operands.query_lengths)[sequence][:, None] + index
    flat_sequence = jnp.repeat(sequence, num_queries)
    first_key, end_key = _key_range(position, is_real, sequence, operands, spec)

    pages_per_block = max(1, num_keys // spec.page_size)
    key_block = pages_per_block * spec.page_size
    # Looked up before the loop, in which XLA:CPU would compute the id again for every number that it copies.
    page = jnp.arange(-(-spec.pages_per_sequence // pages_per_block) * pages_per_block)
    tile_ids = operands.page_table.at[sequence[:, None], page].get(mode="fill", fill_value=0)
    # Outside the range the table may have any ids.
    is_read = (page >= first_key[:, None] // spec.page_size) & (page < -(-end_key[:, None] // spec.page_size))
    tile_ids = jnp.where(is_read, tile_ids, 0)

    def step(block, carry):
        ids = lax.dynamic_slice_in_dim(tile_ids, block * pages_per_block, pages_per_block, 1)
        stored = layout.gather(operands.pages, ids, spec.page)
        k, v, k_scales, v_scales = _merge_pages(stored, compute_dtype, spec)
        keys = block * key_block + jnp.arange(key_block)
        visible = visible_keys(
            flat, spec, flat_sequence, index.reshape(-1), position.reshape(-1), is_real.reshape(-1), keys
        ).reshape(tile, num_queries, key_block)
        # Values outside the range may be NaN, and 0 * NaN is NaN.
        exists = (keys >= first_key[:, None]) & (keys < end_key[:, None])
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
    weighted = jnp.zeros((*shape, spec.value_dim), jnp.float32)
    first = jnp.min(jnp.where(end_key > first_key, first_key // key_block, spec.max_kv_length))
    end = jnp.max(-(-end_key // key_block))
    highest, total, weighted = lax.fori_loop(first, end, step, (highest, total, weighted))
    # XLA:CPU's maximum may drop a NaN; the sum does not, and tells NaN scores from no visible key.
    is_unseen = (highest == MASKED) & ~jnp.isnan(total)
    rows = jnp.where(is_unseen[..., None], 0.0, weighted / jnp.where(total == 0.0, 1.0, total)[..., None])
    return rows.transpose(0, 3, 1, 2, 4)


def _key_range(position, is_real, sequence, operands: PagedOperands, spec: PagedSpec):
    """First and one-past-last key that any query of each item sees, int32 [C]; empty for padding items."""
    end = jnp.max(jnp.where(is_real, position + 1, 0), axis=1)
    first = jnp.zeros_like(end)
    if spec.window is not None:
        lowest = (
            (operands.kv_lengths - operands.query_lengths)[sequence] if spec.has_ancestors else position.min(axis=1)
        )
        first = jnp.maximum(lowest + 1 - spec.window, 0)
    return jnp.minimum(first, end), end


def _merge_pages(stored: layout.SeparatePages, dtype, spec: PagedSpec):
    """k, v [C, keys, Hkv, K] in `dtype` and scales [C, Hkv, keys] or None, from gathered pages [C, pages, ...]."""

    def merged(a: Any) -> Any:
        return None if a is None else a.reshape(a.shape[0], -1, *a.shape[3:]).astype(dtype)

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
