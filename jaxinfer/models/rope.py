"""Rotary position embedding: inverse frequencies of the published variants, and the rotation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.config import RopeConfig
from pallas_kernels.cpu_calls import materialized

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def inverse_frequencies(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """Inverse frequencies float32 [rotary_dim / 2], in radians per token, and the factor on cos and sin.

    Formulas: linear (Chen et al. 2023), dynamic NTK, llama3 (Llama 3.1 report), YaRN (Peng et al. 2023, sections 3.2 to
    3.4), LongRoPE (Ding et al. 2024). Defaults and float32 roundings are those of Transformers' `modeling_rope_utils`:
    at position 100,000, one unit in the last place is a hundredth of a radian.
    """
    base, scaling = 1 / _powers(rope.theta, rope.rotary_dim), 1.0
    if rope.kind == "linear":
        base = base / np.float32(rope.factor)
    elif rope.kind == "dynamic":
        base = 1 / _powers(_dynamic_theta(rope), rope.rotary_dim)
    elif rope.kind == "llama3":
        base = _llama3(rope, base)
    elif rope.kind == "yarn":
        base, scaling = _yarn(rope)
    elif rope.kind == "proportional":
        base = _proportional(rope, base)
    elif rope.kind == "longrope":
        base, scaling = _longrope(rope)
    return base, scaling


def _powers(theta: float, dim: int) -> np.ndarray:
    """theta**(2i / dim), float32 [dim / 2]: the exponent and the result are rounded to float32, the power is
    float64."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(np.float64(np.float32(theta)), exponents.astype(np.float64)).astype(np.float32)


@jax.tree_util.register_pytree_node_class
class Positions:
    """int32 positions [...] of a forward pass; caches the rotations that layers share. A pytree."""

    def __init__(self, positions: jax.Array):
        self.positions = positions
        self._rotations: dict[RopeConfig, tuple[jax.Array, jax.Array]] = {}

    def tree_flatten(self):
        return (self.positions, tuple(self._rotations.values())), tuple(self._rotations)

    @classmethod
    def tree_unflatten(cls, ropes: tuple[RopeConfig, ...], children):
        self = cls(children[0])
        self._rotations = dict(zip(ropes, children[1], strict=True))
        return self

    def rotation(self, rope: RopeConfig) -> tuple[jax.Array, jax.Array]:
        """cos and sin, float32 [..., rotary_dim / 2]."""
        if rope not in self._rotations:
            # Otherwise XLA:CPU recomputes them in every layer, for each head.
            self._rotations[rope] = jax.tree.map(materialized, rotation(rope, self.positions))
        return self._rotations[rope]

    def scaled_queries(self, rope: RopeConfig, q: jax.Array) -> jax.Array:
        """Queries [..., H, K], scaled by position if `query_scale_beta` is set."""
        if rope.query_scale_beta is None:
            return q
        periods = jnp.floor(self.positions.astype(jnp.float32) / _original_length(rope))
        return q * (1 + rope.query_scale_beta * jnp.log1p(periods))[..., None, None].astype(q.dtype)

    def temperature_scaled(self, q: jax.Array, temperature: float, period: int) -> jax.Array:
        """Queries [..., H, K] with the factor of `ModelConfig.query_temperature` (Nakanishi 2025)."""
        periods = jnp.floor((self.positions.astype(jnp.float32) + 1) / period)
        factor = 1 + temperature * jnp.log1p(periods)
        return (q.astype(jnp.float32) * factor[..., None, None]).astype(q.dtype)


def rotation(rope: RopeConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [..., rotary_dim / 2], of int32 positions [...]."""
    frequencies, scaling = inverse_frequencies(rope)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * scaling, jnp.sin(angles) * scaling


def rotate(
    x: Float[Array, "*rows H K"], cos: Float[Array, "*rows half"], sin: Float[Array, "*rows half"]
) -> Float[Array, "*rows H K"]:
    """Rotates the first rotary_dim dimensions of each head of x [..., H, K], pairing i with i + rotary_dim / 2."""
    half = cos.shape[-1]
    cos, sin = cos[..., None, :].astype(x.dtype), sin[..., None, :].astype(x.dtype)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _original_length(rope: RopeConfig) -> int:
    if rope.original_length is None:
        raise ValueError(f"rope kind {rope.kind!r} needs original_length")
    return rope.original_length


def _dynamic_theta(rope: RopeConfig) -> float:
    original = _original_length(rope)
    length = max(rope.sequence_length or original, original)
    stretch = np.float32(rope.factor) * np.float32(length) / np.float32(original) - np.float32(rope.factor - 1)
    exponent = np.float32(rope.rotary_dim / (rope.rotary_dim - 2))
    return float(np.float32(rope.theta) * np.float32(np.float64(stretch) ** np.float64(exponent)))


def _llama3(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    original, factor, low = _original_length(rope), np.float32(rope.factor), np.float32(rope.low_freq_factor)
    wavelength = np.float32(2 * math.pi) / base
    scaled = np.where(wavelength > original / rope.low_freq_factor, base / factor, base)
    if rope.high_freq_factor == rope.low_freq_factor:  # Llama 4 Scout: nothing lies between
        return scaled
    smooth = (np.float32(original) / wavelength - low) / np.float32(rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * base / factor + smooth * base
    is_medium = (wavelength <= original / rope.low_freq_factor) & (wavelength >= original / rope.high_freq_factor)
    return np.where(is_medium, blended, scaled)


def _proportional(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    """The frequencies of a rotation of all dimensions, of which the last are zero (Gemma 4)."""
    count = rope.rotary_dim if rope.num_rotated is None else rope.num_rotated
    is_rotated = np.arange(base.size) < count // 2
    return np.where(is_rotated, base / np.float32(rope.factor), np.float32(0))


def _yarn(rope: RopeConfig) -> tuple[np.ndarray, float]:
    dim, original = rope.rotary_dim, _original_length(rope)

    def correction_dim(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    powers = _powers(rope.theta, dim)
    scaling = rope.attention_factor
    if scaling is None and rope.mscale and rope.mscale_all_dim:
        scaling = _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(rope.factor, rope.mscale_all_dim)
    if scaling is None:
        scaling = _yarn_mscale(rope.factor, 1.0)
    return 1 / (np.float32(rope.factor) * powers) * (1 - kept) + 1 / powers * kept, scaling


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(rope: RopeConfig) -> tuple[np.ndarray, float]:
    original = _original_length(rope)
    is_long = (rope.sequence_length or original) > original
    factors = rope.long_factor if is_long else rope.short_factor
    if factors is None or len(factors) != rope.rotary_dim // 2:
        raise ValueError(f"longrope needs {rope.rotary_dim // 2} factors, one per frequency; got {len(factors or ())}")
    scaling = rope.long_mscale if is_long else rope.short_mscale
    if scaling is None:
        scaling = rope.attention_factor
    if scaling is None:
        scaling = 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(original))
    return 1 / (np.asarray(factors, np.float32) * _powers(rope.theta, rope.rotary_dim)), scaling
