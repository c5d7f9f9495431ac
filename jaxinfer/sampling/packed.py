"""Small arrays of the same rows in one: on a GPU each array that a conditional returns or a loop writes is a launch."""

import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Tree = TypeVar("Tree")


def pack(tree: Any) -> jax.Array:
    """int32 [S, n] with the bits of the leaves, arrays [S, ...] of int32, float32 or bool."""

    def bits(leaf: jax.Array) -> jax.Array:
        leaf = leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else lax.bitcast_convert_type(leaf, jnp.int32)
        return leaf.reshape(leaf.shape[0], -1)

    return jnp.concatenate([bits(leaf) for leaf in jax.tree.leaves(tree)], axis=1)


def unpack(packed: jax.Array, like: Tree) -> Tree:
    """The tree whose `pack` is `packed` [..., S, n]; `like` is a tree of such arrays [S, ...] or their shapes. Leaves
    get the axes before S too."""
    leaves, structure = jax.tree.flatten(like)
    parts, start = [], 0
    for leaf in leaves:
        own, dtype = leaf.shape[1:], leaf.dtype
        part = packed[..., start : (start := start + math.prod(own))].reshape(*packed.shape[:-1], *own)
        parts.append(part != 0 if dtype == jnp.bool_ else lax.bitcast_convert_type(part, dtype))
    return jax.tree.unflatten(structure, parts)
