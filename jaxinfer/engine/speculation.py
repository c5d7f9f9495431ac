"""What a dispatch drafts, which pages the draft has stored, and what was accepted: the host's side of speculation."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jaxinfer.engine.request import SequenceState
from jaxinfer.engine.scheduler import DispatchPlan
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.models.host_layers import all_layers
from jaxinfer.quantization.tree import num_bytes
from jaxinfer.speculative import (
    AcceptanceEstimate,
    LengthController,
    ModelDraft,
    NgramDraft,
    SpeculationStats,
    TokenTree,
    chain,
)


@dataclass(frozen=True)
class DraftPlan:
    """What a dispatch drafts.

    Attributes:
      tree: drafted in each round, of which a sequence takes its first nodes (`lengths`, the root not counted).
      max_rounds: rounds at most. num_behind: tokens made without the draft that it has to catch up with.
    """

    tree: TokenTree
    lengths: dict[SequenceState, int]
    max_rounds: int
    num_behind: int = 0

    def length_of(self, sequence: SequenceState) -> int:
        return self.lengths.get(sequence, 0)


class Speculation:
    """Chooses what each dispatch drafts, adapted to the acceptance rate. Host values only."""

    def __init__(self, spec: EngineSpec):
        if spec.draft is None:
            raise ValueError("speculation needs a draft")
        self.spec, self.draft = spec, spec.draft
        self.rounds: Counter[tuple[int, int]] = Counter()
        self.num_plain = 0
        self._has_own_pages = isinstance(self.draft, ModelDraft)
        self._has_keys = bytearray(spec.num_pages)  # of each page: whether the draft has stored all of it
        self._host_has_keys: dict[int, int] = {}  # the same of host pages
        self._controller = None
        if spec.options.is_adaptive:
            draft_params = {} if spec.draft_model is None else spec.draft_model[1]
            cost_ratio = num_bytes(all_layers(draft_params)) / num_bytes(all_layers(spec.params))
            self._controller = LengthController([tree.depth for tree in spec.trees], cost_ratio)
        self._estimates: dict[SequenceState, AcceptanceEstimate] = {}

    # Before a dispatch.

    def choose(self, sequences: Sequence[SequenceState]) -> DraftPlan | None:
        """What the next dispatch drafts if these decode; None for nothing."""
        if self._controller is None or not sequences:
            tree = self.spec.trees[-1]
            counts = {one: 0 if self._must_follow(one) else tree.num_nodes - 1 for one in sequences}
            return DraftPlan(tree, counts, self.spec.max_rounds)
        num_slots = next(size for size in self.spec.decode_slots if size >= len(sequences))
        limits = [0 if self._must_follow(one) else max(one.num_left - 1, 0) for one in sequences]
        choice = self._controller.choose(num_slots, self._estimates_of(sequences, self._controller), limits)
        if choice.num_draft_tokens == 0:
            return None
        lengths = dict(zip(sequences, choice.lengths, strict=True))
        rounds = min(choice.max_rounds or 2**30, self.spec.max_rounds)
        return DraftPlan(chain(choice.num_draft_tokens), lengths, rounds)

    def start(self, plan: DispatchPlan, draft: DraftPlan | None) -> DispatchPlan:
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
        if plan.tokens_per_step == 1:
            draft = None
        num_behind = 0
        if self._controller is not None and self._has_own_pages and not plan.is_empty:
            estimates = self._estimates_of(plan.decodes, self._controller)
            num_behind = self._controller.start(estimates, 0 if draft is None else draft.tree.depth, plan.num_steps)
        return plan if draft is None else replace(plan, draft=replace(draft, num_behind=num_behind))

    def _must_follow(self, sequence: SequenceState) -> bool:
        """Whether no token may be drafted, as masks from the host could refuse it, and states cannot be cut."""
        return self.spec.has_states and sequence.grammar is not None and sequence.grammar.is_on_host

    def _estimates_of(
        self, sequences: Sequence[SequenceState], controller: LengthController
    ) -> list[AcceptanceEstimate]:
        for sequence in sequences:
            if sequence not in self._estimates:
                num_tokens = len(sequence.tokens) if self._has_own_pages else 0
                self._estimates[sequence] = controller.new_estimate(num_tokens)
        return [self._estimates[sequence] for sequence in sequences]

    # After a dispatch.

    @property
    def stats(self) -> SpeculationStats:
        """Of all answers since the start; tokens beyond the end of an answer count as well."""
        return SpeculationStats.of_rounds(self.rounds, self.num_plain)

    def record_plain(self, sequence: SequenceState, num_made: int) -> None:
        """Tokens of a sequence that were made without a draft."""
        sequence.num_plain += num_made
        self.num_plain += num_made

    def record_rounds(self, sequence: SequenceState, rounds: Iterable[tuple[int, int]], tree: TokenTree) -> None:
        """A sequence's rounds of a dispatch: how many tokens each drafted and accepted. Of a tree, as many drafts count
        as can be accepted."""
        if sequence.rounds is None:
            raise RuntimeError("rounds of a sequence that was not added to an engine with a draft")
        estimate = self._estimates.get(sequence)
        for proposed, accepted in rounds:
            pair = (min(proposed, tree.depth), accepted)
            sequence.rounds[pair] += 1
            self.rounds[pair] += 1
            if estimate is not None:
                # Where no n-gram was found, nothing was gained.
                estimate.observe(tree.depth if isinstance(self.draft, NgramDraft) else pair[0], accepted)

    def record_time(
        self, num_slots: int, draft: DraftPlan | None, seconds: float, num_rounds: int, tokens_per_round: float
    ) -> None:
        """A dispatch of rounds, or of plain steps (`draft` None), and the tokens of a row's round on average."""
        if self._controller is not None and num_rounds > 0 and seconds > 0:
            depth, num_behind = (0, 0) if draft is None else (draft.tree.depth, draft.num_behind)
            self._controller.observe_time(
                num_slots, depth, seconds, num_rounds, tokens_per_round, num_behind=num_behind
            )

    def end(self, sequence: SequenceState) -> None:
        """Drops what is kept of a sequence that has ended."""
        self._estimates.pop(sequence, None)

    # Which pages the draft has stored.

    def mark_draft_pages(self, sequence: SequenceState) -> None:
        """After rounds: the draft has stored all but, at most, the last of what the target has."""
        num_stored = len(sequence.tokens) - 2
        for page in sequence.pages[: max(num_stored, 0) // self.spec.page_size]:
            self._has_keys[page] = 1

    def _clear_draft_pages(self, pages: Sequence[int]) -> None:
        """Before the target fills pages anew."""
        for page in pages:
            self._has_keys[page] = 0

    def _num_drafted(self, sequence: SequenceState) -> int:
        """Leading tokens whose pages the draft has stored, in some earlier sequence; a draft with states, which pages
        do not hold, begins anew."""
        count = 0
        if self._has_own_pages and self.spec.draft_has_states:
            return count
        for page in sequence.pages[: sequence.num_reused // self.spec.page_size]:
            if not self._has_keys[page]:
                break
            count += 1
        return count * self.spec.page_size
