"""Rotary position embedding: inverse frequencies of every published variant, and their application."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """Returns float32 [rotary_dim / 2] radians per token, and the factor on cos and sin.

    Formulas: linear (Chen et al. 2023), dynamic NTK, llama3 (Llama 3.1 report), YaRN (Peng et al. 2023,
    sections 3.2 to 3.4), LongRoPE (Ding et al. 2024); defaults are those of Transformers' `modeling_rope_utils`.
    """
    dim = rope.rotary_dim
    base = rope.theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    scaling = 1.0
    if rope.kind == "linear":
        base = base / rope.factor
    elif rope.kind == "dynamic":
        original = _original(rope)
        length = max(rope.sequence_length or original, original)
        theta = rope.theta * (rope.factor * length / original - (rope.factor - 1)) ** (dim / (dim - 2))
        base = theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    elif rope.kind == "llama3":
        base = _llama3(rope, base)
    elif rope.kind == "yarn":
        base, scaling = _yarn(rope, base)
    elif rope.kind == "longrope":
        base, scaling = _longrope(rope, base)
    return base.astype(np.float32), scaling


def rotation(rope: RopeConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [..., rotary_dim / 2], of int32 positions [...]."""
    frequencies, scaling = inverse_frequencies(rope)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * scaling, jnp.sin(angles) * scaling


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the leading dimensions of each head of x [..., H, K], pairing i with i + rotary_dim / 2."""
    half = cos.shape[-1]
    cos, sin = cos[..., None, :].astype(x.dtype), sin[..., None, :].astype(x.dtype)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _original(rope: RopeConfig) -> int:
    if rope.original_length is None:
        raise ValueError(f"rope kind {rope.kind!r} needs original_length")
    return rope.original_length


def _llama3(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    original = _original(rope)
    wavelength = 2 * math.pi / base
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * base / rope.factor + smooth * base
    scaled = np.where(wavelength > original / rope.low_freq_factor, base / rope.factor, base)
    is_medium = (wavelength <= original / rope.low_freq_factor) & (wavelength >= original / rope.high_freq_factor)
    return np.where(is_medium, blended, scaled)


def _yarn(rope: RopeConfig, base: np.ndarray) -> tuple[np.ndarray, float]:
    dim, original = rope.rotary_dim, _original(rope)

    def correction_dim(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    scaling = rope.attention_factor
    if scaling is None and rope.mscale and rope.mscale_all_dim:
        scaling = _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(rope.factor, rope.mscale_all_dim)
    if scaling is None:
        scaling = _yarn_mscale(rope.factor, 1.0)
    return base / rope.factor * ramp + base * (1 - ramp), scaling


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(rope: RopeConfig, base: np.ndarray) -> tuple[np.ndarray, float]:
    original = _original(rope)
    is_long = (rope.sequence_length or original) > original
    factors = rope.long_factor if is_long else rope.short_factor
    if factors is None or len(factors) != rope.rotary_dim // 2:
        raise ValueError(f"longrope needs {rope.rotary_dim // 2} factors, one per frequency; got {len(factors or ())}")
    scaling = rope.attention_factor
    if scaling is None:
        scaling = 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(original))
    return base / np.asarray(factors), scaling
