"""The rows of a step's sequences, and parts of adjacent rows, which make a ragged batch of their own."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.cache.policy.contract import num_parts


class RowPlaces(NamedTuple):
    """The place of each of T rows: its slot, its number among the rows of the slot and its position, int32 [T], and
    whether it is no padding, bool [T]."""

    slot: jax.Array
    offset: jax.Array
    position: jax.Array
    is_real: jax.Array


def row_places(token_slots: jax.Array, query_starts: jax.Array, lengths: jax.Array, ends: jax.Array) -> RowPlaces:
    """The rows of a step. `token_slots` int32 [T] is the slot of each row, S for padding; `query_starts`, `lengths` and
    `ends` int32 [S] are each slot's first row, its rows, and its tokens that are stored after the step."""
    num_slots = lengths.shape[0]
    slot = jnp.minimum(token_slots, num_slots - 1)
    offset = jnp.arange(token_slots.shape[0], dtype=jnp.int32) - query_starts[slot]
    is_real = (token_slots < num_slots) & (offset < lengths[slot])
    return RowPlaces(slot, offset, (ends - lengths)[slot] + offset, is_real)


def parts_of(is_first: jax.Array, is_real: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Starts and lengths int32 [count] of parts of adjacent rows: one begins at each row that `is_first`, bool [T];
    unused ones have length 0."""
    row, nothing = jnp.arange(is_first.shape[0], dtype=jnp.int32), jnp.zeros(count, jnp.int32)
    number = jnp.where(is_real, jnp.cumsum(is_first) - 1, count)
    starts = nothing.at[jnp.where(is_first, number, count)].set(row, mode="drop")
    return starts, nothing.at[number].add(1, mode="drop")


class RowParts(NamedTuple):
    """N parts of sequences, each within a page: int32 [N], their first rows, their rows, their slots, and the positions
    of their first rows. Unused ones come last and have length 0."""

    starts: jax.Array
    lengths: jax.Array
    slots: jax.Array
    positions: jax.Array


def parts_in_pages(
    page_size: int, token_slots: jax.Array, query_starts: jax.Array, lengths: jax.Array, ends: jax.Array
) -> RowParts:
    """The parts of a step's rows that lie in one page each; arguments as of `row_places`."""
    rows = row_places(token_slots, query_starts, lengths, ends)
    is_first = rows.is_real & ((rows.offset == 0) | (rows.position % page_size == 0))
    size = num_parts(page_size, token_slots.shape[0], lengths.shape[0])
    starts, counts = parts_of(is_first, rows.is_real, size)
    return RowParts(starts, counts, rows.slot[starts], rows.position[starts])
