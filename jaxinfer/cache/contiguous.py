"""A preallocated cache: every row owns `max_length` slots, whether it fills them or not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxinfer.cache.kv_dtype import KVScales, scaled, unscaled
from jaxinfer.models import ModelConfig
from pallas_kernels import flash_attention
from pallas_kernels.paged_attention import (
    BitPages,
    InterleavedPages,
    Pages,
    SeparatePages,
    new_pages,
    platform_layout,
    unpack,
)
from pallas_kernels.paged_attention.layout import append, from_stored, to_stored
from pallas_kernels.platform import current_platform

RowPages = SeparatePages | BitPages


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "key_scales", "value_scales", "scales"],
    meta_fields=["dtype"],
)
@dataclass(frozen=True)
class ContiguousCache:
    """Keys and values of B rows, per layer [B, L, Hkv, K]. Jitted programs take it donated and return it.

    What lies at and beyond a row's length is unspecified and never read. A row lies as one page of L tokens would:
    `dtype` is what is stored, which on a CPU may be kept as bits (`BitPages`). int8 has `key_scales` and
    `value_scales`, per layer float32 [B, Hkv, L]; `scales` are a checkpoint's, of fp8.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    key_scales: tuple[jax.Array, ...] = ()
    value_scales: tuple[jax.Array, ...] = ()
    scales: KVScales | None = None
    dtype: str = "float32"

    @property
    def num_rows(self) -> int:
        return self.keys[0].shape[0]

    @property
    def max_length(self) -> int:
        return self.keys[0].shape[1]

    @property
    def layers(self) -> list[RowPages]:
        """Each layer's rows, as pages."""
        if self.keys[0].dtype != self.dtype:
            return [BitPages(k, v, self.dtype) for k, v in zip(self.keys, self.values, strict=True)]
        has_scales = self.key_scales or self.value_scales
        columns = (self.keys, self.values, *((self.key_scales, self.value_scales) if has_scales else ()))
        return [SeparatePages(*arrays) for arrays in zip(*columns, strict=True)]

    def with_layers(self, layers: Sequence[RowPages]) -> "ContiguousCache":
        """The cache with other contents."""
        scales = [(pages.k_scales, pages.v_scales) for pages in layers if isinstance(pages, SeparatePages)]
        scales = [pair for pair in scales if pair[0] is not None]
        return replace(
            self,
            keys=tuple(pages.k for pages in layers),
            values=tuple(pages.v for pages in layers),
            key_scales=tuple(keys for keys, _ in scales),
            value_scales=tuple(values for _, values in scales),
        )


def init_cache(
    config: ModelConfig, num_rows: int, max_length: int, dtype, scales: KVScales | None = None
) -> ContiguousCache:
    """Zeros: num_rows * max_length * 2 * Hkv * K * num_layers elements of `dtype`, and int8's scales."""
    name = jnp.dtype(dtype).name
    layout = "bits" if platform_layout(current_platform(), name) == "bits" else "separate"
    shape = (num_rows, max_length, config.num_kv_heads, config.head_dim)
    empty = ContiguousCache((), (), scales=jax.device_put(scales), dtype=name)
    return empty.with_layers([_rows(new_pages(*shape, name, layout=layout)) for _ in range(config.num_layers)])


class CachedAttention:
    """`attend` for a forward pass that appends to a contiguous cache and reads it back.

    Rows `rows` of the cache take tokens [B, T] whose positions are `starts + arange(T)`, of which the first
    `lengths` are real. Padding is written nowhere: its index is one past the end and the scatter drops it. What is
    attended to is what is stored, converted to the queries' dtype a layer at a time.
    After the pass, `cache` is the updated cache.
    """

    def __init__(self, cache: ContiguousCache, rows: jax.Array, starts: jax.Array, lengths: jax.Array, num_tokens: int):
        self._before, self._layers = cache, cache.layers
        self._rows, self._starts, self._lengths = rows, starts, lengths
        steps = jnp.arange(num_tokens)
        is_real = steps < lengths[:, None]
        self._slots = jnp.where(is_real, starts[:, None] + steps, cache.max_length + steps)
        self._takes_all_rows = rows.shape[0] == cache.num_rows

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, window: int | None) -> jax.Array:
        q, k, v = scaled(self._before.scales, layer, q, k, v)
        row = jnp.repeat(self._rows, self._slots.shape[1])
        k, v = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
        pages = _rows(append(self._layers[layer], k, v, row, self._slots.reshape(-1), is_unique=True))
        self._layers[layer] = pages
        keys, values = self._read(pages, q.dtype)
        out = flash_attention(
            q, keys, values, query_offset=self._starts, kv_lengths=self._starts + self._lengths, window=window
        )
        return unscaled(self._before.scales, layer, out)

    def _read(self, pages: RowPages, dtype) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, L, Hkv, K] of the rows."""
        if not self._takes_all_rows:
            pages = jax.tree.map(lambda leaf: leaf[self._rows], pages)
        stored = unpack(pages, pages.k.shape[2], pages.k.shape[3])
        k_scales, v_scales = (
            None if scales is None else scales.swapaxes(1, 2) for scales in (stored.k_scales, stored.v_scales)
        )
        return from_stored(stored.k, k_scales, dtype), from_stored(stored.v, v_scales, dtype)

    @property
    def cache(self) -> ContiguousCache:
        return self._before.with_layers(self._layers)


def _rows(pages: Pages) -> RowPages:
    if isinstance(pages, InterleavedPages):
        raise ValueError("a contiguous cache has no interleaved layout")
    return pages


def attend_without_cache(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, window: int | None) -> jax.Array:
    """`attend` for training and scoring: whole sequences [B, T], nothing kept, differentiable."""
    return flash_attention(q, k, v, window=window)


def attend_as_stored(dtype: str, scales: KVScales | None = None) -> Callable[..., jax.Array]:
    """`attend_without_cache` over the keys and values that a cache of `dtype` would give back."""

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, window: int | None) -> jax.Array:
        q, k, v = scaled(scales, layer, q, k, v)
        k, v = (from_stored(*to_stored(x, dtype), q.dtype) for x in (k, v))
        return unscaled(scales, layer, attend_without_cache(layer, q, k, v, window))

    return attend
