"""A fleet in modelled time: arrivals, steps of replicas, failures, as discrete events.

simpy keeps the events in order. An arrival comes before all else of its time.
"""

import random
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from jaxinfer.engine.scheduler import QueueFullError, SchedulerOptions
from jaxinfer.extras import install_hint
from jaxinfer.fleet.simulate.jumps import JumpingReplica, can_jump
from jaxinfer.fleet.simulate.options import SimulationOptions
from jaxinfer.fleet.simulate.replica import SimulatedReplica
from jaxinfer.fleet.simulate.routes import IndexedPrefixRouter, LoadIndex
from jaxinfer.fleet.simulate.sequence import SimulatedSequence
from jaxinfer.fleet.simulate.times import SECOND, StepTimes
from jaxinfer.fleet.simulate.traces import ArrivalTrace

SERVED, QUEUE_FULL, TOO_LONG, LOST = range(4)
MOST_FAILURES = 2  # of replicas, without a new token in between, after which a request is lost (`jaxinfer front`)


@dataclass(frozen=True)
class ReplicaModel:
    """Options and times of each replica.

    Attributes:
      options: of its scheduler. times: of its steps. max_model_len: tokens of a request at most.
      num_chips: that it has.
    """

    options: SchedulerOptions
    times: StepTimes
    max_model_len: int
    num_chips: float = 1.0

    @property
    def most_tokens(self) -> int:
        """Tokens of a request that a replica takes."""
        return min(self.max_model_len, (self.options.num_pages - 1) * self.options.page_size)


@dataclass(frozen=True)
class FleetRun:
    """Results of each request of a trace, and counts of the fleet.

    Attributes:
      trace, num_replicas: what was run. status: SERVED, QUEUE_FULL, TOO_LONG or LOST. first, last: picoseconds from
        arrival to the first and the last token; -1 where there is none.
      seconds: from the first arrival to the last token. num_steps: dispatches of all replicas. num_events: of the
        simulation. num_failures, num_failovers: of replicas, and of requests that went on elsewhere.
      reused_tokens, computed_tokens: of prompts. num_preemptions: of sequences.
    """

    trace: ArrivalTrace
    num_replicas: int
    status: np.ndarray
    first: np.ndarray
    last: np.ndarray
    seconds: float
    num_steps: int
    num_events: int
    num_failures: int
    num_failovers: int
    reused_tokens: int
    computed_tokens: int
    num_preemptions: int


def run_fleet(
    trace: ArrivalTrace,
    model: ReplicaModel,
    num_replicas: int,
    options: SimulationOptions = SimulationOptions(),  # noqa: B008
    *,
    jumps: bool = True,
    progress: Callable[[int], None] = lambda num_arrived: None,
) -> FleetRun:
    """Runs a trace over replicas.

    Args:
      jumps: False simulates every step by itself, which takes longer and gives the same.
      progress: is called with the number of requests that have arrived, at every thousandth.

    Raises ImportError without simpy.
    """
    if num_replicas < 1:
        raise ValueError(f"a fleet has at least 1 replica, got {num_replicas}")
    return _Fleet(trace, model, num_replicas, options, jumps).run(progress)


class _Place:
    """A replica's place in the fleet, in which it is started again when it has failed."""

    __slots__ = ("due_at", "load", "number", "replica", "version")

    def __init__(self, number: int, replica: SimulatedReplica):
        self.number, self.replica = number, replica
        self.version = self.load = 0
        self.due_at: int | None = None


