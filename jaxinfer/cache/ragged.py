"""Attention of a ragged batch of tokens over a paged cache, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxinfer import parallel
from jaxinfer.cache.kv_dtype import KVScales, divide_by_scales, multiply_by_scales, scales_of_layer
from jaxinfer.cache.moved_sinks import MovedSinks, move_sinks
from jaxinfer.cache.paged import PagedCache, PageTables, tables_by_group
from jaxinfer.cache.state import StateAttention, StateOptions
from jaxinfer.models.indexer import Choice, attend_to_chosen
from pallas_kernels.paged_attention import (
    InterleavedPages,
    PagedSpec,
    PagePart,
    Pages,
    Schedule,
    make_schedule,
    make_spec,
    merge_parts,
    paged_attention,
)
from pallas_kernels.paged_attention.layout import append, token_keys
from pallas_kernels.paged_attention.reference import token_places, write_places
from pallas_kernels.recurrence import RaggedBatch

if TYPE_CHECKING:
    from jaxtyping import Array, Float


class AttentionByLayer:
    """`attend` that has one of its own for each layer."""

    def of_layer(self, layer: int) -> Any:
        """The attention of one layer, whose `state` is what it has stored after a call."""
        raise NotImplementedError

    def update(self, layer: int, state: Any) -> None:
        """Takes over what a layer has stored."""
        raise NotImplementedError

    @property
    def cache(self) -> PagedCache:
        """The updated cache after the pass."""
        raise NotImplementedError

    def commit(self, num_committed: jax.Array) -> PagedCache:
        """The cache, whatever rows of a sequence are kept: the next ones overwrite the keys of the others."""
        del num_committed
        return self.cache

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


class PagedAttention(AttentionByLayer):
    """`attend` for a ragged batch of tokens [T] of S sequences: appends to the pages and attends to them.

    Arguments as in `pallas_kernels.paged_attention`: page_tables int32 [S, P], one for each group of the cache's
    layers, or the only one (entries of pages behind a group's window may be anything); query_starts, query_lengths and
    kv_lengths int32 [S], or a tuple of kv_lengths by group; ancestors uint32 [T] or None. `max_query_length` and
    `is_uniform` are static. On a mesh, `jax.shard_map` runs the kernel on each device's own heads, since the compiler
    cannot partition it. After the pass, `cache` is the updated cache.

    `appends_first` is static: sequences may read pages that others of the same pass write to, so that all is stored
    before anything is read. `moved` are sinks of layers that are rotated first, to pages that `page_tables` list.
    """

    def __init__(
        self,
        cache: PagedCache,
        page_tables: PageTables | jax.Array,
        query_starts: jax.Array,
        query_lengths: jax.Array,
        kv_lengths: jax.Array | tuple[jax.Array, ...],
        *,
        max_query_length: int | None = None,
        ancestors: jax.Array | None = None,
        is_uniform: bool = False,
        appends_first: bool = False,
        moved: dict[int, MovedSinks] | None = None,
        mesh: Mesh | None = None,
    ):
        self._before, self._layers, self._moved = cache, list(cache.layers), moved or {}
        tables = tables_by_group(page_tables, cache)
        lengths = kv_lengths if isinstance(kv_lengths, tuple) else (kv_lengths,) * len(tables)
        self._inputs = [
            _RaggedInputs(table, query_lengths, length, query_starts, ancestors)
            for table, length in zip(tables, lengths, strict=True)
        ]
        self._options = (max_query_length, is_uniform, appends_first, mesh)
        self._schedules: list[dict[PagedSpec, Schedule]] = [{} for _ in tables]

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

    def store(self, layer: int, k: Float[Array, "T Hkv K"], v: Float[Array, "T Hkv W"]) -> None:
        """Appends keys and values to a layer's pages, as a call does, and attends to nothing."""
        attend = self.of_layer(layer)
        attend.store(k, v)
        self.update(layer, attend.state)


def attend_ragged(
    cache: PagedCache,
    page_tables: PageTables,
    query_starts: jax.Array,
    query_lengths: jax.Array,
    kv_lengths: Any,
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
        self.state: Any = pages
        self._scales, self._inputs, self._schedules = scales, inputs, schedules
        self._options = {"max_query_length": max_query_length, "is_uniform": is_uniform}
        self._appends_first, self._mesh = appends_first, mesh

    def tree_flatten(self):
        children = (self.state, self._scales, self._inputs, tuple(self._schedules.values()))
        return children, (tuple(self._schedules), *self._options.values(), self._appends_first, self._mesh)

    @classmethod
    def tree_unflatten(cls, static, children) -> LayerAttention:
        specs, *options = static
        pages, scales, inputs, schedules = children
        by_spec = dict(zip(specs, schedules, strict=True))
        return cls(pages, scales, inputs, by_spec, *options)

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
            out_spec, schedule_spec = specs[0], PartitionSpec()
            if self._num_parts > 1:
                # A step of prompts leaves each device its rows. Those of decode are few: everyone computes all.
                scatters = options["max_query_length"] is None and q.shape[0] % self._num_parts == 0
                attend = partial(_attend_to_part, self._num_parts, scatters, attend)
                out_spec = parallel.spec(self._mesh, ("tokens" if scatters else None, "heads", None))
                schedule_spec = PartitionSpec(parallel.SEQUENCE)
            attend = jax.shard_map(
                attend,
                mesh=self._mesh,
                in_specs=(*specs, PartitionSpec(), schedule_spec),
                out_specs=(out_spec, specs[3]),
                check_vma=False,  # a Pallas call does not declare over which axes its results vary
            )
        out, self.state = attend(*operands, self._inputs, schedule)
        return multiply_by_scales(self._scales, out)

    def store(self, k: Float[Array, "T Hkv K"], v: Float[Array, "T Hkv W"]) -> None:
        """Appends keys and values to the pages."""
        _, k, v = divide_by_scales(self._scales, k, k, v)
        store, operands = _stored, (k, v, self.state)
        if self._mesh is not None:
            _, keys, values, pages, _ = _specs(self._mesh, self.state, None)
            store = partial(store, part=self._num_parts)
            specs = (keys, values, pages, PartitionSpec())
            store = jax.shard_map(store, mesh=self._mesh, in_specs=specs, out_specs=pages, check_vma=False)
        self.state = store(*operands, self._inputs)

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

    @property
    def _num_parts(self) -> int:
        """Devices that divide the tokens of a page."""
        return 1 if self._mesh is None else parallel.axis_size(self._mesh, "tokens")

    def _schedule(self, options: dict[str, Any], q: Any, k: Any, v: Any, pages: Any, sinks: Any) -> Schedule:
        """The schedule shared by layers with these options, from the shapes on one device."""
        inputs, num_parts = self._inputs, self._num_parts
        given: Any = {"sinks": sinks, "ancestors": inputs.ancestors, "num_parts": num_parts, **options}
        spec = make_spec(q, k, v, pages, inputs.page_table, **given)
        if spec not in self._schedules:
            make = partial(_make_schedule, spec)
            if num_parts > 1:
                # Each device has its own: an axis in front is cut.
                make = jax.shard_map(
                    lambda inputs: jax.tree.map(
                        lambda leaf: leaf[None], _make_schedule(spec, inputs, _part(num_parts))
                    ),
                    mesh=self._mesh,
                    in_specs=PartitionSpec(),
                    out_specs=PartitionSpec(parallel.SEQUENCE),
                    check_vma=False,
                )
            self._schedules[spec] = make(inputs)
        return self._schedules[spec]


class _RaggedInputs(NamedTuple):
    """Arrays of the ragged batch, replicated on a mesh."""

    page_table: jax.Array
    query_lengths: jax.Array
    kv_lengths: jax.Array
    query_starts: jax.Array
    ancestors: jax.Array | None = None
    moved: MovedSinks | None = None


def _make_schedule(spec: PagedSpec, inputs: _RaggedInputs, part: PagePart | None = None) -> Schedule:
    lengths = (inputs.query_lengths, inputs.kv_lengths)
    return make_schedule(spec, inputs.page_table, *lengths, query_starts=inputs.query_starts, part=part)


def _part(num_parts: int) -> PagePart:
    """The part of this device, inside `jax.shard_map`."""
    return PagePart(lax.axis_index(parallel.SEQUENCE), num_parts)


def _attend_to_part(num_parts: int, scatters: bool, attend: Callable[..., Any], q, *operands):
    """`attend` where devices divide pages. The last of `operands` is the schedule, with an axis in front."""
    *operands, schedule = operands
    schedule = jax.tree.map(lambda leaf: leaf[0], schedule)
    (out, lse), pages = attend(q, *operands, schedule, part=_part(num_parts))
    return merge_parts(out, lse, parallel.SEQUENCE, scatters=scatters).astype(q.dtype), pages


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
    part: PagePart | None = None,
):
    moved = inputs.moved
    # Kernels may write a page while they read it (then with the bytes that it has), and sinks may be new.
    if appends_first and (schedule.implementation not in ("xla", "numba_cpu") or moved is not None):
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
        part=part,
        schedule=schedule,
        **options,
    )


def _stored(k: jax.Array, v: jax.Array, pages: Pages, inputs: _RaggedInputs, part: int = 1) -> Pages:
    """The pages with new keys and values, of which devices divide the tokens into so many parts."""
    spec = make_spec(k, k, v, pages, inputs.page_table, num_parts=part)
    places = token_places(spec, inputs.query_starts, inputs.query_lengths, inputs.kv_lengths)
    own = _part(part) if part > 1 else None
    return append(pages, k, v, *write_places(spec, inputs.page_table, places, own), by_rows=True)


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
