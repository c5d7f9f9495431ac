"""Activations quantized on the way to a product, one scale for each token."""

import jax
import jax.numpy as jnp

INT8_MAX, FP8_MAX = 127.0, 448.0
# Of an all-zero token the scale would be 0; SmoothQuant's code bounds the maximum by the same number.
SMALLEST_MAXIMUM = 1e-5


def quantize_tokens(x: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    """int8 or float8_e4m3fn [..., K] and float32 scales [..., 1], with x close to values * scales.

    The scale is max|x| / 127 or / 448 (Xiao et al. 2022, SmoothQuant, section 4, per-token). A NaN stays one: its
    token's scale is NaN.
    """
    x = x.astype(jnp.float32)
    largest = INT8_MAX if kind == "int8" else FP8_MAX
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), SMALLEST_MAXIMUM) / largest
    # XLA:CPU's maximum may pass over a NaN, which would become a zero.
    scale = jnp.where(jnp.isnan(x).any(axis=-1, keepdims=True), jnp.nan, scale)
    # The cast to fp8 makes NaN of what is too large, so both are clipped first.
    scaled = jnp.clip(x / scale, -largest, largest)
    if kind == "int8":
        return jnp.round(scaled).astype(jnp.int8), scale
    return scaled.astype(jnp.float8_e4m3fn), scale
