"""`attend` for a ragged batch over a paged cache, whatever its layers keep."""

from typing import Any

import jax
from jax.sharding import Mesh

from jaxinfer.cache.paged import PagedAttention, PagedCache, PageTables
from jaxinfer.cache.state import StateAttention, StateOptions
from pallas_kernels.recurrence import RaggedBatch


def attend_ragged(
    cache: PagedCache,
    page_tables: PageTables,
    query_starts: jax.Array,
    query_lengths: jax.Array,
    kv_lengths: jax.Array,
    *,
    max_query_length: int | None = None,
    is_uniform: bool = False,
    mesh: Mesh | None = None,
) -> Any:
    """A `PagedAttention`, or where the cache has states a `StateAttention` over one; arguments are the former's.

    After the pass, its `cache` is the updated cache. Sequence s has slot s.
    """
    static: Any = {"max_query_length": max_query_length, "is_uniform": is_uniform}
    paged = PagedAttention(cache, page_tables, query_starts, query_lengths, kv_lengths, **static, mesh=mesh)
    if cache.states is None:
        return paged
    batch = RaggedBatch(query_starts, query_lengths, kv_lengths - query_lengths)
    return StateAttention(paged, cache.states, batch, StateOptions(**static))
