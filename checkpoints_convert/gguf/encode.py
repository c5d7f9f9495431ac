"""Blocks of ggml made of weights: F32, F16, BF16, Q8_0, Q4_0 and Q4_K.

Q8_0 and Q4_0 are bit for bit those of gguf-py and of ggml's reference; Q4_K searches scales and minima as ggml's
`make_qkx2_quants` does (ggml-quants.c), but no other writer's bits are promised. Weights of the error, one for each
input, make Q4_0 and Q4_K search for the least weighted error (`make_qx_quants`, `make_qkx3_quants`).
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from checkpoints_convert.gguf.blocks import TYPES

ENCODED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K")
WEIGHTED = ("Q4_0", "Q4_K")  # types whose rounding uses weights of the error
_CHUNK = 2**18  # values rounded at once: what a search makes of them stays small


def encode(kind: str, rows: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    """uint8 [rows, bytes] of float32 [rows, columns].

    Args:
      importance: float32 [columns], positive or zero: weights of the squared error; for `WEIGHTED` types only.

    Raises ValueError for values that the type cannot hold: float16 above 65,504, scales of blocks likewise.
    """
    if kind not in ENCODED:
        raise ValueError(f"{kind} is not written; written are {', '.join(ENCODED)}")
    if importance is not None and kind not in WEIGHTED:
        raise ValueError(f"{kind} is rounded without weights of the error")
    with np.errstate(over="ignore"):
        if kind in ("F32", "F16", "BF16"):
            dtype = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[kind]
            converted = np.ascontiguousarray(rows.astype(dtype))
            _check_finite(kind, converted)
            return converted.view(np.uint8)
        size = TYPES[kind].block_size
        blocks = rows.astype(np.float32, copy=False).reshape(-1, size)
        weights = None if importance is None else np.tile(importance.reshape(-1, size), (len(rows), 1))
        step = _CHUNK // size
        parts = []
        for first in range(0, len(blocks), step):
            part = blocks[first : first + step]
            parts.append(_ENCODE[kind](part, None if weights is None else weights[first : first + step]))
    return np.concatenate(parts).reshape(len(rows), -1)


def _check_finite(kind: str, numbers: np.ndarray) -> None:
    if bad := int((~np.isfinite(numbers.astype(np.float32))).sum()):
        raise ValueError(f"{bad} of {numbers.size} numbers are too large for {kind}, or not finite")


def _half(kind: str, numbers: np.ndarray) -> np.ndarray:
    """uint8 [blocks, 2] of float32 [blocks, 1]."""
    halves = numbers.astype(np.float16)
    _check_finite(f"the scales of {kind}", halves)
    return halves.view(np.uint8)


def _inverse(scales: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(scales == 0, np.float32(0), np.float32(1) / scales)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """uint8 [blocks, 16] of [blocks, 32]: the first half of the codes are the low halves of the bytes."""
    return codes[..., :16] | codes[..., 16:] << 4


def _q8_0(blocks: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = blocks * _inverse(scales)
    size = np.abs(scaled)
    below = np.floor(size)
    codes = np.sign(scaled) * (below + np.floor(2 * (size - below)))  # halves are rounded away from zero
    return np.concatenate([_half("Q8_0", scales), codes.astype(np.int8).view(np.uint8)], axis=1)


def _q4_0(blocks: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    if weights is None:
        largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
        scales = largest / np.float32(-8)
        codes = np.trunc(blocks * _inverse(scales) + np.float32(8.5)).astype(np.uint8).clip(0, 15)
    else:
        found_scales, found_codes = _fit_scales(blocks, weights)
        scales, codes = np.asarray(found_scales), np.asarray(found_codes).astype(np.uint8)
    return np.concatenate([_half("Q4_0", scales), _nibbles(codes)], axis=1)


def _q4_k(blocks: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    groups = blocks.reshape(-1, 8, 32)
    fit = _fit_affine(groups, None if weights is None else weights.reshape(-1, 8, 32))
    scales, minima = (np.asarray(part) for part in fit)  # [blocks, 8] each; a weight is scale * code - minimum
    numbers, packed = [], []
    for part in (scales, minima):
        whole = part.max(axis=1, keepdims=True) / np.float32(63)
        half = _half("Q4_K", whole)
        numbers.append(half)
        # Integers for the largest as computed, products with it as stored: as in ggml.
        packed.append(np.minimum(np.round(part * _inverse(whole)), 63).astype(np.uint8))
    halves = [number.view(np.float16).astype(np.float32) for number in numbers]
    spread, lowest = (half * part for half, part in zip(halves, packed, strict=True))
    codes = np.round((groups + lowest[..., None]) * _inverse(spread)[..., None]).clip(0, 15).astype(np.uint8)
    pairs = codes.reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate([*numbers, _packed_scales(*packed), nibbles], axis=1)


def _packed_scales(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """uint8 [blocks, 12] of two times eight numbers of 6 bits; the inverse of unpacking.py's `_scales_and_minima`."""
    low = scales[:, :4] | scales[:, 4:] >> 4 << 6
    middle = minima[:, :4] | minima[:, 4:] >> 4 << 6
    return np.concatenate([low, middle, scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4], axis=1)


