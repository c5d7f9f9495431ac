"""Plans what a dispatch drafts, and counts which pages the draft has stored and what was accepted: the host's side of
speculation."""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jaxinfer.engine.adapter_slots import LoadedAdapter
from jaxinfer.engine.model_runner import Flight, FlightResults
from jaxinfer.engine.plans import DispatchPlan
from jaxinfer.engine.request import SequenceState
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.models.host_layers import all_layers
from jaxinfer.quantization.tree import num_bytes
from jaxinfer.speculative import (
    AcceptanceEstimate,
    LengthController,
    SharedRows,
    SpeculationStats,
    TokenTree,
    chain,
)


@dataclass(frozen=True)
class DraftPlan:
    """The drafts of one dispatch.

    Attributes:
      tree: drafted in each round, of which a sequence takes its first nodes (`lengths`, the root not counted).
      max_rounds: rounds at most. num_behind: tokens made without the draft that it has to catch up with.
      shares_rows: whether slots share rows of the pass, if so many slots have such rounds (`EngineSpec.form_of`).
    """

    tree: TokenTree
    lengths: dict[SequenceState, int]
    max_rounds: int
    num_behind: int = 0
    shares_rows: bool = False

    def length_of(self, sequence: SequenceState) -> int:
        return self.lengths.get(sequence, 0)


NOTHING = DraftPlan(chain(0), {}, 2**30)
# After so many drafted tokens it is told how many were accepted, and warned where fewer of the first ones of each round
# than this share were: published heads have over half.
TOLD_AFTER, LOW_SHARE = 1_000, 0.2
_LOG = logging.getLogger(__name__)


