"""Attention for training: whole sequences of a few hundred tokens, all scores at once."""

import jax
import jax.numpy as jnp
from jax import lax

MASKED = -1e30


def attend_by_head(
    layer: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    window: int | None,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """`attend` for q [B, T, Hq, K], k and v [B, T, Hkv, K], as one batched product over all heads of all sequences.

    XLA:CPU runs that form, backward too, on its fast matrix product: with 12 x 256 tokens a training step of a
    2-layer model takes half the time of one with `attend_without_cache`. Scores need B * Hq * T * T elements.
    """
    num_rows, length, num_heads, head_dim = q.shape

    def by_head(x: jax.Array) -> jax.Array:
        x = jnp.repeat(x, num_heads // x.shape[2], axis=2)
        return x.transpose(0, 2, 1, 3).reshape(num_rows * num_heads, length, x.shape[-1])

    q, k, v = by_head(q), by_head(k), by_head(v)
    ages = jnp.arange(length)[:, None] - jnp.arange(length)
    is_visible = (ages >= 0) if window is None else (ages >= 0) & (ages < window)
    scores = lax.batch_matmul(q, k.swapaxes(1, 2), precision=lax.Precision.HIGHEST).astype(jnp.float32)
    scores = scores * (head_dim**-0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(is_visible, scores, MASKED)
    if sinks is not None:  # one more column, whose value is zero
        column = jnp.broadcast_to(jnp.tile(sinks, num_rows)[:, None, None], (*scores.shape[:2], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :length]
    out = lax.batch_matmul(weights.astype(v.dtype), v, precision=lax.Precision.HIGHEST)
    return out.reshape(num_rows, num_heads, length, v.shape[-1]).swapaxes(1, 2)
