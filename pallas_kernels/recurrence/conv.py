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
    source, row = _source(x, state, batch), jnp.arange(num_tokens)
    out = jnp.zeros(x.shape, jnp.float32)
    for tap in range(width):
        back = width - 1 - tap
        column = width - 1 + index - back  # of the state, where the input is before the sequence's rows
        place = jnp.where(index >= back, row - back, num_tokens + sequence * (width - 1) + column)
        out = out + weight[:, tap].astype(jnp.float32) * _rows(source, place)
    return (out if bias is None else out + bias.astype(jnp.float32)).astype(x.dtype)


def commit_conv(
    state: Float[Array, "S Wm1 C"], x: Float[Array, "T C"], batch: RaggedBatch, num_committed: Int32[Array, " S"]
) -> Float[Array, "S Wm1 C"]:
    """The state after the first `num_committed` rows of each sequence. Donate `state`."""
    columns = state.shape[1]
    index = num_committed[:, None] - columns + jnp.arange(columns)
    sequence = jnp.arange(state.shape[0])[:, None]
    inside = batch.query_starts[:, None] + index
    place = jnp.where(index >= 0, inside, x.shape[0] + sequence * columns + columns + index)
    taken = _rows(_source(x, state, batch), place).astype(state.dtype)
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


def _source(x: jax.Array, state: jax.Array, batch: RaggedBatch) -> jax.Array:
    """float32 [T + S * (W - 1), C]: the rows, then the states, of which those of new sequences are zeros."""
    state = jnp.where((batch.starts > 0)[:, None, None], state, 0)
    return jnp.concatenate([x, state.reshape(-1, x.shape[1]).astype(x.dtype)])


def _rows(source: jax.Array, place: jax.Array) -> jax.Array:
    return source.at[jnp.clip(place, 0, source.shape[0] - 1)].get(mode="promise_in_bounds").astype(jnp.float32)
