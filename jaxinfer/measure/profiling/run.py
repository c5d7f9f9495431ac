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
from jaxinfer.planning.counted import Counted, count, pass_flops
from jaxinfer.planning.roofline import Rates


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
                draft_pass = needed(self._draft, self._rates, [(work.start, 1) for work in dispatch.work])
                total = sum([draft_pass] * depth, start=total)
        return total


NUM_LONGEST = 10


def summarize(phase: Phase, programs: Programs, needs: Callable[[Dispatch], Needed]) -> dict[str, Any]:
    """The results of a phase as JSON values; `needs` computes what a dispatch needs. Seconds are sums over all steps.

    Raises NoDeviceEventsError for a trace without operations.
    """
    timeline = intervals(phase.data)
    ops = identified(timeline, programs)
    num_devices = len({interval.device for interval in timeline})
    # Averaged over devices.
    seconds = [share / num_devices for share in shares(timeline, [op.is_control for op in ops])]
    num_steps = _steps(phase.traced)
    span = (max(interval.end for interval in timeline) - timeline[0].start) / 1e9
    busy = sum(seconds)
    total = sum((needs(dispatch) for dispatch in phase.traced.dispatches if dispatch.replica == 0), start=Needed())
    plain_seconds = phase.plain.seconds * num_steps / max(_steps(phase.plain), 1)
    return {
        "phase": phase.name,
        "kinds": sorted({dispatch.kind for dispatch in phase.traced.dispatches}),
        "dispatches": len(phase.traced.dispatches),
        "steps": num_steps,
        **_work(phase.traced.dispatches),
        "seconds": plain_seconds,
        "traced_seconds": phase.traced.seconds,
        "device": {
            "count": num_devices,
            "busy_seconds": busy,
            "idle_share": max(0.0, 1 - busy / span),
            "operations": len(timeline),
            "unknown_seconds": sum(s for s, op in zip(seconds, ops, strict=True) if not op.scope),
        },
        "host_gap": host_gap(phase.probes),
        **_sums(timeline, ops, seconds),
        "roofline": {
            "bytes": total.num_bytes,
            "flops": total.flops,
            "seconds": total.seconds,
            "bound": total.bound,
            "percent": 100 * total.seconds / plain_seconds if plain_seconds else None,  # of the time without a trace
        },
    }


def identified(timeline: list[Interval], programs: Programs) -> list[Op]:
    """The operation of each interval, from its program's text, else from the names in the trace."""
    names: dict[tuple[str, int | None], set[str]] = defaultdict(set)
    for interval in timeline:
        names[interval.module, interval.run].add(interval.name)
    known = {key: programs.find(key[0], instructions) for key, instructions in names.items()}
    guessed: dict[tuple[str, str], Op] = {}
    ops = []
    for interval in timeline:
        op = known[interval.module, interval.run].get(interval.name)
        if op is None:
            key = (interval.name, interval.scope)
            op = guessed.get(key) or guessed.setdefault(key, op_of(interval.name.partition(".")[0], interval.scope))
        ops.append(op)
    return ops


def _steps(turn: DispatchRun) -> int:
    """Steps of one replica; the others run at the same time."""
    return sum(dispatch.num_steps for dispatch in turn.dispatches if dispatch.replica == 0)


def _work(dispatches: Iterable[Dispatch]) -> dict[str, Any]:
    """The tokens and sequences of the dispatches."""
    all_ = [(dispatch, work) for dispatch in dispatches for work in dispatch.work]
    decoding = [(dispatch.num_steps, work.start) for dispatch, work in all_ if work.is_decoding]
    steps = sum(dispatch.num_steps for dispatch in dispatches if any(work.is_decoding for work in dispatch.work))
    tokens = sum(count for count, _ in decoding)
    return {
        "prompt_tokens": sum(work.num_prompt_tokens for _, work in all_),
        "mean_batch": tokens / steps if steps else 0.0,
        "mean_context": sum(count * start for count, start in decoding) / tokens if tokens else 0.0,
    }


def _sums(timeline: list[Interval], ops: list[Op], seconds: list[float]) -> dict[str, Any]:
    """Seconds by kind and by part, in the order of `KINDS` and `PARTS`, by both, and by layer (None if no operation is
    known to belong to one); and the operations that took longest, summed over layers."""
    by_kind, by_part, by_layer = defaultdict[str, float](float), defaultdict[str, float](float), defaultdict(float)
    crossed: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    named: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for interval, op, value in zip(timeline, ops, seconds, strict=True):
        by_kind[op.kind] += value
        by_part[op.part] += value
        crossed[op.part][op.kind] += value
        by_layer[op.layer] += value
        named[op.part, op.kind, interval.name.partition(".")[0]].append(value)
    by_layer.pop(None, None)
    slowest = max(by_layer, key=lambda layer: by_layer[layer], default=None)
    longest = sorted(named.items(), key=lambda item: -sum(item[1]))[:NUM_LONGEST]
    return {
        "by_kind": {kind: by_kind[kind] for kind in KINDS if by_kind[kind] > 0},
        "by_part": {part: by_part[part] for part in (*PARTS, *(DRAFT + part for part in PARTS)) if by_part[part] > 0},
        "by_part_and_kind": {part: dict(kinds) for part, kinds in crossed.items()},
        "layers": None
        if slowest is None
        else {
            "seconds": [by_layer.get(layer, 0.0) for layer in range(max(by_layer) + 1)],
            "slowest": slowest,
            "slowest_seconds": by_layer[slowest],
            "median_seconds": statistics.median(by_layer.values()),
        },
        "longest": [
            {"name": name, "part": part, "kind": kind, "count": len(values), "seconds": sum(values)}
            for (part, kind, name), values in longest
        ],
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
        measured = [run_phase(bench, name, workload, traces / name, progress) for name in phases]
        progress("measuring the roofline once more, reading the traces")
        # Other work on the machine may have slowed down one of the two measurements.
        again = Ideal.of(engine, **(sizes or {})).measured
        ideal = replace(bench.ideal, measured=bench.ideal.measured.best(again))
        result["roofline"] = ideal.measured.to_dict()
        needs = WorkModel(engine, ideal).needs
        programs = Programs()
        result["phases"] = [summarize(phase, programs, needs) for phase in measured]
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
