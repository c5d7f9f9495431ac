"""`acceptance="maximal"`: rejection sampling. What comes out is distributed as the target's own samples, whatever was
drafted, and a chain's draft is kept as often as any rule can keep it; the tokens are others than without speculation.

Leviathan et al. 2023 section 2.3 and Chen et al. 2023 algorithm 2 for one drafted child of a node; for several, drawn
without replacement, Jeon et al. 2024 (recursive rejection sampling) and Sequoia (Chen et al. 2024) section 3.2.

With p the target's distribution at a node and q the draft's, each child x in turn is accepted with probability
min(1, p(x) / q(x)); where it is rejected, p becomes norm(max(p - q, 0)) and q loses x. A row in which all children are
rejected draws from the p that is left. All noise is addressed by (seed, position), in streams that plain sampling does
not use: what a round throws away used no noise of a position whose token it kept.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.sampling import exact, gumbel_noise, uniform_noise

DRAFT_STREAM = 0  # Gumbel noise by which the draft chooses children
RESIDUAL_STREAM = 1  # Gumbel noise by which a row chooses when it has rejected all children
ACCEPTANCE_STREAM = 2  # and following: the uniform of child j is of stream ACCEPTANCE_STREAM + j


def accept(
    target: jax.Array,
    draft: jax.Array | None,
    children: jax.Array,
    is_child: jax.Array,
    seed: jax.Array,
    positions: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The tokens int32[S] that come out of a node of each row, and the index int32[S] of the child that each is: W
    where it is none of the row's children, and the path ends.

    Args:
      target, draft: float32[S, V], the transformed logits of the node, -inf where a token is impossible. The children
        were drawn from `draft`, without replacement, in their order; None where they were not drawn but given.
      children: int32[S, W], drafted tokens. is_child: bool[S, W], which of them are there; the others may be anything.
      seed: uint32[S, 2]. positions: int32[S], the absolute index of the token being chosen.

    A row depends on nothing of other rows, bit for bit. One without children gives the token of plain sampling. One
    whose target holds a NaN or +inf, or nothing else than -inf, gives an id of no meaning, V included.
    Raises when traced, if shapes or dtypes do not fit.
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
    # Plain sampling adds the noise to the logits themselves: so does a row without children, lest rounding differ.
    scores = jnp.where(has_children[:, None], log_p, target)
    for is_drawn, stream in ((~has_children, None), (has_children & (child == width), RESIDUAL_STREAM)):
        scores = _where(is_drawn, lambda x, s=stream: x + gumbel_noise(seed, positions, vocab_size, stream=s), scores)
    drawn, _ = exact.largest(scores)
    kept = jnp.take_along_axis(children, jnp.minimum(child, width - 1)[:, None], axis=1)[:, 0] if width else drawn
    return jnp.where(child < width, kept, drawn), child


def draw_children(draft: jax.Array, seed: jax.Array, positions: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """`width` tokens int32[S, W] drawn without replacement from softmax(float32[S, V]), in the order drawn, and bool
    [S, W], false where no possible token was left: the largest after adding Gumbel noise (Kool et al. 2019 section 3).
    `positions` int32[S] is the index of the children in their sequence. Raises ValueError for a width above V.
    """
    if not 0 <= width <= draft.shape[1]:
        raise ValueError(f"width={width} is not in 0..{draft.shape[1]}, the tokens of the vocabulary")
    noise = gumbel_noise(seed, positions, draft.shape[1], stream=DRAFT_STREAM)
    scores, tokens = lax.top_k(draft + noise, width)
    return tokens, scores > -jnp.inf


def acceptance(log_p: jax.Array, log_q: jax.Array | None, token: jax.Array) -> jax.Array:
    """The probability float32[S] of accepting `token` int32[S], min(1, p / q), from log-probabilities float32[S, V].
    1 where q is 0 and p is not: only rounding can have drawn such a token. q is 1 where `log_q` is None."""
    p = jnp.take_along_axis(log_p, token[:, None], axis=1)[:, 0]
    q = jnp.zeros_like(p) if log_q is None else jnp.take_along_axis(log_q, token[:, None], axis=1)[:, 0]
    return jnp.where(p > -jnp.inf, jnp.exp(jnp.minimum(p - q, 0)), 0)


def residual(log_p: jax.Array, log_q: jax.Array | None, token: jax.Array) -> jax.Array:
    """Log-probabilities float32[S, V] of norm(max(p - q, 0)), what is left to draw from where `token` int32[S], drawn
    from q, was rejected; p itself where nothing is left, which only rounding can do. A `log_q` of None is 1 at the
    token."""
    if log_q is None:
        rest = without(log_p, token)
    else:
        rest = exact.log_softmax(jnp.log(jnp.maximum(jnp.exp(log_p) - jnp.exp(log_q), 0)))
    return jnp.where(jnp.any(rest > -jnp.inf, axis=1, keepdims=True), rest, log_p)


def without(log_q: jax.Array, token: jax.Array) -> jax.Array:
    """Log-probabilities float32[S, V] given that it is not `token` int32[S]; all -inf where it could only be that."""
    ids = lax.broadcasted_iota(jnp.int32, log_q.shape, 1)
    return exact.log_softmax(jnp.where(ids == token[:, None], -jnp.inf, log_q))


def _where(is_needed: jax.Array, step: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`step(x)` in the rows bool[S]; not computed where there is none."""
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
