"""SmoothQuant: moves outliers of activations into the weights, so that both fit 8 bits."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def smoothing_scale(largest: jax.Array, weights: Sequence[jax.Array], alpha: float) -> jax.Array:
    """The scale [K] by which to divide an input, and to multiply the rows of the weights [K, N] that it enters.

    Xiao et al. 2022, equation 4: max|x|^alpha / max|w|^(1 - alpha), at least 1e-5, with the maximum over all weights. 1
    where the input or the rows are always 0.

    Args:
      largest: the largest |x| observed, [K]. alpha: migration strength, 0..1.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be 0 to 1, got {alpha}")
    of_weights = jnp.max(jnp.stack([jnp.abs(weight).max(axis=1) for weight in weights]), axis=0).astype(jnp.float32)
    is_used = (largest > 0) & (of_weights > 0)
    largest, of_weights = jnp.maximum(largest, 1e-5), jnp.maximum(of_weights, 1e-5)
    return jnp.where(is_used, jnp.maximum(largest**alpha / of_weights ** (1 - alpha), 1e-5), 1.0)
