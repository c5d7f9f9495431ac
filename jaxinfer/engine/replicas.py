"""Data parallel: several engines with the same parameters, each with a pool of its own, behind one queue."""

import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from jaxinfer.engine.events import Observer, Snapshot
from jaxinfer.engine.paged import PagedEngine
from jaxinfer.engine.request import Generation
from jaxinfer.engine.scheduler import QueueFullError, SequenceState
from jaxinfer.speculative import SpeculationStats


class Replicas:
    """Runs `Generation`s on whichever engine has room, with the interface of one `PagedEngine`.

    What waits, waits here, in the order of priority and arrival, and goes where most of its prompt is known; else to
    the engine with the fewest unfinished tokens. An answer follows the first answer to its prompt. Which engine runs it
    changes no token.
    """

    def __init__(self, engines: Iterable[PagedEngine]):
        self.engines = list(engines)
        for number, engine in enumerate(self.engines):
            engine.replica = number
        first = self.engines[0]
        self.config, self.options, self.model, self.weights = first.config, first.options, first.model, first.weights
        self.dtype, self.kv_dtype, self.kv_scales = first.dtype, first.kv_dtype, first.kv_scales
        self._waiting: list[tuple[int, int, Generation]] = []
        self._deadlines: list[tuple[float, int, Generation]] = []  # of those that wait, or did
        self._numbers = itertools.count()
        self._owner: dict[Generation, PagedEngine] = {}  # of those that were admitted and have not ended
        self._queued: set[Generation] = set()

    def check_fits(self, num_prompt: int, max_tokens: int) -> None:
        """As `PagedEngine.check_fits`."""
        self.engines[0].check_fits(num_prompt, max_tokens)

    def add(self, generation: Generation) -> None:
        """As `PagedEngine.add`; max_waiting counts what waits for any of the engines."""
        self._forget_ended()
        self.check_fits(len(generation.prompt), generation.max_tokens)
        limit, most = self.options.max_waiting, self.options.max_seqs * len(self.engines)
        if limit is not None and len(self._owner) + len(self._queued) >= most + limit:
            raise QueueFullError(f"{len(self._queued)} requests wait, as many as max_waiting={limit} allows")
        generation.arrival = time.monotonic()
        heapq.heappush(self._waiting, (generation.priority, next(self._numbers), generation))
        self._queued.add(generation)
        if generation.deadline is not None:
            heapq.heappush(self._deadlines, (generation.deadline, next(self._numbers), generation))

    @contextmanager
    def observe(self, observer: Observer) -> Iterator[None]:
        """As `PagedEngine.observe`, of every engine."""
        with ExitStack() as stack:
            for engine in self.engines:
                stack.enter_context(engine.observe(observer))
            yield

    def snapshot(self) -> Snapshot:
        """As `PagedEngine.snapshot`, of all engines together."""
        return Snapshot.together([engine.snapshot() for engine in self.engines], len(self._queued))

    @property
    def has_work(self) -> bool:
        return bool(self._queued) or any(engine.has_work for engine in self.engines)

    def step(self, max_steps: int | None = None) -> list[Generation]:
        """One turn of every engine that has work. Returns who made progress."""
        progressed = self._expire()
        self._admit()
        for engine in self.engines:
            if engine.has_work:
                progressed += engine.step(max_steps)
        self._forget_ended()
        return progressed

    def finish(self, generation: Generation, reason: str, stop_reason: int | str | None = None) -> None:
        """As `PagedEngine.finish`."""
        if generation in self._queued:
            self._queued.remove(generation)
            generation.finish_reason, generation.stop_reason = reason, stop_reason
            generation.finished = time.monotonic()
        elif (engine := self._owner.pop(generation, None)) is not None:
            engine.finish(generation, reason, stop_reason)

    def warm_up(self, progress: Callable[[Iterator], Iterable] | None = None) -> int:
        """As `PagedEngine.warm_up`, of every engine."""
        if self.has_work:
            raise RuntimeError(f"warm_up while {len(self._queued) + len(self._owner)} requests are unfinished")
        calls = [call for engine in self.engines for call in engine.warm_up_calls()]
        for call in progress(iter(calls)) if progress else calls:
            call()
        return sum(engine.warmed_up() for engine in self.engines)

    @property
    def num_warm_up_calls(self) -> int:
        return sum(engine.num_warm_up_calls for engine in self.engines)

    def hidden_states(self, tokens: list[int], taps: tuple[str, ...]) -> dict[str, np.ndarray]:
        """As `PagedEngine.hidden_states`."""
        return self.engines[0].hidden_states(tokens, taps)

    @property
    def speculation_stats(self) -> SpeculationStats | None:
        """Of all engines together; None without a draft."""
        found = [engine.speculation_stats for engine in self.engines]
        return sum((one for one in found[1:] if one is not None), found[0]) if found[0] is not None else None

    def close(self) -> None:
        """As `PagedEngine.close`."""
        for generation in list(self._queued):
            self.finish(generation, "abort")
        for engine in self.engines:
            engine.close()

    def _expire(self) -> list[Generation]:
        now, late = time.monotonic(), []
        if len(self._deadlines) > 2 * len(self._queued) + 64:  # of requests that were admitted, or ended, long before
            self._deadlines = [entry for entry in self._deadlines if entry[2] in self._queued]
            heapq.heapify(self._deadlines)
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, generation = heapq.heappop(self._deadlines)
            if generation not in self._queued:
                continue
            late.append(generation)
            generation.error = f"its deadline passed, {now - generation.arrival:.3f} s after it arrived"
            self.finish(generation, "abort")
        return late

    def _admit(self) -> None:
        """Hands what waits to engines, as long as one has a slot to spare."""
        loads = dict.fromkeys(self.engines, 0)
        counts = dict.fromkeys(self.engines, 0)
        for generation, engine in self._owner.items():
            counts[engine] += 1
            loads[engine] += _size(generation) - len(generation.output)
        while self._waiting:
            free = [engine for engine in self.engines if counts[engine] < self.options.max_seqs]
            if not free:
                return
            entry = heapq.heappop(self._waiting)
            generation = entry[-1]
            if generation not in self._queued:  # it ended while it waited
                continue
            engine = self._choose(generation, free, loads)
            arrival = generation.arrival
            try:
                engine.add(generation)
            except QueueFullError:  # its pool has no room for those it was given before
                heapq.heappush(self._waiting, entry)
                return
            generation.arrival = arrival
            self._queued.remove(generation)
            self._owner[generation] = engine
            counts[engine] += 1
            loads[engine] += _size(generation)

    def _choose(self, generation: Generation, free: list[PagedEngine], loads: dict[PagedEngine, int]) -> PagedEngine:
        leader = None if generation.leader is None else self._owner.get(generation.leader)
        if leader in free:
            return leader
        probe = SequenceState(list(generation.prompt), len(generation.prompt), 1, salt=generation.cache_salt)
        # What is known need not be computed: it makes the engine that much less loaded.
        return min(free, key=lambda engine: (-engine.num_known_tokens(probe), loads[engine]))

    def _forget_ended(self) -> None:
        for generation in [one for one in self._owner if one.finish_reason is not None]:
            del self._owner[generation]


def _size(generation: Generation) -> int:
    return len(generation.prompt) + generation.max_tokens
