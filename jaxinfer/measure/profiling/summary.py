"""A phase's trace in figures: device time by kind of operation, by part of the model, by layer, beside the roofline."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from jaxinfer.engine.events import Dispatch
from jaxinfer.measure.bench.probe import host_gap
from jaxinfer.measure.profiling.needed import Needed
from jaxinfer.measure.profiling.ops import DRAFT, KINDS, PARTS, Op, Programs, op_of
from jaxinfer.measure.profiling.phases import Phase, Turn
from jaxinfer.measure.profiling.trace import Interval, intervals, shares

NUM_LONGEST = 10


def summarize(phase: Phase, programs: Programs, needs: Callable[[Dispatch], Needed]) -> dict[str, Any]:
    """All figures of a phase as JSON values; `needs` is what one dispatch needs. Seconds are of all steps together.

    Raises NoDeviceEventsError for a trace without operations.
    """
    found = intervals(phase.data)
    ops = identified(found, programs)
    num_devices = len({one.device for one in found})
    seconds = [one / num_devices for one in shares(found, [op.is_control for op in ops])]  # of the mean device
    num_steps = _steps(phase.traced)
    span = (max(one.end for one in found) - found[0].start) / 1e9
    busy = sum(seconds)
    first = [one for one in phase.traced.dispatches if one.replica == 0]
    return {
        "phase": phase.name,
        "kinds": sorted({one.kind for one in phase.traced.dispatches}),
        "dispatches": len(phase.traced.dispatches),
        "steps": num_steps,
        **_work(phase.traced.dispatches),
        "seconds": phase.plain.seconds * num_steps / max(_steps(phase.plain), 1),
        "traced_seconds": phase.traced.seconds,
        "device": {
            "count": num_devices,
            "busy_seconds": busy,
            "idle_share": max(0.0, 1 - busy / span),
            "operations": len(found),
            "unknown_seconds": sum(s for s, op in zip(seconds, ops, strict=True) if not op.scope),
        },
        "host_gap": host_gap(phase.probes),
        "by_kind": _summed((op.kind for op in ops), seconds, KINDS),
        "by_part": _summed((op.part for op in ops), seconds, (*PARTS, *(DRAFT + part for part in PARTS))),
        "by_part_and_kind": _crossed(ops, seconds),
        "layers": _layers(ops, seconds),
        "longest": _longest(found, ops, seconds),
        "roofline": _roofline(sum((needs(one) for one in first), start=Needed()), phase, num_steps),
    }


def identified(found: list[Interval], programs: Programs) -> list[Op]:
    """The operation of each interval: as its program's text has it, else by the trace's own names."""
    names: dict[tuple[str, int | None], set[str]] = defaultdict(set)
    for one in found:
        names[one.module, one.run].add(one.name)
    known = {key: programs.find(key[0], instructions) for key, instructions in names.items()}
    guessed: dict[tuple[str, str], Op] = {}
    ops = []
    for one in found:
        op = known[one.module, one.run].get(one.name)
        if op is None:
            key = (one.name, one.scope)
            op = guessed.get(key) or guessed.setdefault(key, op_of(one.name.partition(".")[0], one.scope))
        ops.append(op)
    return ops


def _steps(turn: Turn) -> int:
    """Of one replica; the others make theirs at the same time."""
    return sum(one.num_steps for one in turn.dispatches if one.replica == 0)


def _work(dispatches: Iterable[Dispatch]) -> dict[str, Any]:
    """What took part in a step."""
    all_ = [(one, work) for one in dispatches for work in one.work]
    decoding = [(one.num_steps, work.start) for one, work in all_ if work.is_decoding]
    steps = sum(one.num_steps for one in dispatches if any(work.is_decoding for work in one.work))
    tokens = sum(count for count, _ in decoding)
    return {
        "prompt_tokens": sum(work.num_prompt_tokens for _, work in all_),
        "mean_batch": tokens / steps if steps else 0.0,
        "mean_context": sum(count * start for count, start in decoding) / tokens if tokens else 0.0,
    }


def _summed(keys: Iterable[str], seconds: list[float], order: Iterable[str]) -> dict[str, float]:
    """In this order; what is not in it comes last."""
    found: dict[str, float] = dict.fromkeys(order, 0.0)
    for key, value in zip(keys, seconds, strict=True):
        found[key] = found.get(key, 0.0) + value
    return {key: value for key, value in found.items() if value > 0}


def _crossed(ops: list[Op], seconds: list[float]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for op, value in zip(ops, seconds, strict=True):
        row = found.setdefault(op.part, {})
        row[op.kind] = row.get(op.kind, 0.0) + value
    return found


def _layers(ops: list[Op], seconds: list[float]) -> dict[str, Any] | None:
    """The time of each layer, the slowest and the median; None where no operation is known to be a layer's."""
    found: dict[int, float] = {}
    for op, value in zip(ops, seconds, strict=True):
        if op.layer is not None:
            found[op.layer] = found.get(op.layer, 0.0) + value
    if not found:
        return None
    slowest = max(found, key=lambda layer: found[layer])
    return {
        "seconds": [found.get(layer, 0.0) for layer in range(max(found) + 1)],
        "slowest": slowest,
        "slowest_seconds": found[slowest],
        "median_seconds": statistics.median(found.values()),
    }


def _longest(found: list[Interval], ops: list[Op], seconds: list[float]) -> list[dict[str, Any]]:
    """Operations that took longest, those of all layers that are alike together."""
    totals: dict[tuple[str, str, str], list[float]] = {}
    for one, op, value in zip(found, ops, seconds, strict=True):
        total = totals.setdefault((op.part, op.kind, one.name.partition(".")[0]), [0, 0.0])
        total[0] += 1
        total[1] += value
    longest = sorted(totals.items(), key=lambda item: -item[1][1])[:NUM_LONGEST]
    return [
        {"name": name, "part": part, "kind": kind, "count": int(count), "seconds": value}
        for (part, kind, name), (count, value) in longest
    ]


def _roofline(total: Needed, phase: Phase, num_steps: int) -> dict[str, Any]:
    """Of the steps that were traced; the share is of the time without a trace."""
    seconds = phase.plain.seconds * num_steps / max(_steps(phase.plain), 1)
    return {
        "bytes": total.num_bytes,
        "flops": total.flops,
        "seconds": total.seconds,
        "bound": total.bound,
        "percent": 100 * total.seconds / seconds if seconds else None,
    }
