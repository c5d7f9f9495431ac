"""Making a plan, for chips or of an engine that runs: programs compiled, or counted, and the roofline."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from jaxinfer.checks import format_bytes
from jaxinfer.chips import Chip, Rates, chip_of_kind
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.memory import activation_bytes, available_bytes
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.loading import DEFAULT_MAX_MODEL_LEN
from jaxinfer.models import ModelConfig, Params
from jaxinfer.models.host_layers import disk_layers, row_bytes
from jaxinfer.planning.buckets import choose_buckets
from jaxinfer.planning.chips import Place
from jaxinfer.planning.compiled import (
    DECODE,
    PREFILL,
    CompiledProgram,
    OutOfChipMemory,
    ProgressCallback,
    chip_compiler,
    compile_programs,
)
from jaxinfer.planning.counted import Counted, count
from jaxinfer.planning.plan import Memory, MemoryPlan, PlanRequest
from jaxinfer.planning.roofline import RooflinePoint, RoundPoint, decode_point, round_point
from jaxinfer.planning.step_model import predict
from pallas_kernels.ahead_of_time import Compilation


def make_plan(
    request: PlanRequest,
    *,
    whole: bool | None = None,
    compiles: bool = True,
    progress: ProgressCallback = lambda step: None,
) -> MemoryPlan:
    """Plans a model for chips by compiling its programs for them.

    Args:
      whole: as in `compile_programs`. compiles: False counts by arithmetic only, as for chips without a compiler here.

    Raises ValueError for a mesh that does not divide the model; RuntimeError if the chip's compiler is not installed.
    """
    start = time.perf_counter()
    chip = request.place.chip
    notes: list[str] = []
    programs: dict[str, CompiledProgram] = {}
    spec = request.spec(compiles=compiles and chip.can_compile)
    if not chip.can_compile:
        notes.append(f"no compiler for {chip.title} on this machine: counted, not compiled; temporaries are estimated")
    elif not compiles:
        notes.append("counted, not compiled: temporaries are estimated")
    else:
        if sum(spec.parts.values()) > request.place.device_bytes:
            whole = False  # compiling all layers would fail after minutes
        try:
            programs = compile_programs(spec, chip_compiler(chip.name, spec.mesh), whole=whole, progress=progress)
        except OutOfChipMemory as error:
            notes.append(f"even a few layers do not fit: {error}; counted, not compiled")
    return assemble(request, spec, programs, chip, request.place.device_bytes, notes, start)


def plan_engine(name: str, engine: Engine) -> MemoryPlan:
    """Plans what an engine holds and needs on its devices, with its pages as they are; its programs are compiled for
    shapes alone, or read from the compilation cache."""
    spec, device = engine.spec, engine.device
    chip = chip_of_kind(device.device_kind)
    title = f"{spec.num_devices} x {device.device_kind}"
    place = Place(title, chip or Chip(device.device_kind, device.device_kind, spec.platform), spec.num_devices)
    axes = None if spec.mesh is None else ",".join(f"{axis}={size}" for axis, size in spec.mesh.shape.items())
    options = replace(spec.options, max_model_len=spec.max_model_len, max_seqs=spec.max_seqs)
    request = PlanRequest(name, spec.config, spec.params, place, options, axes, spec.draft)
    start = time.perf_counter()
    programs = compile_programs(spec, compile_here, whole=True)
    return assemble(request, spec, programs, chip, _usable(device, spec), [], start)


def plan_here(name: str, config: ModelConfig, params: Params, *, max_seqs: int = 8) -> MemoryPlan | None:
    """Counts what a model would need on this machine's first device, with the default options and `max_seqs` answers at
    once; None where the device does not tell its memory."""
    start = time.perf_counter()
    device = jax.devices()[0]
    usable = available_bytes(device)
    if usable is None:
        return None
    chip = Chip(device.device_kind, device.device_kind, device.platform, usable_bytes=usable)
    length = min(config.max_length, DEFAULT_MAX_MODEL_LEN)
    options = EngineOptions(max_model_len=length, max_seqs=max_seqs)
    request = PlanRequest(name, config.for_length(length), params, Place(chip.title, chip, 1), options)
    return assemble(request, request.spec(), {}, None, usable, [], start)


def assemble(
    request: PlanRequest,
    spec: EngineSpec,
    programs: dict[str, CompiledProgram],
    chip: Chip | None,
    usable: int,
    notes: list[str],
    start: float,
) -> MemoryPlan:
    """The plan from compiled programs; `usable` bytes are those of a device, `start` is when planning began."""
    memory = _memory(spec, programs, usable)
    counted = count(spec, spec.config, spec.placed_params, spec.cache)
    layout = request.layout
    points, rounds = (), ()
    if chip is None:
        notes.append("no roofline: the rates of this device are unknown")
    else:
        points, rounds = _roofline(request, spec, programs, counted, Rates.of(chip), layout.num_replicas)
        points = tuple(
            replace(point, predicted=predict(chip, spec, counted, point.batch, point.context)) for point in points
        )
    notes += _notes(spec, programs, bool(points))
    buckets = choose_buckets(spec, request.trace, request.max_programs) if request.trace else None
    return MemoryPlan(
        *(request, layout, memory, programs, counted, points, rounds, tuple(notes)),
        seconds=time.perf_counter() - start,
        buckets=buckets,
        adapters=_adapters(spec),
    )


def _adapters(spec: EngineSpec) -> dict[str, int | None] | None:
    if not spec.slot_bytes:
        return None
    return {
        "max_adapters": spec.options.max_adapters,
        "max_loaded_adapters": spec.options.max_loaded_adapters,
        "slot_bytes": spec.slot_bytes,
        "host_bytes": spec.host_adapter_bytes,
    }


def _memory(spec: EngineSpec, programs: dict[str, CompiledProgram], usable: int) -> Memory:
    parts = dict(spec.parts)
    peak = PREFILL
    if programs:
        peak = max(programs, key=lambda name: programs[name].figures.total_bytes)
        figures = programs[peak].figures
        made = round(figures.temporary_bytes + figures.output_bytes - figures.aliased_bytes)
        parts["temporaries"] = max(made - spec.buffer_bytes, 0)  # which `parts` has already
        parts["code"] = round(figures.code_bytes)
        counted = sum(size for name, size in parts.items() if name != "saved states")  # which no such program takes
        parts["padding and inputs"] = max(round(figures.total_bytes) - counted, 0)
    else:
        guess = activation_bytes(spec) - spec.buffer_bytes
        parts["temporaries"] = guess // spec.num_devices
    budget, sizes = int(spec.options.memory_fraction * usable), spec.pool_sizes
    memory = Memory(
        parts=parts,
        peak=peak,
        usable=usable,
        budget=budget,
        page_size=spec.page_size,
        page_bytes=spec.page_bytes,
        planned_tokens=(spec.num_pages - 1) * spec.page_size,
        is_measured=bool(programs),
        sequence_bytes=sizes.sequence_bytes,
        token_bytes=sizes.token_bytes,
        policy=spec.policy.describe(spec.config),
    )
    if len(spec.groups) == 1:
        return memory
    fitting = sizes.fitting(budget - (memory.total - memory.pool_bytes))
    pools = {group.name: group.pool_bytes for group in spec.groups}
    return replace(memory, pools=pools, pages_that_fit=fitting)


def _roofline(
    request: PlanRequest,
    spec: EngineSpec,
    programs: dict[str, CompiledProgram],
    counted: Counted,
    rates: Rates,
    num_replicas: int,
) -> tuple[tuple[RooflinePoint, ...], tuple[RoundPoint, ...]]:
    decoding = programs.get(DECODE)
    smaller = (size for size in (1, 8, 64, 512) if size < spec.max_seqs)
    batches = request.batches or (*smaller, spec.max_seqs)

    def point(batch: int, counted: Counted, figures: Any, host_bytes: float) -> RooflinePoint:
        return decode_point(
            rates,
            counted,
            figures,
            batch=batch,
            context=spec.max_model_len,
            compiled_batch=spec.max_seqs,
            compiled_context=spec.pages_per_sequence * spec.page_size,
            num_replicas=num_replicas,
            host_bytes=host_bytes,
        )

    figures = None if decoding is None else decoding.figures
    arriving = figures.host_bytes if figures is not None and figures.host_bytes else spec.arriving_bytes
    points = tuple(point(batch, counted, figures, arriving) for batch in batches)
    if not spec.trees:
        return points, ()
    drafts: list[RooflinePoint | None] = [None] * len(points)
    for config, params in spec.draft_models:
        draft_counted = count(spec, config, spec.placed_draft, spec.cache_of_draft)
        drafts = [point(batch, draft_counted, None, sum(row_bytes(params).values())) for batch in batches]
    length = spec.trees[-1].depth
    rounds = (
        round_point(rates, target, draft, num_draft_tokens=length, num_replicas=num_replicas)
        for target, draft in zip(points, drafts, strict=True)
    )
    return points, tuple(rounds)


def _notes(spec: EngineSpec, programs: dict[str, CompiledProgram], has_roofline: bool) -> list[str]:
    facts = spec.draft.describe_own()
    notes = [f"draft {spec.draft.name}: {facts['tokens']}"] if "tokens" in facts else []
    if programs:
        notes.append("memory: from the compiler's analysis of each program")
        small = next((program for program in programs.values() if not program.is_whole), None)
        if small is not None:
            sizes = ", ".join(map(str, small.num_layers))
            count = spec.config.num_layers
            notes.append(f"extrapolated to {count} layers from programs of {sizes} layers: layers of a kind are alike")
        if spec.platform == "cpu":
            notes.append("HBM bytes: counted from shapes; programs for CPUs do not report them")
        else:
            served = ", without reads that the cache serves" if spec.platform == "gpu" else ""
            notes.append(f"HBM bytes: from the compiled program{served}; attention's from its kernels at full length")
    if spec.slot_bytes:
        loaded, each = spec.options.max_loaded_adapters, format_bytes(spec.slot_bytes)
        notes.append(
            f"each loaded adapter takes up to {each} of the host's memory, and any number may be loaded: "
            f"--max-loaded-adapters limits it"
            if spec.host_adapter_bytes is None
            else f"{loaded} loaded adapters take up to {format_bytes(spec.host_adapter_bytes)} of the host's memory, "
            f"{each} each"
        )
    if spec.arriving_bytes:
        layers = len(row_bytes(spec.params))
        notes.append(
            f"{layers} of {spec.config.num_layers} layers, {format_bytes(spec.host_bytes)}, are in the host's memory; "
            f"each step copies {format_bytes(spec.arriving_bytes)}, at the rate of an interface that nothing else uses"
        )
    if (disk := disk_layers(spec.params)) is not None:
        notes.append(
            f"{len(disk.numbers)} of {spec.config.num_layers} layers stay on the disk; each step reads them from files "
            f"into {format_bytes(disk.num_bytes)} of arrays"
        )
    if has_roofline:
        notes.append("FLOPs of the roofline: counted from shapes; times are lower bounds, not measured")
        if spec.dtype.name == "float32":
            notes.append("the model computes in float32, at a fraction of the bf16 rate that the roofline assumes")
    return notes


def compile_here(function: Callable, arguments: tuple[Any, ...]) -> Compilation:
    """Compiles for the default device, or the devices of the arguments' shardings."""
    start = time.perf_counter()
    jitted: Any = function
    program = jitted.lower(*arguments).compile()
    return Compilation.of(jax.default_backend(), program, time.perf_counter() - start)


def _usable(device: Any, spec: EngineSpec) -> int:
    """Bytes of a device that programs may use, this engine's arrays included."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is not None:
        return limit
    return (available_bytes(device) or 0) + sum(spec.parts.values())
