"""Sums and thresholds over the vocabulary that no reduction order, batch size or neighbouring row can change.

A float sum depends on the order in which the compiler adds, and that depends on the shape of the whole batch.
Which tokens top-p keeps, and the log-probabilities that we report, must not: so masses are counted in integers.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_SIGN = np.uint32(2**31)


class Weights(NamedTuple):
    """Numbers in [0, 1], shape [S, N], in fixed point: three digits in base 2**digit_bits, each uint32[S, N].

    The base leaves room for a carry: V digits sum to at most 2**32 - 1. For V = 49,152 there are 48 bits after
    the point, for V = 2**18 there are 39, never more than 72.
    """

    digits: tuple[jax.Array, jax.Array, jax.Array]
    digit_bits: int


def ordered_keys(x: jax.Array) -> jax.Array:
    """uint32 keys that compare as the float32 values do. Both zeros have one key."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, jnp.float32(0), x), jnp.uint32)
    return jnp.where(bits >= _SIGN, ~bits, bits | _SIGN)


def largest_threshold(is_enough: Callable[[jax.Array], jax.Array], num_rows: int) -> jax.Array:
    """The largest uint32 threshold of each row for which `is_enough(thresholds uint32[S]) -> bool[S]` holds.

    `is_enough` must hold at 0 and, from some threshold on, not any more. It is asked 32 times, once per bit.
    """

    def settle_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (_SIGN >> i.astype(jnp.uint32))
        return jnp.where(is_enough(candidate), candidate, threshold)

    return lax.fori_loop(0, 32, settle_bit, jnp.zeros(num_rows, jnp.uint32))


def largest(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The lowest id int32[S] of the largest value of each row of float32[S, N], and that value. A row with a NaN gives
    N, one past the end, or an arbitrary id."""
    # Twice as fast on a CPU as argmax, whose (value, index) reduction is not vectorized.
    best = jnp.max(scores, axis=-1)
    ids = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    return jnp.min(jnp.where(scores == best[:, None], ids, scores.shape[1]), axis=-1), best


def finite_max(x: jax.Array) -> jax.Array:
    """Row maxima float32[S, 1], 0 where a row's is infinite or NaN, so that x - finite_max(x) is not NaN there."""
    largest = jnp.max(x, axis=-1, keepdims=True)
    return jnp.where(jnp.isfinite(largest), largest, jnp.float32(0))


def fixed_point(x: jax.Array, vocab_size: int) -> Weights:
    """float32[S, N] in [0, 1] as `Weights` whose sums over up to `vocab_size` elements are exact.

    The last digit is rounded: an element is off by at most half a unit of the last place.
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
    return Weights((digits[0], digits[1], digits[2]), digit_bits)


def mass(weights: Weights, is_counted: jax.Array | None = None) -> jax.Array:
    """The sum float32[S] of each row's weights, or of those in `is_counted` bool[S, N]: exact until the final
    rounding to a float. It never decreases when more are counted."""
    high, middle, low = (
        jnp.sum(d if is_counted is None else jnp.where(is_counted, d, jnp.uint32(0)), axis=-1, dtype=jnp.uint32)
        for d in weights.digits
    )
    return _to_float(high, middle, low, weights.digit_bits)


def running_mass(weights: Weights) -> jax.Array:
    """float32[S, N]: the mass of the elements up to and including each, equal to `mass` of them."""
    high, middle, low = (jnp.cumsum(d, axis=-1, dtype=jnp.uint32) for d in weights.digits)
    return _to_float(high, middle, low, weights.digit_bits)


def log_softmax(logits: jax.Array) -> jax.Array:
    """log(softmax(logits)) over the last axis of float32[S, V], the sum counted exactly. A row that is all -inf
    stays so."""
    distance = logits - finite_max(logits)
    total = mass(fixed_point(jnp.exp(distance), logits.shape[-1]))
    return distance - jnp.log(jnp.maximum(total, 1))[:, None]


def _to_float(high: jax.Array, middle: jax.Array, low: jax.Array, digit_bits: int) -> jax.Array:
    """The number whose digits are sums of digits: carries, then one float."""
    mask, unit = np.uint32(2**digit_bits - 1), np.float32(0.5**digit_bits)
    bits = np.uint32(digit_bits)
    middle = middle + (low >> bits)
    high = high + (middle >> bits)
    high, middle, low = (x.astype(jnp.float32) for x in (high, middle & mask, low & mask))
    return (high + (middle + low * unit) * unit) * unit
