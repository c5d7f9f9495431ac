"""The engine: continuous batching over a cache of pages. Each request gets the tokens it would get alone."""

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxinfer.cache import KVScales
from jaxinfer.engine import results
from jaxinfer.engine.adapter_slots import LoadedAdapter
from jaxinfer.engine.adapter_stacks import AdapterStacks, widened
from jaxinfer.engine.compiling import Report, compile_ahead, default_jobs
from jaxinfer.engine.events import Dispatch, Observer, Observers, SlotWork, Snapshot
from jaxinfer.engine.grammars import Grammars
from jaxinfer.engine.model_runner import Flight, ModelRunner
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.plans import DispatchPlan
from jaxinfer.engine.programs.work import INVALID_LOGITS
from jaxinfer.engine.request import Request, SequenceState
from jaxinfer.engine.scheduler import Scheduler, SchedulerOptions
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.engine.speculation import Speculation
from jaxinfer.engine.tiers.prefix_store import PrefixStore
from jaxinfer.engine.weights import ModelWeights, WeightsView, as_weights
from jaxinfer.models import ModelConfig, Params
from jaxinfer.sampling import SampleOutput
from jaxinfer.speculative import Draft, SpeculationStats


class Engine:
    """Runs sequences until they end, optionally with a draft model, n-grams or early layers.

    Every `step` plans a dispatch, runs it, and commits the results of the one before, so that the device never waits
    for the host. Owns its cache (`close` frees it); the parameters belong to the caller.
    `weights.replace` gives it others while it is at rest (`come_to_rest`).

    Args:
      config, params: the model; with a `mesh`, as `models.fit_to_mesh` makes them. A tree becomes `weights` of its own.
      options: how to run it. draft: what drafts, if anything does.
      kv_scales: a checkpoint's, for an fp8 cache; ignored by others.
      available: free bytes, in place of the device's own figure.
      replica: its number among engines behind one queue.

    Raises OutOfMemoryError if model and cache do not fit, and ValueError for options that contradict each other.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params | WeightsView[Params],
        options: EngineOptions,
        *,
        draft: Draft | None = None,
        kv_scales: KVScales | None = None,
        available: int | None = None,
        mesh: Mesh | None = None,
        replica: int = 0,
    ):
        weights = base = as_weights(params)
        self.adapter_stacks: AdapterStacks | None = None
        if (sizes := options.adapter_sizes) is not None:
            self.adapter_stacks = AdapterStacks(config, weights.value, sizes, mesh)
            weights, config = base.view(self.adapter_stacks.on), widened(config, sizes)
        spec = EngineSpec.of(config, weights.value, options, draft, mesh)
        self.replica, self.weights = replica, weights.root
        more = {"adapters": self.adapter_stacks, "kv_scales": kv_scales, "available": available}
        self.runner = ModelRunner(spec, weights, draft, **more)
        self.spec = self.runner.spec
        self.grammars = Grammars(self.spec)
        scheduling = SchedulerOptions.of(self.spec, self.runner.host_pages.sizes)
        self.scheduler = Scheduler(scheduling, self.spec.decode_slots)
        self.speculation = Speculation(self.spec, self.scheduler) if self.spec.trees else None
        self._features = tuple(feature for feature in [self.speculation] if feature is not None)
        self._planner = self.speculation or self.scheduler
        self.prefix_store = None if options.prefix_store is None else PrefixStore(self.runner, self.scheduler, base)
        self._sequences: dict[SequenceState, None] = {}  # unfinished ones, in the order of their arrival
        self._num_with_logprobs = self._num_with_grammars = 0  # of the unfinished ones
        self._in_flight: deque[Flight] = deque()
        self._rests_with: set[SequenceState] = set()  # that run on with other weights
        self._deadlines = Deadlines()
        self._processors = () if self.spec.processors is None else self.spec.processors.names
        self._observers = Observers()
        self._busy_since = 0.0
        # Called with each dispatch whose results were read, and the seconds that it took.
        self.on_read: Callable[[Flight, float], None] | None = None
        self._weights_version = self.weights.version  # of the newest spans
        self._all_weights: list[ModelWeights] = []
        self.add_weights(self.weights)

    def add_weights(self, weights: ModelWeights) -> None:
        """It computes with these weights too."""
        self._all_weights.append(weights)
        weights.add_user(self)

    def replace_draft(self, params: Params) -> None:
        """Gives the draft other weights of its own, where it is at rest."""
        self.runner.replace_draft(params)

    def drop_draft(self) -> None:
        """Frees the weights that `replace_draft` gave, until it gives others."""
        self.runner.drop_draft()

    @property
    def engines(self) -> "Sequence[Engine]":
        """This one."""
        return (self,)

    # Requests.

    def check_fits(self, num_prompt: int, max_tokens: int) -> None:
        """Raises RequestTooLargeError, with both numbers, where the pool could never hold the request."""
        self.scheduler.check_fits(num_prompt, max_tokens)

    def add(self, sequence: SequenceState) -> None:
        """Queues a sequence, which must fit: at most max_model_len tokens, and `check_fits`.

        Raises QueueFullError when max_waiting sequences wait, and ValueError for an adapter that there is not, and for
        steering as `Steering.check`.
        """
        self.spec.check_request(sequence.request)
        if sequence.request.grammar is not None:
            self.grammars.add(sequence)  # may refuse tokens that it begins with
        self.scheduler.add(sequence)
        if sequence.leader not in self._sequences:
            sequence.leader = None
        if self.prefix_store is not None:
            self.prefix_store.load(sequence)
        self._num_with_grammars += sequence.grammar is not None
        for feature in self._features:
            feature.add(sequence)
        sequence.arrived = sequence.arrived or time.monotonic()
        if not self._sequences:
            self._busy_since = time.perf_counter()
        self._sequences[sequence] = None
        self._num_with_logprobs += sequence.params.logprobs is not None
        self._deadlines.add(sequence)

    def finish(self, sequence: SequenceState, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a sequence from outside (a stop string, an abort), in any phase; its slot and pages are free at once.
        What the device still computes for it is dropped."""
        if sequence not in self._sequences:
            return
        del self._sequences[sequence]
        self.scheduler.finish(sequence, reason, stop_reason)
        for feature in self._features:
            feature.end(sequence)
        if sequence.grammar is not None:
            self.grammars.end(sequence)
            self._num_with_grammars -= 1
        self._num_with_logprobs -= sequence.params.logprobs is not None
        self.runner.stop_scoring(sequence)
        sequence.finished = time.monotonic()
        if not self._sequences:
            self._in_flight.clear()  # no sequence takes what is still coming

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def unfinished(self) -> list[SequenceState]:
        """The sequences that have not ended, in the order of their arrival."""
        return list(self._sequences)

    @property
    def why_stopped(self) -> str | None:
        """The reason why nothing can be computed, for which `step` raises; None where it can."""
        reasons = (reason for weights in self._all_weights if (reason := weights.why_not_whole) is not None)
        return next(reasons, "the cache is asleep: wake_up brings it back" if self.runner.is_without_cache else None)

    @property
    def has_begun(self) -> bool:
        """True while sequences are computed that `come_to_rest` would set aside or keep, and have not been."""
        return bool(self._in_flight) or not self._rests_with.issuperset(self.scheduler.running)

    def come_to_rest(self, *, retains: bool = False) -> list[SequenceState]:
        """Commits what is in flight and sets aside what runs, to be computed anew from its tokens; returns the
        sequences that made progress. With `retains` those that run keep their cached keys and values, unless hidden
        states of their prompts are read, as for scores."""
        progressed = self._commit_all()
        for sequence in list(self.scheduler.running):
            if retains and not sequence.request.reads_hidden:
                self._rests_with.add(sequence)
            else:
                self.runner.stop_scoring(sequence)
                self.scheduler.set_aside(sequence)
        return progressed

    # A step.

    def step(self, max_steps: int | None = None) -> list[SequenceState]:
        """Plans a dispatch, runs it, commits the results of the one before; returns the sequences that made progress.

        `max_steps` limits the decode steps of the dispatch, for callers that stream single tokens.
        """
        expired = self._begin_step()
        plan, committed = self._plan_with_room(max_steps)
        flight = None if plan is None else self._run(plan)
        if self._in_flight and (flight is None or len(self._in_flight) >= self.runner.max_in_flight):
            committed += self._commit(self._in_flight.popleft())
        return expired + committed

    def _plan_with_room(self, max_steps: int | None) -> tuple[DispatchPlan | None, list[SequenceState]]:
        """The next dispatch; and the sequences that made progress where dispatches had to be committed for it."""
        plan = self._planner.schedule(max_steps, can_preempt=not self._in_flight)
        if plan is not None:
            return plan, []
        # Pages are short: what is in flight may end sequences, and decides who is preempted.
        committed = self._commit_all()
        return self._planner.schedule(max_steps, can_preempt=True), committed

    def _run(self, plan: DispatchPlan) -> Flight | None:
        for sequence in plan.admitted:
            sequence.admitted = sequence.admitted or time.monotonic()
            sequence.begin_span(self.weights.label)
        if self._num_with_grammars:
            plan = replace(plan, grammar=self.grammars.plan(plan))
        try:
            flight = self.runner.run(plan)
        except BaseException:
            for move in plan.adapters:
                self.scheduler.adapters.lost(move.slot)
            raise
        if flight is not None:
            self._in_flight.append(flight)
            if self._observers:
                self._observers.notify(self._dispatch_event(flight))
        return flight

    def _commit_all(self) -> list[SequenceState]:
        progressed = []
        while self._in_flight:
            progressed += self._commit(self._in_flight.popleft())
        return progressed

    def _commit(self, flight: Flight) -> list[SequenceState]:
        """Reads a dispatch's results: appends tokens, ends sequences, lets others use pages that are known."""
        flight_results = self.runner.read(flight, with_samples=self._num_with_logprobs > 0)
        states = results.states_of_slots(flight) if self.spec.tapped_layers else {}
        if self.prefix_store is not None:
            self.prefix_store.collect()
        if self.on_read is not None:
            self.on_read(flight, flight_results.seconds)
        for feature in self._features:
            feature.read(flight, flight_results)
        progressed = []
        for slot, chunk in flight.chunks:
            sequence, tokens = chunk.sequence, flight_results.tokens[slot][:1]
            if sequence.is_finished:
                continue
            if tokens[0] != INVALID_LOGITS:
                if states and sequence.request.options.tapped_layers:
                    results.take_states(sequence, chunk.start, states[slot])
                self.scheduler.confirm(sequence, chunk.start + chunk.length)
                if not chunk.is_last:
                    continue
                if self.prefix_store is not None:
                    self.prefix_store.save(sequence)
                self.runner.stop_scoring(sequence)
                sequence.first_token = sequence.first_token or time.monotonic()
            self._append(sequence, slot, tokens, flight_results.samples)
            progressed.append(sequence)
        for slot, sequence in flight.decodes:
            if not sequence.is_finished:
                tokens = flight_results.tokens[slot]
                if states and sequence.request.options.tapped_layers:
                    num_made = sum(token >= 0 for token in tokens)
                    results.take_states(sequence, len(sequence.tokens) - 1, states[slot], num_made)
                self._append(sequence, slot, tokens, flight_results.samples)
                progressed.append(sequence)
        for feature in self._features:
            feature.committed(flight)
        if self.prefix_store is not None and not self._sequences:
            self.prefix_store.collect()
        return progressed

    def _append(self, sequence: SequenceState, slot: int, tokens: list[int], samples: SampleOutput | None) -> None:
        """A slot's tokens of a dispatch, one each step; INVALID_LOGITS and NO_TOKEN stand after the last one."""
        error = None
        if sequence.grammar is not None:
            tokens, error = self.grammars.accept(sequence, tokens)
        self._append_each(sequence, slot, tokens, samples)
        if sequence.is_finished or sequence.grammar is None:
            return
        if error is not None:
            sequence.error = f"its grammar cannot go on after {sequence.num_output} tokens: {error}"
            self.finish(sequence, "error")
        elif sequence.grammar.rejected and not self.spec.can_rewind:
            self.scheduler.preempt(sequence)
        elif sequence.grammar.rejected:
            self.scheduler.rewind(sequence)

    def _append_each(self, sequence: SequenceState, slot: int, tokens: list[int], samples: SampleOutput | None) -> None:
        for step, token in enumerate(tokens):
            if token < 0:
                if token == INVALID_LOGITS:
                    self.finish(sequence, *results.take_error(sequence, self._processors))
                return
            self.scheduler.append(sequence, token)
            if samples is not None:
                results.take_logprobs(sequence, samples, (step, slot))
            if (end := results.end_of(sequence, token)) is not None:
                self.finish(sequence, *end)
                return

    def _begin_step(self) -> list[SequenceState]:
        """Ends the sequences whose deadlines have passed; returns them. Raises as `_check_whole`."""
        self._check_whole()
        if self._rests_with:
            self._rests_with.clear()
        return self._abort_expired()

    def _check_whole(self) -> None:
        """Raises RuntimeError where weights or cache are not there."""
        for weights in self._all_weights:
            if not weights.is_whole:
                weights.check_whole()
        if self.runner.is_without_cache:
            raise RuntimeError(self.why_stopped)

    def _abort_expired(self) -> list[SequenceState]:
        expired = self._deadlines.pop_expired(self._sequences)
        for sequence in expired:
            self.finish(sequence, "abort")
        return expired

    # Observing.

    def observe(self, observer: Observer) -> AbstractContextManager[None]:
        """While the block runs, `observer` is called with every `Dispatch` when it has been sent, on the thread that
        steps the engine. It must not wait for the dispatch there. On several hosts only host 0 observes."""
        return self._observers.including(observer)

    def snapshot(self) -> Snapshot:
        """Which sequence holds which slot and pages, and the totals. Call it between steps, on the thread that steps
        the engine."""
        return Snapshot.of(self.scheduler, self.replica)

    def _dispatch_event(self, flight: Flight) -> Dispatch:
        chunks = (SlotWork(chunk.sequence, slot, chunk.start, chunk.length) for slot, chunk in flight.chunks)
        decodes = (SlotWork(sequence, slot, len(sequence.tokens), 0) for slot, sequence in flight.decodes)
        kind = "rounds" if flight.counts is not None else "step" if flight.chunks else "decode"
        return Dispatch(
            kind=kind,
            num_steps=flight.plan.num_steps,
            work=(*chunks, *decodes),
            num_rows=flight.num_rows,
            num_drafted=flight.plan.num_drafted,
            replica=self.replica,
            sent_at=time.perf_counter(),
            busy_since=self._busy_since,
            output=flight.output.tokens,
        )

    @property
    def speculation_stats(self) -> SpeculationStats | None:
        """Counts of all answers since the start; None without a draft."""
        return None if self.speculation is None else self.speculation.stats

    def num_known_tokens(self, sequence: SequenceState) -> int:
        """Leading tokens of a sequence whose pages are cached and could be reused."""
        return self.scheduler.num_known_tokens(sequence)

    # Programs and memory.

    def warm_up(self, num_jobs: int | None = None, report: Report = lambda name: None) -> int:
        """Compiles every program, so that none compiles later; returns how many. Raises RuntimeError while requests
        run, and where weights or cache are not there. `num_jobs` are compiled at once (default: as many as there are
        cores, at most 8); `report` gets the name of each of `program_names` when it is compiled."""
        if self.has_work:
            raise RuntimeError(f"warm_up while {len(self._sequences)} requests are unfinished")
        self._check_whole()
        return self.runner.warm_up(num_jobs or default_jobs(), report)

    def compile_ahead(self, is_stopped: Callable[[], bool]) -> None:
        """Compiles every program in another thread than the one that steps, while requests run, until `is_stopped`. A
        request that needs one earlier compiles it itself."""
        compile_ahead(self.runner.all_programs, self._all_weights, is_stopped)

    @property
    def program_names(self) -> list[str]:
        """Names of the programs that `warm_up` compiles, without the small programs that write slots and copy pages."""
        return [program.name for program in self.runner.all_programs]

    def hidden_states(self, request: Request, taps: tuple[str, ...]) -> dict[str, np.ndarray]:
        """The tapped hidden states [tokens, D] of a request's prompt, with its adapter and steering, without touching
        the cache.

        Raises RuntimeError where the weights are not there, and where all slots have adapters of running requests.
        """
        self.weights.check_whole()
        with self._adapter_slot(request.adapter) as slot:
            tokens, start = list(request.token_ids), request.adapter_start
            return self.runner.hidden_states(tokens, taps, slot, start, request.steering)

    @contextmanager
    def _adapter_slot(self, adapter: LoadedAdapter | int) -> Iterator[int]:
        """The slot of an adapter, into which it is written if it is in none."""
        if isinstance(adapter, int):
            yield adapter
            return
        slots = self.scheduler.adapters
        if (taken := slots.take(adapter)) is None:
            raise RuntimeError(f"adapter {adapter.name!r}: running requests have all {slots.num_slots} slots")
        slot, is_new = taken
        try:
            if is_new:
                slots.lost(slot)  # unless it is written
                self.runner.write_stacks(slot, adapter.host)
                slots.written(slot)
            yield slot
        finally:
            slots.give_back(slot)

    @property
    def kv_scales(self) -> KVScales | None:
        """The scales that an fp8 cache applies."""
        return self.runner.kv_scales

    @property
    def device(self) -> Any:
        """The first device."""
        return self.runner.device

    def check_replaced(self) -> None:
        """It goes on with any weights."""

    def drop_prefixes(self) -> None:
        """As `Scheduler.drop_prefixes`; those that run go on with the weights that there are now."""
        self.scheduler.drop_prefixes()
        if self._weights_version == self.weights.version:  # a draft's were replaced, on which no token depends
            return
        self._weights_version = self.weights.version
        for sequence in self.scheduler.running:
            sequence.begin_span(self.weights.label, is_retained=True)

    def free_cache(self) -> None:
        """Frees the cache's memory until `take_cache`, where nothing is computed. Cached prefixes are lost."""
        if self.has_begun:
            raise RuntimeError("the cache is freed while requests are unfinished")
        self.scheduler.drop_prefixes()
        self.runner.free_cache()

    def take_cache(self) -> None:
        """Takes memory for the cache again. Harmless if it has some."""
        self.runner.take_cache()

    def close(self) -> None:
        """Frees the cache's memory now; everything still running is aborted."""
        for sequence in list(self._sequences):
            self.finish(sequence, "abort")
        self._in_flight.clear()
        if self.prefix_store is not None:
            self.prefix_store.close()
        if (observer := self.scheduler.prefixes.observer) is not None:
            observer.cleared()
        self.runner.close()


class Deadlines:
    """Sequences by the time after which they are aborted."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, SequenceState]] = []
        self._numbers = itertools.count()
        self._limit = 64

    def add(self, sequence: SequenceState) -> None:
        if len(self._heap) > self._limit:  # most sequences end long before their deadline
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + 64
        if (deadline := sequence.request.deadline) is not None:
            heapq.heappush(self._heap, (deadline, next(self._numbers), sequence))

    def pop_expired(self, unfinished: Iterable[SequenceState]) -> list[SequenceState]:
        """Those among `unfinished` (a set or dict) whose deadline has passed, with their `error` set."""
        now, expired = time.monotonic(), []
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].is_finished):
            sequence = heapq.heappop(self._heap)[2]
            if sequence in unfinished:
                sequence.error = f"its deadline passed, {now - sequence.arrived:.3f} s after it arrived"
                expired.append(sequence)
        return expired
