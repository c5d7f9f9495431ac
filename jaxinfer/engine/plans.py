"""The scheduler's plan of one dispatch of the device. Plain Python: no JAX here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxinfer.engine.adapter_slots import LoadedAdapter
from jaxinfer.engine.pages import NULL_PAGE
from jaxinfer.engine.request import SequenceState
from jaxinfer.engine.tiers.host_tier import PageMove


class GroupMove(NamedTuple):
    """A prompt's pages of one group: `sources`, of which `num_dropped` fewer `targets` take its place; no targets where
    nothing is dropped."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    num_dropped: int


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `start + length` of a sequence, to be stored; `is_last` when its next token is then chosen.

    `saves_to` is the place where the sequence's state after them is saved; NULL_PAGE for none. Where the last tokens of
    a prompt compact it, `end_moves` says by group where its pages move (`GroupMove`); else it is empty.
    """

    sequence: SequenceState
    start: int
    length: int
    is_last: bool
    saves_to: int = NULL_PAGE
    end_moves: tuple[GroupMove, ...] = ()


class AdapterMove(NamedTuple):
    """An adapter that is written into a slot."""

    slot: int
    adapter: LoadedAdapter


class PageCopy(NamedTuple):
    """A page of a group whose contents another one gets."""

    group: int
    source: int
    destination: int


@dataclass(frozen=True)
class DispatchPlan:
    """One dispatch.

    Attributes:
      admitted: sequences that got a slot; their rows of the device's arrays must be written first, and their states
        copied from where they `restore_from`.
      moves: pairs (old slot, new slot) of sequences that move first, so that fewer rows are computed.
      adapters: adapters that are written into slots first.
      to_host: pages that move to host memory, before any page is written. from_host: pages that are then brought back,
        before states are restored and pages are copied.
      copies: pages to copy before anything is stored. Neither moves nor copies depend on their order.
      chunks: pieces of prompts; one that compacts its prompt is alone. decodes: sequences that take `num_steps` steps
        each, or as many as they have left; each makes a token, or up to `tokens_per_step`.
      draft: what the sequences draft in each step (a `DraftPlan`, which the engine adds); None for nothing.
      grammar: what the device is told of grammars first (by `Grammars.plan`, which the engine adds).
    """

    admitted: list[SequenceState]
    moves: list[tuple[int, int]]
    copies: list[PageCopy]
    chunks: list[Chunk]
    decodes: list[SequenceState]
    num_steps: int
    tokens_per_step: int = 1
    draft: Any = None
    grammar: Sequence[Any] = ()
    adapters: Sequence[AdapterMove] = ()
    to_host: Sequence[PageMove] = ()
    from_host: Sequence[PageMove] = ()

    @property
    def num_drafted(self) -> int:
        """Tokens that are drafted in each step, at most."""
        return 0 if self.draft is None else self.draft.tree.num_nodes - 1

    @property
    def is_empty(self) -> bool:
        return not self.chunks and not self.decodes

    @property
    def sequences(self) -> list[SequenceState]:
        """All that take part."""
        return [*(chunk.sequence for chunk in self.chunks), *self.decodes]


def num_expected(sequences: Sequence[SequenceState], num_steps: int) -> float:
    """Tokens that will count of so many decode steps."""
    return sum(
        num_steps if sequence.grammar is None else sequence.grammar.num_expected(num_steps) for sequence in sequences
    )


def slot_of(sequence: SequenceState) -> int:
    """The slot of a planned sequence. Raises RuntimeError if it has none."""
    if sequence.slot is None:
        raise RuntimeError("a sequence without a slot was planned")
    return sequence.slot
