"""Tokens of a sequence gathered into other pages, each key head its own, as they are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention.layout import InterleavedPages, Pages, PageShape

if TYPE_CHECKING:
    from jaxtyping import Array, Int32


def compact(
    pages: Pages,
    shape: PageShape,
    page_table: Int32[Array, " P"],
    positions: Int32[Array, "Hkv C"],
    count: Int32[Array, ""],
    targets: Int32[Array, " Q"],
) -> Pages:
    """Copies stored keys and values of one layer, bit for bit, scales included.

    The j-th of the first `count` positions of each head goes to slot j % page of the page targets[j // page]; heads may
    have different positions. `page_table` are the pages of the sequence. All is read before anything is written; what
    is for a target beyond the last page, or has none, is dropped. Donate the pages: they are updated in place.
    """
    size, num_pages = shape.page_size, shape.num_pages
    position = jnp.clip(positions, 0, page_table.shape[0] * size - 1)
    source_page, source_slot = page_table[position // size].T, (position % size).T  # [C, Hkv]
    number = jnp.arange(positions.shape[1], dtype=jnp.int32)
    is_kept = (number < count) & (number // size < targets.shape[0])
    target = jnp.where(is_kept, targets[jnp.minimum(number // size, targets.shape[0] - 1)], num_pages)
    target, slot = target[:, None], (number % size)[:, None]

    def move(array: Any, heads: np.ndarray) -> Any:
        """`heads` are those of the array's rows of a token; rows of no head, a layout's padding, are zero."""
        own = np.minimum(heads, shape.num_kv_heads - 1)
        page, at = source_page[:, own], source_slot[:, own]
        if array.ndim == 3:  # scales [pages, rows, slots]
            rows = np.arange(len(heads))
            values = array.at[page, rows, at].get(mode="promise_in_bounds")
            return array.at[target, rows, slot].set(jnp.where(heads < shape.num_kv_heads, values, 0), mode="drop")
        # [pages, page, rows, width] or [pages, page, rows / pack, pack, lanes]. Words are written as wholes: rows of a
        # token, as in `move_tokens`, so that the TPU compiler keeps the layout of the cache.
        grid = np.unravel_index(np.arange(len(heads)), array.shape[2:-1])
        values = array.at[(page, at, *grid)].get(mode="promise_in_bounds")
        values = jnp.where((heads < shape.num_kv_heads)[:, None], values, jnp.zeros((), values.dtype))
        values = values.reshape(values.shape[0], *array.shape[2:])
        return array.at[target, slot, np.arange(array.shape[2])].set(values, mode="drop")

    if not isinstance(pages, InterleavedPages):
        return jax.tree.map(lambda array: move(array, np.arange(shape.num_kv_heads)), pages)
    # Two rows of a head, the key and the value, where it has not both in one; always two scales.
    per_head = 1 if shape.has_whole_heads else 2
    kv = move(pages.kv, np.arange(shape.num_rows) // per_head)
    return InterleavedPages(
        kv, None if pages.scales is None else move(pages.scales, np.arange(pages.scales.shape[1]) // 2)
    )
