"""The blockwise gradient of attention, for every implementation that returns (out, lse)."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.flash_attention.masking import scaled_scores, scaled_scores_gradient
from pallas_kernels.flash_attention.specs import AttentionSpec, FlashOperands
from pallas_kernels.flash_attention.xla import over_key_blocks, over_query_blocks, products


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def differentiable(run, spec: AttentionSpec, operands: FlashOperands):
    """`run(operands, spec)`, differentiated by `gradient`."""
    return run(operands, spec)


def _forward(run, spec: AttentionSpec, operands: FlashOperands):
    out, lse = run(operands, replace(spec, return_lse=True))
    return (out, lse if spec.return_lse else None), (operands, out, lse)


def _backward(run, spec: AttentionSpec, residuals, cotangents):
    return (gradient(spec, *residuals, *cotangents),)


differentiable.defvjp(_forward, _backward)


def gradient(spec: AttentionSpec, operands: FlashOperands, out, lse, d_out, d_lse) -> FlashOperands:
    """The cotangents of q, k, v and sinks, None for the rest (Dao 2023, FlashAttention-2, section 3.1.2).

    The weights of a block are exp(score - lse). d_lse (None for zero) adds weight * d_lse to the gradient of a score.
    Temporaries are the gradients of k and v in float32.
    """
    q, k, v = operands[:3]
    d_out = d_out.astype(jnp.float32)
    # The gradient of a score is its weight * (d_out . value - delta); a sink's value is zero.
    delta = jnp.sum(d_out * out.astype(jnp.float32), axis=-1)
    if d_lse is not None:
        delta = delta - d_lse
    d_sinks = None
    if spec.has_sinks:
        weights = jnp.where(jnp.isneginf(operands.sinks), 0.0, jnp.exp(operands.sinks - lse))
        d_sinks = -jnp.sum(weights * delta, axis=(0, 1))
    split = lambda x: x.reshape(*x.shape[:2], spec.num_kv_heads, spec.num_groups, *x.shape[3:])  # noqa: E731
    # The lse of a query that sees no key is -inf; a finite value keeps its scores finite.
    lse = jnp.where(jnp.isneginf(lse), 0.0, lse)
    arrays = tuple(map(split, (q, d_out.astype(q.dtype), lse, delta)))
    carry = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
    (d_k, d_v), d_q = over_query_blocks(partial(_query_block, operands, spec), arrays, operands, spec, carry)
    return FlashOperands(
        d_q.reshape(q.shape).astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), d_sinks, None, None, None, None
    )


def _query_block(operands: FlashOperands, spec: AttentionSpec, carry, rows, q, d_out, lse, delta):
    """Adds the gradients of one block of queries to those of k and v, and returns its own [B, T, Hkv, G, K]."""
    lse, delta = (x.transpose(0, 2, 3, 1)[..., None] for x in (lse, delta))

    def step(carry, start, k_block, v_block, visible):
        d_q, d_k, d_v = carry
        if spec.has_lengths:
            keys = start + jnp.arange(k_block.shape[1])
            k_block = jnp.where((keys < operands.kv_lengths[:, None])[..., None, None], k_block, 0)
        scores = scaled_scores(spec, products(spec, "bthgk,bshk->bhgts", q, k_block))
        weights = jnp.exp(scores - lse)
        if visible is not None:
            weights = jnp.where(visible, weights, 0.0)
        d_weights = products(spec, "bthgk,bshk->bhgts", d_out, v_block)
        d_products = scaled_scores_gradient(spec, scores, weights * (d_weights - delta)).astype(q.dtype)
        d_q = d_q + products(spec, "bhgts,bshk->bthgk", d_products, k_block)
        d_k = _add_block(d_k, start, products(spec, "bhgts,bthgk->bshk", d_products, q))
        d_v = _add_block(d_v, start, products(spec, "bhgts,bthgk->bshk", weights.astype(q.dtype), d_out))
        return d_q, d_k, d_v

    d_q, d_k, d_v = over_key_blocks(step, (jnp.zeros(q.shape, jnp.float32), *carry), rows, operands, spec)
    return (d_k, d_v), d_q


def _add_block(whole: jax.Array, start, block: jax.Array) -> jax.Array:
    old = lax.dynamic_slice_in_dim(whole, start, block.shape[1], axis=1)
    return lax.dynamic_update_slice_in_dim(whole, old + block, start, axis=1)
