"""Hidden states between layers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Pending(NamedTuple):
    """Hidden states [..., D] as a sum that is still to be computed: by the kernel of the next norm."""

    state: jax.Array
    term: jax.Array


Hidden = jax.Array | Pending


def summed(x: Hidden) -> jax.Array:
    """Hidden states as an array."""
    return x.state + x.term if isinstance(x, Pending) else x


def with_added(x: Hidden, vectors: jax.Array) -> Hidden:
    """Hidden states with float32 vectors [..., D] added, in float32. Where a vector is 0 they keep their bits."""
    if isinstance(x, Pending):  # its sum stays with the kernel of the next norm, which rounds as it does elsewhere
        return Pending(_added(x.state, vectors), x.term)
    return _added(x, vectors)


def _added(state: jax.Array, vectors: jax.Array) -> jax.Array:
    return jnp.where(vectors == 0, state, (state.astype(jnp.float32) + vectors).astype(state.dtype))
