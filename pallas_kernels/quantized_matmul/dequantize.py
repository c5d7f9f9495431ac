"""The formula of dequantization."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels.platform import current_platform

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int8, Num


def dequantize(
    values: Num[Array, "*stack K N"],
    scales: Float[Array, "*stack Kb Nb"],
    zeros: Int8[Array, "*stack Kb Nb"] | None = None,
    codebook: Float32[Array, " 16"] | None = None,
    minima: Float[Array, "*stack Kb Nb"] | None = None,
    *,
    block: tuple[int, int],
) -> Float32[Array, "*stack K N"]:
    """float32 weights [..., K, N]: (value - zero) * scale, codebook[value + 8] * scale, or code * scale + minimum.

    Args:
      values: int4, int8 or float8.
      scales: one for each block, [..., ceil(K / block[0]), ceil(N / block[1])].
      zeros: zero point of each block, in the units of values.
      minima: minimum of each block; the code is value + 8 for int4, value for int8.
    """
    spread_scales = spread(scales.astype(jnp.float32), block, values.shape)
    if codebook is not None:
        return look_up(values, codebook, current_platform()) * spread_scales
    weight = values.astype(jnp.float32)
    if zeros is not None:
        weight = weight - spread(zeros.astype(jnp.float32), block, values.shape)
    if minima is not None:
        weight = (weight - code_zero(values)) * spread_scales
        return weight + spread(minima.astype(jnp.float32), block, values.shape)
    return weight * spread_scales


def code_zero(values: jax.Array) -> int:
    """The stored value of code 0 in formats with minima."""
    return -8 if values.dtype == jnp.int4 else 0


def spread(of_blocks: jax.Array, block: tuple[int, int], shape: tuple[int, ...]) -> jax.Array:
    """Repeats the number of each block, [..., K blocks, N blocks], for each of its values, [..., K, N]."""
    for axis, size in zip((-2, -1), block, strict=True):
        length = shape[axis]
        if of_blocks.shape[axis] == 1 and size >= length:
            continue
        of_blocks = jnp.repeat(of_blocks, size, axis=axis)
        of_blocks = jax.lax.slice_in_dim(of_blocks, 0, length, axis=axis)
    return jnp.broadcast_to(of_blocks, shape)


def look_up(values: jax.Array, codebook: jax.Array, platform: str) -> jax.Array:
    """codebook[value + 8] of int4 values.

    On TPUs and GPUs a gather of single elements neither fuses into a matrix product nor reaches the memory bandwidth:
    there each of the four bits selects between halves of the codebook, 15 instructions per value.
    """
    codes = values.astype(jnp.int32) + 8
    if platform == "cpu":
        return jnp.asarray(codebook).at[codes].get(mode="promise_in_bounds")
    entries = [codebook[i] for i in range(16)]
    for bit in range(4):
        is_odd = (codes >> bit) & 1 == 1
        entries = [jnp.where(is_odd, high, low) for low, high in zip(entries[::2], entries[1::2], strict=True)]
    return entries[0]
