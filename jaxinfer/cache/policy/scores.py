"""Scores of a prompt's keys, by which a policy chooses what to keep: pure functions of queries, keys and values.

All compute in float32, for one sequence and one layer; n tokens, Hq query heads, Hkv key heads of width K. Keys and
queries are rotated unless said otherwise. A higher score is kept before a lower one, each key head for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.models.rope import rotate

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

POOL = 5  # scores of SnapKV are means over so many neighbours
FUTURE_POSITIONS, NUM_SINKS = 512, 4  # of Expected Attention


def snapkv_scores(
    q: Float[Array, "W Hq K"],
    k: Float[Array, "n Hkv K"],
    length: jax.Array | None = None,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    pool: int = POOL,
) -> Float[Array, "Hkv n"]:
    """Mean attention of the last W queries among the tokens before them (SnapKV, Li et al. 2024, section 4);
    -inf from there on. Scores are the mean of `pool` neighbours, zeros beyond the ends, and of the query heads of a
    key head.

    `length`, an int32 scalar, is the number of keys where more are given. Raises ValueError where the queries are of
    all tokens."""
    window, size = q.shape[0], k.shape[0]
    if window >= size:
        raise ValueError(f"SnapKV scores the tokens before the last {window}, and the prompt has {size}")
    first = (size if length is None else length) - window
    groups = _by_key_head(q, k.shape[1])
    products = jnp.einsum("qhgk,shk->hgqs", groups, k.astype(jnp.float32), precision="highest") * _scale(q, scale)
    if soft_cap is not None:
        products = soft_cap * jnp.tanh(products / soft_cap)
    position = jnp.arange(size)
    is_seen = position <= first + jnp.arange(window)[:, None]
    weights = jax.nn.softmax(jnp.where(is_seen, products, -jnp.inf), axis=-1)
    is_scored = position < first
    means = jnp.where(is_scored, weights.mean(axis=(1, 2)), 0)
    padded = jnp.pad(means, ((0, 0), (pool // 2, pool // 2)))
    pooled = sum((padded[:, at : at + size] for at in range(pool)), jnp.zeros_like(means)) / pool
    return jnp.where(is_scored, pooled, -jnp.inf)


def keydiff_scores(k: Float[Array, "n Hkv K"], length: jax.Array | None = None) -> Float[Array, "Hkv n"]:
    """Minus the cosine of a key and the mean direction of all keys (KeyDiff, Park et al. 2025, section 3). `length` as
    in `snapkv_scores`: -inf from there on."""
    is_key = jnp.arange(k.shape[0]) < (k.shape[0] if length is None else length)
    directions = jnp.where(is_key[:, None, None], _unit(k.astype(jnp.float32)), 0)
    anchor = _unit(directions.sum(axis=0) / is_key.sum())
    scores = -jnp.einsum("nhk,hk->hn", directions, anchor, precision="highest")
    return jnp.where(is_key, scores, -jnp.inf)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QueryMoments:
    """Mean and spread of queries before their rotation, by head: a pytree. They are added in blocks (Chan et al. 1979).

    Attributes:
      count: float32 scalar, queries added so far.
      mean: float32 [Hq, K]. spread: float32 [Hq, K, K], the covariance times `count`.
    """

    count: jax.Array
    mean: jax.Array
    spread: jax.Array

    @classmethod
    def none(cls, num_heads: int, width: int) -> QueryMoments:
        """Those of no query."""
        return cls(jnp.zeros(()), jnp.zeros((num_heads, width)), jnp.zeros((num_heads, width, width)))

    def add(self, q: Float[Array, "n Hq K"], is_counted: Bool[Array, " n"] | None = None) -> QueryMoments:
        """With those of n more queries that are counted, all by default."""
        is_counted = jnp.ones(q.shape[0], bool) if is_counted is None else is_counted
        is_row, number = is_counted[:, None, None], is_counted.sum().astype(jnp.float32)
        queries = q.astype(jnp.float32)
        mean = jnp.where(is_row, queries, 0).sum(axis=0) / jnp.maximum(number, 1)
        centred = jnp.where(is_row, queries - mean, 0)
        spread = jnp.einsum("nhi,nhj->hij", centred, centred, precision="highest")
        count = self.count + number
        share, difference = number / jnp.maximum(count, 1), mean - self.mean
        between = self.count * share * difference[:, :, None] * difference[:, None]
        return QueryMoments(count, self.mean + share * difference, self.spread + spread + between)


def expected_attention_scores(
    moments: QueryMoments,
    k: Float[Array, "n Hkv K"],
    v: Float[Array, "n Hkv W"],
    rotations: tuple[Float[Array, "F half"], Float[Array, "F half"]] | None,
    length: jax.Array | None = None,
    *,
    scale: float | None = None,
    num_sinks: int = NUM_SINKS,
) -> Float[Array, "Hkv n"]:
    """Expected attention of queries at the next F positions among the tokens after the first `num_sinks`,
    which score inf, times the norms of values (Expected Attention, Devoto et al. 2025, section 3).

    `moments` are those of the prompt's queries after the sinks', taken for Gaussian; `rotations` are cos and sin of the
    next F positions, None for a layer without rotations. `length` as in `snapkv_scores`: -inf from there on."""
    mean, covariance = moments.mean, moments.spread / moments.count
    if rotations is not None:
        cos, sin = (part.mean(axis=0) for part in rotations)
        mean = rotate(mean, cos, sin)
        for _ in range(2):  # the rotation applies to both sides of the matrix
            covariance = rotate(covariance.swapaxes(1, 2), *_of_each(cos, sin, covariance.shape[0]))
    position, keys, scale = jnp.arange(k.shape[0]), k.astype(jnp.float32), _scale(k, scale)
    is_key = position < (k.shape[0] if length is None else length)
    is_scored = is_key & (position >= num_sinks)

    def of_heads(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Scores of one query head of each key head: what is expected of all is as large as the keys for each."""
        mean, covariance = part
        linear = jnp.einsum("hk,nhk->hn", mean, keys, precision="highest") * scale
        moved = jnp.einsum("hij,nhj->nhi", covariance, keys, precision="highest")
        square = jnp.einsum("nhi,nhi->hn", keys, moved, precision="highest") * (scale * scale / 2)
        return jax.nn.softmax(jnp.where(is_scored, linear + square, -jnp.inf), axis=-1)

    parts = (part.reshape(k.shape[1], -1, *part.shape[1:]).swapaxes(0, 1) for part in (mean, covariance))
    weights = lax.map(of_heads, tuple(parts)).mean(axis=0)
    scores = weights * jnp.linalg.norm(v.astype(jnp.float32), axis=-1).T
    return jnp.where(is_scored, scores, jnp.where(is_key, jnp.inf, -jnp.inf))


def kept_positions(
    scores: Float[Array, "Hkv m"], count: int, num_kept: jax.Array | None = None
) -> Int[Array, "Hkv count"]:
    """The positions of the `count` highest scores of each head, ascending; of equal scores, the first. With `num_kept`,
    an int32 scalar, of so many; then m follows."""
    positions = jax.lax.top_k(scores, count)[1]
    if num_kept is not None:
        positions = jnp.where(jnp.arange(count) < num_kept, positions, scores.shape[1])
    return jnp.sort(positions, axis=-1)


def _by_key_head(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """float32 [n, Hkv, G, K]."""
    return q.astype(jnp.float32).reshape(q.shape[0], num_kv_heads, -1, q.shape[-1])


def _scale(q: jax.Array, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _unit(x: jax.Array) -> jax.Array:
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def _of_each(cos: jax.Array, sin: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    return jnp.broadcast_to(cos, (count, *cos.shape)), jnp.broadcast_to(sin, (count, *sin.shape))
