"""A memory plan: whether a model fits a place, what its programs need there, and the least time of a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax

from jaxinfer.checks import format_bytes
from jaxinfer.chips import Chip
from jaxinfer.engine.adapter_stacks import widened, with_room
from jaxinfer.engine.offload import Offload, layers_for_host, with_host_layers
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.models import ModelConfig, Params, fit_to_mesh
from jaxinfer.planning.buckets import BucketChoice
from jaxinfer.planning.chips import Layout, Place, layout_of
from jaxinfer.planning.compiled import CompiledProgram
from jaxinfer.planning.counted import Counted
from jaxinfer.planning.roofline import RooflinePoint, RoundPoint
from jaxinfer.planning.trace import TraceRequest
from jaxinfer.speculative import NO_DRAFT, Draft
from jaxinfer.tables import table_text


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """A model, its options and the place to plan for.

    Attributes:
      name: the model's name. config, params: the model, with abstract parameters as `loading.load_shapes` returns them.
      place: the chips. mesh: such as "data=2,model=4"; None shards the model over as many devices as divide it.
      options: of the engine; with num_pages=None the pool holds max_seqs sequences of max_model_len.
      draft: a `ModelDraft` of abstract parameters, or another kind of draft.
      batches: batch sizes of the roofline; () for 1, 8, 64, 512 and max_seqs.
      offload: layers in the host's memory, as in `engine.offload.layers_for_host`.
      trace: requests whose lengths choose sizes of programs, at most `max_programs` (`choose_buckets`); () for none.
    """

    name: str
    config: ModelConfig
    params: Params
    place: Place
    options: EngineOptions
    mesh: str | None = None
    draft: Draft | None = None
    batches: tuple[int, ...] = ()
    offload: Offload = 0
    trace: Sequence[TraceRequest] = ()
    max_programs: int | None = None

    @property
    def layout(self) -> Layout:
        """Raises ValueError for a mesh that does not divide the model or its draft."""
        return layout_of(
            self.place, self.config, *(config for config, _ in (self.draft or NO_DRAFT).own), mesh=self.mesh
        )

    def spec(self, *, compiles: bool = False) -> EngineSpec:
        """The shapes of one replica; with `compiles`, on devices that programs can be compiled for.

        Raises as `layout` and `layers_for_host`, and RuntimeError if the chip's compiler is not installed.
        """
        mesh = self.layout.mesh(self.place) if compiles else self.layout.shape_mesh
        config, params = _fitted(mesh, self.config, self.params)
        draft = (self.draft or NO_DRAFT).with_params(partial(_fitted, mesh))
        chip = self.place.chip
        sizes = self.options.adapter_sizes
        config, params = widened(config, sizes), with_room(config, params, sizes, chip.platform)
        spec = EngineSpec(config, params, self.options, chip.platform, mesh, draft, chip=chip.name)
        return with_host_layers(spec, layers_for_host(spec, self.offload, self.place.device_bytes))

    def with_options(self, **changes: Any) -> "PlanRequest":
        """The request with other options of the engine."""
        return replace(self, options=replace(self.options, **changes))


def _fitted(mesh: Any, config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """The model resized to fit the mesh, as shapes."""
    fit = fit_to_mesh(mesh, config)
    if not fit.changes:
        return config, params
    return fit.config, jax.eval_shape(fit.resize, params)


@dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Attributes:
      parts: bytes by name while `peak` runs, the program that needs most; their sum is `total`.
      usable: what programs may use. budget: the engine's share of it (memory_fraction).
      page_size: tokens of a page. page_bytes: bytes of a page, of the layers without a window where others have one.
      planned_tokens: tokens of cache that were asked for. pools: bytes of the pool of each group of layers, if several.
      sequence_bytes: of the pages of a decoding sequence of the greatest length. token_bytes: of a token in all layers.
      policy: what `kv_policy` keeps; None for everything.
      pages_that_fit: of the first group, if there are several; None counts by page_bytes.
      is_measured: whether the numbers come from a compiler's memory analysis; otherwise temporaries are estimated.
    """

    parts: dict[str, int]
    peak: str
    usable: int
    budget: int
    page_size: int
    page_bytes: int
    planned_tokens: int
    is_measured: bool
    sequence_bytes: int = 0
    token_bytes: float = 0.0
    policy: str | None = None
    pools: dict[str, int] = field(default_factory=dict)
    pages_that_fit: int | None = None

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.budget

    @property
    def tokens(self) -> int:
        """Tokens of cache that fit, including the planned ones; the null page holds none."""
        if self.pages_that_fit is not None:
            return max(self.pages_that_fit - 1, 0) * self.page_size
        pages = (self.budget - (self.total - self.pool_bytes)) // self.page_bytes - 1
        return max(pages, 0) * self.page_size

    @property
    def remaining_tokens(self) -> int:
        """Tokens of cache that fit beyond the planned ones; negative if those do not fit."""
        return self.tokens - self.planned_tokens

    @property
    def pool_bytes(self) -> int:
        return self.parts["cache"] + self.parts.get("draft cache", 0)


