"""Drafting, inside the jitted round. Shapes use the legend of jaxinfer/README.md; N is the nodes of the token tree.

The newest token of a sequence is the tree's root, node 0: it is chosen already, but not stored. Drafted tokens are the
other nodes. A proposer returns `Proposal`s and keeps to one rule in the default, exact mode: at each node it drafts
what the target would choose if the draft's logits were the target's, by the same transforms, penalties and noise.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxinfer.cache import PagedAttention, PagedCache, move_tokens
from jaxinfer.models import Decoder
from jaxinfer.sampling import (
    SamplingBatch,
    SamplingState,
    advance,
    choose_several,
    mask_inactive_rows,
    rewind,
    transform,
)
from jaxinfer.speculative.drafts import NgramDraft
from jaxinfer.speculative.maximal import DRAFT_STREAM
from jaxinfer.speculative.slots import DraftSlots
from jaxinfer.speculative.tree import TokenTree

CATCH_UP_TOKENS = 128  # of one pass that stores what the draft has missed


class DraftRows(NamedTuple):
    """The slots of a round.

    Attributes:
      positions: int32[S], of the root, which is the number of tokens stored. is_active: bool[S].
      num_nodes: int32[S], nodes of the tree that the row may use, the root included; the tree is in breadth-first
        order, so the first ones are a tree, too.
      page_table: int32[S, P]. batch, history: the sampling parameters, and the tokens up to the root.
    """

    positions: jax.Array
    is_active: jax.Array
    num_nodes: jax.Array
    page_table: jax.Array
    batch: SamplingBatch
    history: SamplingState


class Proposal(NamedTuple):
    """Attributes:
    tokens: int32[S, N], the root first. num_nodes: int32[S], how many of them are there, 1 for the root alone.
    scores: the draft's transformed logits float32[S, I, V] at the first I nodes, all that have children, in the
      maximal mode; None where the drafts are certain, or the mode is exact.
    """

    tokens: jax.Array
    num_nodes: jax.Array
    scores: jax.Array | None = None


@dataclass(frozen=True)
class DraftDecoder:
    """A bound draft model: `decoder` over its own vocabulary, on `mesh`, for a target of `vocab_size` tokens."""

    decoder: Decoder
    vocab_size: int
    is_maximal: bool
    mesh: Mesh | None = None

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32[S, V] over the target's vocabulary: tokens that the draft lacks are impossible, others of its own
        are left out."""
        logits = self.decoder.logits(hidden)[:, : self.vocab_size]
        missing = self.vocab_size - logits.shape[1]
        return jnp.pad(logits, ((0, 0), (0, missing)), constant_values=-jnp.inf) if missing else logits


def propose_ngram(settings: NgramDraft, draft: DraftSlots, rows: DraftRows, tree: TokenTree) -> Proposal:
    """What followed the longest earlier match. A match near the end goes on with what it has proposed itself, so that
    a short period is repeated as often as there is room."""
    sequence, count = draft.sequence, tree.num_nodes - 1
    num_slots, length = sequence.shape
    places = jnp.arange(length)
    matched, is_alike = jnp.zeros((num_slots, length), jnp.int32), jnp.ones((num_slots, length), bool)
    for back in range(settings.max_match):
        newest = jnp.take_along_axis(sequence, jnp.maximum(rows.positions - back, 0)[:, None], axis=1)
        earlier = jnp.pad(sequence, ((0, 0), (back, 0)))[:, :length]
        is_alike &= (earlier == newest) & (places >= back) & (rows.positions >= back)[:, None]
        matched += is_alike
    matched = jnp.where(places < rows.positions[:, None], matched, 0)
    best = jnp.max(matched, axis=1)
    place = jnp.max(jnp.where(matched == best[:, None], places, 0), axis=1)
    period = jnp.maximum(rows.positions - place, 1)
    following = place[:, None] + 1 + jnp.arange(count) % period[:, None]
    tokens = jnp.take_along_axis(sequence, jnp.minimum(following, length - 1), axis=1)
    root = jnp.take_along_axis(sequence, rows.positions[:, None], axis=1)
    num_nodes = jnp.where(best >= settings.min_match, rows.num_nodes, 1)
    return Proposal(jnp.concatenate([root, tokens], axis=1), num_nodes)


