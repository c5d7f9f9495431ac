"""Drafting with trained heads, inside the jitted round (`models.draft_head`). Shapes use the legend of
jaxinfer/README.md.

A head observes hidden states of every pass of the target. One that pairs states with tokens stores pair i, of state i
and token i + 1, at position i of its pages, and carries the newest state of each slot; its drafts are stored as if they
were true, and what is accepted is stored again with the target's states. One that drafts blocks stores the states
alone; the block's own keys come after them, where the next states will be.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxinfer.cache import PagedAttention, PagedCache, attend_ragged
from jaxinfer.sampling import SamplingState, advance, mask_inactive_rows
from jaxinfer.speculative.proposers import (
    BoundProposer,
    DraftRows,
    DraftState,
    ObservedRows,
    Proposal,
    Proposer,
    ProposingModel,
    draft_tokens_of,
)
from jaxinfer.speculative.tree import TokenTree

if TYPE_CHECKING:
    from jaxinfer.models.draft_head import DraftHead

STATE, END = "state", "end"  # what a head of pairs carries: the newest state of each slot, and how many tokens it has


@dataclass(frozen=True)
class HeadProposer(Proposer):
    """A head with pages of its own, over the taps that it observes."""

    model: ProposingModel
    taps: tuple[str, ...]

    def bind(self, weights: Any, vocab_size: int, is_maximal: bool) -> BoundProposer:
        del vocab_size  # the target's is its own
        head = self.model.bind_head(weights)
        kind = _BoundBlocks if head.head.is_block else _BoundPairs
        return kind(head, self.taps, is_maximal, self.model.mesh)


@dataclass(frozen=True, eq=False)
class _BoundHead(BoundProposer):
    head: "DraftHead"
    taps: tuple[str, ...]
    is_maximal: bool
    mesh: Mesh | None

    def states_of(self, rows: ObservedRows) -> jax.Array:
        """The head's states [T, D] of what it observed."""
        return self.head.states([rows.taps[name] for name in self.taps])


class _Drafting:
    """The tokens of a round as they are chosen, one of each row after the other: a carry of loops."""

    def __init__(self, rows: DraftRows, tree: TokenTree, is_maximal: bool):
        self.rows, self.tree, self.is_maximal = rows, tree, is_maximal

    def start(self, root: jax.Array) -> tuple[jax.Array, SamplingState, jax.Array | None]:
        """Tokens int32[S, N] with the root, history and scores."""
        count, vocab_size = root.shape[0], self.rows.batch.vocab_size
        tokens = jnp.zeros((count, self.tree.num_nodes), jnp.int32).at[:, 0].set(root)
        shape = (count, self.tree.num_nodes - 1, vocab_size)
        return tokens, self.rows.history, jnp.zeros(shape, jnp.float32) if self.is_maximal else None

    def is_drafting(self, number: jax.Array) -> jax.Array:
        """bool[S], the rows that have a draft of that number, from 0."""
        return self.rows.is_active & (self.rows.num_nodes > number + 1)

    def choose(
        self, number: jax.Array, logits: jax.Array, carry: tuple[jax.Array, SamplingState, jax.Array | None]
    ) -> tuple[jax.Array, tuple[jax.Array, SamplingState, jax.Array | None]]:
        """The drafts int32[S] of a number by logits float32[S, V], and the carry with them."""
        tokens, history, scores = carry
        rows, is_drafting = self.rows, self.is_drafting(number)
        drafting = rows._replace(batch=mask_inactive_rows(rows.batch, is_drafting), history=history)
        chosen, transformed = draft_tokens_of(rows.positions + number + 1, logits, drafting, 1, self.is_maximal)
        token = chosen[:, 0]
        if scores is not None:
            scores = lax.dynamic_update_index_in_dim(scores, transformed, number, 1)
        tokens = lax.dynamic_update_index_in_dim(tokens, token, number + 1, 1)
        return token, (tokens, advance(history, token, is_drafting, rows.tables), scores)


def _roots(state: DraftState, rows: DraftRows) -> jax.Array:
    return jnp.take_along_axis(state.slots.sequence, rows.positions[:, None], axis=1)[:, 0]


