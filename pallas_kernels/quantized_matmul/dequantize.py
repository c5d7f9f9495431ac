"""From stored values to weights: the one place with the formula."""

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
      values: [..., K, N], int4, int8 or float8.
      scales: floating point [..., ceil(K / block[0]), ceil(N / block[1])].
      zeros: int8, shaped as scales, in the units of values.
      codebook: float32 [16].
      minima: floating point, shaped as scales; the code is value + 8 in int4, value in int8.
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
    """The value that stands for the code 0 where there are minima."""
    return -8 if values.dtype == jnp.int4 else 0


def spread(of_blocks: jax.Array, block: tuple[int, int], shape: tuple[int, ...]) -> jax.Array:
    """What belongs to each block, [..., K blocks, N blocks], at each of its values [..., K, N]."""
    for axis, size in zip((-2, -1), block, strict=True):
        length = shape[axis]
        if of_blocks.shape[axis] == 1 and size >= length:
            continue
        of_blocks = jnp.repeat(of_blocks, size, axis=axis)
        of_blocks = jax.lax.slice_in_dim(of_blocks, 0, length, axis=axis)
    return jnp.broadcast_to(of_blocks, shape)


def look_up(values: jax.Array, codebook: jax.Array, platform: str) -> jax.Array:
    """codebook[value + 8] of int4 values; elsewhere than on a CPU, by four rounds of choosing between halves.

    A gather of single elements neither fuses into a matrix product nor runs at the speed of memory on a TPU or GPU;
    choosing costs 15 instructions a value.
    """
    codes = values.astype(jnp.int32) + 8
    if platform == "cpu":
        return jnp.asarray(codebook).at[codes].get(mode="promise_in_bounds")
    entries = [codebook[i] for i in range(16)]
    for bit in range(4):
        is_odd = (codes >> bit) & 1 == 1
        entries = [jnp.where(is_odd, high, low) for low, high in zip(entries[::2], entries[1::2], strict=True)]
    return entries[0]
