"""Where keys and values live."""

from jaxinfer.cache.contiguous import CachedAttention, ContiguousCache, attend_without_cache, init_cache
from jaxinfer.cache.paged import (
    PagedAttention,
    PagedCache,
    abstract_paged_cache,
    init_paged_cache,
    move_tokens,
    page_bytes,
)

__all__ = [
    "CachedAttention",
    "ContiguousCache",
    "PagedAttention",
    "PagedCache",
    "abstract_paged_cache",
    "attend_without_cache",
    "init_cache",
    "init_paged_cache",
    "move_tokens",
    "page_bytes",
]
