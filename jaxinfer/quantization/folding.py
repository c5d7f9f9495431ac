"""Scales of activations, moved into what comes before a linear layer, so that nothing is computed for them."""

import jax
import jax.numpy as jnp


def fold_into_norm(
    norm: jax.Array, scale: jax.Array, *, zero_centred: bool = False, dtype: str = "float32"
) -> tuple[jax.Array, jax.Array]:
    """A norm's weight [D] whose output is divided by `scale` [D], rounded to the `dtype` it is stored in.

    Returns it with the scale that it then really divides by, rounding included, which is what to multiply the next
    weights by; 1 where the norm's weight is 0 or would be.

    Args:
      zero_centred: the norm multiplies by 1 + weight (Gemma, Qwen3-Next).
    """
    factor = norm.astype(jnp.float32) + zero_centred
    stored = (factor / scale - zero_centred).astype(dtype).astype(jnp.float32)
    divided = stored + zero_centred
    is_usable = (factor != 0) & (divided != 0)
    exact = jnp.where(is_usable, factor / jnp.where(is_usable, divided, 1.0), 1.0)
    return jnp.where(is_usable, stored, norm.astype(jnp.float32)), exact


def fold_into_outputs(weight: jax.Array, bias: jax.Array | None, scale: jax.Array):
    """Weight [K, N] and bias [N] of a linear layer whose outputs are divided by `scale` [N]."""
    return weight / scale, None if bias is None else bias / scale
