"""Drafting, inside the jitted round. Shapes use the legend of jaxinfer/README.md; N is the nodes of the token tree.

The newest token of a sequence is the tree's root, node 0: it is sampled already, but not in the cache. Draft tokens are
the other nodes. In the default, exact mode, a proposer samples a node's children exactly as the target would from the
same logits: with the same transforms, penalties and noise.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxinfer.cache import PagedAttention, PagedCache, PageTables, attend_ragged, move_tokens
from jaxinfer.grammar.device import GrammarTables, draft_tokens, next_states
from jaxinfer.models import Decoder, ModelConfig
from jaxinfer.sampling import (
    SamplingBatch,
    SamplingState,
    advance,
    choose_several,
    mask_inactive_rows,
    rewind,
    transform,
)
from jaxinfer.speculative.maximal import DRAFT_STREAM
from jaxinfer.speculative.tree import TokenTree

if TYPE_CHECKING:
    from jaxinfer.models.draft_head import DraftHead


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftSlots:
    """Drafting state of S slots: a pytree. Programs take it donated and return it.

    Attributes:
      sequence: int32[S, L], tokens of prompt and answer; entries after a slot's newest token are unspecified.
      num_drafted: int32[S], leading tokens in the draft model's cache. It may be less than in the target's cache, where
        a slot was decoded without drafts or reused pages that the draft model did not write. Of a draft that observes,
        those that were found when the sequence began (`ObservedRows.num_found`).
    """

    sequence: jax.Array
    num_drafted: jax.Array


def init_draft_slots(num_slots: int, length: int) -> DraftSlots:
    """The state of empty slots for sequences of up to `length` tokens, as NumPy arrays."""
    return DraftSlots(np.zeros((num_slots, length), np.int32), np.zeros((num_slots,), np.int32))  # pyright: ignore


def record(draft: DraftSlots | None, positions: jax.Array, tokens: jax.Array, is_new: jax.Array) -> DraftSlots | None:
    """Writes tokens int32[S] at positions int32[S] of the sequences where `is_new` bool[S]; None stays None."""
    if draft is None:
        return None
    rows, length = jnp.arange(tokens.shape[0]), draft.sequence.shape[1]
    columns = jnp.where(is_new, positions, length)
    return replace(draft, sequence=draft.sequence.at[rows, columns].set(tokens, mode="drop"))


CATCH_UP_TOKENS = 128  # tokens per pass that stores what the draft's cache lacks


class DraftRows(NamedTuple):
    """The rows of a round: S slots.

    Attributes:
      positions: int32[S], position of the root, which equals the number of tokens in the target's cache.
      is_active: bool[S]. num_nodes: int32[S], leading nodes of the tree that the row may use, the root included.
      page_tables: int32[S, P] of each group of layers. batch: sampling parameters. history: sampling state, up to the
        root. tables: of grammars. adapters: int32[S], None for a target whose weights hold none. steering: float32
        [S, D] by layer, added to the target's hidden states after it; None for none.
    """

    positions: jax.Array
    is_active: jax.Array
    num_nodes: jax.Array
    page_tables: PageTables
    batch: SamplingBatch
    history: SamplingState
    tables: GrammarTables | None = None
    adapters: jax.Array | None = None
    steering: dict[str, jax.Array] | None = None


class Proposal(NamedTuple):
    """A draft of each row.

    Attributes:
      tokens: int32[S, N], starting with the root. num_nodes: int32[S], valid nodes, 1 for the root alone.
      scores: float32[S, I, V], in maximal mode the draft's transformed logits at the I nodes that have children; None
        in exact mode, and for deterministic drafts.
      chances: float32[S, N - 1], that each token of a chain is accepted if those before it are, by a draft that
        predicts it; None by others.
    """

    tokens: jax.Array
    num_nodes: jax.Array
    scores: jax.Array | None = None
    chances: jax.Array | None = None


class DraftState(NamedTuple):
    """State that a proposer reads and writes.

    Attributes:
      cache: the target's. own: the draft's, under the same page tables; None where it has none. slots: of the rows.
    """

    cache: PagedCache
    own: PagedCache | None
    slots: DraftSlots


class ObservedRows(NamedTuple):
    """Tokens that the target has stored in a pass, for a draft that observes: T rows of S sequences.

    Attributes:
      tokens, positions: int32[T]. The rows of a sequence are adjacent.
      starts, lengths: int32[S], the first row of each sequence, and how many it has; 0 takes no part. Other rows are
        padding.
      slots: int32[S], of the sequences. num_found: int32[S], leading tokens whose pages were found when the sequence
        began: an earlier one was observed there, and from here on this one, without gaps.
      page_table: int32[S, P], of pages of its own.
      taps: by name, hidden states [T, D].
    """

    tokens: jax.Array
    positions: jax.Array
    starts: jax.Array
    lengths: jax.Array
    slots: jax.Array
    num_found: jax.Array
    page_table: jax.Array
    taps: dict[str, jax.Array]


class BoundProposer:
    """A proposer with its weights, while tracing."""

    def propose(self, state: DraftState, rows: DraftRows, tree: TokenTree) -> tuple[DraftState, Proposal]:
        """Drafts a round. What it stores of its drafts counts only as far as they are accepted."""
        raise NotImplementedError

    def keep(self, own: PagedCache | None, rows: DraftRows, path: jax.Array, num_kept: jax.Array) -> PagedCache | None:
        """Its cache after a round over a tree with branches: arguments as of `keep_path`."""
        del rows, path, num_kept
        return own

    def observe(self, own: PagedCache | None, rows: ObservedRows) -> PagedCache | None:
        """Its cache after a pass of the target, of prompts, plain steps or accepted drafts, whose true states replace
        those that it drafted with. Called for one with taps."""
        del rows
        return own


class Proposer:
    """Device half of a draft: a hashable, static argument of programs.

    Attributes:
      taps: hidden states of the target (`models.tap_names`) that it observes in every pass; () for none.
    """

    taps: tuple[str, ...] = ()

    def bind(self, weights: Any, vocab_size: int, is_maximal: bool) -> BoundProposer:
        """With the leaves of its model's parameters, for a target with so many tokens; called while tracing."""
        raise NotImplementedError


