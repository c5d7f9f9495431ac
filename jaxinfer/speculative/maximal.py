"""`acceptance="maximal"`: rejection sampling. Tokens have the target's distribution for any draft, and the acceptance
rate of a chain is the highest possible; the tokens differ from those without speculation.

Leviathan et al. 2023 section 2.3 and Chen et al. 2023 algorithm 2 for one child of a node; for several, drawn without
replacement, Jeon et al. 2024 (recursive rejection sampling) and Sequoia (Chen et al. 2024) section 3.2.

With p the target's distribution at a node and q the draft's, each child x in turn is accepted with probability
min(1, p(x) / q(x)). If it is rejected, p becomes norm(max(p - q, 0)) and x is removed from q. If all children are
rejected, the token is drawn from the remaining p. All noise is a function of (seed, position), in streams that plain
sampling does not use, so rejected tokens consume no noise of the accepted ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.sampling import exact, gumbel_noise, uniform_noise

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float32, Int32, UInt32

DRAFT_STREAM = 0  # Gumbel noise with which the draft samples children
RESIDUAL_STREAM = 1  # Gumbel noise with which the target samples after all children were rejected
ACCEPTANCE_STREAM = 2  # uniform noise of child j: stream ACCEPTANCE_STREAM + j


def accept(
    target: Float32[Array, "S V"],
    draft: Float32[Array, "S V"] | None,
    children: Int32[Array, "S W"],
    is_child: Bool[Array, "S W"],
    seed: UInt32[Array, "S 2"],
    positions: Int32[Array, " S"],
) -> tuple[Int32[Array, " S"], Int32[Array, " S"]]:
    """Samples one token per row; returns tokens int32[S] and the index int32[S] of the accepted child, W for none.

    Args:
      target, draft: float32[S, V], the transformed logits at the node, -inf for impossible tokens. The children were
        drawn from `draft`, without replacement, in their order. None if they are deterministic (n-grams).
      children: int32[S, W], draft tokens. is_child: bool[S, W], which of them exist; the other entries are ignored.
      seed: uint32[S, 2]. positions: int32[S], the absolute index of the token being sampled.

    Rows are independent, bit for bit. A row without children gets the token of plain sampling. A row whose target has a
    NaN or +inf, or only -inf, gets an undefined id in 0..V.
    Raises ValueError while tracing, if shapes or dtypes do not fit.
    """
    _check(target, draft, children, is_child)
    width = children.shape[1]
    log_p = exact.log_softmax(target)
    log_q = None if draft is None else exact.log_softmax(draft)
    child = jnp.full(children.shape[:1], width, jnp.int32)
    for j in range(width):
        token = jnp.clip(children[:, j], 0, target.shape[1] - 1)
        is_tried = is_child[:, j] & (child == width)
        uniform = uniform_noise(seed, positions, stream=ACCEPTANCE_STREAM + j)
        is_accepted = is_tried & (uniform < acceptance(log_p, log_q, token))
        child = jnp.where(is_accepted, j, child)
        is_rejected = is_tried & ~is_accepted
        log_p = _where(is_rejected, lambda p, q=log_q, x=token: residual(p, q, x), log_p)
        if log_q is not None and j + 1 < width:
            log_q = _where(is_rejected, lambda q, x=token: without(q, x), log_q)
    has_children, vocab_size = jnp.any(is_child, axis=1), target.shape[1]
    # Plain sampling adds the noise to the logits; rows without children do the same, to round alike.
    scores = jnp.where(has_children[:, None], log_p, target)
    for is_drawn, stream in ((~has_children, None), (has_children & (child == width), RESIDUAL_STREAM)):
        scores = _where(is_drawn, lambda x, s=stream: x + gumbel_noise(seed, positions, vocab_size, stream=s), scores)
    drawn, _ = exact.largest(scores)
    kept = jnp.take_along_axis(children, jnp.minimum(child, width - 1)[:, None], axis=1)[:, 0] if width else drawn
    return jnp.where(child < width, kept, drawn), child


def acceptance(log_p: jax.Array, log_q: jax.Array | None, token: jax.Array) -> jax.Array:
    """The probability float32[S] of accepting `token` int32[S], min(1, p / q), from log-probabilities float32[S, V].

    1 where q is 0 and p is not: only rounding can draw such a token. q is 1 if `log_q` is None.
    """
    p = jnp.take_along_axis(log_p, token[:, None], axis=1)[:, 0]
    q = jnp.zeros_like(p) if log_q is None else jnp.take_along_axis(log_q, token[:, None], axis=1)[:, 0]
    return jnp.where(p > -jnp.inf, jnp.exp(jnp.minimum(p - q, 0)), 0)


def residual(log_p: jax.Array, log_q: jax.Array | None, token: jax.Array) -> jax.Array:
    """Log-probabilities float32[S, V] of norm(max(p - q, 0)), the distribution after `token` int32[S], drawn from q,
    was rejected; p where that is zero everywhere, which only rounding can cause. If `log_q` is None, q is 1 at the
    token."""
    if log_q is None:
        rest = without(log_p, token)
    else:
        rest = exact.log_softmax(jnp.log(jnp.maximum(jnp.exp(log_p) - jnp.exp(log_q), 0)))
    return jnp.where(jnp.any(rest > -jnp.inf, axis=1, keepdims=True), rest, log_p)


def without(log_q: jax.Array, token: jax.Array) -> jax.Array:
    """Log-probabilities float32[S, V] conditioned on not being `token` int32[S]; all -inf if no other is possible."""
    ids = lax.broadcasted_iota(jnp.int32, log_q.shape, 1)
    return exact.log_softmax(jnp.where(ids == token[:, None], -jnp.inf, log_q))


def _where(is_needed: jax.Array, step: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`step(x)` in the rows `is_needed` bool[S], else x; skipped at run time if there is none."""
    return lax.cond(jnp.any(is_needed), lambda x: jnp.where(is_needed[:, None], step(x), x), lambda x: x, x)


def _check(target: jax.Array, draft: jax.Array | None, children: jax.Array, is_child: jax.Array) -> None:
    for name, logits in (("target", target), ("draft", draft)):
        if logits is not None and (logits.dtype != jnp.float32 or logits.shape != target.shape or logits.ndim != 2):
            raise ValueError(
                f"{name} is float32 [S, V], of one shape for target and draft; got {logits.dtype} {logits.shape}, "
                f"target {target.shape}"
            )
    rows = target.shape[0]
    if children.ndim != 2 or children.shape[0] != rows or children.dtype != jnp.int32:
        raise ValueError(f"children are int32 [{rows}, W]; got {children.dtype} {children.shape}")
    if is_child.shape != children.shape or is_child.dtype != jnp.bool_:
        raise ValueError(f"is_child is bool {children.shape}; got {is_child.dtype} {is_child.shape}")
