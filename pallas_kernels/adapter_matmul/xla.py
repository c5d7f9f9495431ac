"""Adapters by XLA's operations, for all platforms and dtypes, without a copy of adapters for each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.adapter_matmul.api import AdapterSpec

FLAT_COLUMNS = 256  # slots times ranks that are multiplied at once, at most: two tiles of a TPU's matrix unit
BLOCK_RANKS, BLOCK_ROWS = 32, 256  # of an adapter, and rows, that an iteration multiplies


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
    ids = jnp.where((ids >= 0) & (ids <= spec.slots), ids, 0)
    if spec.slots * spec.rank <= FLAT_COLUMNS:
        sums = [_flat(x, *pair, ids) for pair in stacks]
    else:
        sums = _in_blocks(x, stacks, ids, ranks)
    has_adapter = (ids > 0)[:, None]
    return [
        jnp.where(has_adapter, (product.astype(jnp.float32) + total).astype(product.dtype), product)
        for product, total in zip(products, sums, strict=True)
    ]


def _flat(x: jax.Array, a: jax.Array, b: jax.Array, ids: jax.Array) -> jax.Array:
    """float32 [T, N] of x [T, K]: the products with all slots' A, less those of others than the row's own, times B."""
    slots, rank = a.shape[:2]
    hidden = _product(x, a.reshape(slots * rank, -1), 1)
    is_own = jnp.arange(slots * rank) // rank == ids[:, None] - 1
    return _product(jnp.where(is_own, hidden, 0).astype(b.dtype), b.reshape(slots * rank, -1), 0)


class _Block(NamedTuple):
    """What an iteration multiplies: rows from `row` on of those that have adapter `id`, and its ranks from `rank` on."""

    id: jax.Array
    rank: jax.Array
    row: jax.Array


def _in_blocks(
    x: jax.Array, stacks: Sequence[tuple[jax.Array, jax.Array]], ids: jax.Array, ranks: jax.Array
) -> list[jax.Array]:
    """float32 [T, N] of x [T, K] for each weight, of adapters that rows have, one after the other, up to their ranks.

    The rows of an adapter are best next to each other, as those of a sequence are: rows between its first and its last
    one are multiplied, too.
    """
    (num_rows, _), (slots, most) = x.shape, stacks[0][0].shape[:2]
    block_rows, block_ranks = min(BLOCK_ROWS, num_rows), min(BLOCK_RANKS, most)
    index = jnp.arange(num_rows)

    def first_block(after: jax.Array) -> _Block:
        """The first block of the next adapter after one."""
        own = jnp.min(ids, where=ids > after, initial=slots + 1)
        return _Block(own, jnp.int32(0), jnp.min(index, where=ids == own, initial=num_rows))

    def next_block(block: _Block) -> _Block:
        first, last = first_block(block.id - 1).row, jnp.max(index, where=ids == block.id, initial=0)
        row, rank = block.row + block_rows, block.rank + block_ranks
        has_rows, has_ranks = row <= last, rank < ranks[block.id - 1]
        same = _Block(block.id, jnp.where(has_rows, block.rank, rank), jnp.where(has_rows, row, first))
        following = first_block(block.id)
        return _Block(*(jnp.where(has_rows | has_ranks, a, b) for a, b in zip(same, following, strict=True)))

    def step(state: tuple[_Block, list[jax.Array]]) -> tuple[_Block, list[jax.Array]]:
        block, totals = state
        # Those of the last block begin earlier, so that it is whole.
        row, rank = jnp.minimum(block.row, num_rows - block_rows), jnp.minimum(block.rank, most - block_ranks)
        rows, columns = row + jnp.arange(block_rows), rank + jnp.arange(block_ranks)
        is_own = (lax.dynamic_slice_in_dim(ids, row, block_rows) == block.id) & (rows >= block.row)
        is_real = (columns >= block.rank) & (columns < ranks[block.id - 1])
        own_x = lax.dynamic_slice_in_dim(x, row, block_rows)
        sums = []
        for (a, b), total in zip(stacks, totals, strict=True):
            hidden = _product(own_x, _ranks_of(a, block.id - 1, rank, block_ranks), 1)
            hidden = jnp.where(is_real, hidden, 0).astype(b.dtype)
            before = lax.dynamic_slice_in_dim(total, row, block_rows)
            after = before + _product(hidden, _ranks_of(b, block.id - 1, rank, block_ranks), 0)
            after = jnp.where(is_own[:, None], after, before)
            sums.append(lax.dynamic_update_slice_in_dim(total, after, row, 0))
        return next_block(block), sums

    totals = [jnp.zeros((num_rows, b.shape[2]), jnp.float32) for _, b in stacks]
    return lax.while_loop(lambda state: state[0].id <= slots, step, (first_block(jnp.int32(0)), totals))[1]


def _ranks_of(stack: jax.Array, slot: jax.Array, first: jax.Array, count: int) -> jax.Array:
    """[count, N]: some ranks of a slot of a stack [S, R, N]."""
    return lax.dynamic_slice(stack, (slot, first, jnp.int32(0)), (1, count, stack.shape[2]))[0]


def _product(x: jax.Array, weight: jax.Array, axis: int) -> jax.Array:
    """float32 products of x [T, K] with a weight whose `axis` has size K."""
    dtype = jnp.promote_types(x.dtype, weight.dtype)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return lax.dot_general(
        x.astype(dtype),
        weight.astype(dtype),
        (((1,), (axis,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