def catch_up(
    model: DraftDecoder, cache: PagedCache, draft: DraftSlots, rows: DraftRows
) -> tuple[PagedCache, DraftSlots]:
    """Stores what the draft has missed, where that is more than one token, `CATCH_UP_TOKENS` of all rows at a time.

    Rows that share pages may store the same keys there twice.
    """
    places = jnp.arange(CATCH_UP_TOKENS)

    def missing(draft: DraftSlots) -> jax.Array:
        return jnp.where(rows.is_active, rows.positions - draft.num_drafted, 0)

    def store(carry):
        cache, draft = carry
        wanted = jnp.maximum(missing(draft), 0)
        ends = jnp.minimum(jnp.cumsum(wanted), CATCH_UP_TOKENS)
        starts = jnp.minimum(jnp.cumsum(wanted) - wanted, CATCH_UP_TOKENS)
        slot = jnp.minimum(jnp.searchsorted(ends, places, side="right"), wanted.shape[0] - 1)
        positions = jnp.where(places < ends[-1], draft.num_drafted[slot] + places - starts[slot], 0)
        lengths = ends - starts
        stored = draft.num_drafted + lengths
        attend = PagedAttention(cache, rows.page_table, starts, lengths, stored, mesh=model.mesh)
        model.decoder(draft.sequence[slot, positions], positions, attend)
        return attend.cache, replace(draft, num_drafted=stored)

    return lax.while_loop(lambda carry: jnp.any(missing(carry[1]) > 1), store, (cache, draft))


def propose_chain(
    model: DraftDecoder, cache: PagedCache, draft: DraftSlots, rows: DraftRows, tree: TokenTree
) -> tuple[PagedCache, DraftSlots, Proposal]:
    """Drafts a chain, a token at a time. A row that misses its last stored token starts with that, in the same loop.

    Afterwards the draft has stored the root and all drafts but the last.
    """
    num_slots, vocab_size = rows.batch.num_slots, rows.batch.vocab_size
    row, length = jnp.arange(num_slots), draft.sequence.shape[1]
    # A row without drafts stores its root all the same, lest it falls behind.
    ends = rows.positions + jnp.maximum(rows.num_nodes - 1, 1)
    scores = jnp.zeros((num_slots, tree.num_nodes - 1, vocab_size), jnp.float32) if model.is_maximal else None

    def is_feeding(draft: DraftSlots) -> jax.Array:
        return rows.is_active & (draft.num_drafted < ends)

    def feed(carry):
        cache, draft, history, scores = carry
        takes_part, position = is_feeding(draft), draft.num_drafted
        lengths = takes_part.astype(jnp.int32)
        attend = PagedAttention(
            cache, rows.page_table, row, lengths, position + lengths, max_query_length=1, mesh=model.mesh
        )
        place = jnp.where(takes_part, position, 0)
        hidden = model.decoder(draft.sequence[row, place], place, attend)
        is_drafting = takes_part & (position >= rows.positions) & (rows.num_nodes > 1)

        def choose(scores):
            tokens, found = _children(
                model, hidden, position + 1, mask_inactive_rows(rows.batch, is_drafting), history, 1
            )
            if scores is not None:
                node = jnp.where(is_drafting, position - rows.positions, tree.num_nodes)
                scores = scores.at[row, node].set(found, mode="drop")
            return tokens[:, 0], scores

        # While all rows catch up, there is nothing to choose.
        tokens, scores = lax.cond(
            jnp.any(is_drafting), choose, lambda scores: (jnp.zeros((num_slots,), jnp.int32), scores), scores
        )
        column = jnp.where(is_drafting, position + 1, length)
        sequence = draft.sequence.at[row, column].set(tokens, mode="drop")
        draft = DraftSlots(sequence, position + lengths)
        return attend.cache, draft, advance(history, tokens, is_drafting), scores

    cache, draft, _, scores = lax.while_loop(
        lambda carry: jnp.any(is_feeding(carry[1])), feed, (cache, draft, rows.history, scores)
    )
    nodes = jnp.arange(tree.num_nodes)
    tokens = draft.sequence[row[:, None], jnp.minimum(rows.positions[:, None] + nodes, length - 1)]
    return cache, draft, Proposal(tokens, rows.num_nodes, scores)


