"""Sparse attention over latent vectors (DeepSeek-V3.2, section 2.1): an indexer scores all past tokens for a query, and
the query attends to the best of them only.

The index key is the last part of a token's cached row, behind the latent vector and the rotated key. A query's choice
is a function of the query and of the keys up to its own position: scores are float32, of blocks of one size, so that
they do not depend on how a prompt was cut. Of equal scores the lower position is chosen; relu makes many zero.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_BLOCK = 512  # keys that are scored at once


class Choice(NamedTuple):
    """Inputs of the choice of tokens for each query: index queries [..., Hi, Di], float32 weights of their heads [...,
    Hi], and the number of tokens."""

    q: jax.Array
    weights: jax.Array
    count: int


def attend_to_chosen(
    q: jax.Array,
    choice: Choice,
    read: Callable[[jax.Array, jax.Array], jax.Array],
    num_keys: int,
    row: jax.Array,
    positions: jax.Array,
    *,
    value_dim: int,
    scale: float,
) -> jax.Array:
    """Attention of each query to the tokens that it chooses: [N, Hq, value_dim] in q's dtype, computed in float32.

    Args:
      q: [N, Hq, K + Di], of which the last Di numbers are not read. choice: of the same N queries.
      read: of a row and positions int32 [M], the cached [M, K + Di]: key and index key. Values are the key's first
        part. Positions are below `num_keys`; what is stored beyond a query's position is never used.
      row, positions: int32 [N], of each query.
    """
    size, count = choice.q.shape[-1], choice.count
    width = q.shape[-1] - size
    num_blocks = -(-num_keys // _BLOCK)
    exact = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}

    def one(query):
        q, index_q, weights, row, position = query

        def score(block, scores):
            at = block * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)
            keys = lax.stop_gradient(read(row, jnp.minimum(at, num_keys - 1))[:, width:]).astype(jnp.float32)
            products = jax.nn.relu(jnp.einsum("kd,hd->kh", keys, index_q, **exact) * size**-0.5)
            block_scores = jnp.einsum("kh,h->k", products, weights, **exact)
            block_scores = jnp.where(block_scores == 0, 0.0, block_scores)  # -0 would be less than 0
            return lax.dynamic_update_slice(
                scores, jnp.where(at <= position, block_scores, -jnp.inf), (block * _BLOCK,)
            )

        scores = jnp.full(max(num_blocks * _BLOCK, count), -jnp.inf, jnp.float32)
        scores = lax.fori_loop(0, jnp.minimum(position // _BLOCK + 1, num_blocks), score, scores)
        best, chosen = lax.top_k(scores, count)
        # In the order of positions, so that equal sets have equal sums.
        chosen = jnp.sort(jnp.where(best > -jnp.inf, chosen, scores.size).astype(jnp.int32))
        is_chosen = chosen <= position
        keys = read(row, jnp.clip(jnp.minimum(chosen, position), 0, num_keys - 1))[:, :width]
        keys = jnp.where(is_chosen[:, None], keys, 0).astype(jnp.float32)
        logits = jnp.einsum("hk,ck->hc", q[:, :width].astype(jnp.float32), keys, **exact) * scale
        weights = jax.nn.softmax(jnp.where(is_chosen, logits, -jnp.inf), axis=-1)
        return jnp.einsum("hc,cv->hv", weights, keys[:, :value_dim], **exact).astype(q.dtype)

    index_q, weights = (lax.stop_gradient(x.astype(jnp.float32)) for x in (choice.q, choice.weights))
    return lax.map(one, (q, index_q, weights, row, positions))
