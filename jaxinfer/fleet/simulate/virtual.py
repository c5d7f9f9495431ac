"""A virtual device: the engine, its scheduler, cache and server are real, and a step only takes its modelled time.

`run_virtually` gives it to an engine. Answers are one token again and again; nothing is computed. For tests of fleets,
and to compare what `run_fleet` says with servers that run.
"""

import time
from typing import Any

from jaxinfer.engine.cache_groups import MAX_IN_FLIGHT
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.model_runner import Flight, FlightResults, ModelRunner
from jaxinfer.engine.plans import DispatchPlan
from jaxinfer.engine.programs.work import StepOutput
from jaxinfer.engine.protocol import AnyEngine
from jaxinfer.engine.request import SequenceState
from jaxinfer.fleet.simulate.times import SECOND, StepTimes


def run_virtually(engine: AnyEngine, times: StepTimes, token: int = 0) -> None:
    """From now on each step of an engine at rest takes these times, and makes this token for each sequence.

    Raises ValueError for an engine with a draft, RuntimeError for one that has work.
    """
    if engine.has_work:
        raise RuntimeError("requests are running: a virtual device is for an engine at rest")
    if engine.speculation_stats is not None:
        raise ValueError("a virtual device makes no drafts")
    for replica in engine.engines:
        _give_device(replica, VirtualRunner(replica.runner, times, token))


def _give_device(engine: Engine, runner: Any) -> None:
    engine.runner = runner


class VirtualRunner:
    """A `ModelRunner` whose dispatches take modelled time. What it does not have is that of the runner behind it.

    Args:
      runner: that holds the arrays. times: of steps. token: of all answers.
    """

    max_in_flight = MAX_IN_FLIGHT

    def __init__(self, runner: ModelRunner, times: StepTimes, token: int):
        self._runner, self._times, self._token = runner, times, token
        self._free_at = self._read_at = 0.0
        self._ends: dict[int, float] = {}  # by id of the plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, plan: DispatchPlan) -> Flight | None:
        """As `ModelRunner.run`. Raises ValueError for requests whose answers depend on what is computed."""
        for sequence in plan.admitted:
            request = sequence.request
            if request.reads_hidden or request.params.logprobs is not None or request.grammar is not None:
                raise ValueError("a virtual device has no log-probabilities, hidden states and grammars")
        if plan.is_empty:
            return None
        chunks = [(_slot(chunk.sequence), chunk) for chunk in plan.chunks]
        decodes = [(_slot(sequence), sequence) for sequence in plan.decodes]
        now = time.perf_counter()
        start = max(now, self._free_at)
        self._free_at = self._ends[id(plan)] = start + dispatch_picoseconds(self._times, plan) / SECOND
        num_rows = len(decodes) + sum(chunk.length for _, chunk in chunks)
        output: Any = StepOutput(tokens=None, samples=None)  # type: ignore[arg-type]
        return Flight(plan, chunks, decodes, output, self._runner.spec.max_seqs, num_rows, now)

    def read(self, flight: Flight, *, with_samples: bool) -> FlightResults:
        """As `ModelRunner.read`: sleeps until the dispatch has ended."""
        del with_samples
        end = self._ends.pop(id(flight.plan))
        if (left := end - time.perf_counter()) > 0:
            time.sleep(left)
        now = time.perf_counter()
        seconds, self._read_at = now - max(flight.sent_at, self._read_at), now
        tokens: list[list[int]] = [[] for _ in range(flight.num_slots)]
        for slot, _ in flight.chunks:
            tokens[slot] = [self._token]
        for slot, _ in flight.decodes:
            tokens[slot] = [self._token] * flight.plan.num_steps
        return FlightResults(tokens, None, None, None, seconds)

    def stop_scoring(self, sequence: SequenceState) -> None:
        """Nothing is scored."""


def dispatch_picoseconds(times: StepTimes, plan: DispatchPlan) -> int:
    """Modelled time of a plan, whose sequences' `num_stored` the scheduler has raised already."""
    number, steps = len(plan.decodes), plan.num_steps
    total = 0
    for step in range(steps):
        left = steps - 1 - step
        attention = sum(times.decoding(max(sequence.num_stored - left, 1)) for sequence in plan.decodes)
        attention += sum(times.prompt(chunk.start, chunk.length) for chunk in plan.chunks)
        num_tokens = number + sum(chunk.length for chunk in plan.chunks)
        total += times.products(num_tokens, number + len(plan.chunks)) + attention
    return total


def _slot(sequence: SequenceState) -> int:
    if sequence.slot is None:
        raise RuntimeError("a sequence of a dispatch has no slot")
    return sequence.slot
