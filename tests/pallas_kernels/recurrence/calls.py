"""Operands of calls of linear recurrences."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.recurrence import RaggedBatch


def batch_of(*rows: tuple[int, int]) -> RaggedBatch:
    """From (tokens seen, rows) of each sequence."""
    starts, lengths = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    return RaggedBatch(*map(jnp.asarray, ((np.cumsum(lengths) - lengths).astype(np.int32), lengths, starts)))


def per_head(state, num_heads: int) -> np.ndarray:
    """[H, K, V], as the reference has it, of [Hk, K, E]."""
    num_key_heads, key_size, width = state.shape
    parted = np.asarray(state).reshape(num_key_heads, key_size, num_heads // num_key_heads, -1)
    return np.moveaxis(parted, 2, 1).reshape(num_heads, key_size, num_key_heads * width // num_heads)