@partial(jax.tree_util.register_dataclass, data_fields=["weights"], meta_fields=["proposer"])
@dataclass(frozen=True)
class ObservingDraft:
    """A draft that observes, as a program takes it whose own work is not drafting."""

    proposer: Proposer
    weights: Any

    def bind(self, vocab_size: int) -> BoundProposer:
        """As `Proposer.bind`."""
        return self.proposer.bind(self.weights, vocab_size, False)


class ProposingModel(Protocol):
    """A model as programs take it."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def mesh(self) -> Mesh | None: ...
    def bind(self, weights: Any) -> Decoder: ...
    def bind_head(self, weights: Any) -> "DraftHead": ...


@dataclass(frozen=True)
class NgramProposer(Proposer, BoundProposer):
    """As `NgramDraft`."""

    min_match: int
    max_match: int

    def bind(self, weights: Any, vocab_size: int, is_maximal: bool) -> BoundProposer:
        del weights, vocab_size, is_maximal
        return self

    def propose(self, state: DraftState, rows: DraftRows, tree: TokenTree) -> tuple[DraftState, Proposal]:
        return state, propose_ngram(self, state.slots, rows, tree)


@dataclass(frozen=True)
class ClaimedProposer(Proposer, BoundProposer):
    """As `ClaimedDraft`: the host writes the claimed tokens into the sequences, after their newest tokens."""

    def bind(self, weights: Any, vocab_size: int, is_maximal: bool) -> BoundProposer:
        del weights, vocab_size, is_maximal
        return self

    def propose(self, state: DraftState, rows: DraftRows, tree: TokenTree) -> tuple[DraftState, Proposal]:
        sequence = state.slots.sequence
        places = rows.positions[:, None] + jnp.arange(tree.num_nodes)
        tokens = jnp.take_along_axis(sequence, jnp.minimum(places, sequence.shape[1] - 1), axis=1)
        return state, Proposal(tokens, rows.num_nodes)


@dataclass(frozen=True)
class ModelProposer(Proposer):
    """A model with pages of its own."""

    model: ProposingModel

    def bind(self, weights: Any, vocab_size: int, is_maximal: bool) -> BoundProposer:
        return _BoundModel(DraftDecoder(self.model.bind(weights), vocab_size, is_maximal, self.model.mesh))


@dataclass(frozen=True)
class LayersProposer(Proposer):
    """The target's first layers, in its cache."""

    model: ProposingModel

    def bind(self, weights: Any, vocab_size: int, is_maximal: bool) -> BoundProposer:
        decoder = DraftDecoder(self.model.bind(weights), vocab_size, is_maximal, self.model.mesh)
        return _BoundLayers(decoder, self.model.config.num_layers)


