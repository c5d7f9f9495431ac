"""Exact sums and thresholds over the vocabulary: independent of reduction order, batch size and other rows.

A floating-point sum depends on the order of additions, which the compiler chooses by the shape of the whole batch. The
tokens that top-p keeps and the log-probabilities reported must not depend on it, so probabilities are summed as
integers.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_SIGN = np.uint32(2**31)


class FixedPoint(NamedTuple):
    """Fixed-point numbers in [0, 1], shape [S, N]: three digits in base 2**digit_bits, each uint32[S, N].

    The base is so small that the sum of V = `vocab_size` digits fits in uint32. There are 48 fractional bits for
    V = 49,152, 39 for V = 2**18, and at most 72.
    """

    digits: tuple[jax.Array, jax.Array, jax.Array]
    digit_bits: int


def ordered_keys(x: jax.Array) -> jax.Array:
    """uint32 keys in the order of the float32 values; both zeros have the same key."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, jnp.float32(0), x), jnp.uint32)
    return jnp.where(bits >= _SIGN, ~bits, bits | _SIGN)


def largest_threshold(is_enough: Callable[[jax.Array], jax.Array], num_rows: int) -> jax.Array:
    """The largest uint32 threshold of each row for which `is_enough(thresholds uint32[S]) -> bool[S]` holds.

    `is_enough` must hold at 0 and be monotonic. It is evaluated 32 times, once per bit.
    """

    def set_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (_SIGN >> i.astype(jnp.uint32))
        return jnp.where(is_enough(candidate), candidate, threshold)

    return lax.fori_loop(0, 32, set_bit, jnp.zeros(num_rows, jnp.uint32))


def largest(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The index int32[S] of the largest value of each row of float32[S, N], the lowest of equals, and that value.

    The index of a row with a NaN is arbitrary, from 0 to N inclusive.
    """
    # Twice as fast on a CPU as argmax, whose (value, index) reduction is not vectorized.
    best = jnp.max(scores, axis=-1)
    ids = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    return jnp.min(jnp.where(scores == best[:, None], ids, scores.shape[1]), axis=-1), best


def finite_max(x: jax.Array) -> jax.Array:
    """Row maxima float32[S, 1]; 0 for a maximum that is infinite or NaN, so that x - finite_max(x) is not NaN."""
    largest = jnp.max(x, axis=-1, keepdims=True)
    return jnp.where(jnp.isfinite(largest), largest, jnp.float32(0))


def fixed_point(x: jax.Array, vocab_size: int) -> FixedPoint:
    """float32[S, N] in [0, 1] as `FixedPoint` numbers whose sums over up to `vocab_size` elements are exact.

    The last digit is rounded: the error of an element is at most half a unit in the last place.
    """
    digit_bits = min(24, 32 - vocab_size.bit_length())
    scale = jnp.float32(2**digit_bits)
    digits = []
    for is_last in (False, False, True):
        x = x * scale
        whole = jnp.floor(x + 0.5) if is_last else jnp.floor(x)
        # Through int32, which converts in one vector instruction; digits are at most 2**24.
        digits.append(whole.astype(jnp.int32).astype(jnp.uint32))
        x = x - whole
    return FixedPoint((digits[0], digits[1], digits[2]), digit_bits)


def mass(weights: FixedPoint, is_counted: jax.Array | None = None) -> jax.Array:
    """The sum float32[S] of each row, or of the elements in `is_counted` bool[S, N], exact up to the final rounding to
    float32. It is monotonic in the set of elements counted."""
    high, middle, low = (
        jnp.sum(d if is_counted is None else jnp.where(is_counted, d, jnp.uint32(0)), axis=-1, dtype=jnp.uint32)
        for d in weights.digits
    )
    return _to_float(high, middle, low, weights.digit_bits)


def running_mass(weights: FixedPoint) -> jax.Array:
    """Cumulative sums float32[S, N], each equal to `mass` of the elements up to it."""
    high, middle, low = (jnp.cumsum(d, axis=-1, dtype=jnp.uint32) for d in weights.digits)
    return _to_float(high, middle, low, weights.digit_bits)


def log_softmax(logits: jax.Array) -> jax.Array:
    """log(softmax(logits)) over the last axis of float32[S, V], with an exact sum. A row of -inf stays -inf."""
    distance = logits - finite_max(logits)
    total = mass(fixed_point(jnp.exp(distance), logits.shape[-1]))
    return distance - jnp.log(jnp.maximum(total, 1))[:, None]


def _to_float(high: jax.Array, middle: jax.Array, low: jax.Array, digit_bits: int) -> jax.Array:
    """float32 of sums of digits: carries between the digits in uint32, then each is converted and added, from the
    lowest up."""
    mask, unit = np.uint32(2**digit_bits - 1), np.float32(0.5**digit_bits)
    bits = np.uint32(digit_bits)
    middle = middle + (low >> bits)
    high = high + (middle >> bits)
    high, middle, low = (x.astype(jnp.float32) for x in (high, middle & mask, low & mask))
    return (high + (middle + low * unit) * unit) * unit