def propose_tree(
    model: DraftDecoder, cache: PagedCache, draft: DraftSlots, rows: DraftRows, tree: TokenTree
) -> tuple[PagedCache, DraftSlots, Proposal]:
    """Drafts a tree, a depth at a time: each pass stores all nodes so far, as one ragged call in which a node sees its
    ancestors only (Miao et al. 2024, SpecInfer, section 4.2).

    Afterwards the draft has stored the nodes that have children, node i at position + i; `keep_path` puts them right.
    """
    num_slots = rows.batch.num_slots
    row = jnp.arange(num_slots)
    cache, draft, _ = _store_last(model, cache, draft, rows)
    root = draft.sequence[row, rows.positions]
    tokens = jnp.zeros((num_slots, tree.num_nodes), jnp.int32).at[:, 0].set(root)
    history, scores = rows.history, []
    for depth in range(tree.depth):
        level = [node for node in range(tree.num_nodes) if tree.depths[node] == depth]
        count = level[-1] + 1
        lengths = jnp.where(rows.is_active, jnp.minimum(rows.num_nodes, count), 0)
        attend = PagedAttention(
            cache,
            rows.page_table,
            row * count,
            lengths,
            rows.positions + lengths,
            max_query_length=count,
            ancestors=jnp.tile(jnp.asarray(tree.ancestors[:count]), num_slots),
            mesh=model.mesh,
        )
        positions = (rows.positions[:, None] + tree.depths[:count]).reshape(-1)
        hidden = model.decoder(tokens[:, :count].reshape(-1), positions, attend).reshape(num_slots, count, -1)
        cache = attend.cache
        for node in level:
            children = [int(child) for child in tree.children[node] if child < tree.num_nodes]
            is_drafting = rows.is_active & (rows.num_nodes > children[0])
            # The node's history is the root's and the tokens on the way to it, taken back afterwards.
            path = _path(tree, node)
            for ancestor in path:
                history = advance(history, tokens[:, ancestor], is_drafting)
            batch = mask_inactive_rows(rows.batch, is_drafting)
            chosen, found = _children(model, hidden[:, node], rows.positions + depth + 1, batch, history, len(children))
            if path:
                drafted = jnp.where(is_drafting[:, None], tokens[:, jnp.array(path)], rows.batch.vocab_size)
                history = rewind(history, rows.history, drafted, jnp.zeros((num_slots,), jnp.int32))
            tokens = tokens.at[:, jnp.array(children)].set(chosen)
            scores.append(found)
    draft = replace(draft, num_drafted=jnp.where(rows.is_active, rows.positions + tree.depth, draft.num_drafted))
    return cache, draft, Proposal(tokens, rows.num_nodes, jnp.stack(scores, axis=1) if model.is_maximal else None)


def keep_path(
    cache: PagedCache, rows: DraftRows, path: jax.Array, num_kept: jax.Array, mesh: Mesh | None = None
) -> PagedCache:
    """Moves the stored nodes on the accepted path int32[S, D + 1] (the root first; `num_kept` int32[S] of them) from
    where the tree has them, position + node, to where the sequence has them, position + depth."""
    depths = jnp.arange(path.shape[1])
    end = rows.page_table.shape[1] * cache.page_size
    is_kept = (depths < num_kept[:, None]) & rows.is_active[:, None]
    sources = jnp.where(is_kept, rows.positions[:, None] + path, 0)
    destinations = jnp.where(is_kept, rows.positions[:, None] + depths, end)
    return move_tokens(cache, rows.page_table, sources, destinations, mesh=mesh)


def _store_last(model: DraftDecoder, cache: PagedCache, draft: DraftSlots, rows: DraftRows):
    """Stores the one token before the root where the draft misses it."""
    row = jnp.arange(rows.batch.num_slots)

    def is_behind(draft: DraftSlots) -> jax.Array:
        return rows.is_active & (draft.num_drafted < rows.positions)

    def store(carry):
        cache, draft, count = carry
        lengths = is_behind(draft).astype(jnp.int32)
        position = jnp.where(lengths > 0, draft.num_drafted, 0)
        attend = PagedAttention(
            cache, rows.page_table, row, lengths, position + lengths, max_query_length=1, mesh=model.mesh
        )
        model.decoder(draft.sequence[row, position], position, attend)
        return attend.cache, replace(draft, num_drafted=draft.num_drafted + lengths), count + 1

    return lax.while_loop(lambda carry: jnp.any(is_behind(carry[1])), store, (cache, draft, jnp.int32(0)))


def _children(
    model: DraftDecoder,
    hidden: jax.Array,
    positions: jax.Array,
    batch: SamplingBatch,
    history: SamplingState,
    width: int,
) -> tuple[jax.Array, jax.Array]:
    """The `width` best tokens int32[S, width] of one node of each row, best first, and the transformed logits
    float32[S, V]. For sampled rows the best after adding the noise of their position: the target's own, or in the
    maximal mode another, which makes them draws without replacement (Kool et al. 2019)."""
    transformed = transform(model.logits(hidden), batch, history)
    stream = DRAFT_STREAM if model.is_maximal else None
    return choose_several(transformed, positions, batch, width, stream=stream), transformed


def _path(tree: TokenTree, node: int) -> list[int]:
    """The nodes from below the root to `node`."""
    path: list[int] = []
    while node > 0:
        path.insert(0, node)
        node = int(tree.parents[node])
    return path