class _Fleet:
    def __init__(
        self, trace: ArrivalTrace, model: ReplicaModel, num_replicas: int, options: SimulationOptions, jumps: bool
    ):
        try:
            import simpy
        except ImportError:
            raise ImportError(f"simulating a fleet needs simpy: {install_hint('simulate')}") from None
        self.env: Any = simpy.Environment()  # whose times are integers here
        self.trace, self.model, self.options = trace, model, options
        self._most_tokens = model.most_tokens
        self._kind = JumpingReplica if jumps and can_jump(model.options, model.times) else SimulatedReplica
        self.places = [_Place(number, self._make(number)) for number in range(num_replicas)]
        self.index = LoadIndex()
        for place in self.places:
            self.index.set(place.number, 0)
        self._router = None
        if options.routing == "prefix":
            blocks = model.options.num_pages * model.options.page_size // trace.block_size
            self._router = IndexedPrefixRouter(max(blocks, 1), options.max_imbalance)
        self._next = 0  # of replicas in turn
        self._held: deque[SimulatedSequence] = deque()  # while no replica runs
        count = len(trace)
        self._status, self._first, self._last = bytearray(count), array("q", [-1]) * count, array("q", [-1]) * count
        self._num_deaths: dict[int, int] = {}
        self._num_open = count
        self._ended_at = self.num_events = self.num_failures = self.num_failovers = self.num_steps = 0
        self._reused = self._computed = self._preempted = 0
        self._random = random.Random(options.seed)

    def run(self, progress: Callable[[int], None]) -> FleetRun:
        env, trace = self.env, self.trace
        for place in self.places if self.options.mtbf is not None else ():
            self._await_failure(place)
        for number, time in enumerate(trace.times):
            if time > env.now:
                env.run(until=time)
            self._arrive(number)
            if number % 1000 == 0:
                progress(number)
        while self._num_open:
            env.step()
        for place in self.places:
            self._count(place.replica)
        status = np.frombuffer(self._status, np.uint8)
        return FleetRun(
            trace=trace,
            num_replicas=len(self.places),
            status=status,
            first=np.frombuffer(self._first, np.int64),
            last=np.frombuffer(self._last, np.int64),
            seconds=self._ended_at / SECOND,
            num_steps=self.num_steps,
            num_events=self.num_events,
            num_failures=self.num_failures,
            num_failovers=self.num_failovers,
            reused_tokens=self._reused,
            computed_tokens=self._computed,
            num_preemptions=self._preempted,
        )

    # Requests.

    def _arrive(self, number: int) -> None:
        trace, prompt, answer = self.trace, self.trace.prompts[number], self.trace.answers[number]
        self.num_events += 1
        if prompt + answer > self._most_tokens:
            self._close(number, TOO_LONG)
            return
        blocks: Sequence[int] = () if trace.blocks is None else trace.blocks[number]
        num_keyed = 0 if trace.blocks is None else prompt + answer if trace.answers_are_keyed else prompt
        self._route(SimulatedSequence(number, prompt, answer, blocks, trace.block_size, num_keyed))

    def _route(self, sequence: SimulatedSequence) -> None:
        if not self.index.loads:
            self._held.append(sequence)
            return
        place = self.places[self._choose(sequence)]
        try:
            place.replica.add(sequence, self.env.now)
        except QueueFullError:
            self._close(sequence.number, QUEUE_FULL)
            return
        self._set_load(place, place.load + 1)
        if place.replica.wake_at == self.env.now:
            place.replica.wake(self.env.now)
        self._schedule(place)

    def _choose(self, sequence: SimulatedSequence) -> int:
        if self._router is not None:
            keys = sequence.blocks[: min(sequence.num_prompt, sequence.num_keyed) // sequence.block_size]
            return self._router.choose_from(keys, self.index)
        if self.options.routing == "least-load":
            return self.index.least()
        while self._next % len(self.places) not in self.index.loads:
            self._next += 1
        self._next += 1
        return (self._next - 1) % len(self.places)

    def _set_load(self, place: _Place, load: int) -> None:
        place.load = load
        self.index.set(place.number, load)

    def _end(self, place_number: int, sequence: SimulatedSequence, now: int) -> None:
        """A sequence has got its last token."""
        place, number = self.places[place_number], sequence.number
        self._set_load(place, place.load - 1)
        arrived: Any = self.trace.times[number]
        self._first[number] = (sequence.first_at or now) - arrived
        self._last[number] = now - arrived
        self._close(number, SERVED)

    def _close(self, number: int, status: int) -> None:
        self._status[number] = status
        self._num_open -= 1
        self._ended_at = self.env.now

    # Replicas.

    def _make(self, number: int) -> SimulatedReplica:
        return self._kind(self.model.options, self.model.times, partial(self._end, number))

    def _schedule(self, place: _Place) -> None:
        due_at = place.replica.due_at
        if due_at == place.due_at:
            return
        place.due_at = due_at
        place.version += 1
        if due_at is not None:
            event = self.env.timeout(due_at - self.env.now)
            event.callbacks.append(partial(self._wake, place, place.version))

    def _wake(self, place: _Place, version: int, event: Any) -> None:
        if version != place.version:
            return  # it has another time by now
        self.num_events += 1
        place.due_at = None
        place.replica.wake(self.env.now)
        self._schedule(place)

    def _await_failure(self, place: _Place) -> None:
        hours = self._random.expovariate(1 / (self.options.mtbf or 1))
        self.env.timeout(round(3600 * hours * SECOND)).callbacks.append(partial(self._fail, place))

    def _fail(self, place: _Place, event: Any) -> None:
        """A replica is gone, with all that it has; others go on with its requests, from what their clients have."""
        self.num_failures += 1
        replica = place.replica
        lost = replica.lose(self.env.now)
        self._count(replica)
        place.version += 1
        place.due_at, place.load = None, 0
        self.index.remove(place.number)
        if self._router is not None:
            self._router.remove(place.number)
        self.env.timeout(round(self.options.restart_time * SECOND)).callbacks.append(partial(self._restart, place))
        for sequence in sorted(lost, key=_number):
            self._go_on(sequence, replica.num_sent(sequence))

    def _go_on(self, sequence: SimulatedSequence, num_sent: int) -> None:
        number = sequence.number
        deaths = self._num_deaths[number] = 1 if num_sent else self._num_deaths.get(number, 0) + 1
        if deaths >= MOST_FAILURES:
            self._close(number, LOST)
            return
        self.num_failovers += 1
        parts = sequence.blocks, sequence.block_size, sequence.num_keyed
        num_prompt, left = sequence.num_prompt + num_sent, sequence.request.max_tokens - num_sent
        self._route(SimulatedSequence(number, num_prompt, left, *parts, first_at=sequence.first_at))

    def _restart(self, place: _Place, event: Any) -> None:
        place.replica = self._make(place.number)
        self._set_load(place, 0)
        self._await_failure(place)
        held, self._held = self._held, deque()
        for sequence in held:
            self._route(sequence)

    def _count(self, replica: SimulatedReplica) -> None:
        counters = replica.scheduler.counters
        self.num_steps += replica.num_steps
        self._reused += counters.reused_tokens
        self._computed += counters.computed_prompt_tokens
        self._preempted += counters.num_preemptions


def _number(sequence: SimulatedSequence) -> int:
    return sequence.number
