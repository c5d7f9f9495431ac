"""Hidden states between layers."""

from typing import NamedTuple

import jax


class Pending(NamedTuple):
    """Hidden states [..., D] as a sum that is still to be computed: by the kernel of the next norm."""

    state: jax.Array
    term: jax.Array


Hidden = jax.Array | Pending


def summed(x: Hidden) -> jax.Array:
    """Hidden states as an array."""
    return x.state + x.term if isinstance(x, Pending) else x
