"""Causal depthwise convolutions over few tokens, whose state is their last inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels.recurrence.batch import RaggedBatch

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32


def causal_conv(
    x: Float[Array, "T C"],
    weight: Float[Array, "C W"],
    state: Float[Array, "S Wm1 C"],
    batch: RaggedBatch,
    bias: Float[Array, " C"] | None = None,
) -> Float[Array, "T C"]:
    """y_t = sum_i weight[:, i] x_(t - W + 1 + i) + bias, where inputs before a sequence's rows are its state's and
    inputs before its first token are zeros. Rows of no sequence are padding. `commit_conv` makes the next state.

    Args:
      state: the last W - 1 inputs of each sequence: that of position p in column p % (W - 1), where it is overwritten.

    Returns y in x's dtype, summed in float32.
    """
    width, num_tokens = weight.shape[1], x.shape[0]
    sequence, index = _places(batch, num_tokens)
    row, position = jnp.arange(num_tokens), batch.starts[sequence] + index
    out = jnp.zeros(x.shape, jnp.float32)
    for tap in range(width):
        back = width - 1 - tap
        inputs = x.at[jnp.maximum(row - back, 0)].get(mode="promise_in_bounds")
        if back:
            of_state = state.at[sequence, (position - back) % (width - 1)].get(mode="promise_in_bounds")
            before = jnp.where((position >= back)[:, None], of_state.astype(x.dtype), jnp.zeros((), x.dtype))
            inputs = jnp.where((index >= back)[:, None], inputs, before)
        out = out + weight[:, tap].astype(jnp.float32) * inputs.astype(jnp.float32)
    return (out if bias is None else out + bias.astype(jnp.float32)).astype(x.dtype)


def commit_conv(
    state: Float[Array, "S Wm1 C"], x: Float[Array, "T C"], batch: RaggedBatch, num_committed: Int32[Array, " S"]
) -> Float[Array, "S Wm1 C"]:
    """The state after the first `num_committed` rows of each sequence. Donate `state`: their last inputs are written
    where they belong, and nothing else."""
    num_slots, columns = state.shape[:2]
    if columns == 0:
        return state
    index = num_committed[:, None] - 1 - jnp.arange(min(columns, x.shape[0]))
    row = jnp.clip(batch.query_starts[:, None] + index, 0, x.shape[0] - 1)
    slot = jnp.where(index >= 0, jnp.arange(num_slots)[:, None], num_slots)
    column = (batch.starts[:, None] + index) % columns
    taken = x.at[row].get(mode="promise_in_bounds").astype(state.dtype)
    return state.at[slot, column].set(taken, mode="drop")


def conv_of_sequences(
    x: Float[Array, "B T C"], weight: Float[Array, "C W"], bias: Float[Array, " C"] | None = None
) -> Float[Array, "B T C"]:
    """As `causal_conv`, of full sequences; differentiable."""
    width, length = weight.shape[1], x.shape[1]
    padded = jnp.pad(x.astype(jnp.float32), [(0, 0), (width - 1, 0), (0, 0)])
    out = jnp.zeros(x.shape, jnp.float32)
    for tap in range(width):
        out = out + weight[:, tap].astype(jnp.float32) * padded[:, tap : tap + length]
    return (out if bias is None else out + bias.astype(jnp.float32)).astype(x.dtype)


def _places(batch: RaggedBatch, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """The sequence of each row [T], and the row's index in it."""
    count = batch.query_starts.shape[0]
    row = jnp.arange(num_tokens)
    after = row[:, None] - batch.query_starts
    is_own = (after >= 0) & (after < batch.query_lengths)
    sequence = jnp.argmax(is_own, axis=1)
    index = jnp.where(is_own.any(axis=1), row - batch.query_starts[sequence], num_tokens)
    return jnp.minimum(sequence, count - 1), index
