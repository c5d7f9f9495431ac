"""Objectives of heads: chains of tokens (Li et al. 2025, EAGLE-3, section 3.1) and blocks (Chen et al. 2026,
DFlash, arXiv 2602.06036, section 3.3), against what the target says after the true tokens.

Shapes use the legend of jaxinfer/README.md, and A anchors of a row, N draft tokens of each, V the head's vocabulary.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.models import ModelConfig, Params, bind_draft_head, keeps_float32
from jaxinfer.models.basic import scaled_logits
from jaxinfer.models.draft_head import DraftHead
from jaxinfer.training.head_attention import BlockAttend, ChainAttend
from jaxinfer.training.objectives import Objective, forward_kl

HeadLoss = Literal["kl", "lk"]
STEP_DECAY = 0.8  # what a step of a chain weighs, of the one before it
NOT_DRAFTED = -1  # in `HeadBatch.best`: a token that is not in the head's vocabulary


class HeadBatch(NamedTuple):
    """Rows of whole texts, with what the target computed of them. What is said "after" a place follows from all tokens
    up to it.

    Attributes:
      tokens, positions: int32 [B, T]; positions count from 0 in each text.
      texts: int32 [B, T], the number of a token's text in its row; negative for none.
      weights: float32 [B, T], what the choice of the token after a place counts.
      anchors: int32 [B, A], places of the row; those at its end are none.
      states: the target's tapped states, each [B, T, D].
      log_probs: float32 [B, T, V], what it says after each place of the tokens of the head's vocabulary; of all tokens
        the probabilities add up to one.
      best: int32 [B, T], the most probable token in that vocabulary's numbers, or NOT_DRAFTED.
    """

    tokens: jax.Array
    positions: jax.Array
    texts: jax.Array
    weights: jax.Array
    anchors: jax.Array
    states: tuple[jax.Array, ...]
    log_probs: jax.Array
    best: jax.Array


def at_places(values: jax.Array, places: jax.Array) -> jax.Array:
    """values [B, T, ...] at int32 places [B, ...]; those beyond the row are its last."""
    rows = jnp.arange(len(values)).reshape(-1, *[1] * (places.ndim - 1))
    return values[rows, jnp.minimum(places, values.shape[1] - 1)]


def chain_places(anchors: jax.Array, num_steps: int) -> jax.Array:
    """int32 [B, A, N]: the places after which the tokens of chains are said. The pair of an anchor's state and the
    token after it says what follows that token."""
    return anchors[..., None] + 1 + jnp.arange(num_steps)


def block_places(anchors: jax.Array, block_size: int) -> jax.Array:
    """int32 [B, A, N]: the places after which the tokens of blocks are said: an anchor's own, and those of all masks
    but the last."""
    return anchors[..., None] + jnp.arange(block_size - 1)


def chain_logits(head: DraftHead, batch: HeadBatch, num_steps: int) -> jax.Array:
    """float32 logits [B, A, N, V] of chains: step 0 pairs the states of anchors with the tokens after them, each later
    step what the head gave with the next token of the text."""
    anchors, context = batch.anchors, head.states(batch.states)
    places = jnp.arange(batch.tokens.shape[1])
    same_text = batch.texts[:, None] == at_places(batch.texts, anchors)[..., None]
    attend = ChainAttend(same_text & (places <= anchors[..., None]))
    head.store_pairs(jnp.roll(batch.tokens, -1, axis=1), context, batch.positions, attend)
    states, first, outputs = at_places(context, anchors), at_places(batch.positions, anchors), []
    for step in range(num_steps):
        token = at_places(batch.tokens, anchors + 1 + step)
        out, states = head.pairs(token, states, first + step, attend)
        outputs.append(out)
    return _logits(head, jnp.stack(outputs, axis=2))


def block_logits(head: DraftHead, batch: HeadBatch) -> jax.Array:
    """float32 logits [B, A, N, V] of blocks: an anchor's token and masks, which see the states before it."""
    anchors, size = batch.anchors, head.head.block_size
    places = jnp.arange(batch.tokens.shape[1])
    same_text = batch.texts[:, None] == at_places(batch.texts, anchors)[..., None]
    attend = BlockAttend(same_text & (places < anchors[..., None]))
    head.store_context(head.states(batch.states), batch.positions, attend)
    masks = jnp.full((*anchors.shape, size - 1), head.head.mask_token, jnp.int32)
    tokens = jnp.concatenate([at_places(batch.tokens, anchors)[..., None], masks], axis=-1)
    positions = at_places(batch.positions, anchors)[..., None] + jnp.arange(size)
    return _logits(head, head.block(tokens, positions, attend)[:, :, 1:])


