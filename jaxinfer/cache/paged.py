"""Paged cache: a pool of pages, of which a sequence owns as many as its tokens need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer import parallel
from jaxinfer.cache.kv_dtype import KVScales, divide_by_scales, multiply_by_scales, scales_of_layer
from jaxinfer.cache.moved_sinks import MovedSinks, move_sinks
from jaxinfer.cache.state import StateAttention, StateCache, StateOptions
from jaxinfer.models import ModelConfig, check_divides
from jaxinfer.models.indexer import Choice, attend_to_chosen
from pallas_kernels.paged_attention import (
    InterleavedPages,
    PagedSpec,
    Pages,
    PageShape,
    Schedule,
    make_schedule,
    make_spec,
    paged_attention,
    platform_layout,
)
from pallas_kernels.paged_attention import move_tokens as _move_tokens
from pallas_kernels.paged_attention.layout import append, token_keys
from pallas_kernels.paged_attention.reference import token_places, write_places
from pallas_kernels.platform import current_platform
from pallas_kernels.recurrence import RaggedBatch

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

PageTables = tuple[jax.Array, ...]  # int32 [S, P] for each group of layers


@partial(jax.tree_util.register_dataclass, data_fields=["layers", "scales", "states"], meta_fields=["groups"])
@dataclass(frozen=True)
class PagedCache:
    """Keys and values of all layers: a pytree. Programs take it donated and return it.

    The layout of a page is that of the platform's kernel. Page 0 is the null page: unused entries of page tables point
    to it, and it is never written. `scales` are static scales of a checkpoint, for an fp8 cache. `groups` is the group
    of each layer: layers of one group share page ids, and the page table with that number; () where all are in one.
    Layers that store no keys have None for their pages; `states` are those of recurrent layers, by slot.
    """

    layers: tuple[Pages | None, ...]
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

    def first(self, num_layers: int) -> PagedCache:
        """The cache of the first layers."""
        scales = None if self.scales is None else self.scales.first(num_layers)
        states = None if self.states is None else self.states.first(num_layers)
        return PagedCache(self.layers[:num_layers], scales, self.groups[:num_layers], states)

    def with_first(self, part: PagedCache) -> PagedCache:
        """The cache with the first layers' pages replaced. Its states stay: they are of confirmed tokens only."""
        return replace(self, layers=part.layers + self.layers[len(part.layers) :])


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
) -> PagedCache:
    """A zeroed cache, in the platform's layout by default; `num_pages` and `groups` as in `abstract_paged_cache`. On a
    mesh each device holds its own heads, and `scales` are replicated. Raises ValueError as `models.check_divides`."""
    layout = layout or platform_layout(current_platform(), dtype, has_values=config.caches_values)
    cache = abstract_paged_cache(config, num_pages, page_size, dtype, layout, mesh, groups)

    def zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
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
) -> PagedCache:
    """The cache as `jax.ShapeDtypeStruct`s, with shardings if a mesh is given.

    `num_pages` are those of each group, and `groups` the group of each layer, () for one. Each device has the kernel's
    layout for its own heads; the array is their concatenation.
    """
    counts = (num_pages,) if isinstance(num_pages, int) else tuple(num_pages)
    if mesh is not None:
        check_divides(mesh, config)
    numbers = groups or (0,) * config.num_layers

    def pages(layer: int) -> Any:
        if not config.caches_keys(layer):
            return None
        heads = (config.num_kv_heads_of(layer), config.head_dim_of(layer))
        return _abstract_pages(config, heads, counts[numbers[layer]], page_size, dtype, layout, mesh)

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
    shape = PageShape(num_pages, page_size, *heads, jnp.dtype(dtype).name, config.caches_values)
    if mesh is None:
        return shape.abstract(layout)
    num_parts = parallel.axis_size(mesh, "kv_heads") if config.caches_values else 1
    local = replace(shape, num_kv_heads=heads[0] // num_parts).abstract(layout)

    def concatenated(leaf, spec: PartitionSpec):
        sizes = tuple(size * num_parts if axis else size for size, axis in zip(leaf.shape, spec, strict=True))
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
    tables = _by_group(page_tables, cache)

    def move(layer: int, pages: Pages | None) -> Pages | None:
        if pages is None:
            return None
        page_table = tables[cache.group_of(layer)]
        if mesh is None:
            return _move_tokens(pages, page_table, sources, destinations)
        # Without shard_map, the compiler would exchange tokens between devices.
        specs = parallel.page_specs(mesh, pages)
        replicated = (PartitionSpec(),) * 3
        moved = jax.shard_map(_move_tokens, mesh=mesh, in_specs=(specs, *replicated), out_specs=specs)
        return moved(pages, page_table, sources, destinations)

    return replace(cache, layers=tuple(move(layer, pages) for layer, pages in enumerate(cache.layers)))


class PagedAttention:
    """`attend` for a ragged batch of tokens [T] of S sequences: appends to the pages and attends to them.

    Arguments as in `pallas_kernels.paged_attention`: page_tables int32 [S, P], one for each group of the cache's
    layers, or the only one (entries of pages behind a group's window may be anything); query_starts, query_lengths and
    kv_lengths int32 [S]; ancestors uint32 [T] or None. `max_query_length` and `is_uniform` are static. On a mesh,
    `jax.shard_map` runs the kernel on each device's own heads, since the compiler cannot partition it. After the pass,
    `cache` is the updated cache.

    `appends_first` is static: sequences may read pages that others of the same pass write to, so that all is stored
    before anything is read. `moved` are sinks of layers that are rotated first, to pages that `page_tables` list.
    """

    def __init__(
        self,
        cache: PagedCache,
        page_tables: PageTables | jax.Array,
        query_starts: jax.Array,
        query_lengths: jax.Array,
        kv_lengths: jax.Array,
        *,
        max_query_length: int | None = None,
        ancestors: jax.Array | None = None,
        is_uniform: bool = False,
        appends_first: bool = False,
        moved: dict[int, MovedSinks] | None = None,
        mesh: Mesh | None = None,
    ):
        self._before, self._layers, self._moved = cache, list(cache.layers), moved or {}
        tables = _by_group(page_tables, cache)
        self._inputs = [_RaggedInputs(one, query_lengths, kv_lengths, query_starts, ancestors) for one in tables]
        self._options = (max_query_length, is_uniform, appends_first, mesh)
        self._schedules: list[dict[PagedSpec, Schedule]] = [{} for _ in tables]

    def __call__(
        self,
        layer: int,
        q: Float[Array, "T Hq K"],
        k: Float[Array, "T Hkv K"],
        v: Float[Array, "T Hkv W"],
        *args,
        **kwargs,
    ) -> Float[Array, "T Hq W"]:
        attend = self.of_layer(layer)
        out = attend(q, k, v, *args, **kwargs)
        self.update(layer, attend.state)
        return out

    def of_layer(self, layer: int) -> LayerAttention:
        """The attention of one layer."""
        scales = scales_of_layer(self._before.scales, layer)
        group = self._before.group_of(layer)
        inputs = self._inputs[group]._replace(moved=self._moved.get(layer))
        # A layer without attention has None for its pages, and does not call.
        return LayerAttention(self._layers[layer], scales, inputs, self._schedules[group], *self._options)

    def update(self, layer: int, state: Pages) -> None:
        """Takes over what a layer has stored."""
        self._layers[layer] = state

    @property
    def cache(self) -> PagedCache:
        return replace(self._before, layers=tuple(self._layers))

    def commit(self, num_committed: jax.Array) -> PagedCache:
        """The cache, whatever rows of a sequence are kept: the next ones overwrite the keys of the others."""
        del num_committed
        return self.cache


def attend_ragged(
    cache: PagedCache,
    page_tables: PageTables,
    query_starts: jax.Array,
    query_lengths: jax.Array,
    kv_lengths: jax.Array,
    *,
    max_query_length: int | None = None,
    ancestors: jax.Array | None = None,
    is_uniform: bool = False,
    appends_first: bool = False,
    moved: dict[int, MovedSinks] | None = None,
    max_deferred: int | None = None,
    mesh: Mesh | None = None,
) -> Any:
    """A `PagedAttention`, or where the cache has states a `StateAttention` over one; arguments are the former's.

    With `max_deferred`, a static bound of the rows of a sequence, states stay as they are until `commit`, which returns
    the updated cache. Otherwise that is `cache` after the pass. Sequence s has slot s.
    """
    static: Any = {"max_query_length": max_query_length, "is_uniform": is_uniform}
    ragged = (query_starts, query_lengths, kv_lengths)
    options: Any = {**static, "appends_first": appends_first, "moved": moved, "mesh": mesh}
    paged = PagedAttention(cache, page_tables, *ragged, ancestors=ancestors, **options)
    if cache.states is None:
        return paged
    options = StateOptions(**static)
    if max_deferred is not None:
        options = StateOptions(max_deferred, max_query_length=max_deferred, defers=True, is_uniform=is_uniform)
    batch = RaggedBatch(query_starts, query_lengths, kv_lengths - query_lengths)
    return StateAttention(paged, cache.states, batch, options)


@jax.tree_util.register_pytree_node_class
class LayerAttention:
    """One layer of `PagedAttention`: a pytree. `state` are its pages, and after a call what they hold then.

    Layers of a group share `schedules`. One that is missing is added, for layers that run in the same trace.
    """

    def __init__(
        self,
        pages: Any,
        scales: KVScales | None,
        inputs: _RaggedInputs,
        schedules: dict[PagedSpec, Schedule],
        max_query_length: int | None,
        is_uniform: bool,
        appends_first: bool,
        mesh: Mesh | None,
    ):
        self.state, self._scales, self._inputs, self._schedules = pages, scales, inputs, schedules
        self._options = {"max_query_length": max_query_length, "is_uniform": is_uniform}
        self._appends_first, self._mesh = appends_first, mesh

    def tree_flatten(self):
        children = (self.state, self._scales, self._inputs, tuple(self._schedules.values()))
        return children, (tuple(self._schedules), *self._options.values(), self._appends_first, self._mesh)

    @classmethod
    def tree_unflatten(cls, static, children) -> LayerAttention:
        specs, *options = static
        pages, scales, inputs, schedules = children
        found = dict(zip(specs, schedules, strict=True))
        return cls(pages, scales, inputs, found, *options)

    def __call__(
        self,
        q: Float[Array, "T Hq K"],
        k: Float[Array, "T Hkv K"],
        v: Float[Array, "T Hkv W"],
        window: int | None,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: Float[Array, " Hq"] | None = None,
        choice: Choice | None = None,
    ) -> Float[Array, "T Hq W"]:
        if choice is not None:
            return self._attend_to_chosen(q, k, v, choice, scale)
        q, k, v = divide_by_scales(self._scales, q, k, v)
        options = {**self._options, "window": window, "scale": scale, "soft_cap": soft_cap}
        attend, operands = partial(_attend, options, self._appends_first), (q, k, v, self.state, sinks)
        if self._mesh is None:
            schedule = self._schedule(options, *operands)
        else:
            specs = _specs(self._mesh, self.state, sinks)
            schedule = self._schedule(options, *parallel.local_shapes(self._mesh, operands, specs))
            attend = jax.shard_map(
                attend,
                mesh=self._mesh,
                in_specs=(*specs, PartitionSpec(), PartitionSpec()),
                out_specs=(specs[0], specs[3]),
                check_vma=False,  # a Pallas call does not declare over which axes its results vary
            )
        out, self.state = attend(*operands, self._inputs, schedule)
        return multiply_by_scales(self._scales, out)

    def _attend_to_chosen(self, q: jax.Array, k: jax.Array, v: jax.Array, choice: Choice, scale: float | None):
        """Stores keys with their index keys [T, 1, K + Di], and attends to the chosen tokens."""
        inputs, pages = self._inputs, self.state
        if self._mesh is not None or inputs.ancestors is not None or self._scales is not None or scale is None:
            raise NotImplementedError(
                "attention to chosen tokens has no mesh, no trees of drafts and no scales of keys"
            )
        if isinstance(pages, InterleavedPages) or getattr(pages, "k_scales", None) is not None:
            raise NotImplementedError("attention to chosen tokens reads no interleaved pages and no int8")
        spec = make_spec(q, k, v, pages, inputs.page_table, **self._options)
        places = token_places(spec, inputs.query_starts, inputs.query_lengths, inputs.kv_lengths)
        stored: Any = append(pages, k, v, *write_places(spec, inputs.page_table, places))

        def read(row: jax.Array, at: jax.Array) -> jax.Array:
            return token_keys(stored, inputs.page_table[row, at // spec.page_size], at % spec.page_size)[:, 0]

        self.state, positions = stored, jnp.where(places.is_real, places.position, 0)
        sizes: Any = {"value_dim": v.shape[-1], "scale": scale}
        return attend_to_chosen(q, choice, read, spec.max_kv_length, places.sequence, positions, **sizes)

    def _schedule(self, options: dict[str, Any], q: Any, k: Any, v: Any, pages: Any, sinks: Any) -> Schedule:
        """The schedule shared by layers with these options, from the shapes on one device."""
        inputs = self._inputs
        spec = make_spec(q, k, v, pages, inputs.page_table, sinks=sinks, ancestors=inputs.ancestors, **options)
        if spec not in self._schedules:
            self._schedules[spec] = make_schedule(
                spec, inputs.page_table, inputs.query_lengths, inputs.kv_lengths, query_starts=inputs.query_starts
            )
        return self._schedules[spec]


def _by_group(page_tables: PageTables | jax.Array, cache: PagedCache) -> PageTables:
    """A page table for each group. Raises ValueError where there are others."""
    tables = page_tables if isinstance(page_tables, tuple) else (page_tables,)
    if len(tables) < cache.num_groups:
        raise ValueError(f"{len(tables)} page tables for a cache of {cache.num_groups} groups of layers")
    return tables


class _RaggedInputs(NamedTuple):
    """Arrays of the ragged batch, replicated on a mesh."""

    page_table: jax.Array
    query_lengths: jax.Array
    kv_lengths: jax.Array
    query_starts: jax.Array
    ancestors: jax.Array | None = None
    moved: MovedSinks | None = None


def _attend(
    options: dict[str, Any],
    appends_first: bool,
    q,
    k,
    v,
    pages: Pages,
    sinks,
    inputs: _RaggedInputs,
    schedule: Schedule,
):
    moved = inputs.moved
    # Kernels may write a page while they read it (then with the bytes that it has), and sinks may be new.
    if appends_first and (schedule.implementation != "xla" or moved is not None):
        pages = _appended(schedule.spec, pages, k, v, inputs)
    if moved is not None:
        pages = move_sinks(pages, moved, k.shape[-2], k.shape[-1])
    return paged_attention(
        q,
        k,
        v,
        pages,
        inputs.page_table,
        inputs.query_lengths,
        inputs.kv_lengths,
        query_starts=inputs.query_starts,
        sinks=sinks,
        ancestors=inputs.ancestors,
        schedule=schedule,
        **options,
    )


def _appended(spec: PagedSpec, pages: Pages, k: jax.Array, v: jax.Array, inputs: _RaggedInputs) -> Pages:
    """The pages with the new tokens of every sequence."""
    places = token_places(spec, inputs.query_starts, inputs.query_lengths, inputs.kv_lengths)
    return append(pages, k, v, *write_places(spec, inputs.page_table, places), by_rows=True)


def _specs(mesh: Mesh, pages: Pages, sinks: jax.Array | None) -> tuple[Any, ...]:
    """`PartitionSpec`s of q, k, v, the pages of a layer, and its sinks."""
    has_values = isinstance(pages, InterleavedPages) or pages.v is not None
    names = ("heads", "kv_heads" if has_values else None)
    queries, keys = (parallel.spec(mesh, (None, name, None)) for name in names)
    sink_spec = None if sinks is None else parallel.spec(mesh, ("heads",))
    return queries, keys, keys, parallel.page_specs(mesh, pages), sink_spec
