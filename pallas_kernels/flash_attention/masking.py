"""Visible keys and scaled scores: the formulas of every implementation and of the gradient."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.flash_attention.specs import AttentionSpec, FlashOperands

# The score of a masked key. It is finite, so that a row of masked keys only has no NaN; the sums of such a row are
# multiplied by exp(MASKED - score) = 0 at its first visible key.
MASKED = -1e30


def visible_keys(spec: AttentionSpec, positions, keys, lengths, query_segments, key_segments) -> jax.Array | None:
    """True if the query at each of `positions` sees each of `keys`; None when every query sees every key.

    Arguments are int32 and broadcast against each other; those of features that `spec` does not have are ignored.
    """
    terms = []
    if spec.causal:
        terms.append(keys <= positions)
    if spec.window is not None:
        terms.append(keys > positions - spec.window)
    if spec.has_lengths:
        terms.append(keys < lengths)
    if spec.has_segments:
        terms.append(query_segments == key_segments)
    visible = None
    for term in terms:
        visible = term if visible is None else visible & term
    return visible


def visible_blocks(operands: FlashOperands, spec: AttentionSpec, block_tokens: int, block_keys: int):
    """Index of the first and number of the key blocks that each block of queries sees, int32 [B, query blocks].

    Third, an upper bound of the numbers, at least 1: a Python int if it does not depend on operands.
    """
    start = np.arange(-(-spec.num_queries // block_tokens), dtype=np.int32)[None] * block_tokens
    lowest, highest = start, np.minimum(start + block_tokens, spec.num_queries) - 1
    if spec.has_offset:
        lowest, highest = (operands.query_offset[:, None] + x for x in (lowest, highest))
    # NumPy if no operand is involved, so that the bound is static.
    is_static = not (spec.has_offset or spec.has_lengths)
    module = np if is_static else jnp
    first, last = module.zeros_like(lowest), module.full_like(lowest, spec.num_keys)
    if spec.has_lengths:
        last = module.minimum(last, operands.kv_lengths[:, None])
    if spec.causal:
        last = module.minimum(last, highest + 1)
    if spec.window is not None:
        first = module.clip(lowest - spec.window + 1, 0, spec.num_keys - 1)
    first = first // block_keys
    count = module.maximum((last + block_keys - 1) // block_keys - first, 0)
    bound = module.maximum(count.max(), 1)
    shape = (spec.batch_size, start.shape[1])
    first, count = (jnp.broadcast_to(jnp.asarray(x, jnp.int32), shape) for x in (first, count))
    return first, count, int(bound) if is_static else bound


def scaled_scores(spec: AttentionSpec, products: jax.Array, tanh: Callable = jnp.tanh) -> jax.Array:
    """Scores before masking, from the products q . k."""
    scores = products * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * tanh(scores / spec.soft_cap)
    return scores


def scaled_scores_gradient(spec: AttentionSpec, scores: jax.Array, gradient: jax.Array) -> jax.Array:
    """The gradient of the products, from the gradient of the result `scores` of `scaled_scores`."""
    if spec.soft_cap is not None:
        gradient = gradient * (1 - jnp.square(scores / spec.soft_cap))
    return gradient * spec.scale