@dataclass(frozen=True)
class MemoryPlan:
    """Memory and time that a request needs.

    Attributes:
      layout: the mesh. memory: of one device. programs: compiled programs by name, {} if none was compiled.
      counted: FLOPs and bytes by arithmetic. roofline: a decode step for each batch size, () if the chip's rates are
        unknown. rounds: speculative rounds, likewise. notes: what was measured and what was counted.
      seconds: how long planning took. buckets: sizes of programs for the request's trace; None without one.
      adapters: how many there may be, with the bytes of their slots and of the host's memory; None without room.
    """

    request: PlanRequest
    layout: Layout
    memory: Memory
    programs: dict[str, CompiledProgram]
    counted: Counted
    roofline: tuple[RooflinePoint, ...]
    rounds: tuple[RoundPoint, ...]
    notes: tuple[str, ...]
    seconds: float
    buckets: BucketChoice | None = None
    adapters: dict[str, int | None] | None = None

    @property
    def fits(self) -> bool:
        return self.memory.fits

    @property
    def compile_seconds(self) -> float:
        return sum(program.figures.seconds for program in self.programs.values())

    def to_dict(self, changes: "Sequence[Change]" = ()) -> dict[str, Any]:
        """The plan as JSON values, as `jaxinfer plan --json` prints it. Bytes, FLOPs and exchanges are of one device,
        tokens and sequences of one replica, rates of all."""
        request, memory, layout, options = self.request, self.memory, self.layout, self.request.options
        chip = request.place.chip
        return {
            "model": request.name,
            "on": request.place.name,
            "fits": self.fits,
            "layout": {
                "mesh": str(layout),
                "devices": request.place.num_devices,
                "replicas": layout.num_replicas,
                "devices of a replica": layout.num_devices,
            },
            "options": {"context": options.max_model_len} | _fields(options, "max_seqs", "kv_dtype", "memory_fraction"),
            "bytes": {
                **memory.parts,
                **_fields(memory, "total", "budget", "usable", "is_measured"),
                "largest program": memory.peak,
            },
            **({} if self.adapters is None else {"adapters": self.adapters}),
            "cache": {
                **_fields(memory, "page_size", "page_bytes", "sequence_bytes", "pools", "policy"),
                "tokens_planned": memory.planned_tokens,
                "tokens_that_fit": memory.tokens,
                "tokens_remaining": memory.remaining_tokens,
            },
            "programs": {
                name: {
                    **program.figures.to_dict(),
                    "layers_compiled": list(program.num_layers),
                    "is_whole": program.is_whole,
                }
                for name, program in self.programs.items()
            },
            "roofline": [point.to_dict() for point in self.roofline],
            "rounds": [vars(point) for point in self.rounds],
            **({} if self.buckets is None else {"buckets": self.buckets.to_dict()}),
            "changes": [
                {"flags": change.flags, "bytes": change.total, "compiled_bytes": change.compiled, "fits": change.fits}
                for change in changes
            ],
            **_fields(self, "compile_seconds", "seconds"),
            "notes": list(self.notes),
            "chip": {
                **_fields(chip, "title", "hbm_bytes", "l2_bytes", "hbm_bandwidth", "flops"),
                **_fields(chip, "link_bandwidth", "host_bandwidth", "chips_per_host"),
                "sources": [source._asdict() for source in chip.sources],
            },
        }

    def to_text(self, changes: "Sequence[Change] | None" = None) -> str:
        """A page of text, with the cheapest changes if the model does not fit."""
        parts = [_verdict(self), _memory_text(self), _programs_text(self)]
        if self.roofline:
            parts.append(_roofline_text(self))
        if self.rounds:
            parts.append(_rounds_text(self))
        if self.buckets is not None:
            parts.append(str(self.buckets))
        if changes is not None and not self.fits:
            parts.append(_changes_text(changes))
        notes = [*self.notes, *([f"compiled in {self.compile_seconds:.0f} s"] if self.programs else [])]
        parts.append("".join(f"  {note}\n" for note in notes))
        return "\n".join(parts).rstrip("\n")

    def __str__(self) -> str:
        return self.to_text()


@dataclass(frozen=True)
class Change:
    """A change that makes the model fit.

    Attributes:
      flags: flags with values, such as {"--kv-dtype": "int8"}; a name without "--" is a variable of the environment.
      total: bytes of one device with the change, counted.
      compiled: the same from the compiler's analysis of the largest program; None if it was not compiled.
    """

    flags: dict[str, str]
    total: int
    budget: int
    compiled: int | None = None

    @property
    def fits(self) -> bool:
        """By the compiled bytes if they are known, else by the counted ones."""
        return (self.total if self.compiled is None else self.compiled) <= self.budget

    def __str__(self) -> str:
        flags = self.flags.items()
        return " ".join(f"{name} {value}" if name.startswith("--") else f"{name}={value}" for name, value in flags)


