"""A preallocated cache: every row owns `max_length` slots, whether it fills them or not."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxinfer.models import ModelConfig
from pallas_kernels import flash_attention


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ContiguousCache:
    """Keys and values of B rows, per layer [B, L, Hkv, K]. Jitted programs take it donated and return it.

    What lies at and beyond a row's length is unspecified and never read.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    @property
    def num_rows(self) -> int:
        return self.keys[0].shape[0]

    @property
    def max_length(self) -> int:
        return self.keys[0].shape[1]


def init_cache(config: ModelConfig, num_rows: int, max_length: int, dtype) -> ContiguousCache:
    """Zeros: num_rows * max_length * 2 * Hkv * K * num_layers elements."""
    shape = (num_rows, max_length, config.num_kv_heads, config.head_dim)
    make = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))  # noqa: E731
    return ContiguousCache(keys=make(), values=make())


class CachedAttention:
    """`attend` for a forward pass that appends to a contiguous cache and reads it back.

    Rows `rows` of the cache take tokens [B, T] whose positions are `starts + arange(T)`, of which the first
    `lengths` are real. Padding is written nowhere: its index is one past the end and the scatter drops it.
    After the pass, `cache` is the updated cache.
    """

    def __init__(self, cache: ContiguousCache, rows: jax.Array, starts: jax.Array, lengths: jax.Array, num_tokens: int):
        self._keys, self._values = list(cache.keys), list(cache.values)
        self._rows, self._starts, self._lengths = rows, starts, lengths
        steps = jnp.arange(num_tokens)
        is_real = steps < lengths[:, None]
        self._slots = jnp.where(is_real, starts[:, None] + steps, cache.max_length + steps)
        self._takes_all_rows = rows.shape[0] == cache.num_rows

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, window: int | None) -> jax.Array:
        where = (self._rows[:, None], self._slots)
        keys = self._keys[layer] = self._keys[layer].at[where].set(k, mode="drop", unique_indices=True)
        values = self._values[layer] = self._values[layer].at[where].set(v, mode="drop", unique_indices=True)
        if not self._takes_all_rows:
            keys, values = keys[self._rows], values[self._rows]
        return flash_attention(
            q, keys, values, query_offset=self._starts, kv_lengths=self._starts + self._lengths, window=window
        )

    @property
    def cache(self) -> ContiguousCache:
        return ContiguousCache(keys=tuple(self._keys), values=tuple(self._values))


def attend_without_cache(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, window: int | None) -> jax.Array:
    """`attend` for training and scoring: whole sequences [B, T], nothing kept, differentiable."""
    return flash_attention(q, k, v, window=window)
