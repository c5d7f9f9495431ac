"""Which pages the tokens of a pass attend to under a policy that keeps sinks and a window: shorter page tables.

Kernels take causality from a key's place in the page table. A table without the dropped pages, and a length without
their tokens, is all that a kernel needs; positions of rotations are those of the whole sequence.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.cache.paged import PagedCache, PageTables, attend_ragged
from jaxinfer.cache.policies import KeptPages
from pallas_kernels.paged_attention.specs import SHORT_QUERIES


class Pieces(NamedTuple):
    """N parts of sequences, each within a page, as a ragged batch: page tables int32 [N, P] of each group; starts,
    lengths and kv_lengths int32 [N]. Unused ones have length 0."""

    page_tables: PageTables
    starts: jax.Array
    lengths: jax.Array
    kv_lengths: jax.Array


def kept_tables(
    kept: KeptPages, page_tables: PageTables, positions: jax.Array, lengths: jax.Array
) -> tuple[PageTables, jax.Array]:
    """Page tables int32 [S, P] of what the tokens at `positions` int32 [S] attend to, and how many keys that are once
    `lengths` int32 [S] tokens from there on are stored, all in the page of the first.

    `page_tables` int32 [S, pages of a sequence] are whole; entries of dropped pages may be anything.
    """
    page = positions // kept.page_size
    num_dropped = jnp.maximum(page - kept.num_window - kept.num_sinks, 0)
    column = jnp.arange(min(kept.num_columns, page_tables[0].shape[1]))
    columns = jnp.where(column < kept.num_sinks, column, column + num_dropped[:, None])
    tables = tuple(jnp.take_along_axis(table, columns, axis=1, mode="clip") for table in page_tables)
    kv_lengths = positions + lengths - num_dropped * kept.page_size
    return tables, jnp.where(lengths > 0, kv_lengths, 0)


def room_in_page(kept: KeptPages, positions: jax.Array) -> jax.Array:
    """int32 [S]: tokens from `positions` int32 [S] up to the end of its page."""
    return kept.page_size - positions % kept.page_size


def pieces(
    kept: KeptPages,
    page_tables: PageTables,
    token_slots: jax.Array,
    query_starts: jax.Array,
    lengths: jax.Array,
    ends: jax.Array,
) -> Pieces:
    """The parts of a step's rows that lie in one page each.

    `token_slots` int32 [T] is the slot of each row, S for padding; `query_starts`, `lengths` and `ends` int32 [S] are
    each slot's first row, its rows, and its tokens that are stored after the step.
    """
    num_tokens, num_slots = token_slots.shape[0], lengths.shape[0]
    slot = jnp.minimum(token_slots, num_slots - 1)
    row = jnp.arange(num_tokens, dtype=jnp.int32)
    offset = row - query_starts[slot]
    is_real = (token_slots < num_slots) & (offset < lengths[slot])
    position = (ends - lengths)[slot] + offset
    is_first = is_real & ((offset == 0) | (position % kept.page_size == 0))
    # A sequence of n rows lies in n / page_size pages and two more at most.
    num_pieces = min(num_tokens, num_tokens // kept.page_size + 2 * num_slots)
    number = jnp.where(is_real, jnp.cumsum(is_first) - 1, num_pieces)
    nothing = jnp.zeros(num_pieces, jnp.int32)
    starts = nothing.at[jnp.where(is_first, number, num_pieces)].set(row, mode="drop")
    counts = nothing.at[number].add(1, mode="drop")
    owner = slot[starts]
    tables, kv_lengths = kept_tables(kept, tuple(table[owner] for table in page_tables), position[starts], counts)
    return Pieces(tables, jnp.where(counts > 0, starts, 0), counts, kv_lengths)


def attend_to_pieces(
    cache: PagedCache, kept: KeptPages, ragged: Pieces, num_tokens: int, *, is_uniform: bool, mesh: Mesh | None
) -> Any:
    """`attend_ragged` for the pieces of a step of `num_tokens` rows. A piece reads pages that earlier ones of the same
    pass write to."""
    # As for prompts, with pages of few tokens too: the programs of decode append while others read.
    longest = min(max(kept.page_size, SHORT_QUERIES + 1), num_tokens)
    return attend_ragged(
        cache,
        ragged.page_tables,
        ragged.starts,
        ragged.lengths,
        ragged.kv_lengths,
        max_query_length=longest,
        is_uniform=is_uniform,
        appends_first=True,
        mesh=mesh,
    )