def _fields(record: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _verdict(plan: MemoryPlan) -> str:
    request, memory, options = plan.request, plan.memory, plan.request.options
    verdict = "fits" if plan.fits else "does not fit"
    replicas = " per replica" if plan.layout.num_replicas > 1 else ""
    cache = "the compute dtype" if options.kv_dtype == "auto" else options.kv_dtype
    return (
        f"{request.name} {verdict} on {request.place.name} "
        f"({request.place.num_chips} x {request.place.chip.title}, {plan.layout})\n"
        f"  requested: {options.max_seqs} sequences of {options.max_model_len:,} tokens{replicas}, cache in {cache}\n"
        f"  {format_bytes(memory.total)} of {format_bytes(memory.budget)} per device: "
        f"{100 * options.memory_fraction:.0f} % of the {format_bytes(memory.usable)} that programs may use"
        f"{_of_device(request.place.chip, memory.usable)}\n"
    )


def _of_device(chip: Chip, usable: int) -> str:
    """The usable part of a device's memory; "" for a chip that is not listed."""
    whole = chip.hbm_bytes // chip.devices_per_chip
    return f", {100 * usable / whole:.0f} % of {format_bytes(whole)}" if whole else ""


def _memory_text(plan: MemoryPlan) -> str:
    memory = plan.memory
    how = f"while {memory.peak} runs" if memory.is_measured else "temporaries estimated"
    rows = [
        (name, format_bytes(size), f"{100 * size / memory.budget:.1f} %")
        for name, size in {**memory.parts, "total": memory.total}.items()
    ]
    rest = memory.remaining_tokens
    remaining = f"{abs(rest):,} {'more' if rest >= 0 else 'fewer'} than planned"
    table = table_text((f"memory of one device, {how}", "bytes", "of budget"), rows)
    if memory.pools:
        pools = ", ".join(f"{name}: {format_bytes(size)}" for name, size in memory.pools.items())
        table += f"  pages by layers: {pools}; {format_bytes(memory.sequence_bytes)} for the longest sequence\n"
    table += "".join(f"  {text}\n" for text in [memory.policy] if text)
    return f"{table}  cache for {memory.tokens:,} tokens in total: {remaining}\n"


def _programs_text(plan: MemoryPlan) -> str:
    if not plan.programs:
        return "programs: none compiled\n"
    titles = ("programs, on one device", "TFLOP", "HBM bytes", "temporaries", "exchanges", "sent", "compiled in")
    rows = []
    for name, program in plan.programs.items():
        figures = program.figures
        is_known = figures.moved_bytes is not None and figures.kernel_bytes is not None
        rows.append(
            (
                name,
                "-" if figures.flops is None else f"{figures.flops / 1e12:.3f}",
                format_bytes((figures.moved_bytes or 0) + (figures.kernel_bytes or 0)) if is_known else "-",
                format_bytes(figures.temporary_bytes),
                f"{figures.num_collectives:.0f}",
                f"{figures.sent_bytes / 1e6:.1f} MB",
                f"{figures.seconds:.0f} s",
            )
        )
    return table_text(titles, rows)


def _roofline_text(plan: MemoryPlan) -> str:
    rows = [
        (
            point.batch,
            f"{1000 * point.seconds:.2f}",
            f"{point.tokens_per_second:,.0f}",
            format_bytes(point.hbm_bytes),
            f"{point.flops / 1e12:.3f}",
            point.bound,
            *_predicted_cells(point),
        )
        for point in plan.roofline
    ]
    title = f"decoding at the roofline, all sequences {plan.roofline[0].context:,} tokens long\n"
    titles = ("batch", "TPOT ms", "tokens/s", "HBM bytes", "TFLOP", "bound by")
    if plan.roofline[0].predicted is not None:
        titles += ("predicted ms", "of the roofline", "launches")
    return title + table_text(titles, rows, num_left=0, indent="  ")


def _predicted_cells(point: RooflinePoint) -> tuple[str, ...]:
    if (predicted := point.predicted) is None:
        return ()
    return f"{1000 * predicted.seconds:.2f}", f"{point.predicted_share:.0%}", f"{predicted.launches or '-'}"


def _rounds_text(plan: MemoryPlan) -> str:
    first = plan.rounds[0]
    rates = list(first.tokens_per_second)
    titles = ("batch", "ms/round", *(f"{float(rate):.0%} accepted" for rate in rates))
    rows = [
        (point.batch, f"{1000 * point.seconds:.2f}", *(f"{point.tokens_per_second[rate]:,.0f}" for rate in rates))
        for point in plan.rounds
    ]
    title = f"speculative rounds of {first.num_draft_tokens} draft tokens: tokens/s by acceptance rate\n"
    return title + table_text(titles, rows, num_left=0, indent="  ")


def _changes_text(changes: Sequence[Change]) -> str:
    if not changes:
        return "no single change makes it fit\n"
    first = changes[0]
    how = "counted"
    if first.compiled is not None:
        how = f"compiled: {format_bytes(first.compiled)} of {format_bytes(first.budget)}"
    lines = [f"cheapest change that fits: {first} ({how})\n"]
    for change in changes[1:]:
        lines.append(f"  or {change} ({format_bytes(change.total)} of {format_bytes(change.budget)}, counted)\n")
    return "".join(lines)
