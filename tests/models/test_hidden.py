"""Vectors that are added to hidden states: in float32, rounded once, and nothing where they are 0."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.hidden import Pending, summed, with_added


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sums_are_rounded_once_and_zeros_keep_every_bit(dtype):
    state = jnp.asarray([[-0.0, 1.0, jnp.inf, 257.0], [-0.0, 1.0, jnp.nan, 257.0]], dtype)
    vectors = jnp.asarray([[0.0, 0.0, 0.0, 0.0], [1.0, 0.001953125, 0.0, 0.75]])
    found = with_added(state, vectors)
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found[0]).tobytes(), np.asarray(state[0]).tobytes())
    exact = np.asarray(state[1], np.float32) + np.asarray(vectors[1])
    wanted = jnp.asarray(exact).astype(dtype)
    np.testing.assert_array_equal(found[1].astype(jnp.float32), wanted.astype(jnp.float32))


def test_a_sum_that_is_pending_stays_so():
    state, term, vectors = jnp.asarray([1.0, 2.0]), jnp.asarray([10.0, 20.0]), jnp.asarray([0.0, 3.0])
    found = with_added(Pending(state, term), vectors)
    assert isinstance(found, Pending)
    assert summed(found).tolist() == [11.0, 25.0]
