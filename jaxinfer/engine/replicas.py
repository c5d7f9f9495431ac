"""Several engines behind one queue: data parallelism."""

import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxinfer import parallel
from jaxinfer.cache import KVScales
from jaxinfer.engine.compiling import Report
from jaxinfer.engine.engine import Deadlines, Engine
from jaxinfer.engine.events import Observer, Snapshot
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.protocol import AnyEngine
from jaxinfer.engine.request import Request, SequenceState
from jaxinfer.engine.scheduler import QueueFullError
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.engine.weights import ModelWeights, WeightsView, as_weights
from jaxinfer.models import ModelConfig, Params
from jaxinfer.speculative import Draft, SpeculationStats


class Replicas:
    """Engines over copies of one model, each on devices of its own: an `AnyEngine`, as one `Engine` is.

    Requests wait here, in the order of priority and arrival, and go to the engine that has most of their prompt cached;
    else to the one with the fewest unfinished tokens. An answer follows the first answer to its prompt. Which engine
    runs a request changes no token.
    """

    def __init__(self, engines: Iterable[Engine]):
        self.engines = list(engines)
        self._waiting: list[tuple[int, int, SequenceState]] = []
        self._deadlines = Deadlines()  # of those that wait, or did
        self._numbers = itertools.count()
        self._owner: dict[SequenceState, Engine] = {}  # of those that were admitted and have not ended
        self._queued: set[SequenceState] = set()
        self.weights.add_user(self)

    @property
    def spec(self) -> EngineSpec:
        """The spec that all engines have."""
        return self.engines[0].spec

    @property
    def weights(self) -> ModelWeights:
        """Weights of all engines."""
        return self.engines[0].weights

    @property
    def unfinished(self) -> list[SequenceState]:
        """As `Engine.unfinished`, of every engine, and of those that wait for one."""
        waiting = [entry[-1] for entry in sorted(self._waiting, key=itemgetter(0, 1)) if entry[-1] in self._queued]
        return [*(sequence for engine in self.engines for sequence in engine.unfinished), *waiting]

    def replace_draft(self, params: Params) -> None:
        """As `Engine.replace_draft`, of every engine."""
        for engine in self.engines:
            assert engine.spec.mesh is not None
            engine.replace_draft(parallel.on_replica(params, engine.spec.mesh))

    def drop_draft(self) -> None:
        """As `Engine.drop_draft`, of every engine."""
        for engine in self.engines:
            engine.drop_draft()

    @property
    def has_begun(self) -> bool:
        """As `Engine.has_begun`, of any engine."""
        return any(engine.has_begun for engine in self.engines)

    def come_to_rest(self, *, retains: bool = False) -> list[SequenceState]:
        """As `Engine.come_to_rest`, of every engine."""
        return [sequence for engine in self.engines for sequence in engine.come_to_rest(retains=retains)]

    def check_replaced(self) -> None:
        """It goes on with any weights."""

    def drop_prefixes(self) -> None:
        """As `Engine.drop_prefixes`, of every engine."""
        for engine in self.engines:
            engine.drop_prefixes()

    def check_fits(self, num_prompt: int, max_tokens: int) -> None:
        """As `Engine.check_fits`."""
        self.engines[0].check_fits(num_prompt, max_tokens)

    def add(self, sequence: SequenceState) -> None:
        """As `Engine.add`; max_waiting counts the sequences that wait for any of the engines."""
        self.spec.check_request(sequence.request)
        self._remove_ended()
        limit, most = self.spec.options.max_waiting, self.spec.max_seqs * len(self.engines)
        if limit is not None and len(self._owner) + len(self._queued) >= most + limit:
            raise QueueFullError(f"{len(self._queued)} requests wait, as many as max_waiting={limit} allows")
        sequence.arrived = time.monotonic()
        heapq.heappush(self._waiting, (sequence.request.options.priority, next(self._numbers), sequence))
        self._queued.add(sequence)
        self._deadlines.add(sequence)

    @contextmanager
    def observe(self, observer: Observer) -> Iterator[None]:
        """As `Engine.observe`, of every engine."""
        with ExitStack() as stack:
            for engine in self.engines:
                stack.enter_context(engine.observe(observer))
            yield

    def snapshot(self) -> Snapshot:
        """As `Engine.snapshot`, of all engines together."""
        return Snapshot.together([engine.snapshot() for engine in self.engines], len(self._queued))

    @property
    def has_work(self) -> bool:
        return bool(self._queued) or any(engine.has_work for engine in self.engines)

    def step(self, max_steps: int | None = None) -> list[SequenceState]:
        """One step of every engine that has work; returns the sequences that made progress."""
        progressed = self._deadlines.pop_expired(self._queued)
        for sequence in progressed:
            self.finish(sequence, "abort")
        self._admit()
        for engine in self.engines:
            if engine.has_work:
                progressed += engine.step(max_steps)
        self._remove_ended()
        return progressed

    def finish(self, sequence: SequenceState, reason: str, stop_reason: int | str | None = None) -> None:
        """As `Engine.finish`."""
        if sequence in self._queued:
            self._queued.remove(sequence)
            sequence.finish_reason, sequence.stop_reason = reason, stop_reason
            sequence.finished = time.monotonic()
        elif (engine := self._owner.pop(sequence, None)) is not None:
            engine.finish(sequence, reason, stop_reason)

    def compile_ahead(self, is_stopped: Callable[[], bool]) -> None:
        """As `Engine.compile_ahead`, of every engine."""
        for engine in self.engines:
            engine.compile_ahead(is_stopped)

    def warm_up(self, num_jobs: int | None = None, report: Report = lambda name: None) -> int:
        """As `Engine.warm_up`, of every engine."""
        if self.has_work:
            raise RuntimeError(f"warm_up while {len(self._queued) + len(self._owner)} requests are unfinished")
        return sum(engine.warm_up(num_jobs, report) for engine in self.engines)

    @property
    def program_names(self) -> list[str]:
        """As `Engine.program_names`, of every engine."""
        return [name for engine in self.engines for name in engine.program_names]

    def hidden_states(self, request: Request, taps: tuple[str, ...]) -> dict[str, np.ndarray]:
        """As `Engine.hidden_states`."""
        return self.engines[0].hidden_states(request, taps)

    @property
    def kv_scales(self) -> KVScales | None:
        """As `Engine.kv_scales`."""
        return self.engines[0].kv_scales

    @property
    def device(self) -> Any:
        """The first engine's first device."""
        return self.engines[0].device

    @property
    def speculation_stats(self) -> SpeculationStats | None:
        """Counts of all engines together; None without a draft."""
        counts = [engine.speculation_stats for engine in self.engines]
        return sum((count for count in counts[1:] if count is not None), counts[0]) if counts[0] is not None else None

    def close(self) -> None:
        """As `Engine.close`."""
        for sequence in list(self._queued):
            self.finish(sequence, "abort")
        for engine in self.engines:
            engine.close()

    def _admit(self) -> None:
        """Hands waiting sequences to engines, as long as one has a free slot."""
        loads = dict.fromkeys(self.engines, 0)
        counts = dict.fromkeys(self.engines, 0)
        for sequence, engine in self._owner.items():
            counts[engine] += 1
            loads[engine] += _num_tokens(sequence) - sequence.num_output
        while self._waiting:
            free = [engine for engine in self.engines if counts[engine] < self.spec.max_seqs]
            if not free:
                return
            entry = heapq.heappop(self._waiting)
            sequence = entry[-1]
            if sequence not in self._queued:  # it ended while it waited
                continue
            engine = self._choose(sequence, free, loads)
            try:
                engine.add(sequence)
            except QueueFullError:  # its pool has no room for those it was given before
                heapq.heappush(self._waiting, entry)
                return
            self._queued.remove(sequence)
            self._owner[sequence] = engine
            counts[engine] += 1
            loads[engine] += _num_tokens(sequence)

    def _choose(self, sequence: SequenceState, free: list[Engine], loads: dict[Engine, int]) -> Engine:
        leader = None if sequence.leader is None else self._owner.get(sequence.leader)
        if leader in free:
            return leader
        # Cached tokens need not be computed: the engine is that much less loaded.
        return min(free, key=lambda engine: (-engine.num_known_tokens(sequence), loads[engine]))

    def _remove_ended(self) -> None:
        for sequence in [sequence for sequence in self._owner if sequence.is_finished]:
            del self._owner[sequence]


def make_engine(
    config: ModelConfig,
    params: Params | WeightsView[Params],
    options: EngineOptions,
    *,
    draft: Draft | None = None,
    kv_scales: KVScales | None = None,
    mesh: Mesh | None = None,
) -> AnyEngine:
    """One engine, or one for each replica of a mesh, whose devices hold `params` and the draft's parameters already."""
    if mesh is None:
        return Engine(config, params, options, draft=draft, kv_scales=kv_scales)
    weights = as_weights(params)
    engines = [
        Engine(
            config,
            weights.view(partial(parallel.on_replica, mesh=devices)),
            options,
            draft=draft and draft.with_params(partial(_on_replica, devices)),
            kv_scales=kv_scales,
            mesh=devices,
            replica=number,
        )
        for number, devices in enumerate(parallel.replicas(mesh))
    ]
    return engines[0] if len(engines) == 1 else Replicas(engines)


def _num_tokens(sequence: SequenceState) -> int:
    return sequence.num_prompt + sequence.request.max_tokens


def _on_replica(devices: Mesh, config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    return config, parallel.on_replica(params, devices)