@dataclass(frozen=True)
class DraftDecoder:
    """A bound draft model: `decoder`, on `mesh`, for a target with a vocabulary of `vocab_size` tokens."""

    decoder: Decoder
    vocab_size: int
    is_maximal: bool
    mesh: Mesh | None = None

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32[S, V] over the target's vocabulary: -inf for tokens that only the target has; those that only the
        draft has are cut off."""
        logits = self.decoder.logits(hidden)[:, : self.vocab_size]
        missing = self.vocab_size - logits.shape[1]
        return jnp.pad(logits, ((0, 0), (0, missing)), constant_values=-jnp.inf) if missing else logits


def propose_ngram(settings: NgramProposer, draft: DraftSlots, rows: DraftRows, tree: TokenTree) -> Proposal:
    """Drafts the continuation of the longest earlier match. Where that reaches the end of the sequence it continues
    with the draft itself, so that a short period is repeated up to the length of the draft. Tokens that a grammar
    forces are drafted whether there is a match or not."""
    sequence, count = draft.sequence, tree.num_nodes - 1
    num_slots, length = sequence.shape
    indices = jnp.arange(length)
    matched, is_alike = jnp.zeros((num_slots, length), jnp.int32), jnp.ones((num_slots, length), bool)
    for back in range(settings.max_match):
        newest = jnp.take_along_axis(sequence, jnp.maximum(rows.positions - back, 0)[:, None], axis=1)
        earlier = jnp.pad(sequence, ((0, 0), (back, 0)))[:, :length]
        is_alike &= (earlier == newest) & (indices >= back) & (rows.positions >= back)[:, None]
        matched += is_alike
    matched = jnp.where(indices < rows.positions[:, None], matched, 0)
    best = jnp.max(matched, axis=1)
    place = jnp.max(jnp.where(matched == best[:, None], indices, 0), axis=1)
    period = jnp.maximum(rows.positions - place, 1)
    following = place[:, None] + 1 + jnp.arange(count) % period[:, None]
    tokens = jnp.take_along_axis(sequence, jnp.minimum(following, length - 1), axis=1)
    root = jnp.take_along_axis(sequence, rows.positions[:, None], axis=1)
    num_found = jnp.where(best >= settings.min_match, count, 0)
    tokens, num_forced = _force(tokens, rows)
    num_nodes = jnp.minimum(rows.num_nodes, 1 + jnp.maximum(num_found, num_forced))
    return Proposal(jnp.concatenate([root, tokens], axis=1), num_nodes)


def _force(tokens: jax.Array, rows: DraftRows) -> tuple[jax.Array, jax.Array]:
    """Draft tokens int32[S, K] with those that the rows' grammars force in their places, and how many of each row are
    forced from the first on."""
    num_slots, count = tokens.shape
    num_forced, is_forced = jnp.zeros((num_slots,), jnp.int32), jnp.ones((num_slots,), bool)
    if rows.tables is None:
        return tokens, num_forced
    state, columns = rows.history.grammar, []
    for column in range(count):
        forced = draft_tokens(rows.tables, state)
        columns.append(jnp.where(forced >= 0, forced, tokens[:, column]))
        is_forced &= forced >= 0
        num_forced += is_forced
        state = next_states(rows.tables, state, columns[-1])
    return jnp.stack(columns, axis=1), num_forced


def catch_up(
    model: DraftDecoder, cache: PagedCache, draft: DraftSlots, rows: DraftRows
) -> tuple[PagedCache, DraftSlots]:
    """Stores the tokens that the draft's cache lacks, if more than one, `CATCH_UP_TOKENS` of all rows at a time.

    Rows that share pages may write the same keys twice. Donate `cache` and `draft`.
    """
    indices = jnp.arange(CATCH_UP_TOKENS)

    def missing(draft: DraftSlots) -> jax.Array:
        return jnp.where(rows.is_active, rows.positions - draft.num_drafted, 0)

    def store(carry):
        cache, draft = carry
        wanted = jnp.maximum(missing(draft), 0)
        ends = jnp.minimum(jnp.cumsum(wanted), CATCH_UP_TOKENS)
        starts = jnp.minimum(jnp.cumsum(wanted) - wanted, CATCH_UP_TOKENS)
        slot = jnp.minimum(jnp.searchsorted(ends, indices, side="right"), wanted.shape[0] - 1)
        positions = jnp.where(indices < ends[-1], draft.num_drafted[slot] + indices - starts[slot], 0)
        lengths = ends - starts
        stored = draft.num_drafted + lengths
        attend = attend_ragged(cache, rows.page_tables, starts, lengths, stored, mesh=model.mesh)
        model.decoder(draft.sequence[slot, positions], positions, attend)
        return attend.cache, replace(draft, num_drafted=stored)

    return lax.while_loop(lambda carry: jnp.any(missing(carry[1]) > 1), store, (cache, draft))


def propose_chain(
    model: DraftDecoder,
    cache: PagedCache,
    draft: DraftSlots,
    rows: DraftRows,
    tree: TokenTree,
    *,
    may_lack_one: bool,
) -> tuple[PagedCache, DraftSlots, Proposal]:
    """Drafts a chain, one token at a time. A row whose draft cache lacks the token before the root, which
    `may_lack_one` tells, stores both in the first pass.

    Afterwards the draft's cache holds the root and all draft tokens but the last.
    """
    num_slots, vocab_size = rows.batch.num_slots, rows.batch.vocab_size
    row, length = jnp.arange(num_slots), draft.sequence.shape[1]
    # A row without draft tokens stores its root, too: otherwise it would have to catch up.
    ends = rows.positions + jnp.maximum(rows.num_nodes - 1, 1)
    scores = jnp.zeros((num_slots, tree.num_nodes - 1, vocab_size), jnp.float32) if model.is_maximal else None

    def is_feeding(draft: DraftSlots) -> jax.Array:
        return rows.is_active & (draft.num_drafted < ends)

    def feed(width: int, carry):
        """Stores the next token of each row, or in a pass of two those up to the root, and drafts one."""
        cache, draft, history, scores = carry
        is_running, starts = is_feeding(draft), width * row
        lengths = jnp.clip(rows.positions - draft.num_drafted + 1, 1, width) * is_running
        stored = draft.num_drafted + lengths
        attend = attend_ragged(
            cache, rows.page_tables, starts, lengths, stored, max_query_length=width, mesh=model.mesh
        )
        numbers = jnp.arange(width)
        places = jnp.where(numbers < lengths[:, None], draft.num_drafted[:, None] + numbers, 0)
        hidden = model.decoder(draft.sequence[row[:, None], places].reshape(-1), places.reshape(-1), attend)
        newest = hidden[starts + jnp.maximum(lengths - 1, 0)]
        is_drafting = is_running & (stored > rows.positions) & (rows.num_nodes > 1)

        def choose(scores):
            drafting = rows._replace(batch=mask_inactive_rows(rows.batch, is_drafting), history=history)
            tokens, token_scores = draft_tokens_of(stored, model.logits(newest), drafting, 1, model.is_maximal)
            if scores is not None:
                node = jnp.where(is_drafting, stored - 1 - rows.positions, tree.num_nodes)
                scores = scores.at[row, node].set(token_scores, mode="drop")
            return tokens[:, 0], scores

        # Nothing is sampled where no row drafts.
        tokens, scores = lax.cond(
            jnp.any(is_drafting), choose, lambda scores: (jnp.zeros((num_slots,), jnp.int32), scores), scores
        )
        column = jnp.where(is_drafting, stored, length)
        sequence = draft.sequence.at[row, column].set(tokens, mode="drop")
        return attend.cache, DraftSlots(sequence, stored), advance(history, tokens, is_drafting, rows.tables), scores

    carry = cache, draft, rows.history, scores
    if may_lack_one:
        carry = feed(2, carry)
    carry = lax.while_loop(lambda carry: jnp.any(is_feeding(carry[1])), partial(feed, 1), carry)
    cache, draft, _, scores = carry
    nodes = jnp.arange(tree.num_nodes)
    tokens = draft.sequence[row[:, None], jnp.minimum(rows.positions[:, None] + nodes, length - 1)]
    return cache, draft, Proposal(tokens, rows.num_nodes, scores)


def propose_tree(
    model: DraftDecoder, cache: PagedCache, draft: DraftSlots, rows: DraftRows, tree: TokenTree
) -> tuple[PagedCache, DraftSlots, Proposal]:
    """Drafts a tree, one depth at a time: each pass stores all nodes so far in one ragged call, in which a node attends
    to its ancestors only (Miao et al. 2024, SpecInfer, section 4.2).

    Afterwards the draft's cache holds the nodes that have children, node i at position + i; `keep_path` moves the
    accepted ones to their final positions.
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
            rows.page_tables,
            row * count,
            lengths,
            rows.positions + lengths,
            max_query_length=count,
            ancestors=jnp.tile(jnp.asarray(tree.ancestors[:count]), num_slots),
            mesh=model.mesh,
        )
        positions = (rows.positions[:, None] + tree.depths[:count]).reshape(-1)
        of = np.repeat(np.arange(num_slots), count)
        decoder = model.decoder.for_rows(rows.adapters, of).steered(model.decoder.added, of)
        hidden = decoder(tokens[:, :count].reshape(-1), positions, attend).reshape(num_slots, count, -1)
        cache = attend.cache
        for node in level:
            children = [int(child) for child in tree.children[node] if child < tree.num_nodes]
            is_drafting = rows.is_active & (rows.num_nodes > children[0])
            # The node's history is the root's plus the tokens on the path; `rewind` removes these afterwards.
            path = _path(tree, node)
            for ancestor in path:
                history = advance(history, tokens[:, ancestor], is_drafting, rows.tables)
            drafting = rows._replace(batch=mask_inactive_rows(rows.batch, is_drafting), history=history)
            position, logits = rows.positions + depth + 1, model.logits(hidden[:, node])
            chosen, node_scores = draft_tokens_of(position, logits, drafting, len(children), model.is_maximal)
            if path:
                drafted = jnp.where(is_drafting[:, None], tokens[:, jnp.array(path)], rows.batch.vocab_size)
                history = rewind(history, rows.history, drafted, jnp.zeros((num_slots,), jnp.int32))
            tokens = tokens.at[:, jnp.array(children)].set(chosen)
            scores.append(node_scores)
    draft = replace(draft, num_drafted=jnp.where(rows.is_active, rows.positions + tree.depth, draft.num_drafted))
    return cache, draft, Proposal(tokens, rows.num_nodes, jnp.stack(scores, axis=1) if model.is_maximal else None)


