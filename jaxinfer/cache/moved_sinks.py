"""Sinks whose keys are rotated to stand nearer, in pages of their own that last for one pass.

Beyond the length that a model was trained for, positions under a policy are those in the cache (StreamingLLM, Xiao et
al. 2023, section 3.2): sinks stand right before the window. Keys are stored as they were rotated once, so those of the
sinks are rotated by the distance of what was dropped. That happens in every pass and from the stored keys: no rounding
adds up, and the pages of the sinks are never written again, so that sequences can share them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.models.rope import rotate
from pallas_kernels.paged_attention import Pages
from pallas_kernels.paged_attention.layout import append, from_stored, gather, page_shape


class MovedSinks(NamedTuple):
    """Sinks that are moved for each of N sequences in one layer.

    Attributes:
      sources, targets: int32 [N, pages], the pages of the sinks, and those that get their rotated copies; targets
        beyond the last page get none.
      cos, sin: float32 [N, rotary_dim / 2], of the rotation.
    """

    sources: jax.Array
    targets: jax.Array
    cos: jax.Array
    sin: jax.Array


def move_sinks(pages: Pages, moved: MovedSinks, num_kv_heads: int, head_dim: int) -> Pages:
    """The pages of one layer with the rotated copies of the sinks."""
    stored = gather(pages, moved.sources, page_shape(pages, num_kv_heads, head_dim))
    size = stored.k.shape[2]

    def tokens(values: Any, scales: Any) -> jax.Array:
        """float32 [N, tokens * Hkv, K]."""
        scales = None if scales is None else scales.swapaxes(2, 3)
        return from_stored(values, scales).reshape(values.shape[0], -1, head_dim)

    k, v = tokens(stored.k, stored.k_scales), tokens(stored.v, stored.v_scales)
    k = rotate(k, moved.cos, moved.sin)
    page = jnp.repeat(moved.targets.reshape(-1), size)
    slot = jnp.tile(jnp.arange(size, dtype=jnp.int32), moved.targets.size)
    k, v = (x.reshape(-1, num_kv_heads, head_dim) for x in (k, v))
    return append(pages, k, v, page, slot, by_rows=True)