class Speculation:
    """Chooses what each dispatch drafts, adapted to the acceptance rate. Host values only."""

    def __init__(self, spec: EngineSpec, scheduler: Scheduler):
        self.spec, self.draft, self._scheduler = spec, spec.draft, scheduler
        self.rounds: Counter[tuple[int, int]] = Counter()
        self.num_plain = 0
        # A draft that does not observe has of its own pages those in which it drafted, and catches up with the others.
        self._catches_up = bool(self.draft.own) and not self.draft.observes
        self._has_keys = bytearray(spec.num_pages)  # of each page: whether the draft has stored all of it
        self._host_has_keys: dict[int, int] = {}  # the same of host pages
        self._controller = None
        self._num_until_told = TOLD_AFTER if self.draft.is_trained_for_target else None
        if spec.options.is_adaptive:
            drafting = sum(num_bytes(all_layers(params)) for _, params in spec.draft_models)
            cost_ratio = drafting / num_bytes(spec.base_params)
            lengths, shared = [tree.depth for tree in spec.trees], None
            if spec.packs_rounds:
                predicts = self.draft.predicts_acceptance
                shared = SharedRows(lengths[-1], lengths[-2], spec.decode_slots[0], predicts)
            at_once = self.draft.drafts_at_once
            self._controller = LengthController(lengths, cost_ratio, shared=shared, drafts_at_once=at_once)
        self._estimates: dict[SequenceState, AcceptanceEstimate] = {}

    def add(self, sequence: SequenceState) -> None:
        """A sequence was added to the engine."""
        sequence.rounds = Counter()

    # Before a dispatch.

    def choose(self, sequences: Sequence[SequenceState]) -> DraftPlan:
        """Plans what the next dispatch drafts if these decode."""
        if self._controller is None or not sequences:
            tree = self.spec.trees[-1]
            counts = {sequence: 0 if self._must_follow(sequence) else tree.num_nodes - 1 for sequence in sequences}
            return DraftPlan(tree, counts, self.spec.max_rounds)
        num_slots = next(size for size in self.spec.decode_slots if size >= len(sequences))
        limits = [0 if self._must_follow(sequence) else max(sequence.num_left - 1, 0) for sequence in sequences]
        choice = self._controller.choose(num_slots, self._estimates_of(sequences, self._controller), limits)
        if choice.num_draft_tokens == 0:
            return NOTHING
        lengths = dict(zip(sequences, choice.lengths, strict=True))
        rounds = min(choice.max_rounds or NOTHING.max_rounds, self.spec.max_rounds)
        return DraftPlan(chain(choice.num_draft_tokens), lengths, rounds, shares_rows=choice.shares_rows)

    def schedule(self, max_steps: int | None, *, can_preempt: bool) -> DispatchPlan | None:
        """As `Scheduler.schedule`, with what the dispatch drafts."""
        draft = self.choose([sequence for sequence in self._scheduler.running if sequence.can_decode])
        plan = self._scheduler.schedule(
            min(max_steps or draft.max_rounds, draft.max_rounds),
            can_preempt=can_preempt,
            tokens_per_step=draft.tree.depth + 1,
            num_scratch=draft.tree.num_nodes - draft.tree.depth - 1,
        )
        return None if plan is None else self._start(plan, draft)

    def _start(self, plan: DispatchPlan, draft: DraftPlan) -> DispatchPlan:
        """The plan with what it drafts; notes which pages are filled anew, and what the draft has of new sequences.
        Every planned dispatch is started once."""
        for move in plan.to_host:
            if move.group == 0:
                self._host_has_keys[move.host] = self._has_keys[move.page]
        for move in plan.from_host:
            if move.group == 0:
                self._has_keys[move.page] = self._host_has_keys.get(move.host, 0)
        for sequence in plan.admitted:
            sequence.num_drafted = self._num_drafted(sequence)
        for sequence in plan.sequences:
            num_found = sequence.num_reused // self.spec.page_size
            self._clear_draft_pages(sequence.pages[max(sequence.num_listed, num_found) :])
        draft, num_behind = NOTHING if plan.tokens_per_step == 1 else draft, 0
        if self._controller is not None and self._catches_up and not plan.is_empty:
            estimates = self._estimates_of(plan.decodes, self._controller)
            num_behind = self._controller.start(estimates, draft.tree.depth, plan.num_steps)
        return replace(plan, draft=replace(draft, num_behind=num_behind)) if draft.tree.depth else plan

    def _must_follow(self, sequence: SequenceState) -> bool:
        """True if no token may be drafted, as masks from the host could refuse it, and states cannot be cut."""
        return self.spec.has_states and sequence.grammar is not None and sequence.grammar.is_on_host

    def _estimates_of(
        self, sequences: Sequence[SequenceState], controller: LengthController
    ) -> list[AcceptanceEstimate]:
        for sequence in sequences:
            if sequence not in self._estimates:
                num_tokens = len(sequence.tokens) if self._catches_up else 0
                self._estimates[sequence] = controller.new_estimate(num_tokens, _adapter_of(sequence))
        return [self._estimates[sequence] for sequence in sequences]

    # After a dispatch.

    @property
    def stats(self) -> SpeculationStats:
        """Counts of all answers since the start; tokens beyond the end of an answer count as well."""
        return SpeculationStats.of_rounds(self.rounds, self.num_plain)

    def read(self, flight: Flight, results: FlightResults) -> None:
        """Records the numbers of tokens that a dispatch made, before they are appended."""
        num_made = [sum(token >= 0 for token in results.tokens[slot]) for slot, _ in flight.decodes]
        if results.proposed is None or results.accepted is None:
            for (_, sequence), count in zip(flight.decodes, num_made, strict=True):
                self.record_plain(sequence, count)
            for slot, chunk in flight.chunks:
                if results.tokens[slot][0] >= 0:
                    self.record_plain(chunk.sequence, 1)
            if not flight.chunks:
                self.record_time(flight.num_slots, NOTHING, results.seconds, max(num_made, default=0), 1.0)
            return
        draft: DraftPlan = flight.plan.draft
        proposed, accepted = results.proposed.T.tolist(), results.accepted.T.tolist()
        num_rounds = 0
        for (slot, sequence), count in zip(flight.decodes, num_made, strict=True):
            pairs = [pair for pair in zip(proposed[slot], accepted[slot], strict=True) if pair[0] >= 0]
            num_rounds += len(pairs)
            self.record_rounds(sequence, pairs, draft.tree, draft.length_of(sequence) if draft.shares_rows else None)
            self._scheduler.reconcile(sequence, flight.plan.num_steps, draft.tree.depth + 1, count)
        longest = int((results.proposed >= 0).any(axis=1).sum())
        self.record_time(flight.num_slots, draft, results.seconds, longest, sum(num_made) / max(num_rounds, 1))

    def record_plain(self, sequence: SequenceState, num_made: int) -> None:
        """Tokens of a sequence that were made without a draft."""
        sequence.num_plain += num_made
        self.num_plain += num_made

    def record_rounds(
        self,
        sequence: SequenceState,
        rounds: Iterable[tuple[int, int]],
        tree: TokenTree,
        num_asked: int | None = None,
    ) -> None:
        """A sequence's rounds of a dispatch: how many tokens each drafted and accepted. Of a tree, as many drafts count
        as can be accepted. `num_asked` is its share of rows; None for all that the tree has."""
        if sequence.rounds is None:
            raise RuntimeError("rounds of a sequence that was not added to an engine with a draft")
        estimate = self._estimates.get(sequence)
        for proposed, accepted in rounds:
            pair = (min(proposed, tree.depth), accepted)
            sequence.rounds[pair] += 1
            self.rounds[pair] += 1
            if estimate is not None:
                asked = tree.depth if num_asked is None else num_asked
                estimate.observe(max(self.draft.num_tried(pair[0], asked), accepted), accepted)
            if self._num_until_told is not None:
                self._count(pair[0])

    def _count(self, num_drafted: int) -> None:
        """Tells once how many drafts of a trained head were accepted."""
        self._num_until_told = (self._num_until_told or 0) - num_drafted
        if self._num_until_told > 0:
            return
        self._num_until_told, stats = None, self.stats
        share = stats.acceptance_by_position[0]
        told = (
            f"draft {self.draft.name}: {stats.mean_accepted_length:.2f} tokens a round, of the first drafts {share:.0%}"
        )
        if share < LOW_SHARE:
            _LOG.warning("%s were accepted: it may have been trained for another revision of the model", told)
        else:
            _LOG.info("%s were accepted", told)

    def record_time(
        self, num_slots: int, draft: DraftPlan, seconds: float, num_rounds: int, tokens_per_round: float
    ) -> None:
        """A dispatch of rounds, or of plain steps (`NOTHING`), and the tokens of a row's round on average."""
        if self._controller is not None and num_rounds > 0 and seconds > 0:
            rounds = num_slots, draft.tree.depth, seconds, num_rounds, tokens_per_round
            shares_rows = draft.shares_rows and self.spec.shares_rows(num_slots)
            self._controller.observe_time(*rounds, num_behind=draft.num_behind, shares_rows=shares_rows)

    def end(self, sequence: SequenceState) -> None:
        """Drops what is kept of a sequence that has ended."""
        self._estimates.pop(sequence, None)

    # Which pages the draft has stored.

    def committed(self, flight: Flight) -> None:
        """Marks the pages of rounds whose tokens were appended."""
        for _, sequence in flight.decodes if flight.counts is not None else ():
            self._mark_pages(sequence)

    def _mark_pages(self, sequence: SequenceState) -> None:
        """After rounds: the draft has stored all but, at most, the last of what the target has."""
        num_stored = len(sequence.tokens) - 2
        for page in sequence.pages[: max(num_stored, 0) // self.spec.page_size]:
            self._has_keys[page] = 1

    def _clear_draft_pages(self, pages: Sequence[int]) -> None:
        """Before the target fills pages anew."""
        for page in pages:
            self._has_keys[page] = 0

    def _num_drafted(self, sequence: SequenceState) -> int:
        """Leading tokens whose pages the draft has stored, in some earlier sequence: all that were found, where it does
        not catch up. A draft with states, which pages do not hold, begins anew."""
        if not self._catches_up:
            return sequence.num_reused
        count = 0
        if self.spec.draft_has_states:
            return count
        for page in sequence.pages[: sequence.num_reused // self.spec.page_size]:
            if not self._has_keys[page]:
                break
            count += 1
        return count * self.spec.page_size


def _adapter_of(sequence: SequenceState) -> str:
    """A name of the adapter that the target has for a sequence; "" for none."""
    adapter = sequence.request.adapter
    return adapter.fingerprint if isinstance(adapter, LoadedAdapter) else str(adapter or "")
