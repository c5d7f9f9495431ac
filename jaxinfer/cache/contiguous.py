"""Contiguous cache: `max_length` preallocated token slots per row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxinfer.cache.kv_dtype import KVScales, divide_by_scales, multiply_by_scales, scales_of_layer
from jaxinfer.cache.state import LayerStates, StateCache, StateOptions, init_state_cache
from jaxinfer.models import ModelConfig
from jaxinfer.models.indexer import Choice, attend_to_chosen
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
from pallas_kernels.paged_attention.layout import (
    append,
    dtype_name,
    from_stored,
    key_dtype,
    output_of,
    queries_for,
    to_stored,
    token_keys,
    value_dtype,
)
from pallas_kernels.platform import current_platform
from pallas_kernels.recurrence import RaggedBatch, RecurrentTokens

if TYPE_CHECKING:
    from jaxtyping import Array, Float

RowPages = SeparatePages | BitPages


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "key_scales", "value_scales", "scales", "states"],
    meta_fields=["dtype", "attention_layers"],
)
@dataclass(frozen=True)
class ContiguousCache:
    """Keys and values of B rows: a pytree. Programs take it donated and return it.

    Entries at and beyond a row's length are unspecified and never read. A row has the layout of one page of L tokens.

    Attributes:
      keys, values: per layer [B, L, Hkv, K]; no values in latent attention, where keys include them.
      key_scales, value_scales: of int8 and int4, per layer float32 [B, Hkv, L].
      scales: static scales of a checkpoint, for fp8.
      dtype: the stored dtype; on a CPU its bits may be stored as integers (`BitPages`).
      states: of recurrent layers, a slot per row; None if the model has none.
      attention_layers: the layers whose keys are stored, in order; empty for all.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    key_scales: tuple[jax.Array, ...] = ()
    value_scales: tuple[jax.Array, ...] = ()
    scales: KVScales | None = None
    dtype: str = "float32"
    states: StateCache | None = None
    attention_layers: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return self.keys[0].shape[0]

    @property
    def max_length(self) -> int:
        return self.keys[0].shape[1]

    @property
    def layers(self) -> list[RowPages]:
        """The rows of each layer, as pages of L tokens."""
        columns = (column or (None,) * len(self.keys) for column in (self.values, self.key_scales, self.value_scales))
        arrays = zip(self.keys, *columns, strict=True)
        if not self.key_scales and self.keys[0].dtype != self.dtype:
            return [BitPages(keys, values, self.dtype) for keys, values, *_ in arrays]
        return [SeparatePages(*layer) for layer in arrays]

    def with_layers(self, layers: Sequence[RowPages]) -> ContiguousCache:
        """The cache with the contents of `layers`."""

        def column(name: str) -> tuple[jax.Array, ...]:
            arrays = (getattr(pages, name, None) for pages in layers)
            return tuple(array for array in arrays if array is not None)

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
    """A zeroed cache: num_rows * max_length * 2 * Hkv * K elements of `dtype` for each layer that stores keys, and the
    scales of int8."""
    name = dtype_name(dtype)
    layout = "bits" if platform_layout(current_platform(), name) == "bits" else "separate"
    empty = ContiguousCache((), (), scales=jax.device_put(scales), dtype=name)
    kind = {"layout": layout, "has_values": config.caches_values}
    layers = config.cached_layers
    if not layers:
        raise ValueError(f"{config.architecture} has no layer with attention: a contiguous cache would be empty")
    heads = [(config.num_kv_heads_of(layer), config.head_dim_of(layer)) for layer in layers]
    cache = empty.with_layers([_rows(new_pages(num_rows, max_length, *sizes, name, **kind)) for sizes in heads])
    if not config.recurrent_layers and len(layers) == config.num_layers:
        return cache
    states = init_state_cache(config, num_rows, config.dtype)
    return replace(cache, states=states, attention_layers=layers)


