"""What a call costs, for the compiler's schedule."""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.flash_attention.specs import AttentionSpec


def cost_estimate(spec: AttentionSpec) -> pl.CostEstimate:
    """Of rows of full length; a causal call of as many keys as queries does half of the products."""
    seen = spec.num_keys if spec.window is None else min(spec.num_keys, spec.window)
    pairs = spec.batch_size * spec.num_heads * spec.num_queries * seen
    if spec.causal and spec.window is None and spec.num_queries == spec.num_keys:
        pairs //= 2
    rows = 2 * spec.num_queries * spec.num_heads + 2 * spec.num_keys * spec.num_kv_heads
    num_bytes = rows * spec.batch_size * spec.head_dim * jnp.dtype(spec.dtype).itemsize
    return pl.CostEstimate(flops=4 * pairs * spec.head_dim, transcendentals=pairs, bytes_accessed=num_bytes)
