"""Attention of trained heads while they are trained: chains and blocks after anchors, positions of a context.

Shapes use the legend of jaxinfer/README.md, and A anchors of a row, N tokens of a block or one, R keys of its own.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.training.objectives import MASKED

Keys = tuple[jax.Array, jax.Array]


def attend_to_context(q: jax.Array, context: Keys, is_visible: jax.Array, own: Keys | None, scale: float) -> jax.Array:
    """[B, A, N, Hq, K] of queries like it, which see what bool[B, A, T] shows of the keys and values [B, T, Hkv, K] of
    a context, and all of `own` [B, A, R, Hkv, K].

    Products are batched over rows and heads, as in `attend_by_head`; each head's keys are not repeated.
    """
    num_rows, num_anchors, size, num_heads, head_dim = q.shape
    length, num_kv_heads = context[0].shape[1:3]
    groups = num_heads // num_kv_heads

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.batch_matmul(a, b, precision=lax.Precision.HIGHEST)

    k, v = (x.swapaxes(1, 2) for x in context)  # B, Hkv, T, K
    split = q.reshape(num_rows, num_anchors, size, num_kv_heads, groups, head_dim) * scale
    queries = split.transpose(0, 3, 1, 4, 2, 5)  # B, Hkv, A, groups, N, K
    flat = queries.reshape(num_rows, num_kv_heads, -1, head_dim)
    scores = product(flat, k.swapaxes(2, 3)).reshape(*queries.shape[:-1], length)
    scores = jnp.where(is_visible[:, None, :, None, None, :], scores, MASKED)
    by_anchor, own_v = (num_rows, num_kv_heads, num_anchors, groups * size), None
    if own is not None:
        own_k, own_v = (x.transpose(0, 3, 1, 2, 4) for x in own)  # B, Hkv, A, R, K
        own_scores = product(queries.reshape(*by_anchor, head_dim), own_k.swapaxes(3, 4))
        scores = jnp.concatenate([scores, own_scores.reshape(*scores.shape[:-1], -1)], axis=-1)
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(v.dtype)
    of_context = weights[..., :length].reshape(*flat.shape[:3], length)
    out = product(of_context, v).reshape(*queries.shape[:-1], v.shape[-1])
    if own_v is not None:
        of_own = weights[..., length:].reshape(*by_anchor, -1)
        out = out + product(of_own, own_v).reshape(out.shape)
    return out.transpose(0, 2, 4, 1, 3, 5).reshape(num_rows, num_anchors, size, num_heads, v.shape[-1])


class _AfterAnchors:
    """`attend` of a head without a cache: `store` keeps keys and values [B, T, Hkv, K] of the context by layer."""

    def __init__(self, is_visible: jax.Array):
        self._is_visible, self._context = is_visible, dict[int, Keys]()

    def store(self, layer: int, k: jax.Array, v: jax.Array) -> None:
        self._context[layer] = k, v

    def _attend(self, layer: int, q: jax.Array, own: Keys | None, window: int | None, scale: float | None) -> jax.Array:
        if window is not None:
            raise ValueError("heads with a window are not trained")
        scale = float(q.shape[-1] ** -0.5) if scale is None else scale
        return attend_to_context(q, self._context[layer], self._is_visible, own, scale)


class ChainAttend(_AfterAnchors):
    """Chains of tokens [B, A]: step 0 sees the context, whose keys have its own among them; each later step also the
    steps 1 to itself of its own chain."""

    def __init__(self, is_visible: jax.Array):
        super().__init__(is_visible)
        self._own: list[Keys] | None = None

    def __call__(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, window: int | None, *, scale: float | None = None
    ) -> jax.Array:
        if self._own is None:
            self._own, own = [], None
        else:
            self._own.append((k, v))
            keys, values = zip(*self._own, strict=True)
            own = jnp.stack(keys, axis=2), jnp.stack(values, axis=2)
        return self._attend(layer, q[:, :, None], own, window, scale)[:, :, 0]


class BlockAttend(_AfterAnchors):
    """Blocks of tokens [B, A, N] that see the context before them and each other."""

    def __call__(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, window: int | None, **options: Any
    ) -> jax.Array:
        return self._attend(layer, q, (k, v), window, options.get("scale"))
