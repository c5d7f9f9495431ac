"""A cache of pages that sequences own a few of: no memory is held for tokens that may never come."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxinfer.models import ModelConfig
from pallas_kernels.paged_attention import (
    Pages,
    PageShape,
    Schedule,
    make_schedule,
    make_spec,
    new_pages,
    paged_attention,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """Keys and values of all layers; page i of a sequence is the same page in each. Programs take it donated.

    The bytes' layout belongs to the platform's kernel. Page 0 is the null page: tables point there where they have no
    page, and nothing is ever written to it.
    """

    layers: tuple[Pages, ...]


def page_bytes(config: ModelConfig, page_size: int, dtype, layout: str) -> int:
    """Bytes of one page in all layers, padding of the layout included."""
    shape = PageShape(1, page_size, config.num_kv_heads, config.head_dim, jnp.dtype(dtype).name)
    leaves = jax.tree.leaves(shape.abstract(layout))
    return config.num_layers * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def init_paged_cache(config: ModelConfig, num_pages: int, page_size: int, dtype, layout: str | None = None):
    """Zeroed pages of every layer, in the layout of the platform unless named."""
    name = jnp.dtype(dtype).name
    return PagedCache(
        tuple(
            new_pages(num_pages, page_size, config.num_kv_heads, config.head_dim, name, layout=layout)
            for _ in range(config.num_layers)
        )
    )


class PagedAttention:
    """`attend` for tokens [T] of S sequences side by side: appends to the pages and reads them back.

    Arguments as in `pallas_kernels.paged_attention`: page_table int32 [S, P]; query_starts, query_lengths and
    kv_lengths int32 [S]. `max_query_length` and `is_uniform` are static. After the pass, `cache` is the updated one.
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
        is_uniform: bool = False,
    ):
        self._layers = list(cache.layers)
        self._page_table, self._query_starts = page_table, query_starts
        self._query_lengths, self._kv_lengths = query_lengths, kv_lengths
        self._options = {"max_query_length": max_query_length, "is_uniform": is_uniform}
        self._schedules: dict[int | None, Schedule] = {}

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, window: int | None) -> jax.Array:
        pages = self._layers[layer]
        options = {**self._options, "window": window}
        if window not in self._schedules:
            self._schedules[window] = make_schedule(
                make_spec(q, k, v, pages, self._page_table, **options),
                self._page_table,
                self._query_lengths,
                self._kv_lengths,
                query_starts=self._query_starts,
            )
        out, self._layers[layer] = paged_attention(
            q,
            k,
            v,
            pages,
            self._page_table,
            self._query_lengths,
            self._kv_lengths,
            query_starts=self._query_starts,
            schedule=self._schedules[window],
            **options,
        )
        return out

    @property
    def cache(self) -> PagedCache:
        return PagedCache(tuple(self._layers))
