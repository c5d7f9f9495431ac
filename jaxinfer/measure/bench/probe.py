"""Observing an engine while requests run: gaps between dispatches, the mean batch size, memory."""

import queue
import resource
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.events import Dispatch

MAX_SAMPLES = 400
SAMPLE_SECONDS = 0.05


class DispatchProbe:
    """Observes one engine's dispatches while the context is entered.

    A gap is the time from the completion of all earlier dispatches until the next one is sent, while there is work: the
    time in which the device waits for the host. A thread waits for the results, so that completion is noticed even if
    the host reads them later.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._ready_at: float | None = None
        self._num_pending = 0
        self._lock = threading.Lock()
        self._sent: queue.SimpleQueue[Dispatch | None] = queue.SimpleQueue()
        self.gaps: list[float] = []
        self.num_steps = 0
        self._num_decode_steps = 0
        self._rows = 0.0  # decoding sequences, summed over the steps
        self._tokens = 0.0  # of their contexts, likewise

    def __enter__(self) -> "DispatchProbe":
        self._thread = threading.Thread(target=self._wait, name="dispatch probe", daemon=True)
        self._thread.start()
        self._observing = self._engine.observe(self._note)
        self._observing.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._observing.__exit__(None, None, None)
        self._sent.put(None)
        self._thread.join()

    def _note(self, dispatch: Dispatch) -> None:
        with self._lock:
            if self._num_pending:
                self.gaps.append(0.0)
            elif self._ready_at is not None and self._ready_at >= dispatch.busy_since:
                self.gaps.append(dispatch.sent_at - self._ready_at)  # else the device waited for a request
            self._num_pending += 1
        decodes = [work for work in dispatch.work if work.is_decoding]
        steps = dispatch.num_steps if decodes else 0
        self.num_steps += max(steps, 1)
        self._num_decode_steps += steps
        self._rows += steps * len(decodes)
        self._tokens += steps * sum(work.start for work in decodes)
        self._sent.put(dispatch)

    def _wait(self) -> None:
        while (dispatch := self._sent.get()) is not None:
            dispatch.wait()
            with self._lock:
                self._num_pending -= 1
                self._ready_at = time.perf_counter()

    @property
    def mean_batch(self) -> float:
        """Mean number of decoding sequences, over the steps that have any; 0 without such steps."""
        return self._rows / self._num_decode_steps if self._num_decode_steps else 0.0

    @property
    def mean_context(self) -> float:
        """Mean context length of a decoding sequence, in tokens."""
        return self._tokens / self._rows if self._rows else 0.0


def host_gap(probes: Sequence[DispatchProbe]) -> dict[str, Any] | None:
    """Seconds that devices waited for the host, over the dispatches of all replicas; None for fewer than two."""
    gaps = [gap for probe in probes for gap in probe.gaps]
    if not gaps:
        return None
    total, num_steps = float(np.sum(gaps)), sum(probe.num_steps for probe in probes)
    return {
        "dispatches": len(gaps),
        "steps": num_steps,
        "per_dispatch_mean": float(np.mean(gaps)),
        "per_dispatch_p99": float(np.percentile(gaps, 99)),
        "per_step_mean": total / max(num_steps, 1),
        "seconds": total,
    }


class MemorySampler:
    """Samples the process's resident bytes and the devices' bytes in use while the context is entered."""

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
            if len(self._samples) >= MAX_SAMPLES:  # in a long run, drop every second sample
                del self._samples[1::2]
                self._interval *= 2

    def _take(self) -> None:
        self._samples.append((time.perf_counter() - self._start, resident_bytes(), device_bytes("bytes_in_use")))

    def to_dict(self) -> dict[str, Any]:
        times, resident, device = zip(*self._samples, strict=True)
        return {
            "peak_rss_bytes": max(resident),
            "peak_device_bytes": device_bytes("peak_bytes_in_use"),
            "seconds": [round(seconds, 3) for seconds in times],
            "rss_bytes": list(resident),
            "device_bytes": None if device[0] is None else list(device),
        }


def resident_bytes() -> int:
    """Resident bytes of this process; the peak if the system does not report the current number."""
    file = Path("/proc/self/statm")
    if not file.exists():
        return peak_resident_bytes()
    return int(file.read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def peak_resident_bytes() -> int:
    """Peak resident bytes of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_bytes(name: str) -> int | None:
    """A memory statistic, the largest of the local devices; None if they do not report it."""
    values = [(device.memory_stats() or {}).get(name) for device in jax.local_devices()]
    known = [value for value in values if value is not None]
    return max(known) if known else None
