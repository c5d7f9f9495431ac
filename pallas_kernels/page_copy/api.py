"""Entry point of page copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp

from pallas_kernels.choice import Implementations
from pallas_kernels.platform import current_platform

if TYPE_CHECKING:
    from jaxtyping import Array, Int32

Tree = TypeVar("Tree")
IMPLEMENTATIONS = ("xla", "pallas_tpu")
_BY_PLATFORM = {"tpu": ("pallas_tpu", "xla"), "gpu": ("xla",), "cpu": ("xla",)}
_MODULES = Implementations("pallas_kernels.page_copy", IMPLEMENTATIONS, _BY_PLATFORM)


def copy_pages(
    pages: Tree,
    source: Int32[Array, " N"],
    destination: Int32[Array, " N"],
    count: Int32[Array, ""] | None = None,
    *,
    implementation: str | None = None,
) -> Tree:
    """Copies page source[i] to page destination[i] in every array of a cache, for i < count.

    Args:
      pages: pytree of arrays whose first axis is the page, of one layer or all. Donate it: the result aliases it.
      source: page ids. None may be in `destination` too: the order of the copies is undefined.
      destination: page ids, each at most once. An id equal to the number of pages copies nothing.
      count: number of valid entries, N when None. Entries beyond it may hold anything.
      implementation: "xla" or "pallas_tpu" (page-sized DMAs within HBM, no temporary); None selects by platform.

    Raises:
      ValueError: arrays with different numbers of pages, ids of another shape or dtype, an unknown implementation.
      NotImplementedError: "pallas_tpu" on another platform.
    """
    leaves = jax.tree.leaves(pages)
    sizes = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    if len(sizes) != 1 or None in sizes:
        raise ValueError(
            f"the arrays of a cache share their first axis, the pages; got {[leaf.shape for leaf in leaves]}"
        )
    if source.ndim != 1 or source.shape != destination.shape:
        raise ValueError(f"source and destination are int32 [N]; got {source.shape} and {destination.shape}")
    if source.dtype != jnp.int32 or destination.dtype != jnp.int32:
        raise ValueError(f"source and destination are int32; got {source.dtype} and {destination.dtype}")
    taken = _MODULES.take(None, current_platform(), implementation)
    if source.shape[0] == 0:
        return pages
    (num_pages,) = sizes
    is_real = destination != num_pages
    if count is not None:
        is_real &= jnp.arange(source.shape[0]) < count
    return _MODULES[taken].copy(pages, source, destination, is_real)
