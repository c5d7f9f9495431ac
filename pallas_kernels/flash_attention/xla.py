"""Blockwise attention in plain JAX: correct on every platform, memory linear in the number of tokens."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.flash_attention.specs import AttentionSpec

QUERY_BLOCK = 512
KEY_BLOCK = 512
# Decoding reads few keys per query: a smaller block reads less beyond the end (6 times faster at 100 of 512 keys on
# a CPU, float32, 30 layers of 3 heads of 64).
DECODE_QUERIES = 16
DECODE_KEY_BLOCK = 128
# The score of a key that is not visible. Finite, so that no NaN arises while a row has seen nothing but masked keys;
# what such a row has summed up is multiplied by exp(MASKED - score) = 0 at its first visible key.
MASKED = -1e30


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query_offset: jax.Array,
    kv_lengths: jax.Array | None,
    spec: AttentionSpec,
) -> jax.Array:
    grouped = q.reshape(*q.shape[:2], spec.num_kv_heads, spec.num_groups, spec.head_dim)
    if spec.num_queries <= QUERY_BLOCK:
        out = _query_block(grouped, k, v, query_offset, kv_lengths, spec)
        return out.reshape(q.shape).astype(q.dtype)
    num_blocks = -(-spec.num_queries // QUERY_BLOCK)
    padding = num_blocks * QUERY_BLOCK - spec.num_queries
    grouped = jnp.pad(grouped, ((0, 0), (0, padding), (0, 0), (0, 0), (0, 0)))
    blocks = grouped.reshape(spec.batch_size, num_blocks, QUERY_BLOCK, *grouped.shape[2:]).swapaxes(0, 1)

    @jax.checkpoint
    def one(index_and_block):
        index, block = index_and_block
        return _query_block(block, k, v, query_offset + index * QUERY_BLOCK, kv_lengths, spec)

    out = lax.map(one, (jnp.arange(num_blocks), blocks)).swapaxes(0, 1)
    out = out.reshape(spec.batch_size, num_blocks * QUERY_BLOCK, -1)[:, : spec.num_queries]
    return out.reshape(q.shape).astype(q.dtype)


def _query_block(q, k, v, query_offset, kv_lengths, spec: AttentionSpec) -> jax.Array:
    """Online softmax of q [B, T, Hkv, G, K] over all key blocks; returns float32 of q's shape."""
    batch, num_queries = q.shape[:2]
    key_block = min(DECODE_KEY_BLOCK if num_queries <= DECODE_QUERIES else KEY_BLOCK, spec.num_keys)
    num_blocks = -(-spec.num_keys // key_block)
    positions = query_offset[:, None] + jnp.arange(num_queries)

    def step(carry, index):
        # The last block is shifted back to stay inside the keys; keys it shares with the block before are masked.
        start = jnp.minimum(index * key_block, spec.num_keys - key_block)
        k_block = lax.dynamic_slice_in_dim(k, start, key_block, axis=1)
        v_block = lax.dynamic_slice_in_dim(v, start, key_block, axis=1)
        keys = start + jnp.arange(key_block)
        visible = (keys >= index * key_block) & jnp.ones((batch, num_queries, 1), bool)
        if spec.causal:
            visible &= keys <= positions[:, :, None]
        if spec.window is not None:
            visible &= keys > positions[:, :, None] - spec.window
        if kv_lengths is not None:
            # What lies beyond a row's length may be NaN, and 0 * NaN is NaN.
            exists = keys < kv_lengths[:, None]
            visible &= exists[:, None]
            v_block = jnp.where(exists[:, :, None, None], v_block, 0)
        return _accumulate(carry, q, k_block, v_block, visible[:, None, None], spec)

    shape = (batch, spec.num_kv_heads, spec.num_groups, num_queries)
    carry = (
        jnp.full(shape, MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, spec.head_dim), jnp.float32),
    )
    if num_blocks == 1:
        carry = step(carry, jnp.int32(0))
    elif kv_lengths is None:
        carry, _ = lax.scan(lambda c, i: (jax.checkpoint(step)(c, i), None), carry, jnp.arange(num_blocks))
    else:
        first, last = _block_range(positions, kv_lengths, key_block, spec)
        carry = lax.fori_loop(first, last, lambda i, c: step(c, i), carry)
    highest, total, weighted = carry
    out = weighted / jnp.where(total == 0.0, 1.0, total)[..., None]
    if kv_lengths is not None:
        # XLA:CPU's maximum may drop a NaN, so a row of NaN scores looks unseen by its maximum; its sum does not.
        is_unseen = (highest == MASKED) & ~jnp.isnan(total)
        out = jnp.where(is_unseen[..., None], 0.0, out)
    return out.transpose(0, 3, 1, 2, 4)


def _block_range(positions, kv_lengths, key_block, spec: AttentionSpec):
    """First and one-past-last key block that any row can see; blocks outside change no bit of the result."""
    last_key = jnp.max(kv_lengths)
    first_key = jnp.int32(0)
    if spec.causal:
        last_key = jnp.minimum(last_key, jnp.max(positions) + 1)
    if spec.window is not None:
        first_key = jnp.maximum(jnp.min(positions) - spec.window + 1, 0)
    last_key = jnp.minimum(last_key, spec.num_keys)
    return first_key // key_block, (last_key + key_block - 1) // key_block


def _accumulate(carry, q, k_block, v_block, visible, spec: AttentionSpec):
    highest, total, weighted = carry
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    scores = jnp.einsum("bthgk,bshk->bhgts", q, k_block, preferred_element_type=jnp.float32, precision=precision)
    scores = jnp.where(visible, scores * spec.scale, MASKED)
    # The subtracted maximum cancels out of the result, so no gradient has to flow through it.
    new_highest = lax.stop_gradient(jnp.maximum(highest, scores.max(-1)))
    weights = jnp.exp(scores - new_highest[..., None])
    decay = jnp.exp(highest - new_highest)
    total = total * decay + weights.sum(-1)
    update = jnp.einsum(
        "bhgts,bshk->bhgtk",
        weights.astype(v_block.dtype),
        v_block,
        preferred_element_type=jnp.float32,
        precision=precision,
    )
    return new_highest, total, weighted * decay[..., None] + update
