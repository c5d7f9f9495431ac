"""A cache of pages that sequences own a few of: no memory is held for tokens that may never come."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer import parallel
from jaxinfer.cache.kv_dtype import KVScales, scaled, unscaled
from jaxinfer.models import ModelConfig
from pallas_kernels.paged_attention import (
    Pages,
    PageShape,
    Schedule,
    make_schedule,
    make_spec,
    paged_attention,
    platform_layout,
)
from pallas_kernels.paged_attention import move_tokens as _move_tokens
from pallas_kernels.platform import current_platform


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """Keys and values of all layers; page i of a sequence is the same page in each. Programs take it donated.

    The bytes' layout belongs to the platform's kernel. Page 0 is the null page: tables point there where they have no
    page, and nothing is ever written to it. `scales` are a checkpoint's, of an fp8 cache.
    """

    layers: tuple[Pages, ...]
    scales: KVScales | None = None

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return jax.tree.leaves(self.layers[0])[0].shape[1]

    def first(self, num_layers: int) -> "PagedCache":
        """The first layers' part."""
        return PagedCache(self.layers[:num_layers], None if self.scales is None else self.scales.first(num_layers))

    def with_first(self, part: "PagedCache") -> "PagedCache":
        """The cache with the first layers' contents replaced."""
        return replace(self, layers=part.layers + self.layers[len(part.layers) :])


def page_bytes(config: ModelConfig, page_size: int, dtype, layout: str) -> int:
    """Bytes of one page in all layers, padding of the layout included."""
    leaves = jax.tree.leaves(abstract_paged_cache(config, 1, page_size, dtype, layout))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def init_paged_cache(
    config: ModelConfig,
    num_pages: int,
    page_size: int,
    dtype,
    layout: str | None = None,
    mesh: Mesh | None = None,
    scales: KVScales | None = None,
) -> PagedCache:
    """Zeroed pages of every layer, in the layout of the platform unless named, each device of a mesh with its own
    heads; `scales` go to all devices. Raises ValueError as `parallel.check_divides`."""
    layout = layout or platform_layout(current_platform(), dtype)
    cache = abstract_paged_cache(config, num_pages, page_size, dtype, layout, mesh)
    cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), cache)
    on_all = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return cache if scales is None else replace(cache, scales=jax.device_put(scales, on_all))


