"""Events of an engine: each dispatch, for observers, and snapshots of slots and pages."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import jax

from jaxinfer.engine.request import SequenceState
from jaxinfer.engine.scheduler import Counters, Scheduler

Kind = Literal["step", "decode", "rounds"]


@dataclass(frozen=True)
class SlotWork:
    """The part of a dispatch that is for one answer.

    Attributes:
      sequence: the answer, to be read only. slot: its row of the device's arrays.
      start: tokens before those that it works on: of a prompt, stored ones; of a decoding answer, what the host knows
        of it, which may be a dispatch behind.
      num_prompt_tokens: computed of its prompt, from `start` on; 0 where it decodes.
    """

    sequence: SequenceState
    slot: int
    start: int
    num_prompt_tokens: int

    @property
    def is_decoding(self) -> bool:
        return self.num_prompt_tokens == 0


@dataclass(frozen=True)
class Dispatch:
    """One call of a device program.

    Attributes:
      kind: "step" (prompt tokens, and a token for each decoding answer beside them), "decode" (steps of decoding
        answers alone) or "rounds" (speculative ones). num_steps: at most so many steps, or rounds.
      work: its part for each answer. num_rows: of tokens that each step computes, padding included. num_drafted: tokens
        that a round drafts for each answer at most.
      replica: the number of the engine that sent it, from 0. sent_at: seconds of time.perf_counter when it had been
        sent. busy_since: likewise, when the first request came after the engine had none.
      output: an array of its results; it is ready when the dispatch has ended.
    """

    kind: Kind
    num_steps: int
    work: tuple[SlotWork, ...]
    num_rows: int
    num_drafted: int
    replica: int
    sent_at: float
    busy_since: float
    output: jax.Array

    def wait(self) -> None:
        """Returns when the dispatch has ended; from any thread."""
        jax.block_until_ready(self.output)


Observer = Callable[[Dispatch], None]


class Observers:
    """The observers of an engine's dispatches; false without any. They may be added and removed on any thread."""

    def __init__(self) -> None:
        self._all: tuple[Observer, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._all)

    @contextlib.contextmanager
    def including(self, observer: Observer) -> Iterator[None]:
        self._all = (*self._all, observer)
        try:
            yield
        finally:
            others = list(self._all)
            others.remove(observer)
            self._all = tuple(others)

    def notify(self, dispatch: Dispatch) -> None:
        for observer in self._all:
            observer(dispatch)


@dataclass(frozen=True)
class Running:
    """An answer that holds a slot.

    Attributes:
      num_stored: tokens whose keys are in the cache once everything that was sent has run. pages: those that it owns,
        in the order of its tokens; several answers may share one. replica: whose slot and pages they are.
    """

    sequence: SequenceState
    slot: int
    is_decoding: bool
    num_stored: int
    pages: tuple[int, ...]
    replica: int = 0


@dataclass(frozen=True)
class Snapshot:
    """An engine between two steps.

    Attributes:
      running: answers in slots. num_waiting: answers that have none. num_free_pages: pages that an answer could get.
      counters: totals since the start.
    """

    running: tuple[Running, ...]
    num_waiting: int
    num_free_pages: int
    counters: Counters

    @classmethod
    def of(cls, scheduler: Scheduler, replica: int) -> "Snapshot":
        running = tuple(
            Running(
                sequence,
                sequence.slot,
                sequence.is_decoding,
                sequence.num_stored,
                tuple(filter(None, sequence.pages)),
                replica,
            )
            for sequence in scheduler.running
            if sequence.slot is not None
        )
        return cls(running, len(scheduler.waiting), scheduler.pools.num_available, replace(scheduler.counters))

    @classmethod
    def together(cls, parts: Sequence["Snapshot"], num_waiting: int) -> "Snapshot":
        """That of replicas, for any of which `num_waiting` answers wait."""
        totals = {field.name: sum(getattr(part.counters, field.name) for part in parts) for field in fields(Counters)}
        return cls(
            tuple(sequence for part in parts for sequence in part.running),
            num_waiting + sum(part.num_waiting for part in parts),
            sum(part.num_free_pages for part in parts),
            Counters(**totals),
        )