def _logits(head: DraftHead, hidden: jax.Array) -> jax.Array:
    """float32 logits [..., V] of hidden states [..., D], in one product: its weights are most of what a step reads."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    return scaled_logits(head.config, head.logits(flat)).reshape(*hidden.shape[:-1], -1)


def lk_loss(log_probs: jax.Array, logits: jax.Array) -> jax.Array:
    """-log of the chance [...] that a sampled draft is accepted, the sum of min(p, q) (arXiv 2602.23881)."""
    return -jnp.log(jnp.sum(jnp.minimum(jnp.exp(log_probs), jax.nn.softmax(logits)), axis=-1) + 1e-9)


LOSSES: dict[HeadLoss, Callable[[jax.Array, jax.Array], jax.Array]] = {"kl": forward_kl, "lk": lk_loss}


class DraftedTokens(NamedTuple):
    """Draft tokens of a batch: logits [B, A, N, V], the places after which they are said, and what they count."""

    logits: jax.Array
    places: jax.Array
    counts: jax.Array  # what each token counts, before the weight of its step


def drafted_tokens(config: ModelConfig, params: Params, batch: HeadBatch, num_steps: int) -> DraftedTokens:
    """The tokens that a head drafts after the anchors of a batch: chains of `num_steps`, or blocks."""
    head = bind_draft_head(config, params)
    if head.head.is_block:
        logits, places = block_logits(head, batch), block_places(batch.anchors, head.head.block_size)
    else:
        logits, places = chain_logits(head, batch, num_steps), chain_places(batch.anchors, num_steps)
    is_inside = places < batch.tokens.shape[1]
    same_text = at_places(batch.texts, places) == at_places(batch.texts, batch.anchors)[..., None]
    is_anchor = (batch.anchors < batch.tokens.shape[1])[..., None]
    counts = at_places(batch.weights, places) * (is_inside & same_text & is_anchor)
    return DraftedTokens(logits, places, counts)


def computed_in(dtype: str, params: Params) -> Params:
    """Parameters in the dtype in which they are computed with."""

    def cast(path: Any, leaf: jax.Array) -> jax.Array:
        is_kept = not jnp.issubdtype(leaf.dtype, jnp.floating) or keeps_float32([key.key for key in path])
        return leaf if is_kept else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


def head_objective(
    config: ModelConfig, loss: HeadLoss, num_steps: int, step_weights: Any, compute_dtype: str = "float32"
) -> Objective:
    """Mean loss of a head's draft tokens, of which number k weighs `step_weights[k]` (float32 [N]).

    A batch is a `HeadBatch`. Given: the parameters that are not trained. Products are of parameters in
    `compute_dtype`. Tokens after places where the target's best
    one is not in the head's vocabulary do not count: no draft would be accepted. The metrics `agreement_k` are the
    weighted shares of all tokens k that are the target's best one. Raises ValueError for an unknown loss.
    """
    if loss not in LOSSES:
        raise ValueError(f"loss={loss!r} is none of {', '.join(LOSSES)}")

    def objective(params: Params, batch: HeadBatch, given: Params):
        drafted = drafted_tokens(config, computed_in(compute_dtype, {**params, **given}), batch, num_steps)
        best, counts = at_places(batch.best, drafted.places), drafted.counts
        values = LOSSES[loss](at_places(batch.log_probs, drafted.places), drafted.logits)
        shares = counts * (best != NOT_DRAFTED) * step_weights
        value = jnp.sum(shares * values) / jnp.maximum(shares.sum(), 1e-6)
        agrees = jnp.sum(counts * (jnp.argmax(drafted.logits, axis=-1) == best), axis=(0, 1))
        rates = agrees / jnp.maximum(counts.sum(axis=(0, 1)), 1e-6)
        return value, {"loss": value} | {f"agreement_{k + 1}": rates[k] for k in range(len(step_weights))}

    return objective
