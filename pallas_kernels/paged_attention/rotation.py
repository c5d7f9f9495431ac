"""Four bits for a number of a key or value, by rotation (TurboQuant, arXiv 2504.19874, algorithm 1).

A vector of width K is divided by its root mean square and rotated by a fixed orthogonal matrix. Then its numbers are
nearly those of a unit normal, whatever the vector was, and each is rounded to the nearest of 16 levels. The stored
scale is the one with which the levels are nearest to the vector. Scores and weighted sums of values are computed in
the rotated space, where queries are rotated once and outputs rotated back once.

The levels are near those of the Lloyd-Max quantizer of a unit normal, but integers of 4 significant bits times a step,
so that a TPU's matrix unit multiplies them as float8_e4m3 (`tpu_program`). With the fitted scale the mean squared error
is the same: 0.0093 for K = 128.

The rotation is R = Q S: S are fixed signs, and for K = m 2^p with m odd, Q is the Hadamard matrix of 2^p within each of
m blocks and the reflection I - 2/m across blocks. Q is symmetric, so R^-1 = S Q.

Stored bits are a function of the vector alone: on a CPU, where a product's rounding depends on its number of rows and
on how the compiler fuses it, R is computed by sums and differences of pairs, and norms are sums of integers.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.platform import current_platform

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Integer, UInt8

# Positive levels in steps, and the step at unit variance with the least mean squared error.
LEVELS = (1, 3, 5, 7, 9, 12, 15, 20)
LEVEL_STEP = 0.135
MAX_WIDTH = 2048
MAX_ODD = 15
# Norms are of numbers in 1,024ths, whose squares and products with levels are integers: their sums have no rounding.
_RESOLUTION = 1024


def unsupported_width(width: int) -> str | None:
    """Why vectors of this width are not stored in 4 bits, or None."""
    odd, power = _factors(width)
    if power < 2:
        return f"head_dim is {width}; two numbers share a byte, so it must be even"
    if odd > MAX_ODD or width > MAX_WIDTH:
        return (
            f"head_dim is {width} = {odd} x {power}; it must be at most {MAX_WIDTH}, and an odd number up to {MAX_ODD} "
            "times a power of two"
        )
    return None


def rotate(x: Float[Array, "*rows K"]) -> Float[Array, "*rows K"]:
    """R x in x's dtype, computed in float32. Raises ValueError as `unsupported_width`."""
    width = _checked(x)
    return (_mix(x * _signs(width).astype(x.dtype)) * _unit(width)).astype(x.dtype)


def rotate_back(x: Float[Array, "*rows K"]) -> Float[Array, "*rows K"]:
    """The inverse of `rotate`."""
    width = _checked(x)
    return (_mix(x) * _unit(width) * _signs(width)).astype(x.dtype)


def quantize(x: Float[Array, "*rows K"]) -> tuple[UInt8[Array, "*rows K"], Float32[Array, "*rows"]]:
    """Codes of the rotated vectors, and their scales: x is nearly scale times `rotate_back` of the codes' levels.

    A code's highest bit is the sign, the others count levels from zero. A vector with a NaN or infinity has the scale
    NaN. Raises ValueError as `unsupported_width`.
    """
    width = _checked(x)
    odd, _ = _factors(width)
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1)
    parts = x / jnp.where(largest > 0, largest, 1.0)[..., None]
    squares = jnp.square(jnp.round(jnp.abs(parts) * _RESOLUTION).astype(jnp.int32))
    norms = jnp.sqrt(jnp.sum(squares, axis=-1).astype(jnp.float32))
    scales = largest * (norms * np.float32(1 / (_RESOLUTION * width**0.5)))
    # XLA's maximum may drop a NaN.
    scales = jnp.where(jnp.all(jnp.isfinite(x), axis=-1), scales, jnp.nan)
    divisor = jnp.where(norms > 0, norms, 1.0) * np.float32(odd**0.5 / _RESOLUTION)
    unit = _mix(parts * _signs(width)) / divisor[..., None]
    codes = jnp.where(unit < 0, jnp.uint8(8), jnp.uint8(0))
    levels = jnp.full(unit.shape, LEVELS[0], jnp.int32)
    for low, high in pairwise(LEVELS):
        is_above = jnp.abs(unit) > np.float32(LEVEL_STEP * (low + high) / 2)
        codes += is_above.astype(jnp.uint8)
        levels += jnp.where(is_above, high - low, 0)
    # The least-squares fit: the product of the vector and its levels over the levels' squared norm.
    products = jnp.round(jnp.abs(unit) * _RESOLUTION).astype(jnp.int32) * levels
    fit = jnp.sum(products, axis=-1).astype(jnp.float32) / jnp.sum(levels * levels, axis=-1).astype(jnp.float32)
    return codes, scales * (fit * np.float32(1 / (_RESOLUTION * LEVEL_STEP)))


