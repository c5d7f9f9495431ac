"""Verification: which draft tokens are accepted, in the jitted round. Shapes use the legend of jaxinfer/README.md.

Both acceptance modes walk down the token tree, all rows at once: at each node a token is sampled from the target's
logits, with the history up to the node; if a child of the node holds that token, the walk continues there. Penalties,
bad words and min_tokens therefore apply within a draft, and log-probabilities are the target's.

  exact    the token is sampled as in plain decoding, with the noise of its seed and position (Daliri et al. 2024,
           drafter-invariant decoding): the answer is that of plain decoding for any draft.
  maximal  sampled rows accept draft tokens by rejection sampling (Leviathan et al. 2023): the same distribution, other
           tokens, a higher acceptance rate. Greedy rows are as in exact mode.
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
    """State of the walk of S rows down a tree of depth D.

    Attributes:
      node: int32[S], the current node. is_walking: bool[S], whether another token is sampled.
      num_tokens: int32[S], generated tokens. num_accepted: int32[S], accepted draft tokens among them.
      newest: int32[S], the last generated token. path: int32[S, D + 1], the accepted nodes, starting with the root.
      remaining: int32[S], tokens the row may still generate. is_active: bool[S], whether its answer is unfinished.
      history: the sampling state, including the generated tokens.
    """

    node: jax.Array
    is_walking: jax.Array
    num_tokens: jax.Array
    num_accepted: jax.Array
    newest: jax.Array
    path: jax.Array
    remaining: jax.Array
    is_active: jax.Array
    history: SamplingState


# Accumulates results: keep(kept, samples, is_walking bool[S], is_valid bool[S], num_before int32[S]) -> kept
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
    """Samples tokens down the tree; returns the final `Walk` and the accumulated `kept`.

    Args:
      logits_at: the target's logits float32[S, V] at a node int32[S] of each row.
      remaining: int32[S], tokens each row may still generate.
      keep: called at each depth with the `SampleOutput`, see `Keep`. kept: its initial value, a pytree.
    """
    row = jnp.arange(rows.positions.shape[0])
    children = jnp.asarray(tree.children)  # [N, W], N where there is none

    def step(carry):
        depth, state, kept = carry
        candidates = children[state.node]
        is_child = candidates < proposal.num_nodes[:, None]
        tokens = proposal.tokens[row[:, None], jnp.minimum(candidates, tree.num_nodes - 1)]
        positions = rows.positions + depth + 1
        batch = mask_inactive_rows(rows.batch, state.is_walking)
        draw = _draw(proposal, state.node, tokens, is_child, batch, positions) if is_maximal else None
        samples = sample(logits_at(state.node), positions, batch, state.history, rows.tables, draw)
        is_valid = state.is_walking & samples.ok
        kept = keep(kept, samples, state.is_walking, is_valid, state.num_tokens)
        is_same = is_child & (tokens == samples.tokens[:, None])
        is_accepted = is_valid & jnp.any(is_same, axis=1)
        node = jnp.where(is_accepted, candidates[row, jnp.argmax(is_same, axis=1)], state.node)
        remaining = state.remaining - is_valid
        is_active = is_valid & ~is_stop(samples.tokens, rows.batch) & (remaining > 0)
        state = Walk(
            node=node,
            is_walking=is_active & is_accepted,
            num_tokens=state.num_tokens + is_valid,
            num_accepted=state.num_accepted + is_accepted,
            newest=jnp.where(is_valid, samples.tokens, state.newest),
            path=state.path.at[row, jnp.where(is_accepted, depth + 1, tree.depth + 1)].set(node, mode="drop"),
            remaining=remaining,
            is_active=jnp.where(state.is_walking, is_active, state.is_active),
            history=advance(state.history, samples.tokens, is_valid, rows.tables),
        )
        return depth + 1, state, kept

    # A leaf has no children, so the walk ends after at most D + 1 tokens.
    start = (jnp.int32(0), _at_root(proposal, rows, tree, remaining), kept)
    _, state, kept = lax.while_loop(lambda carry: jnp.any(carry[1].is_walking), step, start)
    return state, kept


def _at_root(proposal: Proposal, rows: DraftRows, tree: TokenTree, remaining: jax.Array) -> Walk:
    zeros = jnp.zeros_like(rows.positions)
    return Walk(
        node=zeros,
        is_walking=rows.is_active,
        num_tokens=zeros,
        num_accepted=zeros,
        newest=proposal.tokens[:, 0],
        path=jnp.zeros((rows.positions.shape[0], tree.depth + 1), jnp.int32),
        remaining=remaining,
        is_active=rows.is_active,
        history=rows.history,
    )


def _draw(
    proposal: Proposal, node: jax.Array, tokens: jax.Array, is_child: jax.Array, batch: SamplingBatch, positions
) -> Callable[[jax.Array], jax.Array]:
    """The sampler of the maximal mode at each row's node, whose children hold `tokens` int32[S, W]."""
    draft = None
    if proposal.scores is not None:
        draft = proposal.scores[jnp.arange(node.shape[0]), jnp.minimum(node, proposal.scores.shape[1] - 1)]

    def draw(target: jax.Array) -> jax.Array:
        return accept(target, draft, tokens, is_child, batch.seed, positions)[0]

    return draw
