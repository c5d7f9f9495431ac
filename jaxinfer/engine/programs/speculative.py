"""The jitted speculative round: draft, verify, accept, roll back, several times in a dispatch.

Shapes use the legend of jaxinfer/README.md. The host sees the accepted tokens only. Draft and target share the page
table; rolling back only shortens the sequence: keys of rejected tokens stay in the pages and the next round overwrites
them. Recurrent states cannot be rolled back: verification leaves them as they were, and then `commit` advances them
over the accepted tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.cache import PagedCache, PageTables
from jaxinfer.cache.policy.contract import SlotRows
from jaxinfer.engine.compiling import LargeProgram
from jaxinfer.engine.programs import ProgramModel, Weights, uniform_logits
from jaxinfer.engine.programs.paged import constrain_sharding, replicate, returned_taps, take_rows, write_rows
from jaxinfer.engine.programs.work import INVALID_LOGITS, NO_TOKEN, Slots, StepOutput
from jaxinfer.grammar.device import GrammarTables
from jaxinfer.models import Decoder, collect
from jaxinfer.sampling import SampleOutput, SamplingBatch
from jaxinfer.sampling.params import MAX_LOGPROBS
from jaxinfer.sampling.sampler import no_logprobs
from jaxinfer.speculative import (
    BoundProposer,
    DraftRows,
    DraftSlots,
    DraftState,
    ObservedRows,
    Proposal,
    Proposer,
    TokenTree,
    keep_path,
    walk,
)
from jaxinfer.speculative.packing import NodeRows, all_rows, packed_rows, within_budget


@dataclass(frozen=True)
class Drafter:
    """The draft's part of what a round is compiled for, as a static argument.

    Attributes:
      proposer: what proposes. tree: what is drafted in a round. is_maximal: how drafts are accepted.
      min_rows: rows of the target's pass, filled up with padding, so that every pass has the same shape; 0 for no more
        than there are. is_uniform as in `paged_attention`.
      rows_per_slot: rows of the target's pass for each slot on average, which the slots share; 0 for all nodes of all.
    """

    proposer: Proposer
    tree: TokenTree
    is_maximal: bool = False
    min_rows: int = 0
    is_uniform: bool = False
    rows_per_slot: int = 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SpeculativeWork:
    """Rounds of B slots: is_scheduled bool[B], the slots that take part if active; page_tables int32[B, P] of each
    group of layers; num_rounds, an int32 scalar; num_drafts int32[B], how many tokens each slot may draft in a round.
    """

    is_scheduled: jax.Array
    page_tables: PageTables
    num_rounds: jax.Array
    num_drafts: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoundCounts:
    """Drafted and accepted tokens of each round, int32[R, B]; -1 where the slot took no part."""

    proposed: jax.Array
    accepted: jax.Array


def empty_rounds(num_slots: int) -> dict[str, Any]:
    """The arrays of rounds in which nothing takes part, without the page table."""
    work = {"is_scheduled": np.zeros(num_slots, np.bool_), "num_rounds": np.int32(0)}
    return {**work, "num_drafts": np.zeros(num_slots, np.int32)}


@partial(
    LargeProgram,
    static_argnums=(0, 2, 9),
    donate_argnums=(4, 5, 6),
)
def speculate(
    model: ProgramModel,
    weights: Weights,
    drafter: Drafter,
    draft_weights: Weights,
    cache: PagedCache,
    draft_cache: PagedCache | None,
    slots: Slots,
    batch: SamplingBatch,
    work: SpeculativeWork,
    max_rounds: int,
    tables: GrammarTables | None = None,
) -> tuple[PagedCache, PagedCache | None, Slots, StepOutput, RoundCounts]:
    """Up to `work.num_rounds` (at most the static `max_rounds`) rounds for every held, active slot; each produces
    between 1 and tree.depth + 1 tokens of a slot. Donates the caches and the slots.

    A slot's tokens stand together at the beginning of its column of the output, NO_TOKEN after them.
    """
    num_slots = work.is_scheduled.shape[0]
    all_slots, slots, batch = slots, take_rows(slots, num_slots), take_rows(batch, num_slots)
    proposer = drafter.proposer.bind(draft_weights, model.config.vocab_size, drafter.is_maximal)
    one_round = _Round(model, model.bind(weights), drafter, proposer, batch, work, tables)

    def keep_going(carry):
        count, _, slots, *_ = carry
        return (count < work.num_rounds) & jnp.any(slots.is_active & work.is_scheduled)

    nothing = jnp.full((max_rounds, num_slots), -1, jnp.int32)
    carry = (
        jnp.int32(0),
        (cache, draft_cache),
        slots,
        _no_outputs(model, max_rounds * (drafter.tree.depth + 1), num_slots, batch.vocab_size),
        jnp.zeros((num_slots,), jnp.int32),
        RoundCounts(nothing, nothing),
    )
    _, caches, slots, outputs, _, counts = lax.while_loop(keep_going, one_round, carry)
    slots = constrain_sharding(model.mesh, write_rows(all_slots, slots))
    return *caches, slots, replicate(model.mesh, outputs), replicate(model.mesh, counts)


@dataclass(frozen=True, eq=False)
class _Round:
    """One round of `speculate`: a body for `lax.while_loop`, which hashes it, and so not by its arrays."""

    model: ProgramModel
    target: Decoder
    drafter: Drafter
    proposer: BoundProposer
    batch: SamplingBatch
    work: SpeculativeWork
    tables: GrammarTables | None

    def __call__(self, carry):
        count, (cache, draft_cache), slots, outputs, num_tokens, counts = carry
        tree, batch, work = self.drafter.tree, self.batch, self.work
        is_active = slots.is_active & work.is_scheduled
        # The keys of a node are stored where they may stay, so there are at most `remaining` nodes, the root included.
        num_nodes = 1 + jnp.clip(work.num_drafts, 0, jnp.minimum(slots.remaining, tree.num_nodes) - 1)
        num_nodes = self.model.policy.limit_rows(slots.positions, num_nodes)
        num_nodes = jnp.where(is_active, num_nodes, 0)
        own = slots.adapters, slots.steering
        rows = DraftRows(
            slots.positions, is_active, num_nodes, work.page_tables, batch, slots.history, self.tables, *own
        )
        with jax.named_scope("draft"):
            state, proposal = self.proposer.propose(DraftState(cache, draft_cache, slots.draft), rows, tree)
        cache, draft_cache, draft_slots = state
        proposal, nodes = _laid_out(proposal, rows, self.drafter)
        attend, hidden, taps = verify(self.target, self.model, cache, proposal, rows, nodes, self.drafter)
        state, outputs = walk(
            _logits_at(self.target, hidden, rows, nodes, self.drafter.is_uniform),
            proposal,
            rows,
            tree,
            slots.remaining,
            partial(_keep, num_tokens, batch.has_logprobs & work.is_scheduled),
            outputs,
            is_maximal=self.drafter.is_maximal,
        )
        cache = attend.commit(state.num_tokens)
        if tree.max_width > 1:
            moved = (rows, state.path, state.num_tokens)
            cache = keep_path(cache, *moved, self.model.mesh)
            draft_cache = self.proposer.keep(draft_cache, *moved)
        positions = rows.positions + state.num_tokens
        path = jnp.take_along_axis(proposal.tokens, state.path, axis=1)
        if self.drafter.proposer.taps:
            seen = _accepted(rows, path, nodes.at(state.path), state.num_tokens, slots.draft, taps)
            draft_cache = self.proposer.observe(draft_cache, seen)
        new_slots = Slots(
            tokens=jnp.where(is_active, state.newest, slots.tokens),
            positions=positions,
            remaining=state.remaining,
            is_active=jnp.where(is_active, state.is_active, slots.is_active),
            history=state.history,
            draft=_extend_sequences(draft_slots, rows, path, state.newest, positions, jnp.arange(tree.depth + 1)),
            adapters=slots.adapters,
            adapter_starts=slots.adapter_starts,
            steering=slots.steering,
        )
        if self.model.taps:
            outputs = _with_states(outputs, self.model, taps, nodes.at(state.path), num_tokens, state.num_tokens)
        # Where an answer ended with an accepted draft token, the target did not judge those after it.
        is_cut = ~state.is_active & (state.num_accepted == state.num_tokens)
        proposed = jnp.where(is_cut, state.num_accepted, proposal.num_nodes - 1)
        counts = RoundCounts(
            counts.proposed.at[count].set(jnp.where(is_active, proposed, -1)),
            counts.accepted.at[count].set(jnp.where(is_active, state.num_accepted, -1)),
        )
        return count + 1, (cache, draft_cache), new_slots, outputs, num_tokens + state.num_tokens, counts


def _laid_out(proposal: Proposal, rows: DraftRows, drafter: Drafter) -> tuple[Proposal, NodeRows]:
    """The drafts that are verified, and their rows in the target's pass."""
    num_slots, count = proposal.tokens.shape
    num_nodes = jnp.where(rows.is_active, proposal.num_nodes, 0)
    if not drafter.rows_per_slot:
        return proposal._replace(num_nodes=num_nodes), all_rows(num_nodes, count)
    num_rows = drafter.rows_per_slot * num_slots
    # The host divides rows among the slots that it plans for; those of a dispatch may be fewer, and have fewer rows.
    chances = jnp.ones((num_slots, count - 1), jnp.float32) if proposal.chances is None else proposal.chances
    num_nodes = within_budget(num_nodes, chances, num_rows)
    return proposal._replace(num_nodes=num_nodes), packed_rows(num_nodes, num_rows)