def levels_of(codes: Integer[Array, "*rows K"], dtype=jnp.float32) -> Float[Array, "*rows K"]:
    """The levels of codes, in `dtype`. Selections by bit: XLA:CPU and TPUs gather from small tables one by one."""
    levels = [jnp.asarray(LEVEL_STEP * level, dtype) for level in LEVELS]
    for bit in range(3):
        is_set = (codes & (1 << bit)) != 0
        levels = [jnp.where(is_set, high, low) for low, high in zip(levels[::2], levels[1::2], strict=True)]
    return jnp.where((codes & 8) != 0, -levels[0], levels[0])


def pack_nibbles(codes: UInt8[Array, "*rows K"]) -> UInt8[Array, "*rows _"]:
    """Codes of 4 bits, two a byte: the first half of them in the low bits, the second half in the high bits."""
    half = codes.shape[-1] // 2
    return codes[..., :half] | (codes[..., half:] << 4)


def unpack_nibbles(packed: UInt8[Array, "*rows _"]) -> UInt8[Array, "*rows K"]:
    """The inverse of `pack_nibbles`."""
    return jnp.concatenate([packed & 15, packed >> 4], axis=-1)


def _checked(x: jax.Array) -> int:
    if (reason := unsupported_width(x.shape[-1])) is not None:
        raise ValueError(f"4 bits by rotation: {reason}")
    return x.shape[-1]


def _factors(width: int) -> tuple[int, int]:
    """The odd factor and the power of two."""
    power = width & -width
    return width // power, power


@cache
def _signs(width: int) -> np.ndarray:
    """The fixed signs, float32 [width]: those of the mixed numbers 1, 2, ... (the finalizer of SplitMix64)."""
    mixed = np.arange(1, width + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.where(mixed >> np.uint64(63), -1, 1).astype(np.float32)


def _unit(width: int) -> np.float32:
    """The factor that makes `_mix` orthogonal."""
    odd, power = _factors(width)
    return np.float32(1 / (odd * power**0.5))


def _mix(x: jax.Array) -> jax.Array:
    """x times m sqrt(2^p) Q, a matrix of small integers, in float32."""
    if current_platform() != "cpu":
        # Every dtype has these integers: products of bfloat16 need one pass.
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        matrix = jnp.asarray(_matrix(x.shape[-1]), x.dtype)
        return jnp.einsum("...k,kj->...j", x, matrix, precision=precision, preferred_element_type=jnp.float32)
    x = x.astype(jnp.float32)
    odd, power = _factors(x.shape[-1])
    width = 1
    while width < power:
        pairs = x.reshape(*x.shape[:-1], -1, 2, width)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = jnp.stack([low + high, low - high], axis=-2).reshape(x.shape)
        width *= 2
    if odd == 1:
        return x
    blocks = [x[..., index * power : (index + 1) * power] for index in range(odd)]
    total = sum(blocks[1:], blocks[0])
    return jnp.concatenate([_times(block, odd) - (total + total) for block in blocks], axis=-1)


def _times(x: jax.Array, factor: int) -> jax.Array:
    """x times a whole number, as a sum of exact products: the compiler may contract any of them."""
    terms = [x * float(1 << bit) for bit in range(factor.bit_length()) if factor >> bit & 1]
    return sum(terms[1:], terms[0])


@cache
def _matrix(width: int) -> np.ndarray:
    """The matrix of `_mix`, float32 [K, K]."""
    odd, power = _factors(width)
    hadamard = np.ones((1, 1), np.float32)
    while hadamard.shape[0] < power:
        hadamard = np.kron(np.array([[1, 1], [1, -1]], np.float32), hadamard)
    across = np.ones((1, 1), np.float32) if odd == 1 else odd * np.eye(odd, dtype=np.float32) - 2
    return np.kron(across, hadamard).astype(np.float32)