@dataclass(frozen=True, eq=False)
class _BoundModel(BoundProposer):
    decoder: DraftDecoder

    def propose(self, state: DraftState, rows: DraftRows, tree: TokenTree) -> tuple[DraftState, Proposal]:
        if state.own is None:
            raise ValueError("a draft model needs a cache of its own")
        own, slots = catch_up(self.decoder, state.own, state.slots, rows)
        states, num_drafted = own.states, slots.num_drafted
        own, slots, proposal = _propose(self.decoder, own, slots, rows, tree, may_lack_one=True)
        if states is not None:  # drafting has read tokens into a copy that may be rejected
            own, slots = replace(own, states=states), replace(slots, num_drafted=num_drafted)
        return DraftState(state.cache, own, slots), proposal

    def keep(self, own: PagedCache | None, rows: DraftRows, path: jax.Array, num_kept: jax.Array) -> PagedCache | None:
        return None if own is None else keep_path(own, rows, path, num_kept, self.decoder.mesh)


@dataclass(frozen=True, eq=False)
class _BoundLayers(BoundProposer):
    decoder: DraftDecoder
    num_layers: int

    def propose(self, state: DraftState, rows: DraftRows, tree: TokenTree) -> tuple[DraftState, Proposal]:
        slots = replace(state.slots, num_drafted=rows.positions)
        target = self.decoder.decoder.for_rows(rows.adapters).steered(rows.steering)
        decoder = replace(self.decoder, decoder=target)
        first, slots, proposal = _propose(
            decoder, state.cache.first(self.num_layers), slots, rows, tree, may_lack_one=False
        )
        return DraftState(state.cache.with_first(first), state.own, slots), proposal


