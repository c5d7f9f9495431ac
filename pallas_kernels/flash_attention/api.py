"""Entry points of flash attention."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.choice import Implementations, KernelChoice
from pallas_kernels.flash_attention.masking import scaled_scores, scaled_scores_gradient
from pallas_kernels.flash_attention.specs import IMPLEMENTATIONS, AttentionSpec, FlashOperands, make_spec
from pallas_kernels.flash_attention.xla import over_key_blocks, over_query_blocks, products
from pallas_kernels.platform import current_platform

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int32


_BY_PLATFORM = {"tpu": ("pallas_tpu", "xla"), "gpu": ("cudnn", "pallas_gpu", "xla"), "cpu": ("xla",)}
# Each has `attention(operands, spec)`, which returns (out, lse or None).
_MODULES = Implementations("pallas_kernels.flash_attention", IMPLEMENTATIONS, _BY_PLATFORM)
# Differentiated by JAX, or with a gradient of their own.
_HAVE_GRADIENT = ("cudnn", "reference")


def flash_attention(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B S Hkv K"],
    v: Float[Array, "B S Hkv K"],
    *,
    causal: bool = True,
    query_offset: Int32[Array, " B"] | None = None,
    kv_lengths: Int32[Array, " B"] | None = None,
    segment_ids: Int32[Array, "B T"] | tuple[Int32[Array, "B T"], Int32[Array, "B S"]] | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float32[Array, " Hq"] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Any:
    """Softmax attention that never holds the [T, S] score matrix (Dao 2023, FlashAttention-2, section 3.1).

    Differentiable in q, k, v and sinks, also through the log-sum-exp. The result of a row does not depend, to the bit,
    on the other rows of the batch. A query that sees a NaN returns NaN.

    Args:
      q: queries, Hq a multiple of Hkv (grouped-query attention).
      causal: the query at position p sees the keys at positions up to p.
      query_offset: position of each row's first query among its keys, 0 when None.
      kv_lengths: number of valid keys of each row, S when None. Keys and values beyond are never used and may be NaN.
        A query that sees no key returns zeros.
      segment_ids: one array if T == S, or a pair (of queries, of keys): a query sees keys of its own segment only.
      window: a query sees the last `window` keys, its own included.
      soft_cap: scores become soft_cap * tanh(score / soft_cap), after scaling, before masking (Gemma 2, section 2).
      sinks: one more score in each head's softmax, with value zero (gpt-oss). -inf has no weight.
      scale: factor of the scores, K**-0.5 when None.
      return_lse: also return the natural logarithm of the softmax's denominator, sink included.
      implementation: "pallas_tpu", "pallas_gpu", "cudnn", "xla" or "reference" (dense float32, for tests); None selects
        by platform and shape (see `explain`).

    Returns:
      The output in q's dtype; scores and sums are float32. With return_lse, (output, lse float32 [B, T, Hq]); lse is
      -inf for a query that sees no key and has no sink.

    Raises:
      ValueError: shapes, dtypes or options that do not fit, or an unknown implementation.
      NotImplementedError: the named implementation cannot run the call; the message has the reason.
    """
    operands = _operands(q, k, v, query_offset, kv_lengths, segment_ids, sinks)
    spec = make_spec(operands, causal=causal, window=window, soft_cap=soft_cap, scale=scale, return_lse=return_lse)
    out, lse = _attend(q, operands, spec, implementation)
    return (out, lse) if return_lse else out


def _attend(
    q: Float[Array, "B T Hq K"], operands: FlashOperands, spec: AttentionSpec, implementation: str | None
) -> tuple[Float[Array, "B T Hq K"], Float32[Array, "B T Hq"] | None]:
    name = _MODULES.take(spec, current_platform(), implementation)
    run = _MODULES[name].attention
    return run(operands, spec) if name in _HAVE_GRADIENT else differentiable(run, spec, operands)  # pyright: ignore


def explain(
    q,
    k,
    v,
    *,
    causal: bool = True,
    query_offset=None,
    kv_lengths=None,
    segment_ids=None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks=None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> KernelChoice:
    """The implementation that `flash_attention` selects for the same arguments, and the reasons against the others.

    Arguments are arrays or `jax.ShapeDtypeStruct`s. Raises as `flash_attention` does.
    """
    operands = _operands(q, k, v, query_offset, kv_lengths, segment_ids, sinks)
    spec = make_spec(operands, causal=causal, window=window, soft_cap=soft_cap, scale=scale, return_lse=return_lse)
    return _MODULES.choose(spec, current_platform(), implementation)


def _operands(q, k, v, query_offset, kv_lengths, segment_ids, sinks) -> FlashOperands:
    queries = keys = None
    if isinstance(segment_ids, tuple):
        if len(segment_ids) != 2:
            raise ValueError(f"segment_ids is one array or a pair (queries, keys), not {len(segment_ids)} arrays")
        queries, keys = segment_ids
    elif segment_ids is not None:
        queries = keys = segment_ids
    return FlashOperands(q, k, v, sinks, query_offset, kv_lengths, queries, keys)


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
