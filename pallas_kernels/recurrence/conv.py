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
      state: the last W - 1 inputs of each sequence, the oldest first.

    Returns y in x's dtype, summed in float32.
    """
    width, num_tokens = weight.shape[1], x.shape[0]
    sequence, index = _places(batch, num_tokens)
    row, starts = jnp.arange(num_tokens), batch.starts[sequence]
    out = jnp.zeros(x.shape, jnp.float32)
    for tap in range(width):
        back = width - 1 - tap
        inputs = _inputs(x, state, row - back, sequence, index - back, starts)
        out = out + weight[:, tap].astype(jnp.float32) * inputs.astype(jnp.float32)
    return (out if bias is None else out + bias.astype(jnp.float32)).astype(x.dtype)


def commit_conv(
    state: Float[Array, "S Wm1 C"], x: Float[Array, "T C"], batch: RaggedBatch, num_committed: Int32[Array, " S"]
) -> Float[Array, "S Wm1 C"]:
    """The state after the first `num_committed` rows of each sequence. Donate `state`."""
    columns = state.shape[1]
    index = num_committed[:, None] - columns + jnp.arange(columns)
    sequence = jnp.broadcast_to(jnp.arange(state.shape[0])[:, None], index.shape)
    row = batch.query_starts[:, None] + index
    taken = _inputs(x, state, row, sequence, index, batch.starts[sequence]).astype(state.dtype)
    return jnp.where((num_committed > 0)[:, None, None], taken, state)


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


def _inputs(
    x: jax.Array, state: jax.Array, row: jax.Array, sequence: jax.Array, index: jax.Array, starts: jax.Array
) -> jax.Array:
    """[..., C]: each row of x, or where its index in the sequence's rows is below 0 what the state has of it, which is
    zeros for one that begins."""
    of_x = x.at[jnp.clip(row, 0, x.shape[0] - 1)].get(mode="promise_in_bounds")
    column = jnp.clip(state.shape[1] + index, 0, state.shape[1] - 1)
    of_state = state.at[sequence, column].get(mode="promise_in_bounds").astype(x.dtype)
    of_state = jnp.where((starts > 0)[..., None], of_state, jnp.zeros((), x.dtype))
    return jnp.where((index >= 0)[..., None], of_x, of_state)
