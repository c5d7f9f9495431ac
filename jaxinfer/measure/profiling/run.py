"""Profiling a model: its phases, each with the summary of its trace.

A summary is device time by kind of operation, part of the model and layer, and the roofline.
"""

import contextlib
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.events import Dispatch
from jaxinfer.measure.bench.model import machine, opened, public_name
from jaxinfer.measure.bench.probe import host_gap
from jaxinfer.measure.bench.rates import Ideal
from jaxinfer.measure.profiling.ops import DRAFT, KINDS, PARTS, Op, Programs, op_of
from jaxinfer.measure.profiling.phases import PHASES, DispatchRun, Phase, Workload, run_phase
from jaxinfer.measure.profiling.trace import Interval, intervals, shares
from jaxinfer.planning.counted import Counted, count
from jaxinfer.planning.roofline import Rates, pass_flops


@dataclass(frozen=True)
class Needed:
    """The least that work needs on one device.

    Attributes:
      num_bytes: of weights and cache. flops: of products. seconds: by the roofline. memory_seconds: the part of
        `seconds` that is bound by memory.
    """

    num_bytes: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0
    memory_seconds: float = 0.0

    def __add__(self, other: "Needed") -> "Needed":
        return Needed(
            self.num_bytes + other.num_bytes,
            self.flops + other.flops,
            self.seconds + other.seconds,
            self.memory_seconds + other.memory_seconds,
        )

    @property
    def bound(self) -> str:
        return "memory" if self.memory_seconds > self.seconds / 2 else "compute"


def needed(
    counted: Counted, rates: Rates, spans: Iterable[tuple[int, int]], *, reads_all_logits: bool = False
) -> Needed:
    """The needs of a pass over the weights for spans (tokens before the span, tokens of the span), each of which reads
    the keys before it that it sees and its own. Logits are as in `pass_flops`."""
    spans = list(spans)
    if not spans:
        return Needed()
    num_tokens = sum(length for _, length in spans)
    moved = counted.read_weight_bytes(num_tokens)
    moved += sum(counted.read_cache_bytes(start + length, length) for start, length in spans)
    flops = pass_flops(counted, spans, reads_all_logits=reads_all_logits)
    compute = rates.compute_seconds(flops)
    memory = moved / rates.hbm
    return Needed(moved, sum(flops.values()), max(memory, compute), memory if memory >= compute else 0.0)


class WorkModel:
    """Computes what an engine's dispatches need, including its draft."""

    def __init__(self, engine: Engine, ideal: Ideal):
        self._target, self._rates = ideal.counted, ideal.measured.rates
        self._draft: Counted | None = None
        self._tree: tuple[int, ...] | None = None
        spec = engine.spec
        for config, _ in spec.draft_models:
            self._draft = count(spec, config, spec.placed_draft, spec.cache_of_draft)
        if spec.options.draft_tree is not None:
            self._tree = tuple(spec.options.draft_tree)

    def needs(self, dispatch: Dispatch) -> Needed:
        """The needs of all its steps. A round needs a draft pass for each depth, and one pass of the target."""
        total = Needed()
        for step in range(dispatch.num_steps):
            if dispatch.kind != "rounds":
                spans = [
                    (work.start + step, 1) if work.is_decoding else (work.start, work.num_prompt_tokens)
                    for work in dispatch.work
                ]
                total += needed(self._target, self._rates, spans)
                continue
            width = dispatch.num_drafted + 1
            spans = [(work.start, width) for work in dispatch.work]
            total += needed(self._target, self._rates, spans, reads_all_logits=True)
            if self._draft is not None:
                depth = dispatch.num_drafted if self._tree is None else len(self._tree)
                one = needed(self._draft, self._rates, [(work.start, 1) for work in dispatch.work])
                total = sum([one] * depth, start=total)
        return total


NUM_LONGEST = 10


def summarize(phase: Phase, programs: Programs, needs: Callable[[Dispatch], Needed]) -> dict[str, Any]:
    """The results of a phase as JSON values; `needs` computes what a dispatch needs. Seconds are sums over all steps.

    Raises NoDeviceEventsError for a trace without operations.
    """
    found = intervals(phase.data)
    ops = identified(found, programs)
    num_devices = len({one.device for one in found})
    seconds = [one / num_devices for one in shares(found, [op.is_control for op in ops])]  # averaged over devices
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
    """The operation of each interval, from its program's text, else from the names in the trace."""
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


def _steps(turn: DispatchRun) -> int:
    """Steps of one replica; the others run at the same time."""
    return sum(one.num_steps for one in turn.dispatches if one.replica == 0)


def _work(dispatches: Iterable[Dispatch]) -> dict[str, Any]:
    """The tokens and sequences of the dispatches."""
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
    """Seconds by key, in the given order; other keys come last."""
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
    """The time of each layer, the slowest and the median; None if no operation is known to belong to a layer."""
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
    """The operations that took longest, summed over layers."""
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
    """The roofline of the traced steps, as a share of the time without a trace."""
    seconds = phase.plain.seconds * num_steps / max(_steps(phase.plain), 1)
    return {
        "bytes": total.num_bytes,
        "flops": total.flops,
        "seconds": total.seconds,
        "bound": total.bound,
        "percent": 100 * total.seconds / seconds if seconds else None,
    }


SCHEMA, VERSION = "jaxinfer.profile", 1


def profile(
    model: str,
    arguments: dict[str, Any],
    workload: Workload,
    *,
    phases: Sequence[str] = PHASES,
    random_weights: bool = False,
    folder: Path | None = None,
    sizes: dict[str, int] | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> dict[str, Any]:
    """Profiles the phases of a model opened with these arguments of `LLM`; returns JSON values.

    Args:
      folder: for the traces, with a subfolder for each phase; None keeps none. sizes: as in `rates.measure_rates`.

    Raises as `LLM`, `run_phase` and `summarize`.
    """
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "version": VERSION,
        "model": public_name(model),
        "workload": asdict(workload),
        "machine": machine(),
    }
    progress("opening the model, measuring the roofline")
    with (
        _named_programs(),
        _folder(folder) as traces,
        opened(model, arguments, random_weights=random_weights, warms_up=False, sizes=sizes) as bench,
    ):
        engine = bench.llm.engine.engines[0]
        if engine.spec.trees and engine.spec.options.is_adaptive:  # any program may be next
            progress("compiling")
            bench.llm.warm_up(use_tqdm=False)
        found = [run_phase(bench, name, workload, traces / name, progress) for name in phases]
        progress("measuring the roofline once more, reading the traces")
        # Other work on the machine may have slowed down one of the two measurements.
        again = Ideal.of(engine, **(sizes or {})).measured
        ideal = replace(bench.ideal, measured=bench.ideal.measured.best(again))
        result["roofline"] = ideal.measured.to_dict()
        needs = WorkModel(engine, ideal).needs
        programs = Programs()
        result["phases"] = [summarize(phase, programs, needs) for phase in found]
    return result


@contextlib.contextmanager
def _named_programs() -> Iterator[None]:
    """Makes names of operations part of the keys of the compilation cache. By default they are not, and a cached
    program could lack the names that this code looks for."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = jax.config.values[name]
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


@contextlib.contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="jaxinfer-profile-") as name:
        yield Path(name)
