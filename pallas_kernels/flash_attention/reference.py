"""Dense attention, the oracle in tests of every implementation: in float32, or in float64 where q is.

Memory is B x Hq x T x S.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention.masking import scaled_scores, visible_keys
from pallas_kernels.flash_attention.specs import AttentionSpec, FlashOperands


def unsupported(spec: AttentionSpec, platform: str) -> str | None:
    return None


def attention(operands: FlashOperands, spec: AttentionSpec) -> tuple[jax.Array, jax.Array | None]:
    q, k, v = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in operands[:3])
    if spec.has_lengths:
        # Keys and values beyond a row's length may be NaN, and 0 * NaN is NaN.
        exists = (jnp.arange(spec.num_keys) < operands.kv_lengths[:, None])[..., None, None]
        k, v = jnp.where(exists, k, 0), jnp.where(exists, v, 0)
    grouped = q.reshape(*q.shape[:2], spec.num_kv_heads, spec.num_groups, spec.head_dim)
    scores = scaled_scores(spec, jnp.einsum("bthgk,bshk->bthgs", grouped, k, precision="highest"))
    visible = _visible(operands, spec)[:, :, None, None]
    scores = jnp.where(visible, scores, -jnp.inf)
    if spec.has_sinks:
        sinks = operands.sinks.reshape(spec.num_kv_heads, spec.num_groups, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))], axis=-1)
        visible = jnp.concatenate([jnp.broadcast_to(visible, (*scores.shape[:-1], spec.num_keys)),
                                   jnp.ones((*scores.shape[:-1], 1), bool)], axis=-1)  # fmt: skip
    sees = visible.any(-1)
    # Finite scores for queries that see no key, so that their gradient is zero and not NaN.
    scores = jnp.where(sees[..., None], scores, 0.0)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.where(sees[..., None], jnp.exp(scores - lse[..., None]), 0.0)[..., : spec.num_keys]
    out = jnp.einsum("bthgs,bshk->bthgk", weights, v, precision="highest").reshape(q.shape).astype(operands.q.dtype)
    return out, jnp.where(sees, lse, -jnp.inf).reshape(q.shape[:-1]) if spec.return_lse else None


def _visible(operands: FlashOperands, spec: AttentionSpec) -> jax.Array:
    """bool [B, T, S]."""
    offset = 0 if operands.query_offset is None else operands.query_offset[:, None]
    visible = visible_keys(
        spec,
        (offset + jnp.arange(spec.num_queries))[..., :, None],
        jnp.arange(spec.num_keys),
        None if operands.kv_lengths is None else operands.kv_lengths[:, None, None],
        None if operands.query_segments is None else operands.query_segments[:, :, None],
        None if operands.key_segments is None else operands.key_segments[:, None, :],
    )
    shape = (spec.batch_size, spec.num_queries, spec.num_keys)
    return jnp.ones(shape, bool) if visible is None else jnp.broadcast_to(visible, shape)
