"""Folds scales of activations into the preceding norm or linear layer, so that they cost nothing at run time."""

import jax
import jax.numpy as jnp


def fold_into_norm(
    norm: jax.Array, scale: jax.Array, *, zero_centred: bool = False, dtype: str = "float32"
) -> tuple[jax.Array, jax.Array]:
    """Divides the output of a norm with weight [D] by `scale` [D].

    Args:
      zero_centred: the norm multiplies by 1 + weight (Gemma, Qwen3-Next).
      dtype: dtype in which the weight is stored.

    Returns: the new weight, rounded to `dtype`, and the effective scale after rounding, by which the following weights
      are to be multiplied; 1 where the norm's weight is, or would become, 0.
    """
    factor = norm.astype(jnp.float32) + zero_centred
    stored = (factor / scale - zero_centred).astype(dtype).astype(jnp.float32)
    divided = stored + zero_centred
    is_usable = (factor != 0) & (divided != 0)
    exact = jnp.where(is_usable, factor / jnp.where(is_usable, divided, 1.0), 1.0)
    return jnp.where(is_usable, stored, norm.astype(jnp.float32)), exact


def fold_into_outputs(weight: jax.Array, bias: jax.Array | None, scale: jax.Array):
    """Weight [K, N] and bias [N] of a linear layer with outputs divided by `scale` [N]."""
    return weight / scale, None if bias is None else bias / scale
