"""Linear recurrences of a ragged batch: which rows run in blocks, and which in one pass over all slots (`RunShort`).

Blocks of long rows run in a loop whose length is known on the device, so that a step of single tokens pays nothing for
them. States are updated where they are.
"""

from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.recurrence.batch import BLOCK_TOKENS, BlockWork, RaggedBatch, RecurrentTokens, divide
from pallas_kernels.recurrence.blocks import block, step


class RunShort(Protocol):
    """A pass over all slots."""

    def __call__(
        self,
        tokens: RecurrentTokens,
        state: jax.Array,
        lengths: jax.Array,
        is_new: jax.Array,
        *,
        writes: bool = True,
    ) -> tuple[jax.Array, jax.Array]:
        """Outputs [S, C, H, V] of tokens [S, C, ...], of which a slot has `lengths` [S], and the states after them.

        States begin as zeros where `is_new`, bool [S]. Without `writes` (static) they are returned as they are.
        """
        ...


def recur(
    tokens: RecurrentTokens,
    state: jax.Array,
    batch: RaggedBatch,
    run_short: RunShort,
    *,
    short_tokens: int,
    has_long: bool,
    defers: bool,
) -> tuple[jax.Array, jax.Array]:
    """Outputs [T, H, V] of all rows, and the states after them; with `defers`, without rows of short sequences."""
    out = jnp.zeros(tokens.v.shape, jnp.float32)
    work = divide(batch, short_tokens)
    if has_long:
        state, out = _run_blocks(tokens, state, out, batch, work)
    rows = (batch.query_starts + work.block_lengths)[:, None] + jnp.arange(short_tokens)
    is_real, is_new = _first(work.short_lengths, short_tokens), batch.starts + work.block_lengths == 0
    values, after = run_short(tokens.take(rows, is_real), state, work.short_lengths, is_new, writes=not defers)
    out = out.at[jnp.where(is_real, rows, out.shape[0])].set(values, mode="drop")
    if defers and has_long:
        kept = jnp.where(batch.query_lengths <= short_tokens, 0, work.short_lengths)
        after = run_short(tokens.take(rows, _first(kept, short_tokens)), state, kept, is_new)[1]
    return out, after


def recur_uniform(
    tokens: RecurrentTokens, state: jax.Array, batch: RaggedBatch, *, short_tokens: int, defers: bool
) -> tuple[jax.Array, jax.Array]:
    """As `recur`, token by token: results do not depend, to the bit, on how rows are cut into steps."""
    lengths = batch.query_lengths
    kept = jnp.where(lengths <= short_tokens, 0, lengths) if defers else lengths
    start, out = _zeroed(state, batch.starts, lengths), jnp.zeros(tokens.v.shape, jnp.float32)

    def body(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        current, out = carry
        rows, is_real = batch.query_starts + index, index < lengths
        values, current = step(current, tokens.take(rows, is_real))
        return current, out.at[jnp.where(is_real, rows, out.shape[0])].set(values, mode="drop")

    after, out = lax.fori_loop(0, jnp.max(lengths), body, (start, out))
    return out, _where(kept > 0, after, state) if defers else after


def commit(
    state: jax.Array,
    tokens: RecurrentTokens,
    batch: RaggedBatch,
    num_committed: jax.Array,
    run_short: RunShort,
    *,
    short_tokens: int,
    is_uniform: bool,
) -> jax.Array:
    """States after the first `num_committed` rows of each sequence with at most `short_tokens` rows."""
    kept = jnp.where(batch.query_lengths <= short_tokens, num_committed, 0)
    if is_uniform:
        return recur_uniform(tokens, state, batch._replace(query_lengths=kept), short_tokens=0, defers=False)[1]
    rows = batch.query_starts[:, None] + jnp.arange(short_tokens)
    return run_short(tokens.take(rows, _first(kept, short_tokens)), state, kept, batch.starts == 0)[1]


def of_sequences(tokens: RecurrentTokens) -> jax.Array:
    """float32 outputs [B, T, H, V] of full sequences [B, T], which begin with zero states; differentiable."""
    batch, length = tokens.v.shape[:2]
    num_blocks = -(-length // BLOCK_TOKENS)

    def blocks(x: jax.Array) -> jax.Array:
        x = jnp.pad(x.astype(jnp.float32), [(0, 0), (0, num_blocks * BLOCK_TOKENS - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, num_blocks, BLOCK_TOKENS, *x.shape[2:]), 1, 0)

    def body(state: jax.Array, inputs: RecurrentTokens) -> tuple[jax.Array, jax.Array]:
        out, state = jax.vmap(block)(state, inputs)
        return state, out

    num_key_heads, key_size = tokens.k.shape[-2:]
    width = tokens.v.shape[-2] * tokens.v.shape[-1] // num_key_heads
    state = jnp.zeros((batch, num_key_heads, key_size, width), jnp.float32)
    _, out = lax.scan(body, state, jax.tree.map(blocks, tokens))
    return jnp.moveaxis(out, 0, 1).reshape(batch, num_blocks * BLOCK_TOKENS, *out.shape[3:])[:, :length]


def _run_blocks(
    tokens: RecurrentTokens, state: jax.Array, out: jax.Array, batch: RaggedBatch, work: BlockWork
) -> tuple[jax.Array, jax.Array]:
    """The blocks of all long sequences: an outer order by sequence, an inner one by position."""

    def body(number: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        state, out = carry
        # A sequence without blocks has the same `first_block` as the next one, and so is never the last to begin.
        slot = jnp.searchsorted(work.first_block, number, side="right").astype(jnp.int32) - 1
        start, length = batch.starts[slot], work.block_lengths[slot]
        inner = number - work.first_block[slot]
        index = (start // BLOCK_TOKENS + inner) * BLOCK_TOKENS - start + jnp.arange(BLOCK_TOKENS)
        is_real, rows = (index >= 0) & (index < length), batch.query_starts[slot] + index
        before = lax.dynamic_index_in_dim(state, slot, keepdims=False)
        before = jnp.where((start == 0) & (inner == 0), 0, before)
        values, after = block(before, tokens.take(rows, is_real))
        out = out.at[jnp.where(is_real, rows, out.shape[0])].set(values, mode="drop")
        return lax.dynamic_update_index_in_dim(state, after, slot, 0), out

    return lax.fori_loop(0, work.num_blocks, body, (state, out))


def _first(lengths: jax.Array, count: int) -> jax.Array:
    return jnp.arange(count) < lengths[:, None]


def _zeroed(state: jax.Array, starts: jax.Array, lengths: jax.Array) -> jax.Array:
    return _where((starts > 0) | (lengths == 0), state, jnp.zeros((), state.dtype))


def _where(condition: jax.Array, state: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.where(condition[:, None, None, None], state, other)
