"""Caches of keys and values: contiguous rows or pages, and their dtypes."""

from jaxinfer.cache.contiguous import (
    CachedAttention,
    ContiguousCache,
    attend_as_stored,
    attend_without_cache,
    init_cache,
)
from jaxinfer.cache.kv_dtype import (
    AUTO,
    KVScales,
    applied_scales,
    check_kv_dtype,
    is_scaled,
    kv_dtype_name,
    stored_dtype,
)
from jaxinfer.cache.paged import (
    PagedAttention,
    PagedCache,
    PageTables,
    abstract_paged_cache,
    attend_ragged,
    init_paged_cache,
    move_tokens,
    page_bytes,
)
from jaxinfer.cache.state import (
    LayerState,
    StateAttention,
    StateCache,
    StateOptions,
    abstract_state_cache,
    commit,
    init_state_cache,
    state_bytes,
)

__all__ = [
    "AUTO",
    "CachedAttention",
    "ContiguousCache",
    "KVScales",
    "LayerState",
    "PageTables",
    "PagedAttention",
    "PagedCache",
    "StateAttention",
    "StateCache",
    "StateOptions",
    "abstract_paged_cache",
    "abstract_state_cache",
    "applied_scales",
    "attend_as_stored",
    "attend_ragged",
    "attend_without_cache",
    "check_kv_dtype",
    "commit",
    "init_cache",
    "init_paged_cache",
    "init_state_cache",
    "is_scaled",
    "kv_dtype_name",
    "move_tokens",
    "page_bytes",
    "state_bytes",
    "stored_dtype",
]
