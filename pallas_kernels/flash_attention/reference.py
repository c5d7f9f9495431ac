"""Dense attention in float32: the oracle of every other implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention.specs import AttentionSpec


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query_offset: jax.Array,
    kv_lengths: jax.Array | None,
    spec: AttentionSpec,
) -> jax.Array:
    batch, num_queries = spec.batch_size, spec.num_queries
    grouped = q.reshape(batch, num_queries, spec.num_kv_heads, spec.num_groups, spec.head_dim)
    scores = jnp.einsum("bthgk,bshk->bhgts", grouped.astype(jnp.float32), k.astype(jnp.float32)) * spec.scale
    positions = query_offset[:, None] + jnp.arange(num_queries)
    keys = jnp.arange(spec.num_keys)
    visible = jnp.ones((batch, num_queries, spec.num_keys), bool)
    if spec.causal:
        visible &= keys <= positions[:, :, None]
    if spec.window is not None:
        visible &= keys > positions[:, :, None] - spec.window
    if kv_lengths is not None:
        visible &= keys < kv_lengths[:, None, None]
    visible = visible[:, None, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    weights = jnp.where(visible.any(-1, keepdims=True), weights, 0.0)
    out = jnp.einsum("bhgts,bshk->bthgk", weights, v.astype(jnp.float32))
    return out.reshape(q.shape).astype(q.dtype)
