"""Sampling noise: a function of a row's seed and position, and of nothing else.

The position is the absolute index, in prompt plus answer, of the token being sampled: the first token of an answer to a
prompt of 7 tokens has position 7. So a prompt followed by the start of its answer is continued, given the same seed,
with the same tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np

# Streams are folded into the seed as 2**31 and above, positions as less: they never collide.
_STREAMS = 2**31


def seed_words(seed: int) -> np.ndarray:
    """uint32[2], the high and low words of a seed in 0..2**64-1: the key data of `jax.random.key(seed)`."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be in 0..2**64-1, got {seed}")
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def gumbel_noise(seed: jax.Array, position: jax.Array, vocab_size: int, *, stream: int | None = None) -> jax.Array:
    """Standard Gumbel noise, float32[S, V], for seeds uint32[S, 2] and positions int32[S].

    Element [s, v] is a function of (seed[s], position[s], v, stream), and not of S or V. It is finite, between -2.9 and
    22.2: the upper tail, which decides how often a rare token is sampled, has a resolution of 2**-32.
    `stream` selects independent noise; None is that of plain sampling.
    """
    draw = jax.vmap(lambda key: jax.random.bits(key, (vocab_size,), jnp.uint32))
    bits = draw(_keys(seed, position, stream))
    # 31 bits: signed integers convert to float in one vector instruction. Rounding may reach 1, hence the minimum.
    uniform = ((bits >> 1).astype(jnp.int32).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-31)
    exponential = -jnp.log1p(-jnp.minimum(uniform, jnp.float32(1 - 2.0**-24)))
    return -jnp.log(exponential)


def uniform_noise(seed: jax.Array, position: jax.Array, *, stream: int) -> jax.Array:
    """Uniform draws in [0, 1), float32[S], multiples of 2**-24, independent of all Gumbel noise of other streams.

    Accept with probability p by `uniform < p`: p=0 never accepts, p=1 always does.
    """
    bits = jax.vmap(lambda key: jax.random.bits(key, (), jnp.uint32))(_keys(seed, position, stream))
    return (bits >> 8).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-24)


def _keys(seed: jax.Array, position: jax.Array, stream: int | None) -> jax.Array:
    if stream is not None and not 0 <= stream < _STREAMS:
        raise ValueError(f"stream must be in 0..{_STREAMS - 1} or None, got {stream}")
    keys = jax.random.wrap_key_data(seed, impl="threefry2x32")
    if stream is not None:
        keys = jax.vmap(lambda key: jax.random.fold_in(key, jnp.uint32(_STREAMS + stream)))(keys)
    return jax.vmap(jax.random.fold_in)(keys, position)
