"""What happens inside while requests run: the device's gaps, how many sequences decode at once, memory."""

import queue
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.engine.paged import PagedEngine
from jaxinfer.engine.replicas import Replicas

MAX_SAMPLES = 400
SAMPLE_SECONDS = 0.05


def engines_of(engine: Any) -> list[PagedEngine]:
    """The paged engines behind a model: one, or its replicas."""
    return list(engine.engines) if isinstance(engine, Replicas) else [engine]


class DispatchProbe:
    """Watches an engine's dispatches while it is entered.

    A gap is the time from when the results of all earlier dispatches were there to when the next one was sent, while
    there was work: what the host keeps the device waiting. A thread waits for results, so that the moment is known
    even where the host reads them later.
    """

    def __init__(self, engine: PagedEngine):
        self._engine = engine
        self._ready_at: float | None = None
        self._num_pending = 0
        self._lock = threading.Lock()
        self._sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.gaps: list[float] = []
        self.num_steps = 0
        self._num_decode_steps = 0
        self._rows = 0.0  # decoding sequences, summed over the steps
        self._tokens = 0.0  # of their contexts, likewise

    def __enter__(self) -> "DispatchProbe":
        self._dispatch: Callable[..., Any] = self._engine._dispatch
        self._add: Callable[..., None] = self._engine.add
        self._engine._dispatch = self._watched  # type: ignore[method-assign]
        self._engine.add = self._added  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._wait, name="dispatch probe", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        del self._engine._dispatch, self._engine.add
        self._sent.put(None)
        self._thread.join()

    def _added(self, generation: Any) -> None:
        if not self._engine.has_work:  # the next dispatch waited for this request, not for the host
            with self._lock:
                self._ready_at = None
        self._add(generation)

    def _watched(self, plan: Any, *choice: Any) -> Any:
        flight = self._dispatch(plan, *choice)
        now = time.perf_counter()
        with self._lock:
            if self._num_pending:
                self.gaps.append(0.0)
            elif self._ready_at is not None:
                self.gaps.append(now - self._ready_at)
            self._num_pending += 1
        steps = plan.num_steps if plan.decodes else 0
        self.num_steps += max(steps, 1)
        self._num_decode_steps += steps
        self._rows += steps * len(plan.decodes)
        self._tokens += steps * sum(len(one.tokens) for one in plan.decodes)
        self._sent.put(flight.output.tokens)
        return flight

    def _wait(self) -> None:
        while (output := self._sent.get()) is not None:
            jax.block_until_ready(output)
            with self._lock:
                self._num_pending -= 1
                self._ready_at = time.perf_counter()

    @property
    def mean_batch(self) -> float:
        """Sequences that decode in a step, of the steps in which any do; 0 of none."""
        return self._rows / self._num_decode_steps if self._num_decode_steps else 0.0

    @property
    def mean_context(self) -> float:
        """Tokens of such a sequence."""
        return self._tokens / self._rows if self._rows else 0.0

    def to_dict(self) -> dict[str, Any] | None:
        """Seconds; None before a second dispatch."""
        if not self.gaps:
            return None
        total = float(np.sum(self.gaps))
        return {
            "dispatches": len(self.gaps),
            "steps": self.num_steps,
            "per_dispatch_mean": float(np.mean(self.gaps)),
            "per_dispatch_p99": float(np.percentile(self.gaps, 99)),
            "per_step_mean": total / max(self.num_steps, 1),
            "seconds": total,
        }


class MemorySampler:
    """The process's resident bytes and the devices' bytes in use, over time, while it is entered."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, int, int | None]] = []
        self._done = threading.Event()
        self._interval = SAMPLE_SECONDS

    def __enter__(self) -> "MemorySampler":
        self._start = time.perf_counter()
        self._take()
        self._thread = threading.Thread(target=self._run, name="memory sampler", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()
        self._take()

    def _run(self) -> None:
        while not self._done.wait(self._interval):
            self._take()
            if len(self._samples) >= MAX_SAMPLES:  # a long run keeps every second one
                del self._samples[1::2]
                self._interval *= 2

    def _take(self) -> None:
        self._samples.append((time.perf_counter() - self._start, resident_bytes(), device_bytes("bytes_in_use")))

    def to_dict(self) -> dict[str, Any]:
        times, resident, device = zip(*self._samples, strict=True)
        return {
            "peak_rss_bytes": max(resident),
            "peak_device_bytes": device_bytes("peak_bytes_in_use"),
            "seconds": [round(one, 3) for one in times],
            "rss_bytes": list(resident),
            "device_bytes": None if device[0] is None else list(device),
        }


def resident_bytes() -> int:
    """Of this process now; where the system does not tell, the most it had."""
    file = Path("/proc/self/statm")
    if not file.exists():
        return peak_resident_bytes()
    return int(file.read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def peak_resident_bytes() -> int:
    """The most that this process had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_bytes(name: str) -> int | None:
    """A figure of the devices' memory, the largest of the local ones; None where they do not tell."""
    found = [(device.memory_stats() or {}).get(name) for device in jax.local_devices()]
    known = [value for value in found if value is not None]
    return max(known) if known else None