def abstract_paged_cache(
    config: ModelConfig, num_pages: int, page_size: int, dtype, layout: str, mesh: Mesh | None = None
) -> PagedCache:
    """The cache as `jax.ShapeDtypeStruct`s, with their shardings where there is a mesh.

    Each device holds its heads as a kernel for just these lays them out, and the array is their concatenation.
    """
    whole = PageShape(num_pages, page_size, config.num_kv_heads, config.head_dim, jnp.dtype(dtype).name)
    if mesh is None:
        return PagedCache((whole.abstract(layout),) * config.num_layers)
    parallel.check_divides(mesh, config)
    num_parts = mesh.shape.get(parallel.RULES["kv_heads"], 1)
    local = replace(whole, num_kv_heads=config.num_kv_heads // num_parts).abstract(layout)

    def concatenated(leaf, spec: PartitionSpec):
        shape = tuple(size * num_parts if axis else size for size, axis in zip(leaf.shape, spec, strict=True))
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return PagedCache((jax.tree.map(concatenated, local, parallel.page_specs(mesh, local)),) * config.num_layers)


def move_tokens(
    cache: PagedCache, page_table: jax.Array, sources: jax.Array, destinations: jax.Array, *, mesh: Mesh | None = None
) -> PagedCache:
    """Copies the tokens at positions `sources` to positions `destinations` int32 [S, N] of the same sequences, in all
    layers, as `pallas_kernels.paged_attention.move_tokens`; page_table int32 [S, P]. Pad with P * page. Donate the
    cache: it is updated in place. On a mesh each device moves what it holds."""

    def move(pages: Pages) -> Pages:
        if mesh is None:
            return _move_tokens(pages, page_table, sources, destinations)
        # Left to the compiler, devices would exchange tokens.
        specs = parallel.page_specs(mesh, pages)
        whole = (PartitionSpec(),) * 3
        moved = jax.shard_map(_move_tokens, mesh=mesh, in_specs=(specs, *whole), out_specs=specs)
        return moved(pages, page_table, sources, destinations)

    return replace(cache, layers=tuple(move(pages) for pages in cache.layers))


class PagedAttention:
    """`attend` for tokens [T] of S sequences side by side: appends to the pages and reads them back.

    Arguments as in `pallas_kernels.paged_attention`: page_table int32 [S, P]; query_starts, query_lengths and
    kv_lengths int32 [S]; ancestors uint32 [T] or None. `max_query_length` and `is_uniform` are static. On a mesh each
    device attends with its own heads: the compiler cannot cut a kernel, so `jax.shard_map` does. After the pass,
    `cache` is the updated one.
    """

    def __init__(
        self,
        cache: PagedCache,
        page_table: jax.Array,
        query_starts: jax.Array,
        query_lengths: jax.Array,
        kv_lengths: jax.Array,
        *,
        max_query_length: int | None = None,
        ancestors: jax.Array | None = None,
        is_uniform: bool = False,
        mesh: Mesh | None = None,
    ):
        self._before, self._layers = cache, list(cache.layers)
        self._mesh = mesh
        self._rows = _Rows(page_table, query_lengths, kv_lengths, query_starts, ancestors)
        self._options = {"max_query_length": max_query_length, "is_uniform": is_uniform}
        self._schedules: dict[int | None, Schedule] = {}

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, window: int | None) -> jax.Array:
        scales, pages = self._before.scales, self._layers[layer]
        q, k, v = scaled(scales, layer, q, k, v)
        attend = partial(_attend, {**self._options, "window": window})
        if self._mesh is None:
            schedule = self._schedule(window, q, k, v, pages)
        else:
            specs = _specs(self._mesh, pages)
            schedule = self._schedule(window, *parallel.local_shapes(self._mesh, (q, k, v, pages), specs))
            attend = jax.shard_map(
                attend,
                mesh=self._mesh,
                in_specs=(*specs, PartitionSpec(), PartitionSpec()),
                out_specs=(specs[0], specs[3]),
                check_vma=False,  # a Pallas call does not say over which axes its results vary
            )
        out, self._layers[layer] = attend(q, k, v, pages, self._rows, schedule)
        return unscaled(scales, layer, out)

    def _schedule(self, window: int | None, q: Any, k: Any, v: Any, pages: Any) -> Schedule:
        """The schedule of the layers of a window, from the shapes of what one device holds."""
        if window not in self._schedules:
            rows = self._rows
            options = {**self._options, "window": window, "ancestors": rows.ancestors}
            spec = make_spec(q, k, v, pages, rows.page_table, **options)
            self._schedules[window] = make_schedule(
                spec, rows.page_table, rows.query_lengths, rows.kv_lengths, query_starts=rows.query_starts
            )
        return self._schedules[window]

    @property
    def cache(self) -> PagedCache:
        return replace(self._before, layers=tuple(self._layers))


class _Rows(NamedTuple):
    """What each device knows of all sequences."""

    page_table: jax.Array
    query_lengths: jax.Array
    kv_lengths: jax.Array
    query_starts: jax.Array
    ancestors: jax.Array | None = None


def _attend(options: dict[str, Any], q, k, v, pages: Pages, rows: _Rows, schedule: Schedule):
    return paged_attention(
        q,
        k,
        v,
        pages,
        rows.page_table,
        rows.query_lengths,
        rows.kv_lengths,
        query_starts=rows.query_starts,
        ancestors=rows.ancestors,
        schedule=schedule,
        **options,
    )


def _specs(mesh: Mesh, pages: Pages) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec, Pages]:
    """How q, k, v and the pages of a layer are cut."""
    queries, keys = (parallel.spec(mesh, (None, name, None)) for name in ("heads", "kv_heads"))
    return queries, keys, keys, parallel.page_specs(mesh, pages)
