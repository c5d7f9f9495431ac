"""Exact masses and thresholds: against Python's exact arithmetic, and independent of every order."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.sampling import exact

V = 300
keys_of = jax.jit(exact.ordered_keys)
log_softmax = jax.jit(exact.log_softmax)


@jax.jit
def masses(x, is_counted):
    weights = exact.fixed_point(x, V)
    return exact.mass(weights, is_counted), exact.mass(weights), exact.running_mass(weights)


@jax.jit
def largest_with_count(keys, count):
    return exact.largest_threshold(lambda t: jnp.sum(keys >= t[:, None], axis=-1) >= count, keys.shape[0])


def peaked(seed, num_rows=1):
    """exp of logits that spread over 60 units below their maximum: a peak and a tail down to 1e-26."""
    return np.exp(-np.random.default_rng(seed).uniform(0, 60, (num_rows, V))).astype(np.float32)


# Subnormal numbers are zero on the chips and on XLA:CPU.
floats = st.floats(width=32, allow_nan=False, allow_subnormal=False)


@settings(max_examples=100, deadline=None)
@given(st.lists(floats, min_size=8, max_size=8))
def test_keys_order_as_the_floats_do(values):
    x = np.array(values, np.float32)
    keys = np.asarray(keys_of(x))
    assert np.array_equal(keys[:, None] < keys[None, :], x[:, None] < x[None, :])
    assert np.array_equal(keys[:, None] == keys[None, :], x[:, None] == x[None, :])


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, V))
def test_the_largest_threshold_is_the_kth_largest_key(seed, k):
    keys = np.random.default_rng(seed).integers(0, 2**32, (2, V), np.uint32)
    threshold = largest_with_count(keys, k)
    assert np.array_equal(threshold, np.sort(keys, axis=-1)[:, -k])


@pytest.mark.parametrize("keys", [0, 2**32 - 1, 2**31])
def test_thresholds_at_the_ends(keys):
    assert np.array_equal(largest_with_count(np.full((2, V), keys, np.uint32), 1), [keys, keys])


def test_mass_is_exact_until_the_final_rounding():
    for seed in range(20):
        x = peaked(seed)
        is_counted = np.random.default_rng(seed).random((1, V)) < 0.5
        for got, among in zip(masses(x, is_counted), (is_counted, np.ones_like(is_counted)), strict=False):
            expected = math.fsum(np.where(among, x, 0)[0].tolist())
            assert abs(float(got[0]) - expected) <= 2 * np.spacing(np.float32(expected))


def test_mass_counts_a_long_tail_of_tiny_weights():
    """300 tokens of 1e-9 beside one of 1, which a float32 sum would drop altogether."""
    x = np.full((1, V), 1e-9, np.float32)
    x[0, 7] = 1
    is_tail = x < 1
    assert math.isclose(masses(x, is_tail)[0][0], 299e-9, rel_tol=1e-4)
    ones = np.ones((1, V), np.float32)
    assert masses(ones, is_tail)[1][0] == V


def test_no_order_changes_a_mass_and_a_float_sum_is_changed():
    """The inverse test: the same permutations do change the float32 sum, so the first check can fail."""
    x, rng = peaked(0), np.random.default_rng(1)
    # One row per order: a serial float32 sum stands for what a compiler may do.
    orders = np.stack([x[0, rng.permutation(V)] for _ in range(50)])
    exact_sums = {float(masses(order[None], order[None] > 0)[1][0]) for order in orders}
    float_sums = {float(np.cumsum(order, dtype=np.float32)[-1]) for order in orders}
    assert len(exact_sums) == 1
    assert len(float_sums) > 1


def test_more_tokens_never_weigh_less_and_the_running_mass_agrees():
    x = -np.sort(-peaked(3), axis=-1)
    running = np.asarray(masses(x, x > 0)[2])[0]
    assert np.all(np.diff(running) >= 0)
    for n in (1, 2, 7, 100, V):
        assert masses(x, np.arange(V)[None] < n)[0][0] == running[n - 1]


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 49_152, 2**18, 2**22])
def test_digits_never_overflow(vocab_size):
    weights = exact.fixed_point(jnp.ones((1, 1)), vocab_size)
    largest = 2**weights.digit_bits
    assert int(weights.digits[0][0, 0]) == largest
    assert vocab_size * largest < 2**32  # also with a carry: a digit is at most largest - 1 where the carry is 1
    assert 3 * weights.digit_bits >= 27


def test_log_softmax_against_float64():
    logits = np.random.default_rng(0).normal(0, 8, (3, V)).astype(np.float32)
    logits[1, ::2] = -np.inf
    logits[2] = -np.inf
    wide = logits[:2].astype(np.float64)
    expected = wide - np.logaddexp.reduce(wide, axis=-1, keepdims=True)
    got = np.asarray(log_softmax(logits))
    np.testing.assert_allclose(got[:2], expected, rtol=3e-7, atol=1e-6)
    assert np.all(got[2] == -np.inf)


def test_log_softmax_does_not_depend_on_the_other_rows():
    logits = np.random.default_rng(0).normal(0, 8, (5, V)).astype(np.float32)
    together = np.asarray(log_softmax(logits))
    for i in range(5):
        assert np.array_equal(together[i], log_softmax(logits[i : i + 1])[0])
