"""An engine in modelled time: its own scheduler, page pools and prefix tree, and a device that takes the modelled time.

The order of things is that of `Engine.step`: a dispatch is planned and sent while the one before it runs, then the
results of that one are read. Plain Python: no JAX here.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.engine.cache_groups import MAX_IN_FLIGHT
from jaxinfer.engine.plans import Chunk
from jaxinfer.engine.scheduler import QueueFullError, Scheduler, SchedulerOptions
from jaxinfer.fleet.simulate.sequence import SimulatedSequence
from jaxinfer.fleet.simulate.times import StepTimes


@dataclass(slots=True)
class SimulatedFlight:
    """A dispatch on the device.

    Attributes:
      end: when its results are there, in picoseconds. chunks: pieces of prompts. decodes: sequences that take a step;
        None where `tick` stands for them.
      tick: its number among the dispatches with decode steps; that of the one before where it has none.
    """

    end: int
    chunks: Sequence[Chunk]
    decodes: Sequence[SimulatedSequence] | None
    tick: int = 0


class SimulatedReplica:
    """Runs sequences step by step. Call `wake` at `due_at`, unless that is None: no sequence ends before it.

    Args:
      options: of the scheduler, whose dispatches are single steps. times: of its device.
      on_end: is called with each sequence that ends, and the time.
    """

    def __init__(self, options: SchedulerOptions, times: StepTimes, on_end: Callable[[SimulatedSequence, int], None]):
        if options.steps_per_dispatch != 1:
            raise ValueError(f"dispatches of a server are single steps, got {options.steps_per_dispatch}")
        self.options, self.times, self.on_end = options, times, on_end
        self.scheduler = Scheduler(replace(options, max_waiting=None))  # `check_room` limits the queue
        self.wake_at: int | None = None  # of its next step
        self.num_steps = 0
        self.num_added = self.num_ended = 0
        self._inbox: list[SimulatedSequence] = []
        self._in_flight: deque[SimulatedFlight] = deque()
        self._device_free_at = 0
        self._is_short = False  # of pages: what is in flight is read before anything is planned

    # Called by the fleet.

    def add(self, sequence: SimulatedSequence, now: int) -> None:
        """Takes a sequence, which the scheduler gets between two steps. Raises QueueFullError."""
        self.check_room()  # before anything is changed
        self._pass(now)
        self.num_added += 1
        self._inbox.append(sequence)
        if self.wake_at is None:
            self.wake_at = now

    def check_room(self) -> None:
        """Raises QueueFullError as the scheduler will, for which those in the inbox wait already."""
        limit = self.options.max_waiting
        if limit is not None and self.num_added - self.num_ended >= limit + self.options.max_seqs:
            raise QueueFullError(f"{limit} requests wait already")

    @property
    def due_at(self) -> int | None:
        """When `wake` is to be called next; None where nothing runs."""
        return self.wake_at

    def wake(self, now: int) -> None:
        """Brings it up to this time, all of whose arrivals it has."""
        while self.wake_at is not None and self.wake_at <= now:
            self._step(self.wake_at)

    def _pass(self, now: int) -> None:
        """Brings it up to the moment before this time."""
        while self.wake_at is not None and self.wake_at < now:
            self._step(self.wake_at)

    def _step(self, now: int) -> None:
        """Reads what has ended, plans and sends what comes next, as `Engine.step` does again and again."""
        if self._in_flight:
            self._commit(self._in_flight.popleft(), now)
            if self._is_short and self._in_flight:
                self.wake_at = self._in_flight[0].end
                return
        while True:
            if not self._is_short:
                self._take_inbox()
            flight = self._plan(now)
            if self._is_short:
                self.wake_at = self._in_flight[0].end
                return
            if flight is not None:
                self._in_flight.append(flight)
            if self._in_flight and (flight is None or len(self._in_flight) >= MAX_IN_FLIGHT):
                self.wake_at = self._in_flight[0].end
                return
            if not self._has_work:
                self._in_flight.clear()
                self.wake_at = None
                return

    def lose(self, now: int) -> list[SimulatedSequence]:
        """The unfinished sequences of a replica that fails at this time, which knows nothing after it."""
        self._pass(now)
        return [*self._inbox, *self.scheduler.waiting, *self.scheduler.running]  # type: ignore[list-item]

    def num_sent(self, sequence: SimulatedSequence) -> int:
        """Tokens of its answer that the client has, of those that this replica made."""
        return sequence.num_output

    # A step.

    @property
    def _has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._inbox)

    def _take_inbox(self) -> None:
        for sequence in self._inbox:
            self.scheduler.add(sequence)
        self._inbox.clear()

    def _plan(self, now: int) -> SimulatedFlight | None:
        """The next dispatch, None for an empty one; `_is_short` is set where there is none for want of pages."""
        plan = self.scheduler.schedule(can_preempt=not self._in_flight)
        self._is_short = plan is None
        if plan is None or plan.is_empty:
            return None
        decodes: Any = plan.decodes
        return self._sent(now, plan.chunks, decodes, len(decodes), sum(map(self._attends, decodes)))

    def _attends(self, sequence: SimulatedSequence) -> int:
        return self.times.decoding(sequence.num_stored)

    def _sent(
        self, now: int, chunks: Sequence[Chunk], decodes: Any, num_decodes: int, attention: int, tick: int = 0
    ) -> SimulatedFlight:
        """A dispatch that begins when the device is free."""
        self.num_steps += 1
        num_tokens = num_logits = num_decodes
        for chunk in chunks:
            num_tokens += chunk.length
            num_logits += 1
            attention += self.times.prompt(chunk.start, chunk.length)
        start = max(now, self._device_free_at)
        self._device_free_at = end = start + self.times.products(num_tokens, num_logits) + attention
        return SimulatedFlight(end, chunks, decodes, tick)

    def _commit(self, flight: SimulatedFlight, now: int) -> None:
        """Reads a dispatch's results, as `Engine._commit`."""
        self._commit_chunks(flight, now)
        for sequence in flight.decodes or ():
            if not sequence.is_finished:
                self._append(sequence, now)

    def _commit_chunks(self, flight: SimulatedFlight, now: int) -> None:
        for chunk in flight.chunks:
            sequence: Any = chunk.sequence
            if sequence.is_finished:
                continue
            self.scheduler.confirm(sequence, chunk.start + chunk.length)
            if chunk.is_last:
                if sequence.first_at is None:
                    sequence.first_at = now
                self._append(sequence, now)

    def _append(self, sequence: SimulatedSequence, now: int) -> None:
        self.scheduler.append(sequence, 0)
        if sequence.num_output >= sequence.request.max_tokens:
            self._finish(sequence, now)

    def _finish(self, sequence: SimulatedSequence, now: int) -> None:
        self.scheduler.finish(sequence, "length")
        self.num_ended += 1
        self.on_end(sequence, now)