def _first_positions(rows: ObservedRows) -> jax.Array:
    return rows.positions.at[rows.starts].get(mode="clip")


@dataclass(frozen=True, eq=False)
class _BoundPairs(_BoundHead):
    """EAGLE-3 and MTP."""

    def observe(self, own: PagedCache | None, rows: ObservedRows) -> PagedCache | None:
        if own is None:
            raise ValueError("a head needs a cache of its own")
        carried: Any = own.states
        states, numbers = self.states_of(rows), jnp.arange(rows.tokens.shape[0])
        is_inside = (numbers >= rows.starts[:, None]) & (numbers < (rows.starts + rows.lengths)[:, None])
        sequence = jnp.argmax(is_inside, axis=0)
        first = _first_positions(rows)
        newest, end = carried[STATE][rows.slots], carried[END][rows.slots]
        # Without its state, the pair before the first token stays as an earlier sequence left it.
        lacks = ((first == rows.num_found) | (end != first)).astype(jnp.int32) * (rows.lengths > 0)
        is_first = numbers == rows.starts[sequence]
        before = jnp.where(is_first[:, None], newest[sequence], jnp.roll(states, 1, axis=0))
        lengths = rows.lengths - lacks
        ends = jnp.where(lengths > 0, first + rows.lengths - 1, 0)
        attend = attend_ragged(
            replace(own, states=None), (rows.page_table,), rows.starts + lacks, lengths, ends, mesh=self.mesh
        )
        self.head.store_pairs(rows.tokens, before, jnp.maximum(rows.positions - 1, 0), attend)
        last = states.at[rows.starts + rows.lengths - 1].get(mode="clip")
        slots = jnp.where(rows.lengths > 0, rows.slots, carried[END].shape[0])
        new = {STATE: last, END: first + rows.lengths}
        kept = {name: leaf.at[slots].set(new[name].astype(leaf.dtype), mode="drop") for name, leaf in carried.items()}
        return replace(attend.cache, states=kept)

    def propose(self, state: DraftState, rows: DraftRows, tree: TokenTree) -> tuple[DraftState, Proposal]:
        own: Any = state.own
        drafting, slots = _Drafting(rows, tree, self.is_maximal), jnp.arange(rows.positions.shape[0])
        root = _roots(state, rows)

        def draft(carry):
            number, pages, token, hidden, chosen = carry
            is_drafting = drafting.is_drafting(number)
            ends = jnp.where(is_drafting, rows.positions + number, 0)
            lengths = (ends > 0).astype(jnp.int32)
            attend = attend_ragged(
                pages, rows.page_tables[:1], slots, lengths, ends, max_query_length=1, mesh=self.mesh
            )
            out, hidden = self.head.pairs(token, hidden, jnp.maximum(ends - 1, 0), attend)
            token, chosen = drafting.choose(number, self.head.of_target(self.head.logits(out)), chosen)
            return number + 1, attend.cache, token, hidden, chosen

        most = jnp.max(jnp.where(rows.is_active, rows.num_nodes, 0)) - 1
        newest = own.states[STATE][: slots.shape[0]]
        carry = jnp.int32(0), replace(own, states=None), root, newest, drafting.start(root)
        _, pages, _, _, (tokens, _, scores) = lax.while_loop(lambda carry: carry[0] < most, draft, carry)
        proposal = Proposal(tokens, rows.num_nodes, scores)
        return DraftState(state.cache, replace(own, layers=pages.layers), state.slots), proposal