def _propose(
    model: DraftDecoder, cache: PagedCache, slots: DraftSlots, rows: DraftRows, tree: TokenTree, *, may_lack_one: bool
):
    if tree.max_width > 1:
        return propose_tree(model, cache, slots, rows, tree)
    return propose_chain(model, cache, slots, rows, tree, may_lack_one=may_lack_one)


def keep_path(
    cache: PagedCache, rows: DraftRows, path: jax.Array, num_kept: jax.Array, mesh: Mesh | None = None
) -> PagedCache:
    """Moves the keys and values of the accepted path int32[S, D + 1] (the root first, `num_kept` int32[S] nodes) from
    the tree's positions, position + node, to the sequence's, position + depth. Donate the cache."""
    depths = jnp.arange(path.shape[1])
    end = rows.page_tables[0].shape[1] * cache.page_size
    is_kept = (depths < num_kept[:, None]) & rows.is_active[:, None]
    sources = jnp.where(is_kept, rows.positions[:, None] + path, 0)
    destinations = jnp.where(is_kept, rows.positions[:, None] + depths, end)
    return move_tokens(cache, rows.page_tables, sources, destinations, mesh=mesh)


def _store_last(model: DraftDecoder, cache: PagedCache, draft: DraftSlots, rows: DraftRows):
    """Stores the token before the root in the rows whose draft cache lacks it."""
    row = jnp.arange(rows.batch.num_slots)

    def is_behind(draft: DraftSlots) -> jax.Array:
        return rows.is_active & (draft.num_drafted < rows.positions)

    def store(carry):
        cache, draft, count = carry
        lengths = is_behind(draft).astype(jnp.int32)
        position = jnp.where(lengths > 0, draft.num_drafted, 0)
        attend = PagedAttention(
            cache, rows.page_tables, row, lengths, position + lengths, max_query_length=1, mesh=model.mesh
        )
        model.decoder(draft.sequence[row, position], position, attend)
        return attend.cache, replace(draft, num_drafted=draft.num_drafted + lengths), count + 1

    return lax.while_loop(lambda carry: jnp.any(is_behind(carry[1])), store, (cache, draft, jnp.int32(0)))


def draft_tokens_of(
    positions: jax.Array, logits: jax.Array, rows: DraftRows, width: int, is_maximal: bool
) -> tuple[jax.Array, jax.Array]:
    """The `width` best tokens int32[S, width] for positions int32[S] by logits float32[S, V] at one node of each row,
    best first, and the transformed logits float32[S, V]. Sampled rows add the noise of their position: the
    target's own in exact mode, an independent one in maximal mode, which draws without replacement (Kool et al.
    2019)."""
    transformed = transform(logits, rows.batch, rows.history, rows.tables)
    stream = DRAFT_STREAM if is_maximal else None
    return choose_several(transformed, positions, rows.batch, width, stream=stream), transformed


def _path(tree: TokenTree, node: int) -> list[int]:
    """The nodes from the root, which is left out, to `node`."""
    path: list[int] = []
    while node > 0:
        path.insert(0, node)
        node = int(tree.parents[node])
    return path