_ENCODE = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_K": _q4_k}


@jax.jit
def _fit_scales(blocks: jax.Array, importance: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scales [blocks, 1] and codes [blocks, 32] in 0..15, for code - 8, of the least weighted error found."""
    variance = jnp.mean(blocks**2, axis=1, keepdims=True)
    weights = _usable(importance) * jnp.sqrt(variance + blocks**2)
    largest = jnp.take_along_axis(blocks, jnp.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
    safe = jnp.where(largest == 0, 1.0, largest)

    def tried(step: jax.Array, best: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        codes = jnp.clip(jnp.round(-(8 + 0.1 * (step - 9)) / safe * blocks), -8, 7)
        products = jnp.sum(weights * blocks * codes, axis=1, keepdims=True)
        squares = jnp.sum(weights * codes**2, axis=1, keepdims=True)
        scales = jnp.where(squares > 0, products / jnp.where(squares > 0, squares, 1.0), 0.0)
        gain = products * scales  # the error is a constant minus this
        is_better = gain > best[0]
        return tuple(jnp.where(is_better, new, old) for new, old in zip((gain, scales, codes), best, strict=True))

    start = (jnp.zeros_like(largest), jnp.zeros_like(largest), jnp.zeros_like(blocks))
    _, scales, codes = jax.lax.fori_loop(0, 19, tried, start)
    return scales, codes + 8


def _usable(importance: jax.Array) -> jax.Array:
    """The weights of the error; equal ones where a group has none, since its inputs were never seen."""
    return jnp.where(jnp.sum(importance, axis=-1, keepdims=True) > 0, importance, 1.0)


@jax.jit
def _fit_affine(groups: jax.Array, importance: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Scales and minima [blocks, 8], both at least 0, of groups [blocks, 8, 32]: weight = scale * code - minimum."""
    if importance is None:
        weights = jnp.sqrt(jnp.mean(groups**2, axis=2, keepdims=True)) + jnp.abs(groups)
        lowest_step, step_size, num_steps = -1.0, 0.1, 21
    else:
        variance = 2 * jnp.mean(groups**2, axis=(1, 2), keepdims=True)
        weights = _usable(importance) * jnp.sqrt(variance + groups**2)
        lowest_step, step_size, num_steps = -0.9, 0.05, 37
    smallest = jnp.minimum(groups.min(axis=2, keepdims=True), 0)
    size = groups.max(axis=2, keepdims=True) - smallest
    safe = jnp.where(size > 0, size, 1.0)
    total = jnp.sum(weights, axis=2, keepdims=True)
    mean = jnp.sum(weights * groups, axis=2, keepdims=True)

    def error(scales: jax.Array, minima: jax.Array, codes: jax.Array) -> jax.Array:
        return jnp.sum(weights * (scales * codes + minima - groups) ** 2, axis=2, keepdims=True)

    def codes_at(top: jax.Array | float) -> jax.Array:
        return jnp.clip(jnp.round(top / safe * (groups - smallest)), 0, 15)

    def tried(step: jax.Array, best: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        codes = codes_at(15 + lowest_step + step_size * step)
        ones = jnp.sum(weights * codes, axis=2, keepdims=True)
        squares = jnp.sum(weights * codes**2, axis=2, keepdims=True)
        products = jnp.sum(weights * groups * codes, axis=2, keepdims=True)
        determinant = total * squares - ones**2
        is_regular = determinant > 0
        divisor = jnp.where(is_regular, determinant, 1.0)
        scales = (total * products - mean * ones) / divisor
        minima = (squares * mean - ones * products) / divisor
        scales = jnp.where(minima > 0, products / jnp.where(squares > 0, squares, 1.0), scales)
        minima = jnp.minimum(minima, 0)
        lost = error(scales, minima, codes)
        is_better = is_regular & (scales > 0) & (lost < best[0])
        return tuple(jnp.where(is_better, new, old) for new, old in zip((lost, scales, minima), best, strict=True))

    first = jnp.where(size > 0, size / 15, 0.0)
    best = (error(first, smallest, codes_at(15.0)), first, smallest)
    _, scales, minima = jax.lax.fori_loop(0, num_steps, tried, best)
    return scales[..., 0], -minima[..., 0]
