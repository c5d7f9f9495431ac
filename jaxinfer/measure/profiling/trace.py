"""A trace of `jax.profiler` as intervals of operations, and the division of the devices' time among them.

The events of an operation depend on the platform. An accelerator has a plane for each device, with a line of operations
("XLA Ops", or the streams of a GPU). A CPU has one plane for the host; an operation lasts from its beginning on one
thread until the last thread has finished its work. That thread writes an event "end: NAME", but only after the
operations that it runs next, which were waiting for this one.
"""

import bisect
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.measure.profiling.ops import CONTROL

_NAME = re.compile(r"%?([\w.\-]+)")
_RUNS_OTHERS = re.compile(rf"({'|'.join(CONTROL)})\b")
_OPS, _MODULES, _STEPS = "XLA Ops", "XLA Modules", "Steps"
# Lines of an accelerator that repeat the same time.
_OTHER_LINES = (_MODULES, _STEPS, "Async XLA Ops", "Framework Ops", "Framework Name Scope", "Source code")
SUFFIX = ".xplane.pb"


class NoDeviceEventsError(RuntimeError):
    """A trace has no events of devices."""


@dataclass(frozen=True)
class Interval:
    """One run of an operation. Times are in nanoseconds of one clock.

    Attributes:
      name: of the instruction. module: of its program. run: distinguishes programs of one module; None if the trace
        does not. scope: from the trace, "" if only the compiled program has it.
    """

    name: str
    module: str
    run: int | None
    device: str
    start: float
    end: float
    scope: str = ""


def start(folder: Path) -> None:
    """Begins a trace of the devices and the host, without Python events, which would slow it down."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(str(folder), profiler_options=options)


def stop(folder: Path) -> Any:
    """Ends the trace and returns its data. Raises NoDeviceEventsError if no file was written."""
    jax.profiler.stop_trace()
    files = sorted(folder.rglob(f"*{SUFFIX}"))
    if not files:
        raise NoDeviceEventsError(f"the profiler wrote no *{SUFFIX} file")
    return jax.profiler.ProfileData.from_file(str(files[-1]))


def intervals(data: Any) -> list[Interval]:
    """All operations of a trace (`jax.profiler.ProfileData`) in the order of their start.

    Raises NoDeviceEventsError, with the names of the planes, if there are none.
    """
    planes = list(data.planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:") and "CUSTOM" not in plane.name]
    with warnings.catch_warnings():
        # On Python 3.13 the first `event.stats` of a process warns, and aborts the process if warnings are errors.
        warnings.filterwarnings("ignore", message="builtin type event_stats", category=DeprecationWarning)
        timeline = [interval for plane in devices for interval in _on_device(plane)]
        if not timeline:
            timeline = [
                interval for plane in planes if plane.name.startswith("/host:CPU") for interval in _on_cpu(plane)
            ]
    if not timeline:
        names = ", ".join(plane.name for plane in planes) or "none"
        raise NoDeviceEventsError(f"the trace has no operations of a device; its planes are: {names}")
    return sorted(timeline, key=lambda interval: interval.start)


def _on_device(plane: Any) -> Iterator[Interval]:
    lines = list(plane.lines)
    modules = [
        (event.start_ns, event.end_ns, event.name.partition("(")[0])
        for line in lines
        if line.name == _MODULES
        for event in line.events
    ]
    own = [line for line in lines if line.name == _OPS] or [line for line in lines if line.name not in _OTHER_LINES]
    for line in own:
        for event in line.events:
            stats = dict(event.stats)
            if line.name != _OPS and "hlo_op" not in stats:  # copies from and to the host, of a GPU's stream
                continue
            matched = _NAME.match(str(stats.get("hlo_op") or event.name))
            around = (name for start, end, name in modules if start <= event.start_ns < end)
            module = stats.get("hlo_module") or next(around, "")
            yield Interval(
                name=matched.group(1) if matched is not None else event.name,
                module=str(module),
                run=stats.get("program_id"),
                device=plane.name,
                start=event.start_ns,
                end=event.end_ns,
                scope=str(stats.get("tf_op") or ""),
            )


def _on_cpu(plane: Any) -> Iterator[Interval]:
    ends: dict[Any, tuple[float, int]] = {}
    begun: list[tuple[float, float, dict[str, Any]]] = []
    starts: list[list[float]] = []  # of the operations of each line, a thread
    for number, line in enumerate(plane.lines):
        starts.append([])
        for event in line.events:
            if event.name.startswith("end: "):
                stats = dict(event.stats)
                if "_c" in stats:
                    ends[stats["_c"]] = event.start_ns, number
            elif event.duration_ns > 0:
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    begun.append((event.start_ns, event.end_ns, stats))
                    starts[-1].append(event.start_ns)
        starts[-1].sort()
    for start_ns, end_ns, stats in begun:
        name, end = str(stats["hlo_op"]), end_ns
        if stats.get("_p") in ends:
            end, number = ends[stats["_p"]]
            following = bisect.bisect_left(starts[number], end_ns)
            if following < len(starts[number]) and not _RUNS_OTHERS.match(name):
                end = min(end, starts[number][following])
        yield Interval(
            name=name,
            module=str(stats.get("hlo_module", "")),
            run=stats.get("program_id"),
            device=f"cpu {stats.get('device_ordinal', 0)}",
            start=start_ns,
            end=max(end, start_ns),
        )


def shares(timeline: Sequence[Interval], is_control: Sequence[bool]) -> list[float]:
    """Seconds of device time of each interval; their sum is the time in which a device ran anything.

    Operations of a device that run at the same time get equal parts of it. An operation that only runs others
    (`is_control`) gets the time in which none of them runs.
    """
    result, devices = np.zeros(len(timeline)), np.array([interval.device for interval in timeline])
    all_starts, all_ends = [interval.start for interval in timeline], [interval.end for interval in timeline]
    for device in set(devices.tolist()):
        own = np.flatnonzero(devices == device)
        starts, ends, control = (np.array(values)[own] for values in (all_starts, all_ends, is_control))
        times = np.unique([starts, ends])  # between two of them the same operations run
        first, last = np.searchsorted(times, starts), np.searchsorted(times, ends)
        lengths, size = np.diff(times) / 1e9, len(times)
        running, runners = (
            np.cumsum(np.bincount(first[kind], minlength=size) - np.bincount(last[kind], minlength=size))[:-1]
            for kind in (~control, control)
        )
        for kind, count in ((~control, running), (control, np.where(running > 0, 0, runners))):
            parts = np.divide(lengths, count, out=np.zeros(len(lengths)), where=count > 0)
            clock = np.concatenate([[0.0], np.cumsum(parts)])  # of an operation that always runs
            result[own[kind]] = clock[last[kind]] - clock[first[kind]]
    return result.tolist()
