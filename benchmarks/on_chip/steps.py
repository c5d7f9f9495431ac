"""The kernels of decode steps: a table from a trace of `jax.profiler`."""

import contextlib
import re
import statistics
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from benchmarks.on_chip.results import Row
from jaxinfer.chips import chip_of_kind
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.measure.bench.model import Bench
from jaxinfer.measure.profiling import trace
from jaxinfer.measure.profiling.ops import CONTROL
from jaxinfer.measure.profiling.phases import DECODE, Workload, run_phase
from jaxinfer.planning.counted import count
from jaxinfer.planning.step_model import StepPrediction, predict
from pallas_kernels.hbm_traffic import HloProgram

Operation = tuple[str, str] | None  # names of a program and of an instruction in it
MAX_ROWS = 24  # of kernels, the longest first; the trace has all
MIN_GAP = 0.1e-6  # seconds: less is the clock's resolution


@dataclass(frozen=True)
class KernelRun:
    """One run of a kernel, in seconds of one clock. operation: of which program it is a part, if the trace says so."""

    name: str
    start: float
    end: float
    operation: Operation = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


def kernels(bench: Bench, batch: int, prompt_tokens: int, num_steps: int, file: Path, name: str) -> Iterator[Row]:
    """Rows of a step: its kernels by name, launches, and the gaps between kernels. The archive `file` gets the trace,
    as `name`."""
    with tempfile.TemporaryDirectory() as folder:
        phase = run_phase(bench, DECODE, Workload(batch, prompt_tokens, num_steps), Path(folder), lambda said: None)
        keep(Path(folder), file, name + trace.SUFFIX)
    runs = kernel_runs(phase.data)
    num_steps = sum(dispatch.num_steps for dispatch in phase.traced.dispatches)
    step = predicted_step(bench.llm.engine.engines[0].spec, batch, prompt_tokens)
    launches = step.launches if step is not None else None
    yield from rows(runs, num_steps, bytes_by_operation({run.operation for run in runs}), launches)


def predicted_step(spec: EngineSpec, batch: int, context: int) -> StepPrediction | None:
    """A step as `jaxinfer.planning.step_model` predicts it; None where it has no model of this device."""
    if (chip := chip_of_kind(jax.devices()[0].device_kind)) is None:
        return None
    return predict(chip, spec, count(spec, spec.config, spec.placed_params, spec.cache), batch, context)


def rows(
    runs: list[KernelRun], num_steps: int, num_bytes: dict[Operation, float], launches: int | None = None
) -> Iterator[Row]:
    """The table of `num_steps` steps on one device; num_bytes: of one execution of each operation. launches: of a step,
    as predicted."""
    gaps = list(_gaps(runs))
    busy = sum(run.seconds for run in runs)
    note = f"{busy / num_steps * 1e6:.0f} us a step"
    yield Row("kernels", len(runs) / num_steps, "launches/step", predicted=launches or None, note=note)
    middle = f", median {statistics.median(gaps) * 1e6:.1f} us, longest {max(gaps) * 1e6:.0f} us" if gaps else ""
    note = f"{len(gaps) / num_steps:.1f} a step{middle}"
    yield Row("gaps between kernels", sum(gaps) / num_steps * 1e6, "us/step", note=note)
    by_name: dict[str, list[KernelRun]] = {}
    of_operation: dict[Operation, dict[str, float]] = {}
    for run in runs:
        by_name.setdefault(run.name, []).append(run)
        of_kernel = of_operation.setdefault(run.operation, {})
        of_kernel[run.name] = of_kernel.get(run.name, 0.0) + run.seconds
    # Of the kernels of one operation, as a product's in parts, the longest is taken to move its bytes.
    movers = {operation: max(seconds, key=seconds.__getitem__) for operation, seconds in of_operation.items()}
    longest = sorted(by_name.items(), key=lambda item: -sum(run.seconds for run in item[1]))
    for name, found in longest[:MAX_ROWS]:
        seconds = sum(run.seconds for run in found)
        moved = sum(num_bytes.get(run.operation, 0.0) for run in found if movers[run.operation] == name)
        note = f"{len(found) / num_steps:.1f} a step of {seconds / len(found) * 1e6:.1f} us"
        note += f", {moved / num_steps / 1e6:.3g} MB a step, {moved / seconds / 1e9:.0f} GB/s" * (moved > 0)
        yield Row(f"  {name[:42]}", seconds / num_steps * 1e6, "us/step", note=note)


def _gaps(runs: list[KernelRun]) -> Iterator[float]:
    """Seconds in which nothing ran, between the first kernel and the last."""
    end = None
    for run in sorted(runs, key=lambda run: run.start):
        if end is not None and run.start - end > MIN_GAP:
            yield run.start - end
        end = run.end if end is None else max(end, run.end)


def kernel_runs(data: Any) -> list[KernelRun]:
    """Every kernel of the first device in a trace (`jax.profiler.ProfileData`).

    On a GPU these are the events of its streams, by the names of the kernels: those of a CUDA graph do not say which
    operation they belong to. Elsewhere they are operations, without those that only run others.
    """
    planes = sorted((plane for plane in data.planes if plane.name.startswith("/device:GPU")), key=lambda one: one.name)
    found = [
        KernelRun(_short(event.name), event.start_ns / 1e9, event.end_ns / 1e9, _operation(dict(event.stats)))
        for plane in planes[:1]
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
        if event.duration_ns > 0
    ]
    if found:
        return found
    timeline = trace.intervals(data)
    first = min(interval.device for interval in timeline)
    return [
        KernelRun(_short(run.name), run.start / 1e9, run.end / 1e9, (run.module, run.name))
        for run in timeline
        if run.device == first and not run.name.startswith(CONTROL)
    ]


def _operation(stats: dict[str, Any]) -> Operation:
    return (str(stats.get("hlo_module", "")), str(stats["hlo_op"])) if "hlo_op" in stats else None


def _short(name: str) -> str:
    """The name of a kernel without its number, return type, arguments and template."""
    name = re.sub(r"^void |[(<].*$", "", name)
    return re.sub(r"[._]\d+$", "", name.rpartition("::")[2]) or name


def bytes_by_operation(operations: set[Operation]) -> dict[Operation, float]:
    """Bytes between memory and chip of one execution of each operation, by the text of its compiled program."""
    names: dict[str, set[str]] = {}
    for module, name in filter(None, operations):
        names.setdefault(module, set()).add(name)
    programs: dict[str, list[HloProgram]] = {}
    for executable in jax.devices()[0].client.live_executables():
        for module in executable.hlo_modules():
            if module.name in names:
                programs.setdefault(module.name, []).append(HloProgram(module.to_string()))
    found: dict[Operation, float] = {}
    for module, candidates in programs.items():
        common = [len(names[module].intersection(one.name for one in program.instructions)) for program in candidates]
        program = candidates[common.index(max(common))]  # programs for other numbers of slots have the same name
        with contextlib.suppress(ValueError):  # a call without a cost estimate
            moves = program.moves()
            found |= {(module, move.instruction.name): move.num_bytes / max(move.times, 1) for move in moves}
    return found


def keep(folder: Path, file: Path, name: str) -> None:
    """Adds the trace in a folder to the archive of all traces, which is written whole or not at all."""
    partial = file.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        if file.exists():
            with zipfile.ZipFile(file) as before:
                for other in before.namelist():
                    if other != name:
                        archive.writestr(other, before.read(other))
        for path in sorted(folder.rglob(f"*{trace.SUFFIX}"))[-1:]:
            archive.write(path, name)
    partial.replace(file)
