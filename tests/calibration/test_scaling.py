"""Smoothing and folding: the formula, and that nothing changes but where the difficulty lies."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.calibration.scaling import fold_into_norm, smoothing_scale

RANDOM = np.random.default_rng(0)


def test_the_scale_is_the_published_formula():
    largest = RANDOM.gamma(1.0, 3.0, 16).astype(np.float32)
    weights = [RANDOM.normal(size=(16, n)).astype(np.float32) for n in (8, 4)]
    of_weights = np.abs(np.concatenate(weights, axis=1)).max(1)
    found = smoothing_scale(jnp.asarray(largest), [jnp.asarray(weight) for weight in weights], 0.7)
    np.testing.assert_allclose(found, largest**0.7 / of_weights**0.3, rtol=1e-5)
    halves = smoothing_scale(jnp.asarray(largest), [jnp.asarray(weight) for weight in weights], 0.5)
    np.testing.assert_allclose(largest / halves, of_weights * halves, rtol=1e-5)  # both have the same range


def test_what_is_never_used_stays():
    weight = np.ones((3, 4), np.float32)
    weight[1] = 0
    np.testing.assert_array_equal(smoothing_scale(jnp.array([0.0, 2.0, 1.0]), [jnp.asarray(weight)], 0.5), [1, 1, 1])


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_folded_norm_divides_by_the_scale_it_returns(zero_centred, dtype):
    norm = RANDOM.normal(0.2, 0.5, 64).astype(np.float32)
    norm[:2] = [0.0, -1.0]  # of which one multiplies by 0
    scale = RANDOM.gamma(2.0, 1.0, 64).astype(np.float32) + 0.1
    stored, exact = fold_into_norm(jnp.asarray(norm), jnp.asarray(scale), zero_centred=zero_centred, dtype=dtype)
    np.testing.assert_array_equal(stored[2:], stored[2:].astype(dtype).astype(jnp.float32))
    before, after = norm + zero_centred, np.asarray(stored) + zero_centred
    np.testing.assert_allclose(after * np.asarray(exact), before, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(exact[2:], scale[2:], rtol={"float32": 1e-4, "float16": 0.05, "bfloat16": 0.3}[dtype])
    assert exact[int(zero_centred)] == 1
