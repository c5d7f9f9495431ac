"""Which drafts an answer keeps, inside the jitted round. Shapes use the legend of jaxinfer/README.md.

Both rules walk down the token tree, all rows at once: at each node the target's token is chosen from its logits there,
with the history up to it; where a drafted child is that token, the walk goes on at the child. So penalties, bad words
and min_tokens count within the drafted run, and log-probabilities are the target's.

  exact    the token is chosen as plain decoding chooses it, with the noise of its seed and position (Daliri et al.
           2024, drafter-invariant decoding): the answer is that of plain decoding, whatever was drafted.
  maximal  sampled rows accept a draft by rejection sampling (Leviathan et al. 2023): the same distribution, other
           tokens, and more drafts are kept. Greedy rows are the same.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.sampling import SamplingBatch, SamplingState, advance, is_stop, mask_inactive_rows, sample
from jaxinfer.speculative.maximal import accept
from jaxinfer.speculative.proposers import DraftRows, Proposal
from jaxinfer.speculative.tree import TokenTree


class Walk(NamedTuple):
    """How far each row came; S rows, D the tree's depth.

    Attributes:
      node: int32[S], where the row stands. is_going_on: bool[S], whether it chooses another token.
      num_tokens: int32[S], tokens that came out. num_accepted: int32[S], of these, drafts. newest: int32[S], the last
        one. path: int32[S, D + 1], the nodes that it came by. remaining: int32[S], tokens it may still generate.
      is_active: bool[S], whether its answer goes on. history: with the tokens that came out. sequence: the caller's.
    """

    node: jax.Array
    is_going_on: jax.Array
    num_tokens: jax.Array
    num_accepted: jax.Array
    newest: jax.Array
    path: jax.Array
    remaining: jax.Array
    is_active: jax.Array
    history: SamplingState


# (what the caller keeps, samples, bool[S] rows that chose, bool[S] rows whose token counts, int32[S] tokens before it)
Keep = Callable[..., object]


def walk(
    logits_at: Callable[[jax.Array], jax.Array],
    proposal: Proposal,
    rows: DraftRows,
    tree: TokenTree,
    remaining: jax.Array,
    keep: Keep,
    kept,
    *,
    is_maximal: bool,
):
    """Chooses tokens down the tree; returns the `Walk` and what was kept. `logits_at` gives the target's logits
    float32[S, V] at a node int32[S] of each row.

    `kept = keep(kept, samples, chose, took_part, num_before)` is called for each depth with the `SampleOutput`.
    """
    row = jnp.arange(rows.positions.shape[0])
    children = jnp.asarray(tree.children)  # [N, W], N where there is none

    def step(carry):
        depth, state, kept = carry
        candidates = children[state.node]
        is_child = candidates < proposal.num_nodes[:, None]
        tokens = proposal.tokens[row[:, None], jnp.minimum(candidates, tree.num_nodes - 1)]
        positions = rows.positions + depth + 1
        batch = mask_inactive_rows(rows.batch, state.is_going_on)
        draw = _draw(proposal, state.node, tokens, is_child, batch, positions) if is_maximal else None
        samples = sample(logits_at(state.node), positions, batch, state.history, draw)
        took_part = state.is_going_on & samples.ok
        kept = keep(kept, samples, state.is_going_on, took_part, state.num_tokens)
        is_same = is_child & (tokens == samples.tokens[:, None])
        is_accepted = took_part & jnp.any(is_same, axis=1)
        node = jnp.where(is_accepted, candidates[row, jnp.argmax(is_same, axis=1)], state.node)
        remaining = state.remaining - took_part
        is_active = took_part & ~is_stop(samples.tokens, rows.batch) & (remaining > 0)
        state = Walk(
            node=node,
            is_going_on=is_active & is_accepted,
            num_tokens=state.num_tokens + took_part,
            num_accepted=state.num_accepted + is_accepted,
            newest=jnp.where(took_part, samples.tokens, state.newest),
            path=state.path.at[row, jnp.where(is_accepted, depth + 1, tree.depth + 1)].set(node, mode="drop"),
            remaining=remaining,
            is_active=jnp.where(state.is_going_on, is_active, state.is_active),
            history=advance(state.history, samples.tokens, took_part),
        )
        return depth + 1, state, kept

    zeros = jnp.zeros_like(rows.positions)
    start = Walk(
        node=zeros,
        is_going_on=rows.is_active,
        num_tokens=zeros,
        num_accepted=zeros,
        newest=proposal.tokens[:, 0],
        path=jnp.zeros((row.shape[0], tree.depth + 1), jnp.int32),
        remaining=remaining,
        is_active=rows.is_active,
        history=rows.history,
    )
    # At a leaf no child is left, so the walk ends by itself after D + 1 tokens.
    _, state, kept = lax.while_loop(lambda carry: jnp.any(carry[1].is_going_on), step, (jnp.int32(0), start, kept))
    return state, kept


def _draw(
    proposal: Proposal, node: jax.Array, tokens: jax.Array, is_child: jax.Array, batch: SamplingBatch, positions
) -> Callable[[jax.Array], jax.Array]:
    """The rule of the maximal mode for the children `tokens` of each row's node."""

    draft = None
    if proposal.scores is not None:
        draft = proposal.scores[jnp.arange(node.shape[0]), jnp.minimum(node, proposal.scores.shape[1] - 1)]

    def draw(target: jax.Array) -> jax.Array:
        return accept(target, draft, tokens, is_child, batch.seed, positions)[0]

    return draw
