"""Blockwise attention in plain JAX, for every platform; memory is linear in the number of tokens."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.flash_attention.masking import MASKED, scaled_scores, visible_keys
from pallas_kernels.flash_attention.specs import AttentionSpec, FlashOperands

QUERY_BLOCK = 512
KEY_BLOCK = 512
# Decode reads few keys: with smaller blocks it reads fewer beyond the end (6 times faster at 100 of 512 keys on a CPU,
# float32, 30 layers of 3 heads of 64).
DECODE_QUERIES = 16
DECODE_KEY_BLOCK = 128


def unsupported(spec: AttentionSpec, platform: str) -> str | None:
    return None


def attention(operands: FlashOperands, spec: AttentionSpec) -> tuple[jax.Array, jax.Array | None]:
    q = operands.q
    grouped = q.reshape(*q.shape[:2], spec.num_kv_heads, spec.num_groups, spec.head_dim)
    out, lse = over_query_blocks(
        lambda rows, block: _query_block(block, rows, operands, spec), (grouped,), operands, spec
    )
    return out.reshape(q.shape).astype(q.dtype), None if lse is None else lse.reshape(q.shape[:-1])


class QueryRows(NamedTuple):
    """Positions int32 [B or 1, T] and segments int32 [B, T] or None of the queries of a block."""

    positions: jax.Array
    segments: Any


def over_query_blocks(function, arrays, operands: FlashOperands, spec: AttentionSpec, carry=None):
    """Maps `function(rows, *blocks)` over blocks of QUERY_BLOCK queries of `arrays` [B, T, ...].

    Returns the concatenated results [B, T, ...]. With a `carry`, `function(carry, rows, *blocks)` returns
    (carry, results), and so does this function. The last block is padded with zeros, of segment 0.
    """
    num_queries = spec.num_queries
    rows_of = lambda start, segments, length: QueryRows(  # noqa: E731
        (0 if operands.query_offset is None else operands.query_offset[:, None])
        + (start + jnp.arange(length, dtype=jnp.int32))[None],
        segments,
    )
    if num_queries <= QUERY_BLOCK:
        rows = rows_of(0, operands.query_segments, num_queries)
        return function(rows, *arrays) if carry is None else function(carry, rows, *arrays)
    num_blocks = -(-num_queries // QUERY_BLOCK)
    padding = num_blocks * QUERY_BLOCK - num_queries

    def split(array):
        padded = jnp.pad(array, ((0, 0), (0, padding), *[(0, 0)] * (array.ndim - 2)))
        return padded.reshape(array.shape[0], num_blocks, QUERY_BLOCK, *array.shape[2:]).swapaxes(0, 1)

    def join(array):
        joined = array.swapaxes(0, 1).reshape(spec.batch_size, num_blocks * QUERY_BLOCK, *array.shape[3:])
        return joined[:, :num_queries]

    def step(carry, inputs):
        index, segments, blocks = inputs
        rows = rows_of(index * QUERY_BLOCK, segments, QUERY_BLOCK)
        if carry is None:
            return None, function(rows, *blocks)
        return function(carry, rows, *blocks)

    inputs = (jnp.arange(num_blocks, dtype=jnp.int32), operands.query_segments, tuple(arrays))
    carry, results = lax.scan(step, carry, (inputs[0], *jax.tree.map(split, inputs[1:])))
    results = jax.tree.map(join, results)
    return results if carry is None else (carry, results)


def over_key_blocks(function, carry, rows: QueryRows, operands: FlashOperands, spec: AttentionSpec):
    """Folds `function(carry, start, k_block, v_block, visible)` over the key blocks that some row of the block sees.

    `visible` is bool [B or 1, 1, 1, T, keys of the block] or None; values beyond a row's length are zero.
    """
    num_queries = rows.positions.shape[1]
    key_block = min(DECODE_KEY_BLOCK if num_queries <= DECODE_QUERIES else KEY_BLOCK, spec.num_keys)
    num_blocks = -(-spec.num_keys // key_block)

    def step(index, carry):
        # The last block is shifted to end with the keys; keys that it shares with the block before are masked.
        start = jnp.minimum(index * key_block, spec.num_keys - key_block)
        k_block = lax.dynamic_slice_in_dim(operands.k, start, key_block, axis=1)
        v_block = lax.dynamic_slice_in_dim(operands.v, start, key_block, axis=1)
        keys = start + jnp.arange(key_block, dtype=jnp.int32)
        lengths = key_segments = query_segments = None
        if spec.has_lengths:
            lengths = operands.kv_lengths[:, None]
            # Values beyond a row's length may be NaN, and 0 * NaN is NaN.
            v_block = jnp.where((keys < lengths)[..., None, None], v_block, 0)
            lengths = lengths[..., None]
        if spec.has_segments:
            query_segments = rows.segments[..., None]
            key_segments = lax.dynamic_slice_in_dim(operands.key_segments, start, key_block, axis=1)[:, None]
        visible = visible_keys(spec, rows.positions[..., None], keys, lengths, query_segments, key_segments)
        if spec.num_keys % key_block:
            is_new = keys >= index * key_block
            visible = is_new[None, None] if visible is None else visible & is_new
        return function(carry, start, k_block, v_block, None if visible is None else visible[:, None, None])

    if num_blocks == 1:
        return step(jnp.int32(0), carry)
    first, last = _block_range(rows.positions, operands.kv_lengths, key_block, spec)
    return lax.fori_loop(first, last, step, carry)


def _block_range(positions, kv_lengths, key_block, spec: AttentionSpec):
    """First and one-past-last key block that any row sees; other blocks would not change a bit of the result."""
    last_key = jnp.int32(spec.num_keys)
    first_key = jnp.int32(0)
    if spec.has_lengths:
        last_key = jnp.minimum(last_key, jnp.max(kv_lengths))
    if spec.causal:
        last_key = jnp.minimum(last_key, jnp.max(positions) + 1)
    if spec.window is not None:
        first_key = jnp.maximum(jnp.min(positions) - spec.window + 1, 0)
    return first_key // key_block, (last_key + key_block - 1) // key_block


def products(spec: AttentionSpec, equation: str, *arrays: jax.Array) -> jax.Array:
    """An einsum with float32 results, at full precision if the operands of the call are float32."""
    precision = lax.Precision.HIGHEST if spec.dtype == "float32" else None
    return jnp.einsum(equation, *arrays, preferred_element_type=jnp.float32, precision=precision)


def _query_block(q, rows: QueryRows, operands: FlashOperands, spec: AttentionSpec):
    """Online softmax of q [B, T, Hkv, G, K] over all key blocks: float32 out of q's shape, lse [B, T, Hkv, G]."""
    batch, num_queries = q.shape[:2]
    shape = (batch, spec.num_kv_heads, spec.num_groups, num_queries)
    highest, total = jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
    if spec.has_sinks:
        # A sink is a key before all others whose value is zero; -inf has no weight.
        sinks = jnp.broadcast_to(operands.sinks.reshape(shape[1:3])[None, :, :, None], shape)
        highest = jnp.maximum(sinks, MASKED)
        total = jnp.exp(sinks - highest)

    def step(carry, start, k_block, v_block, visible):
        highest, total, weighted = carry
        scores = scaled_scores(spec, products(spec, "bthgk,bshk->bhgts", q, k_block))
        if visible is not None:
            scores = jnp.where(visible, scores, MASKED)
        new_highest = jnp.maximum(highest, scores.max(-1))
        weights = jnp.exp(scores - new_highest[..., None])
        decay = jnp.exp(highest - new_highest)
        total = total * decay + weights.sum(-1)
        update = products(spec, "bhgts,bshk->bhgtk", weights.astype(v_block.dtype), v_block)
        return new_highest, total, weighted * decay[..., None] + update

    carry = (highest, total, jnp.zeros((*shape, spec.head_dim), jnp.float32))
    highest, total, weighted = over_key_blocks(step, carry, rows, operands, spec)
    out = weighted / jnp.where(total == 0.0, 1.0, total)[..., None]
    lse = highest + jnp.log(total) if spec.return_lse else None
    if spec.may_see_nothing:
        # XLA:CPU's maximum may drop a NaN; the sum does not, and tells NaN scores from no visible key.
        is_unseen = (highest == MASKED) & ~jnp.isnan(total)
        out = jnp.where(is_unseen[..., None], 0.0, out)
        lse = None if lse is None else jnp.where(is_unseen, -jnp.inf, lse)
    return out.transpose(0, 3, 1, 2, 4), None if lse is None else lse.transpose(0, 3, 1, 2)
