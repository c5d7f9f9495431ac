"""Rows of a pass that verifies drafts: all nodes of all slots, or as many as a budget has, side by side. Shapes use the
legend of jaxinfer/README.md.

Where a chip computes and does not only read, a row that will be rejected costs as much as one that will be accepted. A
budget goes to the drafts that are most likely to be accepted, of whichever slot (as DSpark does, arXiv 2607.05147).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class NodeRows:
    """Which node of which slot each of T rows is.

    Attributes:
      starts: int32 [S], each slot's first row. slots, nodes: int32 [T], NumPy arrays where they are static. num_nodes:
        int32 [S], of each slot those that take part, at the start of its rows. Other rows are padding.
    """

    starts: jax.Array
    slots: jax.Array | np.ndarray
    nodes: jax.Array | np.ndarray
    num_nodes: jax.Array

    @property
    def num_rows(self) -> int:
        return self.slots.shape[0]

    def at(self, nodes: jax.Array) -> jax.Array:
        """The rows int32 [S, ...] of nodes int32 [S, ...] of each slot; those that have none give any row."""
        starts = self.starts.reshape(-1, *[1] * (nodes.ndim - 1))
        return jnp.minimum(starts + nodes, self.num_rows - 1)


def all_rows(num_nodes: jax.Array, count: int) -> NodeRows:
    """`count` rows of each slot, of which num_nodes int32 [S] take part."""
    num_slots = num_nodes.shape[0]
    slots, nodes = np.repeat(np.arange(num_slots), count), np.tile(np.arange(count), num_slots)
    return NodeRows(count * jnp.arange(num_slots, dtype=jnp.int32), slots, nodes, num_nodes)


def packed_rows(num_nodes: jax.Array, num_rows: int) -> NodeRows:
    """The nodes int32 [S] of each slot side by side, in `num_rows` rows, which is at least their sum."""
    ends, rows = jnp.cumsum(num_nodes), jnp.arange(num_rows)
    starts = ends - num_nodes
    slots = jnp.minimum(jnp.searchsorted(ends, rows, side="right"), num_nodes.shape[0] - 1)
    is_taken = rows < ends[-1]
    return NodeRows(starts, slots, jnp.where(is_taken, rows - starts[slots], 0), num_nodes)


def within_budget(num_nodes: jax.Array, chances: jax.Array, num_rows: int) -> jax.Array:
    """int32 [S]: how many nodes of chains of num_nodes int32 [S], the roots included, take part where there are
    `num_rows` rows for all: the roots, and the drafts that are most likely to be accepted.

    chances: float32 [S, N - 1], that a draft is accepted if those before it are. 0 nodes stay 0.
    """
    num_slots, count = chances.shape
    is_drafted = jnp.arange(count)[:, None] < num_nodes - 1
    # By depth, then slot: of equal chances the shallow ones come first, so that what is kept of a chain is its start.
    value = jnp.where(is_drafted, jnp.cumprod(chances.T, axis=0), -1.0)
    order = jnp.argsort(-value.reshape(-1), stable=True)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0])).reshape(count, num_slots)
    is_kept = is_drafted & (rank < num_rows - jnp.sum(num_nodes > 0))
    return jnp.minimum(num_nodes, 1 + jnp.sum(is_kept, axis=0, dtype=num_nodes.dtype))
