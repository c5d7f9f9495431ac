"""The rows of a step's sequences, and parts of adjacent rows, which make a ragged batch of their own."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class StepRows(NamedTuple):
    """Of each of T rows: its slot, its number among the rows of the slot and its position, int32 [T], and whether it is
    no padding, bool [T]."""

    slot: jax.Array
    offset: jax.Array
    position: jax.Array
    is_real: jax.Array


def step_rows(token_slots: jax.Array, query_starts: jax.Array, lengths: jax.Array, ends: jax.Array) -> StepRows:
    """The rows of a step. `token_slots` int32 [T] is the slot of each row, S for padding; `query_starts`, `lengths` and
    `ends` int32 [S] are each slot's first row, its rows, and its tokens that are stored after the step."""
    num_slots = lengths.shape[0]
    slot = jnp.minimum(token_slots, num_slots - 1)
    offset = jnp.arange(token_slots.shape[0], dtype=jnp.int32) - query_starts[slot]
    is_real = (token_slots < num_slots) & (offset < lengths[slot])
    return StepRows(slot, offset, (ends - lengths)[slot] + offset, is_real)


def parts_of(is_first: jax.Array, is_real: jax.Array, num_parts: int) -> tuple[jax.Array, jax.Array]:
    """Starts and lengths int32 [num_parts] of parts of adjacent rows: one begins at each row that `is_first`, bool [T];
    unused ones have length 0."""
    row, nothing = jnp.arange(is_first.shape[0], dtype=jnp.int32), jnp.zeros(num_parts, jnp.int32)
    number = jnp.where(is_real, jnp.cumsum(is_first) - 1, num_parts)
    starts = nothing.at[jnp.where(is_first, number, num_parts)].set(row, mode="drop")
    return starts, nothing.at[number].add(1, mode="drop")