def verify(
    target: Decoder,
    model: ProgramModel,
    cache: PagedCache,
    proposal: Proposal,
    rows: DraftRows,
    nodes: NodeRows,
    drafter: Drafter,
) -> tuple[Any, jax.Array, dict[str, jax.Array]]:
    """The target's pass over nodes [T] of all slots. Returns what stored them (`attend_ragged`), whose `commit` makes
    the cache, the final hidden states [T, D], and those that the draft observes or the pass returns, by name."""
    count, num_nodes = nodes.num_rows, proposal.tokens.shape[1]
    tree, padding = drafter.tree, max(drafter.min_rows - count, 0)
    depths, ancestors = jnp.asarray(tree.depths), None
    if tree.max_width > 1:
        ancestors = jnp.pad(jnp.asarray(tree.ancestors)[nodes.nodes], (0, padding))
    options: Any = {"ancestors": ancestors, "max_deferred": num_nodes, "is_uniform": drafter.is_uniform}
    slots = SlotRows(nodes.starts, rows.positions, nodes.num_nodes, num_nodes, **options, mesh=model.mesh)
    attend = model.policy.attend_slots(model.config, cache, rows.page_tables, slots)
    tokens, positions = proposal.tokens[nodes.slots, nodes.nodes], rows.positions[nodes.slots] + depths[nodes.nodes]
    tokens, positions, slot = (jnp.pad(x, (0, padding)) for x in (tokens, positions, nodes.slots))
    taps, tap = collect((*model.taps, *drafter.proposer.taps))
    hidden = target.for_rows(rows.adapters, slot).steered(rows.steering, slot)(tokens, positions, attend, tap)
    return attend, hidden[:count], {name: states[:count] for name, states in taps.items()}


