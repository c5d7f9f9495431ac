"""Paged cache: a pool of pages, of which a sequence owns as many as its tokens need."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer import parallel
from jaxinfer.cache.kv_dtype import KVScales
from jaxinfer.cache.state import StateCache
from jaxinfer.models import ModelConfig, check_divides
from pallas_kernels import cpu_calls
from pallas_kernels.paged_attention import Pages, PageShape, platform_layout
from pallas_kernels.paged_attention import move_tokens as _move_tokens
from pallas_kernels.paged_attention.layout import dtype_name
from pallas_kernels.platform import current_platform

if TYPE_CHECKING:
    from jaxtyping import Array, Int

PageTables = tuple[jax.Array, ...]  # int32 [S, P] for each group of layers
# From a layer and its pages to what else a policy keeps of each page, None for nothing.
PageLeaves = Callable[[int, Any], Any]


class LeafedPages(NamedTuple):
    """The pages of a layer and what a policy keeps beside them: arrays whose first axis is the pages. They are copied
    and moved together."""

    pages: Any
    leaves: Any


@partial(jax.tree_util.register_dataclass, data_fields=["layers", "scales", "states"], meta_fields=["groups"])
@dataclass(frozen=True)
class PagedCache:
    """Keys and values of all layers: a pytree. Programs take it donated and return it.

    The layout of a page is that of the platform's kernel. Page 0 is the null page: unused entries of page tables point
    to it, and it is never written. `scales` are static scales of a checkpoint, for an fp8 cache. `groups` is the group
    of each layer: layers of one group share page ids, and the page table with that number; () where all are in one.
    Layers that store no keys have None for their pages; `states` are those of recurrent layers, by slot, or what a
    draft carries beside pages of its own.
    """

    layers: tuple[Pages | LeafedPages | None, ...]
    scales: KVScales | None = None
    groups: tuple[int, ...] = ()
    states: StateCache | None = None

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return jax.tree.leaves(self.layers)[0].shape[1]

    def group_of(self, layer: int) -> int:
        """The number of a layer's page table."""
        return self.groups[layer] if self.groups else 0

    @property
    def num_groups(self) -> int:
        return max(self.groups, default=0) + 1

    def of_group(self, group: int) -> tuple[int, ...]:
        """The layers of a group that have pages."""
        layers = (layer for layer, pages in enumerate(self.layers) if pages is not None)
        return tuple(layer for layer in layers if self.group_of(layer) == group)

    @property
    def bare(self) -> PagedCache:
        """The cache without what policies keep beside pages."""
        bare = (pages.pages if isinstance(pages, LeafedPages) else pages for pages in self.layers)
        return replace(self, layers=tuple(bare))

    @property
    def leaves(self) -> tuple[Any, ...]:
        """By layer, what a policy keeps beside its pages; None for nothing."""
        return tuple(pages.leaves if isinstance(pages, LeafedPages) else None for pages in self.layers)

    def with_leafed(self, layers: Sequence[Pages | LeafedPages | None]) -> PagedCache:
        """The cache with those of other layers that have leaves in place of its own."""
        pairs = zip(self.layers, layers, strict=True)
        return replace(self, layers=tuple(new if isinstance(new, LeafedPages) else old for old, new in pairs))

    def first(self, num_layers: int) -> PagedCache:
        """The cache of the first layers."""
        scales = None if self.scales is None else self.scales.first(num_layers)
        states = None if self.states is None else self.states.first(num_layers)
        return PagedCache(self.layers[:num_layers], scales, self.groups[:num_layers], states)

    def with_first(self, part: PagedCache) -> PagedCache:
        """The cache with the first layers' pages replaced. Its states stay: they are of confirmed tokens only."""
        return replace(self, layers=part.layers + self.layers[len(part.layers) :])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PromptPages:
    """Pages of one sequence's prompt in a group of layers, and of what is kept of it.

    Attributes:
      page_table: int32 [P]. num_tokens: int32 scalar, of the prompt. num_dropped: int32 scalar, pages that it loses.
      targets: int32 [Q], the pages that it goes to; unused ones are one past the last page.
    """

    page_table: jax.Array
    num_tokens: jax.Array
    num_dropped: jax.Array
    targets: jax.Array


def page_bytes(config: ModelConfig, page_size: int, dtype, layout: str, mesh: Mesh | None = None) -> int:
    """Bytes of one page in all layers, including padding of the layout; with a mesh, per device."""
    leaves = jax.tree.leaves(abstract_paged_cache(config, 1, page_size, dtype, layout, mesh))
    shapes = (leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape) for leaf in leaves)
    return sum(math.prod(shape) * leaf.dtype.itemsize for shape, leaf in zip(shapes, leaves, strict=True))


def init_paged_cache(
    config: ModelConfig,
    num_pages: int | Sequence[int],
    page_size: int,
    dtype,
    layout: str | None = None,
    mesh: Mesh | None = None,
    scales: KVScales | None = None,
    groups: tuple[int, ...] = (),
    leaves: PageLeaves | None = None,
) -> PagedCache:
    """A zeroed cache, in the platform's layout by default; `num_pages`, `groups` and `leaves` as in
    `abstract_paged_cache`. A CPU takes its memory as pages are written. On a mesh each device holds its own heads, and
    `scales` are replicated. Raises ValueError as `models.check_divides`."""
    layout = layout or platform_layout(current_platform(), dtype, has_values=config.caches_values)
    cache = abstract_paged_cache(config, num_pages, page_size, dtype, layout, mesh, groups, leaves)

    def zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if mesh is None and cpu_calls.can_be_untouched(leaf.dtype):
            return cpu_calls.untouched_zeros(leaf.shape, leaf.dtype)
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, parallel.shortest(sharding.spec))
        return jnp.zeros(leaf.shape, leaf.dtype, device=sharding)

    cache = jax.tree.map(zeros, cache)
    replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return cache if scales is None else replace(cache, scales=jax.device_put(scales, replicated))


