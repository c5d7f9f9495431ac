"""Pages whose tokens are divided between devices: which keys a device holds, and the sum of what all of them found.

A page of G tokens has its tokens r * G / n to (r + 1) * G / n - 1 on device r of n: every device has an equal part of
each sequence, so causal work is balanced however a prompt is cut (Brandon et al. 2023, Striped Attention, arXiv
2311.09431, with stripes of G / n tokens), and page ids are the same everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int32


@partial(jax.tree_util.register_dataclass, data_fields=["index"], meta_fields=["count"])
@dataclass(frozen=True)
class PagePart:
    """The part of a device: its `index`, an int32 scalar, among `count` devices."""

    index: jax.Array
    count: int

    def num_before(self, position: Int32[Array, "*at"], page_size: int) -> Int32[Array, "*at"]:
        """The number of keys of this part at positions below `position`; `page_size` tokens of a page are its own."""
        whole = page_size * self.count
        in_page = position % whole - self.index * page_size
        return position // whole * page_size + jnp.clip(in_page, 0, page_size)

    def position_of(self, key: Int32[Array, "*at"], page_size: int) -> Int32[Array, "*at"]:
        """The position in its sequence of the part's key with this number."""
        return key // page_size * (page_size * self.count) + self.index * page_size + key % page_size

    def slot_of(self, position: Int32[Array, "*at"], page_size: int) -> Int32[Array, "*at"]:
        """The place in its page of the key at `position`; `page_size` for a key of another part."""
        in_page = position % (page_size * self.count) - self.index * page_size
        return jnp.where((in_page >= 0) & (in_page < page_size), in_page, page_size)


def merge_parts(
    out: Float32[Array, "T Hq W"], lse: Float32[Array, "T Hq"], axis: str, *, scatters: bool = False
) -> Float[Array, "T_part Hq W"]:
    """Attention to the keys of all parts, from that to the keys of each and the logarithm of its softmax's denominator.

    Inside `jax.shard_map` over `axis`. Zero where no part saw a key. With `scatters`, each device gets the rows of its
    part, else every device gets all (Dao et al. 2023, Flash-Decoding; Liu et al. 2023, Ring Attention, section 3).
    """
    highest = lax.pmax(lse, axis)
    weights = jnp.exp(lse - jnp.where(jnp.isneginf(highest), 0.0, highest))
    total = lax.psum(weights, axis)
    share = out * (weights / jnp.where(total > 0, total, 1.0))[..., None]
    if scatters:
        return lax.psum_scatter(share, axis, scatter_dimension=0, tiled=True)
    return lax.psum(share, axis)