def _accepted(
    rows: DraftRows,
    tokens: jax.Array,
    path: jax.Array,
    num_kept: jax.Array,
    slots: DraftSlots,
    taps: dict[str, jax.Array],
) -> ObservedRows:
    """The first `num_kept` int32[S] tokens [S, D + 1] of the accepted path, in rows int32[S, D + 1] of the pass, of
    whose taps [T, D] they have theirs."""
    num_slots, length = path.shape
    slot = jnp.arange(num_slots)
    positions = rows.positions[:, None] + jnp.arange(length)
    accepted_taps = {name: states[path.reshape(-1)] for name, states in taps.items()}
    flat = tokens.reshape(-1), positions.reshape(-1), slot * length, jnp.where(rows.is_active, num_kept, 0)
    return ObservedRows(*flat, slot, slots.num_drafted, rows.page_tables[0], accepted_taps)


def _logits_at(
    target: Decoder, hidden: jax.Array, rows: DraftRows, nodes: NodeRows, is_uniform: bool
) -> Callable[[jax.Array], jax.Array]:
    """The logits float32[S, V] at a node int32[S] of each slot. Those of all rows are computed in one pass over the
    head, unless every bit has to be that of plain decoding, whose product has S rows."""
    if is_uniform:
        return lambda node: uniform_logits(target, hidden[nodes.at(node)], rows.adapters)
    logits = target.for_rows(rows.adapters, nodes.slots).logits(hidden)
    return lambda node: logits[nodes.at(node)]


