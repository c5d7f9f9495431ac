"""Attention for training against the kernels' own, options included."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache import attend_without_cache
from jaxinfer.training.objectives import attend_by_head

RANDOM = np.random.default_rng(0)
Q, K, V = (jnp.asarray(RANDOM.standard_normal((2, 11, heads, 8)), jnp.float32) for heads in (4, 2, 2))
SINKS = jnp.asarray(RANDOM.standard_normal(4), jnp.float32)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("options", [{}, {"scale": 0.7}, {"soft_cap": 1.5}, {"sinks": SINKS}])
def test_it_is_the_kernels_attention(window, options):
    found = attend_by_head(0, Q, K, V, window, **options)
    np.testing.assert_allclose(found, attend_without_cache(0, Q, K, V, window, **options), atol=2e-6)
