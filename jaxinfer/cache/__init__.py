"""Where keys and values live."""

from jaxinfer.cache.contiguous import CachedAttention, ContiguousCache, attend_without_cache, init_cache

__all__ = ["CachedAttention", "ContiguousCache", "attend_without_cache", "init_cache"]