def _extend_sequences(
    draft: DraftSlots, rows: DraftRows, path: jax.Array, newest: jax.Array, positions: jax.Array, depths: jax.Array
) -> DraftSlots:
    """The sequence with the accepted path int32[S, D + 1] and the newest token, and what the draft has of it."""
    row, length = jnp.arange(newest.shape[0]), draft.sequence.shape[1]
    places = rows.positions[:, None] + depths
    is_kept = rows.is_active[:, None] & (places < positions[:, None])
    sequence = draft.sequence.at[row[:, None], jnp.where(is_kept, places, length)].set(path, mode="drop")
    sequence = sequence.at[row, jnp.where(rows.is_active, positions, length)].set(newest, mode="drop")
    # The draft's cache is valid up to what ends first: what it has stored, or the accepted tokens.
    return DraftSlots(sequence, jnp.where(rows.is_active, jnp.minimum(draft.num_drafted, positions), draft.num_drafted))


def _keep(
    num_before, has_logprobs, outputs: StepOutput, samples: SampleOutput, chose, took_part, num_in_round
) -> StepOutput:
    """Adds one token of each row that chose to its column; the rest of its sample only if a request wants it."""
    rows = jnp.arange(outputs.tokens.shape[0])[:, None]
    is_here = (rows == num_before + num_in_round) & chose
    tokens = jnp.where(took_part, samples.tokens, INVALID_LOGITS)

    def write(all_, new):
        return jnp.where(is_here.reshape(*is_here.shape, *(1,) * (new.ndim - 1)), new, all_)

    kept = lax.cond(
        jnp.any(has_logprobs),
        lambda all_: jax.tree.map(write, all_, samples),
        lambda all_: all_,
        outputs.samples,
    )
    return StepOutput(write(outputs.tokens, tokens), kept, outputs.states)


def _with_states(
    outputs: StepOutput,
    model: ProgramModel,
    taps: dict[str, jax.Array],
    path: jax.Array,
    num_before: jax.Array,
    num_kept: jax.Array,
) -> StepOutput:
    """Adds the tapped states [T, D] of the first `num_kept` int32[S] tokens of the accepted path: those of the rows
    int32[S, D + 1] of the pass."""
    slot, steps = jnp.arange(path.shape[0])[:, None], jnp.arange(path.shape[1])
    rows = jnp.where(steps < num_kept[:, None], num_before[:, None] + steps, outputs.tokens.shape[0])
    states = {
        name: outputs.states[name].at[rows, slot].set(new[path], mode="drop")
        for name, new in returned_taps(model, taps).items()
    }
    return replace(outputs, states=states)


def _no_outputs(model: ProgramModel, num_rows: int, num_slots: int, vocab_size: int) -> StepOutput:
    empty = no_logprobs(num_slots, MAX_LOGPROBS, vocab_size)
    leaves = {name: jnp.broadcast_to(leaf, (num_rows, *leaf.shape)) for name, leaf in vars(empty).items()}
    tokens = jnp.full((num_rows, num_slots), NO_TOKEN, jnp.int32)
    samples = SampleOutput(tokens=jnp.zeros_like(tokens), ok=jnp.zeros(tokens.shape, bool), **leaves)
    shape = num_rows, num_slots, model.config.hidden_size
    return StepOutput(tokens, samples, {name: jnp.zeros(shape, jnp.float32) for name in model.taps})