def abstract_paged_cache(
    config: ModelConfig,
    num_pages: int | Sequence[int],
    page_size: int,
    dtype,
    layout: str,
    mesh: Mesh | None = None,
    groups: tuple[int, ...] = (),
    leaves: PageLeaves | None = None,
) -> PagedCache:
    """The cache as `jax.ShapeDtypeStruct`s, with shardings if a mesh is given.

    `num_pages` are those of each group, and `groups` the group of each layer, () for one. Each device has the kernel's
    layout for its own heads; the array is their concatenation. Layers for which there are `leaves`, on one device,
    have `LeafedPages`.
    """
    counts = (num_pages,) if isinstance(num_pages, int) else tuple(num_pages)
    if mesh is not None:
        check_divides(mesh, config)
    numbers = groups or (0,) * config.num_layers

    def pages(layer: int) -> Any:
        if not config.caches_keys(layer):
            return None
        heads = (config.num_kv_heads_of(layer), config.head_dim_of(layer))
        layer_pages = _abstract_pages(config, heads, counts[numbers[layer]], page_size, dtype, layout, mesh)
        own = None if leaves is None else leaves(layer, layer_pages)
        return layer_pages if own is None else LeafedPages(layer_pages, own)

    return PagedCache(tuple(map(pages, range(config.num_layers))), groups=groups)


def _abstract_pages(
    config: ModelConfig,
    heads: tuple[int, int],
    num_pages: int,
    page_size: int,
    dtype,
    layout: str,
    mesh: Mesh | None,
):
    """Pages of one layer with so many heads of this width."""
    shape = PageShape(num_pages, page_size, *heads, dtype_name(dtype), config.caches_values)
    if mesh is None:
        return shape.abstract(layout)
    num_parts = parallel.axis_size(mesh, "kv_heads") if config.caches_values else 1
    own_tokens = page_size // parallel.axis_size(mesh, "tokens")
    local = replace(shape, num_kv_heads=heads[0] // num_parts, page_size=own_tokens).abstract(layout)

    def concatenated(leaf, spec: PartitionSpec):
        sizes = tuple(size * mesh.shape[axis] if axis else size for size, axis in zip(leaf.shape, spec, strict=True))
        return jax.ShapeDtypeStruct(sizes, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(concatenated, local, parallel.page_specs(mesh, local))


def move_tokens(
    cache: PagedCache,
    page_tables: PageTables | Int[Array, "S P"],
    sources: Int[Array, "S N"],
    destinations: Int[Array, "S N"],
    *,
    mesh: Mesh | None = None,
) -> PagedCache:
    """Copies tokens from positions `sources` to positions `destinations` int32 [S, N] of the same sequences, in all
    layers, as `pallas_kernels.paged_attention.move_tokens`. page_tables int32 [S, P] as in `PagedAttention`; pad with
    P * page size. Donate the cache: it is updated in place. On a mesh each device moves its own heads."""
    tables = tables_by_group(page_tables, cache)

    def move(layer: int, pages: Pages | LeafedPages | None) -> Pages | None:
        if pages is None:
            return None
        if isinstance(pages, LeafedPages):
            raise NotImplementedError("tokens of pages with leaves are not moved")
        page_table = tables[cache.group_of(layer)]
        if mesh is None:
            return _move_tokens(pages, page_table, sources, destinations)
        # Without shard_map, the compiler would exchange tokens between devices.
        specs = parallel.page_specs(mesh, pages)
        replicated = (PartitionSpec(),) * 3
        moved = jax.shard_map(_move_tokens, mesh=mesh, in_specs=(specs, *replicated), out_specs=specs)
        return moved(pages, page_table, sources, destinations)

    return replace(cache, layers=tuple(move(layer, pages) for layer, pages in enumerate(cache.layers)))


def tables_by_group(page_tables: PageTables | jax.Array, cache: PagedCache) -> PageTables:
    """A page table for each group. Raises ValueError where there are others."""
    tables = page_tables if isinstance(page_tables, tuple) else (page_tables,)
    if len(tables) < cache.num_groups:
        raise ValueError(f"{len(tables)} page tables for a cache of {cache.num_groups} groups of layers")
    return tables


def visible_tables(
    cache: PagedCache, page_tables: PageTables, ends: jax.Array, lengths: jax.Array
) -> tuple[PageTables, Any]:
    """Page tables and kv_lengths int32 [S] of sequences that have `ends` int32 [S] tokens after the pass, of which
    `lengths` are new.

    Where prompts lose pages, the last of `page_tables`, int32 [S, groups], are their numbers: tables begin after them,
    and lengths, then a tuple by group, are without them.
    """
    return (page_tables, ends) if len(page_tables) == cache.num_groups else _shorter(cache, page_tables, ends, lengths)


def _shorter(cache: PagedCache, page_tables: PageTables, ends: jax.Array, lengths: jax.Array) -> tuple[PageTables, Any]:
    *tables, num_dropped = page_tables
    lost = jnp.where((lengths > 0)[:, None], num_dropped * cache.page_size, ends[:, None])
    return tuple(tables), tuple((ends[:, None] - lost).T)
