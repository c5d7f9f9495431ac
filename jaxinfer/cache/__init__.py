"""Caches of keys and values: contiguous rows or pages, and their dtypes.

Names are resolved when first used: a policy is plain Python, and what imports one must not load JAX.
"""

from typing import TYPE_CHECKING

from jaxinfer.lazy_names import first_with

if TYPE_CHECKING:
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
        check_rotated,
        default_page_size,
        is_rotated,
        is_scaled,
        kv_dtype_name,
        stored_dtype,
    )
    from jaxinfer.cache.paged import (
        PagedCache,
        PageTables,
        abstract_paged_cache,
        init_paged_cache,
        move_tokens,
        page_bytes,
    )
    from jaxinfer.cache.ragged import PagedAttention, attend_ragged
    from jaxinfer.cache.state import (
        LayerState,
        StateAttention,
        StateCache,
        StateOptions,
        abstract_state_cache,
        commit,
        deferred_bytes,
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
    "check_rotated",
    "commit",
    "default_page_size",
    "deferred_bytes",
    "init_cache",
    "init_paged_cache",
    "init_state_cache",
    "is_rotated",
    "is_scaled",
    "kv_dtype_name",
    "move_tokens",
    "page_bytes",
    "state_bytes",
    "stored_dtype",
]

__getattr__ = first_with(__name__, __all__, "contiguous", "kv_dtype", "paged", "ragged", "state")