class CachedAttention:
    """`attend` for a forward pass that appends to a contiguous cache and attends to the stored keys and values.

    Tokens [B, T] at positions `starts + arange(T)`, of which the first `lengths` are valid, go to the cache rows
    `rows`. Padding gets an index one past the end, which the scatter drops. Stored keys and values are converted to the
    dtype of the queries one layer at a time. After the pass, `cache` is the updated cache.
    """

    def __init__(self, cache: ContiguousCache, rows: jax.Array, starts: jax.Array, lengths: jax.Array, num_tokens: int):
        self._before, self._layers, self._states = cache, cache.layers, cache.states
        self._rows, self._starts, self._lengths = rows, starts, lengths
        steps = jnp.arange(num_tokens)
        is_real = steps < lengths[:, None]
        self._slots = jnp.where(is_real, starts[:, None] + steps, cache.max_length + steps)
        self._has_all_rows = rows.shape[0] == cache.num_rows

    def __call__(
        self,
        layer: int,
        q: Float[Array, "B T Hq K"],
        k: Float[Array, "B T Hkv K"],
        v: Float[Array, "B T Hkv W"],
        window: int | None,
        **options: Any,
    ) -> Float[Array, "B T Hq W"]:
        scales = scales_of_layer(self._before.scales, layer)
        q, k, v = divide_by_scales(scales, q, k, v)
        if self._before.attention_layers:
            layer = self._before.attention_layers.index(layer)
        row = jnp.repeat(self._rows, self._slots.shape[1])
        k, v = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
        pages = _rows(append(self._layers[layer], k, v, row, self._slots.reshape(-1), is_unique=True))
        self._layers[layer] = pages
        if (choice := options.pop("choice", None)) is not None:
            if scales is not None or getattr(pages, "k_scales", None) is not None:
                raise NotImplementedError("attention to chosen tokens reads no int8 and no scales of keys")
            rows, positions = row.reshape(self._slots.shape), self._starts[:, None] + jnp.arange(self._slots.shape[1])
            return _attend_to_chosen(q, choice, pages, rows, positions, v.shape[-1], options["scale"])
        keys, values = self._read(pages, q.dtype)
        value_dim = v.shape[-1]
        out = flash_attention(
            queries_for(q, self._before.dtype),
            keys,
            keys if values is None else values,
            query_offset=self._starts,
            kv_lengths=self._starts + self._lengths,
            window=window,
            **options,
        )[..., :value_dim]
        return multiply_by_scales(scales, output_of(out, self._before.dtype))

    def convolve(self, layer: int, x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        """The convolution of a recurrent layer over x [B, T, C]."""
        states = self._states_of(layer)
        out = states.convolve(x.reshape(-1, x.shape[-1]), weight, bias).reshape(x.shape)
        self._store(layer, states)
        return out

    def recur(self, layer: int, tokens: RecurrentTokens) -> jax.Array:
        """The recurrence of a recurrent layer over tokens [B, T]."""
        states = self._states_of(layer)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tokens)
        out = states.recur(flat).reshape(tokens.v.shape)
        self._store(layer, states)
        return out

    def _states_of(self, layer: int) -> LayerStates:
        """The states of the rows of the pass."""
        state = None if self._states is None else self._states.layers[layer]
        if state is None:
            raise ValueError(f"layer {layer} has no state in this cache")
        num_rows, num_tokens = self._slots.shape
        starts = jnp.arange(num_rows, dtype=jnp.int32) * num_tokens
        batch = RaggedBatch(starts, self._lengths.astype(jnp.int32), self._starts.astype(jnp.int32))
        own = jax.tree.map(lambda leaf: leaf[self._rows], state)
        return LayerStates(own, batch, StateOptions(max_query_length=num_tokens))

    def _store(self, layer: int, states: LayerStates) -> None:
        assert self._states is not None
        layers = list(self._states.layers)
        layers[layer] = jax.tree.map(lambda leaf, new: leaf.at[self._rows].set(new), layers[layer], states.state)
        self._states = StateCache(tuple(layers))

    def _read(self, pages: RowPages, dtype) -> tuple[jax.Array, jax.Array | None]:
        """Keys and values [B, L, Hkv, K] of the rows; values are None if keys include them."""
        if not self._has_all_rows:
            pages = jax.tree.map(lambda leaf: leaf[self._rows], pages)
        stored = unpack(pages, pages.k.shape[2], pages.k.shape[3])
        k_scales, v_scales = (
            None if scales is None else scales.swapaxes(1, 2) for scales in (stored.k_scales, stored.v_scales)
        )
        values = None if stored.v is None else from_stored(stored.v, v_scales, dtype)
        return from_stored(stored.k, k_scales, dtype), values

    @property
    def cache(self) -> ContiguousCache:
        return replace(self._before.with_layers(self._layers), states=self._states)