@dataclass(frozen=True, eq=False)
class _BoundBlocks(_BoundHead):
    """DFlash, DFlash 2 and DSpark."""

    def observe(self, own: PagedCache | None, rows: ObservedRows) -> PagedCache | None:
        if own is None:
            raise ValueError("a head needs a cache of its own")
        ends = jnp.where(rows.lengths > 0, _first_positions(rows) + rows.lengths, 0)
        attend = PagedAttention(own, (rows.page_table,), rows.starts, rows.lengths, ends, mesh=self.mesh)
        self.head.store_context(self.states_of(rows), rows.positions, attend)
        return attend.cache

    def propose(self, state: DraftState, rows: DraftRows, tree: TokenTree) -> tuple[DraftState, Proposal]:
        own: Any = state.own
        head, root = self.head, _roots(state, rows)
        drafting = _Drafting(rows, tree, self.is_maximal)
        own, hidden = self._block(own, root, rows, tree)
        drafted = hidden if head.head.drafts_at_root else hidden[:, 1:]
        logits, markov, dtype = head.logits(drafted), head.markov, drafted.dtype
        memory: Any = None if markov is None else markov.start(drafted[:, 0])
        chances = jnp.zeros((root.shape[0], tree.num_nodes - 1), jnp.float32) if head.head.has_confidence else None
        if markov is not None and not head.head.drafts_at_root:  # what a recurrent head keeps begins with the root
            memory, _ = markov(memory, markov.embedding(root, dtype), hidden[:, 0])

        def draft(number, carry):
            token, memory, chosen, chances = carry
            own_hidden = lax.dynamic_index_in_dim(drafted, number, 1, keepdims=False)
            own_logits = lax.dynamic_index_in_dim(logits, number, 1, keepdims=False)
            before = None if markov is None else markov.embedding(token, dtype)
            if chances is not None:
                chance = jax.nn.sigmoid(head.confidence(own_hidden, before))
                chances = lax.dynamic_update_index_in_dim(chances, chance, number, 1)
            if markov is not None and before is not None:
                memory, bias = markov(memory, before, own_hidden)
                own_logits = own_logits + bias.astype(jnp.float32)
            if head.selector is not None:
                own_logits = head.selector(own_logits, own_hidden, token)
            token, chosen = drafting.choose(number, head.of_target(own_logits), chosen)
            return token, memory, chosen, chances

        carry = root, memory, drafting.start(root), chances
        *_, (tokens, _, scores), chances = lax.fori_loop(0, tree.num_nodes - 1, draft, carry)
        return DraftState(state.cache, own, state.slots), Proposal(tokens, rows.num_nodes, scores, chances)

    def _block(
        self, own: PagedCache, root: jax.Array, rows: DraftRows, tree: TokenTree
    ) -> tuple[PagedCache, jax.Array]:
        """The cache with the blocks' keys after the context's, and hidden states [S, B, D] of blocks that begin with
        the roots. A row with fewer drafts has a shorter block: what its pages have room for."""
        config, head = self.head.config, self.head.head
        size, count = tree.num_nodes - head.drafts_at_root, root.shape[0]
        tokens = jnp.full((count, size), head.mask_token, jnp.int32).at[:, 0].set(root)
        positions = rows.positions[:, None] + jnp.arange(size)
        lengths = jnp.where(rows.is_active & (rows.num_nodes > 1), rows.num_nodes - head.drafts_at_root, 0)
        starts = size * jnp.arange(count, dtype=jnp.int32)
        arrays = (rows.page_tables[:1], starts, lengths, jnp.where(lengths > 0, rows.positions + lengths, 0))
        make = partial(PagedAttention, own, *arrays, max_query_length=size, mesh=self.mesh)
        causal = make()
        mutual = make(ancestors=jnp.full((count * size,), np.uint32(2**size - 1), jnp.uint32))
        by_layer = [causal if layer in head.causal_layers else mutual for layer in range(config.num_layers)]

        def attend(
            layer: int, q: jax.Array, k: jax.Array, v: jax.Array, window: int | None, **options: Any
        ) -> jax.Array:
            chosen = by_layer[layer]
            # Where all see each other, a window counts from the root: its depth is that of the last token.
            window = window if window is None or chosen is causal else window + size
            flat = (part.reshape(count * size, *part.shape[2:]) for part in (q, k, v))
            return chosen(layer, *flat, window, **options).reshape(q.shape[:-1] + v.shape[-1:])

        hidden = self.head.block(tokens, positions, attend)
        layers = tuple(chosen.cache.layers[layer] for layer, chosen in enumerate(by_layer))
        return replace(own, layers=layers), hidden
