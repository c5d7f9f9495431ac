"""A ragged batch of tokens, and what a token gives to a recurrence."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

BLOCK_TOKENS = 64


class RecurrentTokens(NamedTuple):
    """Operands of a linear recurrence, with leading axes of tokens; H is a multiple of Hk, as in grouped attention.

    Attributes:
      q, k: [..., Hk, K], normalized and scaled. In a state space (Dao & Gu 2024) they are C and B.
      v: [..., H, V]; in a state space dt * x.
      g: [..., H], logarithms of the decays, at most 0; in a state space dt * A.
      beta: [..., H], rates of the delta rule (Yang et al. 2024); None for a state space, which adds k v' as it is.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array | None = None

    def take(self, rows: jax.Array, is_real: jax.Array) -> RecurrentTokens:
        """float32 tokens `rows`; those that are not real are zeros, which leave a state as it is."""

        def take(x: jax.Array) -> jax.Array:
            taken = x.at[jnp.where(is_real, rows, 0)].get(mode="promise_in_bounds").astype(jnp.float32)
            return jnp.where(is_real.reshape(is_real.shape + (1,) * (x.ndim - 1)), taken, 0)

        return RecurrentTokens(*(None if x is None else take(x) for x in self))  # pyright: ignore[reportArgumentType]


class RaggedBatch(NamedTuple):
    """Rows of a batch [T]: sequence s, in slot s, has `query_lengths[s]` of them, from row `query_starts[s]`.

    Attributes:
      query_starts, query_lengths: int32 [S].
      starts: int32 [S], tokens of the sequence that its state has seen. A sequence of 0 begins with a zero state,
        whatever its slot holds.
    """

    query_starts: jax.Array
    query_lengths: jax.Array
    starts: jax.Array


class BlockWork(NamedTuple):
    """Which rows run in blocks, one sequence after the other, and which in one pass over all slots.

    Attributes:
      first_block: int32 [S], number of the sequence's first block of the step.
      num_blocks: int32, blocks of the step.
      block_lengths: int32 [S], rows of the sequence in blocks: all, or all but the short rest, or none.
      short_lengths: int32 [S], rows after these, at most `short_tokens`.
    """

    first_block: jax.Array
    num_blocks: jax.Array
    block_lengths: jax.Array
    short_lengths: jax.Array


def divide(batch: RaggedBatch, short_tokens: int) -> BlockWork:
    """Blocks end at positions that are multiples of `BLOCK_TOKENS`. A sequence's rows after the last of them are its
    short rest, if they are few; so are all rows of a sequence that has few.

    How a row is computed then depends on its own block only, where steps end at block borders.
    """
    lengths, starts = batch.query_lengths, batch.starts
    rest = jnp.minimum((starts + lengths) % BLOCK_TOKENS, lengths)
    short = jnp.where(lengths <= short_tokens, lengths, jnp.where(rest <= short_tokens, rest, 0))
    long = lengths - short
    counts = jnp.where(long > 0, (starts + long - 1) // BLOCK_TOKENS - starts // BLOCK_TOKENS + 1, 0)
    ends = jnp.cumsum(counts)
    return BlockWork(ends - counts, ends[-1], long, short)
