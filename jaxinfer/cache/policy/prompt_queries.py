"""Mean and covariance of a prompt's queries by head, by which the policy `expected_attention` predicts later queries.

Queries are not stored: at the prompt's end its tokens go through the model once more, in blocks at fixed positions,
over the keys and values that are stored. So the chunks of the prompt do not matter, nor which sequence wrote the pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.cache.kv_dtype import KVScales, scales_of_layer
from jaxinfer.cache.paged import PagedCache
from jaxinfer.cache.policy.scores import FUTURE_POSITIONS, NUM_SINKS, QueryMoments
from jaxinfer.cache.ragged import AttentionByLayer
from jaxinfer.models import Decoder, ModelConfig
from jaxinfer.models.rope import Positions, rotate
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.paged_attention import Pages
from pallas_kernels.paged_attention.layout import from_stored, gather, page_shape
from pallas_kernels.paged_attention.rotation import rotate_back

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

Rotation = tuple[jax.Array, jax.Array]


def prompt_moments(
    decoder: Decoder,
    cache: PagedCache,
    page_tables: tuple[jax.Array, ...],
    tokens: Int[Array, " n"],
    end: jax.Array,
    block_size: int,
) -> tuple[QueryMoments, ...]:
    """For each layer, the moments of the queries at positions below `end`, an int32 scalar. The keys and values of
    these positions are stored in the pages of `page_tables`, int32 [P] for each group of layers. n is a multiple of
    `block_size`.
    """
    config = decoder.config

    def add(number: jax.Array, moments: tuple[QueryMoments, ...]) -> tuple[QueryMoments, ...]:
        start = number * block_size
        positions = start + jnp.arange(block_size)
        queries = PromptQueries(config, moments, positions, end)
        attend = ObservingAttention(cache, page_tables, queries, start, end)
        decoder(lax.dynamic_slice_in_dim(tokens, start, block_size), positions, attend)
        return attend.moments

    layers = range(config.num_layers)
    nothing = tuple(QueryMoments.none(config.num_heads, config.head_dim_of(layer)) for layer in layers)
    return lax.fori_loop(0, -(-end // block_size), add, nothing)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerQueries:
    """Facts that a layer needs of the queries of a pass over tokens of a prompt: a pytree.

    Attributes:
      moments: of the queries before the pass.
      rotation, future: cos and sin at the pass's positions, and at the FUTURE_POSITIONS positions after the prompt;
        None for a layer without RoPE.
      is_counted: bool [T].
    """

    moments: QueryMoments
    rotation: Rotation | None
    future: Rotation | None
    is_counted: jax.Array

    def add(self, q: Float[Array, "T Hq K"]) -> QueryMoments:
        """The moments with those of the pass's queries, which are rotated."""
        q = q.astype(jnp.float32)
        if self.rotation is not None:
            cos, sin = self.rotation
            size = cos * cos + sin * sin  # YaRN multiplies cos and sin by a factor
            q = rotate(q, cos / size, -sin / size)
        return self.moments.add(q, self.is_counted)


class PromptQueries:
    """The queries of a pass over tokens at int32 `positions` [T] of a prompt. Queries at positions NUM_SINKS to end - 1
    enter the moments: sinks attract all queries, and positions from `end` on are padding. `moments`: of each layer,
    before the pass."""

    def __init__(self, config: ModelConfig, moments: tuple[QueryMoments, ...], positions: jax.Array, end: jax.Array):
        self._config, self.moments, self._positions = config, moments, Positions(positions)
        self._future = Positions(end + jnp.arange(FUTURE_POSITIONS))
        self._is_counted = (positions >= NUM_SINKS) & (positions < end)

    def of_layer(self, layer: int) -> LayerQueries:
        """Those of one layer."""
        rotations = None, None
        if (rope := self._config.rope_of(layer)) is not None:
            rotations = self._positions.rotation(rope), self._future.rotation(rope)
        return LayerQueries(self.moments[layer], *rotations, self._is_counted)


class ObservingAttention(AttentionByLayer):
    """`attend` for tokens of a prompt from position `start` on. It reads keys and values up to `end` from the cache,
    writes none, and adds the queries of the pass to `moments`."""

    def __init__(
        self,
        cache: PagedCache,
        page_tables: tuple[jax.Array, ...],
        queries: PromptQueries,
        start: jax.Array,
        end: jax.Array,
    ):
        self._cache, self._tables, self._queries, self._range = cache, page_tables, queries, (start, end)
        self._moments = list(queries.moments)

    def of_layer(self, layer: int) -> ObservingLayer:
        """The attention of one layer."""
        scales, table = scales_of_layer(self._cache.scales, layer), self._tables[self._cache.group_of(layer)]
        pages: Any = self._cache.layers[layer]
        return ObservingLayer(self._queries.of_layer(layer), pages, scales, table, self._range)

    def update(self, layer: int, state: QueryMoments) -> None:
        """Takes over a layer's moments."""
        self._moments[layer] = state

    @property
    def moments(self) -> tuple[QueryMoments, ...]:
        return tuple(self._moments)


@jax.tree_util.register_pytree_node_class
class ObservingLayer:
    """One layer of `ObservingAttention`: a pytree. `state` are its moments after a call."""

    def __init__(
        self,
        queries: LayerQueries,
        pages: Pages,
        scales: KVScales | None,
        page_table: jax.Array,
        among: tuple[jax.Array, jax.Array],
    ):
        self._children = queries, pages, scales, page_table, among
        self.state: Any = queries.moments

    def tree_flatten(self):
        return self._children, None

    @classmethod
    def tree_unflatten(cls, static, children) -> ObservingLayer:
        return cls(*children)

    def __call__(
        self,
        q: Float[Array, "T Hq K"],
        k: Float[Array, "T Hkv K"],
        v: Float[Array, "T Hkv K"],
        window: int | None,
        **options: Any,
    ) -> Float[Array, "T Hq K"]:
        queries, pages, scales, page_table, (start, end) = self._children
        self.state = queries.add(q)
        keys, values = stored_prompt(pages, page_table, k.shape[1:], scales, q.dtype)
        places = {"query_offset": start[None], "kv_lengths": end[None]}
        return flash_attention(q[None], keys[None], values[None], window=window, **places, **options)[0]


def stored_prompt(
    pages: Pages, page_table: Int[Array, " P"], heads: tuple[int, ...], scales: KVScales | None, dtype: Any
) -> tuple[Float[Array, "n Hkv K"], Float[Array, "n Hkv K"]]:
    """Keys and values in the pages of one layer, in `dtype`, dequantized, and without the rotation that int4 storage
    adds. Keys still have RoPE.
    `heads` are the number of key heads and their width."""
    shape = page_shape(pages, *heads)
    stored = gather(pages, page_table, shape)

    def read(values: Any, of_tokens: Any, of_heads: Any, stored_dtype: str) -> jax.Array:
        factors = None if of_tokens is None else of_tokens.swapaxes(1, 2).reshape(-1, shape.num_kv_heads)
        rows = from_stored(values.reshape(-1, *values.shape[2:]), factors)
        rows = rotate_back(rows) if stored_dtype == "int4" else rows
        return (rows if of_heads is None else rows * of_heads[:, None]).astype(dtype)

    of_keys, of_values = (None, None) if scales is None else (scales.keys, scales.values)
    keys = read(stored.k, stored.k_scales, of_keys, shape.key_dtype)
    return keys, read(stored.v, stored.v_scales, of_values, shape.value_dtype)
