"""Grammars of running answers, the host's side: masks and states for a dispatch, which of its tokens count, and which
tables lie where on the device.

If an answer's grammar has its table on the device, every token is masked there. Otherwise the host sends a mask for the
first token of a dispatch. The tokens after it, in the same dispatch, are free: noise is a function of seed
and position, so a token that wins without the mask and is allowed would have won with it. The host keeps those that
the grammar allows, and takes the others back. Where a mask changes more than which tokens are left (top-k, top-p,
min-p, rejection sampling), only the first token is kept.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxinfer.engine.plans import DispatchPlan
from jaxinfer.engine.programs.grammar import (
    MASKS,
    ROWS,
    STATES,
    SUCCESSORS,
    GrammarRows,
    TableBlock,
    empty_block,
    empty_rows,
)
from jaxinfer.engine.request import SequenceState
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.grammar.compiler import Grammar
from jaxinfer.grammar.device import CLASS_ROW, DRAFT, FIRST_SUCCESSOR, MASK_ROW, TableSizes, slot_state
from jaxinfer.grammar.gate import Gate
from jaxinfer.grammar.matcher import Matcher
from jaxinfer.grammar.table_builder import TokenTable
from jaxinfer.sampling.state import NUM_RECENT

FIRST_RATE = 0.95  # of `AnswerGrammar.rate`: high enough for several steps in a dispatch, which tell
RATE_STEP = 0.1  # how much one token changes it
RECOVERY = 0.005  # and a dispatch of one step, which tells nothing: after some of them several are tried again
NO_END = 2**30  # min_tokens of an answer that may not end yet


class ClaimRefusedError(ValueError):
    """A token with which an answer begins is not of its grammar. `position`: its number in the answer."""

    def __init__(self, token: int, position: int):
        super().__init__(f"the grammar refuses token {token} at position {position} of the answer")
        self.position = position


@dataclass
class AnswerGrammar:
    """A running answer's place in its grammar.

    Attributes:
      matcher: where it is, as long as masks come from the host. is_exact: whether tokens after a dispatch's first may
        count then.
      gate: where the grammar begins, None for the answer's first token. num_before: tokens of the answer before that.
      state: of the device's tables, None under masks from the host. is_sent: whether the device has it.
      rate: of the tokens that were free and checked by the host, the share that was allowed, lately.
      rejected: tokens that the device chose and that do not count; it is told with the next dispatch.
    """

    grammar: Grammar
    matcher: Matcher
    is_exact: bool
    gate: Gate | None = None
    num_before: int = 0
    state: int | None = None
    is_sent: bool = False
    rate: float = FIRST_RATE
    rejected: list[int] = field(default_factory=list)

    @property
    def is_on_host(self) -> bool:
        """True if its masks come from the host, which then has to know all tokens before the next dispatch."""
        return self.state is None

    @property
    def keeps_one(self) -> bool:
        """True if only the first token of a dispatch counts."""
        return self.is_on_host and not self.is_reasoning and (self.gate is not None or not self.is_exact)

    def num_expected(self, num_steps: int) -> float:
        """Tokens that will count of so many decode steps."""
        if not self.is_on_host or self.is_reasoning:
            return num_steps
        return 1 if self.keeps_one else (1 - self.rate**num_steps) / (1 - self.rate)

    @property
    def is_reasoning(self) -> bool:
        """True if the grammar has not begun: everything is allowed but an end."""
        return self.gate is not None and self.gate.state == "reasoning"


class Grammars:
    """Keeps the grammars of one engine's answers. Host values only."""

    def __init__(self, spec: EngineSpec):
        self._spec, self._vocab_size = spec, spec.config.vocab_size
        self.tables = TablePool(spec.table_sizes)

    def add(self, sequence: SequenceState) -> None:
        """A new answer, at the beginning of its request's grammar, or after the tokens that it has. Raises
        ClaimRefusedError for one that the grammar refuses."""
        grammar: Grammar | None = sequence.request.grammar
        if grammar is None:
            return
        params = sequence.params
        cuts = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        cuts |= bool(self._spec.trees) and self._spec.options.acceptance == "maximal"
        gate = copy.copy(sequence.request.gate)
        answer = AnswerGrammar(grammar, grammar.start(), params.is_greedy or not cuts, gate)
        for position, token in enumerate(sequence.output):
            if not self._num_kept(answer, [token]):
                raise ClaimRefusedError(token, position)
        sequence.grammar = answer

    def end(self, sequence: SequenceState) -> None:
        """Its table may give way to others."""
        answer: AnswerGrammar | None = sequence.grammar
        if answer is not None and answer.state is not None:
            self.tables.release(answer.grammar.key)
        sequence.grammar = None

    # Before a dispatch.

    def plan(self, plan: DispatchPlan) -> list[TableBlock | GrammarRows]:
        """Facts that the device needs for a planned dispatch, in this order."""
        for sequence in plan.admitted:
            if (admitted := sequence.grammar) is not None:
                admitted.is_sent, admitted.rejected = False, []
        chosen = [*(chunk.sequence for chunk in plan.chunks if chunk.is_last), *plan.decodes]
        answers = [sequence for sequence in chosen if sequence.grammar is not None]
        blocks: list[TableBlock] = []
        for sequence in answers:
            if sequence.grammar.is_on_host:
                self._use_table(sequence, blocks)
        needed = [sequence for sequence in answers if sequence.grammar.is_on_host or not sequence.grammar.is_sent]
        rows = [self._rows(needed[start : start + ROWS]) for start in range(0, len(needed), ROWS)]
        return [*blocks, *rows]

    def _use_table(self, sequence: SequenceState, blocks: list[TableBlock]) -> None:
        """Moves an answer from masks to its grammar's table, if there is one and room for it."""
        answer: AnswerGrammar = sequence.grammar
        table = answer.grammar.table if answer.gate is None else None
        if table is None or (first := self.tables.acquire(answer.grammar.key, table, blocks)) is None:
            return
        answer.state, answer.is_sent = first, False

    def _rows(self, sequences: Sequence[SequenceState]) -> GrammarRows:
        rows: Any = empty_rows(self._spec.max_seqs, self._vocab_size, self._spec.max_tokens_per_dispatch)
        on_host = []
        for row, sequence in enumerate(sequences):
            answer: AnswerGrammar = sequence.grammar
            rows.slots[row] = sequence.slot
            rows.min_tokens[row] = NO_END if answer.is_reasoning else sequence.params.min_tokens
            if answer.is_reasoning:
                rows.states[row] = 0
            elif answer.state is None:
                rows.states[row], rows.has_mask[row] = slot_state(rows.slots[row]), True
                on_host.append((row, answer))
            else:
                table = answer.grammar.table
                assert table is not None
                rows.states[row] = answer.state + table.state_after(sequence.output[answer.num_before :])
                answer.is_sent = True
            if answer.rejected:
                rows.is_rewound[row] = True
                rows.tokens[row], rows.positions[row] = sequence.tokens[-1], len(sequence.tokens) - 1
                rows.remaining[row] = sequence.request.max_tokens - sequence.num_output
                rows.num_output[row] = sequence.num_output
                recent = sequence.output[-NUM_RECENT:]
                rows.recent[row, NUM_RECENT - len(recent) :] = recent
                rows.rejected[row, : len(answer.rejected)] = answer.rejected
                answer.rejected = []
        if on_host:
            masks = np.empty((len(on_host), rows.masks.shape[1]), np.uint32)
            on_host[0][1].matcher.library.fill([answer.matcher for _, answer in on_host], masks)
            for (row, answer), mask in zip(on_host, masks, strict=True):
                rows.masks[row] = mask
                if answer.gate is not None and answer.gate.opening is not None:
                    rows.masks[row, answer.gate.opening // 32] |= np.uint32(1 << answer.gate.opening % 32)
        return rows

    # After a dispatch.

    def accept(self, sequence: SequenceState, tokens: Sequence[int]) -> tuple[list[int], str | None]:
        """Those of a dispatch's tokens that count, and why the answer cannot go on, if it cannot. `tokens` are as the
        device gives them: what follows the last one is negative."""
        answer: AnswerGrammar = sequence.grammar
        if not answer.is_on_host:
            return list(tokens), None
        made = [token for token in tokens if token >= 0]
        kept = made[: self._num_kept(answer, made)]
        answer.rejected = made[len(kept) :]
        if (error := answer.matcher.error) is not None:
            return kept, error
        if made and not kept:
            return [], f"it refuses token {made[0]}, which its mask allowed"
        return [*kept, *(tokens[len(made) :] if len(kept) == len(made) else ())], None

    def _num_kept(self, answer: AnswerGrammar, made: Sequence[int]) -> int:
        if answer.gate is None:
            if answer.keeps_one:
                return answer.matcher.accept(made[:1])
            count = answer.matcher.accept(made)
            if len(made) == 1:
                answer.rate += RECOVERY * (1 - answer.rate)
            for was_allowed in (*(True for _ in made[1:count]), *(False for _ in made[count : count + 1])):
                answer.rate += RATE_STEP * (0.99 * was_allowed - answer.rate)
            return count
        was_undecided = answer.gate.state == "undecided"
        for count, token in enumerate(made[:1] if was_undecided else made, 1):
            answer.gate.feed(token)
            if answer.gate.state != "open":
                continue
            answer.gate = None
            answer.num_before = 0 if was_undecided else answer.num_before + count
            return answer.matcher.accept(made[:1]) if was_undecided else count
        answer.num_before += 1 if was_undecided else len(made)
        return 1 if was_undecided else len(made)


class TablePool:
    """Which table has which rows of the device's arrays. Tables of running answers stay; of the others the least
    recently used gives way."""

    def __init__(self, sizes: TableSizes):
        self._sizes = sizes
        slots = 1 + sizes.num_slots
        self._masks, self._states = _Rows(slots, sizes.num_masks), _Rows(slots, sizes.num_states)
        self._classes, self._successors = _Rows(1, sizes.num_grammars), _Rows(1, sizes.num_successors)
        self._held: OrderedDict[str, _Held] = OrderedDict()  # the least recently used first

    @property
    def num_bytes(self) -> int:
        """Bytes of the tables that are held."""
        return sum(table.num_bytes for table in self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    def acquire(self, key: str, table: TokenTable, blocks: list[TableBlock]) -> int | None:
        """The device's state that is the table's first, None where there is no room; adds to `blocks` what the device
        needs for it. It stays until as many calls of `release`."""
        if (held := self._held.get(key)) is None:
            if (held := self._place(table)) is None:
                return None
            self._held[key] = held
            blocks += _blocks(self._sizes, held, table)
        held.num_users += 1
        self._held.move_to_end(key)
        return held.states.start

    def release(self, key: str) -> None:
        """An answer needs it no more."""
        self._held[key].num_users -= 1

    def _place(self, table: TokenTable) -> _Held | None:
        wanted = (len(table.masks), len(table.mask_of), 1, table.successors.size)
        parts = (self._masks, self._states, self._classes, self._successors)
        if any(count > rows.capacity for rows, count in zip(parts, wanted, strict=True)):
            return None
        unused = [key for key, held in self._held.items() if not held.num_users]
        while True:
            taken = [rows.take(count) for rows, count in zip(parts, wanted, strict=True)]
            ranges = [span for span in taken if span is not None]
            if len(ranges) == len(parts):
                return _Held(*ranges, num_bytes=table.num_bytes)
            for rows, span in zip(parts, taken, strict=True):
                if span is not None:
                    rows.give_back(span)
            if not unused:
                return None
            gone = self._held.pop(unused.pop(0))
            for rows, span in zip(parts, gone.ranges, strict=True):
                rows.give_back(span)


@dataclass
class _Held:
    masks: range
    states: range
    classes: range
    successors: range
    num_bytes: int
    num_users: int = 0

    @property
    def ranges(self) -> tuple[range, range, range, range]:
        return self.masks, self.states, self.classes, self.successors


class _Rows:
    """Adjacent rows, given and taken back."""

    def __init__(self, start: int, count: int):
        self.capacity = count
        self._free = [range(start, start + count)]

    def take(self, count: int) -> range | None:
        for number, free in enumerate(self._free):
            if len(free) >= count:
                self._free[number] = free[count:]
                return free[:count]
        return None

    def give_back(self, rows: range) -> None:
        merged: list[range] = []
        for span in sorted((*(span for span in self._free if span), rows), key=lambda span: span.start):
            if merged and merged[-1].stop == span.start:
                merged[-1] = range(merged[-1].start, span.stop)
            else:
                merged.append(span)
        self._free = merged


def _blocks(sizes: TableSizes, held: _Held, table: TokenTable) -> Iterable[TableBlock]:
    """A table in pieces of fixed shapes, its rows numbered as on the device."""
    states = np.empty((4, len(table.mask_of)), np.int32)
    states[MASK_ROW] = held.masks.start + table.mask_of
    states[CLASS_ROW] = held.classes.start
    states[FIRST_SUCCESSOR] = held.successors.start + np.arange(states.shape[1]) * table.successors.shape[1]
    states[DRAFT] = table.drafts
    successors = table.successors.reshape(-1)
    successors = np.where(successors < 0, -1, successors + held.states.start)
    # Rows stand first, as `TableBlock` has them but for the states.
    parts = {"masks": (table.masks, MASKS), "states": (states.T, STATES), "successors": (successors, SUCCESSORS)}
    for number in range(max(-(-len(array) // size) for array, size in parts.values())):
        block: Any = empty_block(sizes)
        for name, (array, size) in parts.items():
            piece = array[number * size : (number + 1) * size]
            rows = getattr(block, name)
            (rows.T if name == "states" else rows)[: len(piece)] = piece
            first = getattr(held, name).start + number * size
            getattr(block, f"{name}_at")[: len(piece)] = first + np.arange(len(piece))
        yield replace(block, classes=table.classes, class_row=np.int32(held.classes.start))
