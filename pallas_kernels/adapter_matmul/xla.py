"""Adapters by XLA's operations, for all platforms and dtypes, without a copy of adapters for each row."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.adapter_matmul.api import AdapterSpec
from pallas_kernels.platform import current_platform

FLAT_COLUMNS = 256  # slots times ranks that are multiplied at once, at most: two tiles of a TPU's matrix unit
BLOCK_RANKS, MIN_ROWS, MAX_ROWS = 32, 32, 256  # that are multiplied at once where there are more


def unsupported(spec: AdapterSpec, platform: str) -> str | None:
    return None


def add(
    x: jax.Array,
    products: Sequence[jax.Array],
    stacks: Sequence[tuple[jax.Array, jax.Array]],
    ids: jax.Array,
    ranks: jax.Array,
    spec: AdapterSpec,
) -> list[jax.Array]:
    ids = jnp.where((ids > 0) & (ids <= spec.slots), ids, 0)
    if spec.slots * spec.rank > FLAT_COLUMNS:
        return _add_in_blocks(x, products, stacks, ids, ranks)
    return [_add(product, _flat(x, *pair, ids), ids > 0) for product, pair in zip(products, stacks, strict=True)]


def _add(product: jax.Array, total: jax.Array, is_own: jax.Array) -> jax.Array:
    """product + total in the rows where `is_own`, rounded to the product's dtype."""
    return jnp.where(is_own[:, None], (product.astype(jnp.float32) + total).astype(product.dtype), product)


def _flat(x: jax.Array, a: jax.Array, b: jax.Array, ids: jax.Array) -> jax.Array:
    """float32 [T, N] of x [T, K]: the products with all slots' A, less those of others than the row's own, times B.

    NaN times 0 is NaN, so slots that no row uses count as zeros; not on a GPU, where XLA would write a copy of B.
    """
    slots, rank = a.shape[:2]
    hidden, b = _product(x, a.reshape(slots * rank, -1), 1), b.reshape(slots * rank, -1)
    is_own = jnp.arange(slots * rank) // rank == ids[:, None] - 1
    if current_platform() != "gpu":
        b = jnp.where(jnp.any(is_own, axis=0)[:, None], b, 0)
    return _product(jnp.where(is_own, hidden, 0).astype(b.dtype), b, 0)


def _add_in_blocks(
    x: jax.Array,
    products: Sequence[jax.Array],
    stacks: Sequence[tuple[jax.Array, jax.Array]],
    ids: jax.Array,
    ranks: jax.Array,
) -> list[jax.Array]:
    """The results, from one adapter that rows have to the next, up to its rank.

    The rows of an adapter are best next to each other, as those of a sequence are: blocks of rows from its first to its
    last one are multiplied.
    """
    (num_rows, _), slots = x.shape, stacks[0][0].shape[0]
    size, index = min(max(MIN_ROWS, min(MAX_ROWS, num_rows // slots)), num_rows), jnp.arange(num_rows)

    def first_row(own: jax.Array) -> jax.Array:
        return jnp.min(index, where=ids == own, initial=num_rows)

    def next_block(own: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        is_last = row + size > jnp.max(index, where=ids == own, initial=0)
        own = jnp.where(is_last, jnp.min(ids, where=ids > own, initial=slots + 1), own)
        return own, jnp.where(is_last, first_row(own), row + size)

    def step(state: tuple[jax.Array, jax.Array, list[jax.Array]]) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        own, row, results = state
        start = jnp.minimum(row, num_rows - size)  # the last block begins earlier, so that it is whole
        is_own = (lax.dynamic_slice_in_dim(ids, start, size) == own) & (start + jnp.arange(size) >= row)
        totals = _totals(lax.dynamic_slice_in_dim(x, start, size), stacks, own - 1, ranks[own - 1])
        updated = []
        for result, total in zip(results, totals, strict=True):
            block = _add(lax.dynamic_slice_in_dim(result, start, size), total, is_own)
            updated.append(lax.dynamic_update_slice_in_dim(result, block, start, 0))
        return *next_block(own, row), updated

    first = jnp.min(ids, where=ids > 0, initial=slots + 1)
    return lax.while_loop(lambda state: state[0] <= slots, step, (first, first_row(first), list(products)))[2]


def _totals(
    x: jax.Array, stacks: Sequence[tuple[jax.Array, jax.Array]], slot: jax.Array, rank: jax.Array
) -> list[jax.Array]:
    """float32 [T, N] of x [T, K] for each weight: the products with the adapter in a slot, by blocks of its ranks."""
    most = stacks[0][0].shape[1]
    size = min(BLOCK_RANKS, most)

    def add_ranks(block: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        start = jnp.minimum(block * size, most - size)  # as of rows
        column = start + jnp.arange(size)
        is_real = (column >= block * size) & (column < rank)
        sums = []
        for (a, b), total in zip(stacks, totals, strict=True):
            hidden = _product(x, _ranks(a, slot, start, size), 1)
            hidden = jnp.where(is_real, hidden, 0).astype(b.dtype)
            sums.append(total + _product(hidden, _ranks(b, slot, start, size), 0))
        return sums

    totals = [jnp.zeros((x.shape[0], b.shape[2]), jnp.float32) for _, b in stacks]
    if size == most:
        return add_ranks(jnp.int32(0), totals)
    return lax.fori_loop(0, -(-jnp.minimum(rank, most) // size), add_ranks, totals)


def _ranks(stack: jax.Array, slot: jax.Array, start: jax.Array, count: int) -> jax.Array:
    """[count, N]: some ranks of a slot of a stack [S, R, N]."""
    return lax.dynamic_slice(stack, (slot, start, jnp.int32(0)), (1, count, stack.shape[2]))[0]


def _product(x: jax.Array, weight: jax.Array, axis: int) -> jax.Array:
    """float32 products of x [T, K] with a weight whose `axis` has size K."""
    dtype = jnp.promote_types(x.dtype, weight.dtype)
    return lax.dot_general(
        x.astype(dtype),
        weight.astype(dtype),
        (((1,), (axis,)), ((), ())),
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
