"""A preallocated cache: every row owns `max_length` slots, whether it fills them or not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

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
    """Keys and values of B rows, per layer [B, L, Hkv, K]; no values where keys hold them (latent attention). Jitted
    programs take it donated and return it.

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
        columns = (column or (None,) * len(self.keys) for column in (self.values, self.key_scales, self.value_scales))
        arrays = zip(self.keys, *columns, strict=True)
        if self.keys[0].dtype != self.dtype:
            return [BitPages(keys, values, self.dtype) for keys, values, *_ in arrays]
        return [SeparatePages(*layer) for layer in arrays]

    def with_layers(self, layers: Sequence[RowPages]) -> "ContiguousCache":
        """The cache with other contents."""

        def column(name: str) -> tuple[jax.Array, ...]:
            found = (getattr(pages, name, None) for pages in layers)
            return tuple(array for array in found if array is not None)

        return replace(
            self,
            keys=column("k"),
            values=column("v"),
            key_scales=column("k_scales"),
            value_scales=column("v_scales"),
        )


def init_cache(
    config: ModelConfig, num_rows: int, max_length: int, dtype, scales: KVScales | None = None
) -> ContiguousCache:
    """Zeros: num_rows * max_length * 2 * Hkv * K * num_layers elements of `dtype`, and int8's scales."""
    name = jnp.dtype(dtype).name
    layout = "bits" if platform_layout(current_platform(), name) == "bits" else "separate"
    shape = (num_rows, max_length, config.num_kv_heads, config.head_dim)
    empty = ContiguousCache((), (), scales=jax.device_put(scales), dtype=name)
    kind = {"layout": layout, "has_values": config.caches_values}
    return empty.with_layers([_rows(new_pages(*shape, name, **kind)) for _ in range(config.num_layers)])


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

    def __call__(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, window: int | None, **options: Any
    ) -> jax.Array:
        q, k, v = scaled(self._before.scales, layer, q, k, v)
        row = jnp.repeat(self._rows, self._slots.shape[1])
        k, v = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
        pages = _rows(append(self._layers[layer], k, v, row, self._slots.reshape(-1), is_unique=True))
        self._layers[layer] = pages
        keys, values = self._read(pages, q.dtype)
        value_dim = v.shape[-1]
        out = flash_attention(
            q,
            keys,
            keys if values is None else values,
            query_offset=self._starts,
            kv_lengths=self._starts + self._lengths,
            window=window,
            **options,
        )[..., :value_dim]
        return unscaled(self._before.scales, layer, out)

    def _read(self, pages: RowPages, dtype) -> tuple[jax.Array, jax.Array | None]:
        """Keys and values [B, L, Hkv, K] of the rows; None where keys hold the values."""
        if not self._takes_all_rows:
            pages = jax.tree.map(lambda leaf: leaf[self._rows], pages)
        stored = unpack(pages, pages.k.shape[2], pages.k.shape[3])
        k_scales, v_scales = (
            None if scales is None else scales.swapaxes(1, 2) for scales in (stored.k_scales, stored.v_scales)
        )
        values = None if stored.v is None else from_stored(stored.v, v_scales, dtype)
        return from_stored(stored.k, k_scales, dtype), values

    @property
    def cache(self) -> ContiguousCache:
        return self._before.with_layers(self._layers)


def _rows(pages: Pages) -> RowPages:
    if isinstance(pages, InterleavedPages):
        raise ValueError("a contiguous cache has no interleaved layout")
    return pages


def attend_without_cache(
    layer: int, q: jax.Array, k: jax.Array, v: jax.Array, window: int | None, **options: Any
) -> jax.Array:
    """`attend` for training and scoring: whole sequences [B, T], nothing kept, differentiable. Values may be narrower
    than keys."""
    missing = k.shape[-1] - v.shape[-1]
    wide = v if missing == 0 else jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, missing)])
    return flash_attention(q, k, wide, window=window, **options)[..., : v.shape[-1]]


def attend_as_stored(dtype: str, scales: KVScales | None = None) -> Callable[..., jax.Array]:
    """`attend_without_cache` over the keys and values that a cache of `dtype` would give back."""

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, window: int | None, **options: Any) -> jax.Array:
        q, k, v = scaled(scales, layer, q, k, v)
        width = v.shape[-1]
        k, v = (from_stored(*to_stored(x, dtype), q.dtype) for x in (k, v))
        if width < k.shape[-1]:
            v = k[..., :width]  # keys hold the values
        return unscaled(scales, layer, attend_without_cache(layer, q, k, v, window, **options))

    return attend