def _rows(pages: Pages) -> RowPages:
    if isinstance(pages, InterleavedPages):
        raise ValueError("a contiguous cache has no interleaved layout")
    return pages


def _attend_to_chosen(
    q: jax.Array, choice: Choice, pages: RowPages, row: jax.Array, positions: jax.Array, value_dim: int, scale: float
) -> jax.Array:
    """`attend_to_chosen` of q [B, T, Hq, K] over rows [., L, 1, K + Di]; row and positions int32 [B, T]."""
    length = pages.k.shape[1]

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[2:])

    def read(row: jax.Array, at: jax.Array) -> jax.Array:
        return token_keys(pages, jnp.broadcast_to(row, at.shape), at)[:, 0]

    flat_choice = Choice(flat(choice.q), flat(choice.weights), choice.count)
    row, positions = flat(row), jnp.minimum(flat(positions), length - 1)
    sizes: Any = {"value_dim": value_dim, "scale": scale}
    out = attend_to_chosen(flat(q), flat_choice, read, length, row, positions, **sizes)
    return out.reshape(*q.shape[:-1], value_dim)


def attend_without_cache(
    layer: int,
    q: Float[Array, "*rows Hq K"],
    k: Float[Array, "*rows Hkv K"],
    v: Float[Array, "*rows Hkv W"],
    window: int | None,
    **options: Any,
) -> Float[Array, "*rows Hq W"]:
    """`attend` for training and scoring: causal attention over full sequences [B, T], without a cache, differentiable.
    Values may be narrower than keys."""
    if (choice := options.pop("choice", None)) is not None:
        lead = q.shape[:-2]
        row, positions = (jnp.broadcast_to(x, lead) for x in (jnp.arange(lead[0])[:, None], jnp.arange(lead[1])))
        return _attend_to_chosen(q, choice, SeparatePages(k, None), row, positions, v.shape[-1], options["scale"])
    missing = k.shape[-1] - v.shape[-1]
    padded = v if missing == 0 else jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, missing)])
    return flash_attention(q, k, padded, window=window, **options)[..., : v.shape[-1]]


def attend_as_stored(dtype: str, scales: KVScales | None = None) -> Callable[..., jax.Array]:
    """`attend_without_cache` over keys and values rounded as a cache of `dtype` stores them."""

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, window: int | None, **options: Any) -> jax.Array:
        if "choice" in options:
            raise NotImplementedError(
                "attention to chosen tokens is not computed as a cache of another dtype stores it"
            )
        own = scales_of_layer(scales, layer)
        q, k, v = divide_by_scales(own, q, k, v)
        width = v.shape[-1]
        k, v = (
            from_stored(*to_stored(x, dtype_of(dtype)), q.dtype) for x, dtype_of in ((k, key_dtype), (v, value_dtype))
        )
        if width < k.shape[-1]:
            v = k[..., :width]  # keys include the values
        out = attend_without_cache(layer, queries_for(q, dtype), k, v, window, **options)
        return multiply_by_scales(own, output_of(out, dtype))

    return attend
