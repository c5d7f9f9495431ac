"""The plan: whether a model fits a place, what its programs hold there, and the least time that a step takes."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxinfer.engine.memory import activation_bytes
from jaxinfer.engine.options import EngineOptions
from jaxinfer.models import ModelConfig, Params, fit_to_mesh
from jaxinfer.planning.chips import Chip, Place
from jaxinfer.planning.counted import Counted, count
from jaxinfer.planning.layout import Layout, layout_of
from jaxinfer.planning.measure import Compiler, Measured, OutOfChipMemory, chip_compiler, measure
from jaxinfer.planning.programs import DECODE, PREFILL
from jaxinfer.planning.roofline import Rates, RooflinePoint, RoundPoint, decode_point, round_point
from jaxinfer.planning.subject import Subject
from jaxinfer.speculative import Draft, ModelDraft, NgramDraft

ProgressCallback = Callable[[str], None]


def no_progress(_: str) -> None:
    """Tells nobody."""


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """What is asked.

    Attributes:
      name: of the model. config, params: as `checkpoints_convert.abstract` gives them.
      place: chips. mesh: such as "data=2,model=4"; None is all devices for the model, as far as they divide it.
      options: of the engine; with num_pages=None the pool holds max_seqs sequences of max_model_len.
      draft: a `ModelDraft` of abstract parameters, or another kind of draft.
      batches: sequences decoded at once, for the roofline; () for 1, 8 and so on up to max_seqs.
    """

    name: str
    config: ModelConfig
    params: Params
    place: Place
    options: EngineOptions
    mesh: str | None = None
    draft: Draft | None = None
    batches: tuple[int, ...] = ()

    @property
    def layout(self) -> Layout:
        """Raises ValueError for a mesh that does not divide the model or its draft."""
        drafts = [self.draft.config] if isinstance(self.draft, ModelDraft) else []
        return layout_of(self.place, self.config, *drafts, mesh=self.mesh)

    def subject(self, *, compiles: bool = False) -> Subject:
        """Its shapes, and with `compiles` on devices that programs can be compiled for.

        Raises as `layout`, and RuntimeError where the chip's compiler is not installed.
        """
        mesh = self.layout.mesh(self.place) if compiles else self.layout.shape_mesh
        config, params = _fitted(mesh, self.config, self.params)
        draft = self.draft
        if isinstance(draft, ModelDraft):
            its_config, its_params = _fitted(mesh, draft.config, draft.params)
            draft = replace(draft, config=its_config, params=its_params)
        return Subject(self.name, config, params, self.options, self.place.chip.platform, mesh, draft)


def _fitted(mesh: Any, config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """The model as the mesh runs it, as shapes."""
    fit = fit_to_mesh(mesh, config)
    if not fit.changes:
        return config, params
    return fit.config, jax.eval_shape(fit.resize, params)


@dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Attributes:
      parts: what lies there, by name; their sum is `total`, of the program that needs most, `peak`.
      usable: what programs may use; budget: the share of it that the engine takes (memory_fraction).
      page_size, page_bytes: of a page, in tokens and bytes. planned_tokens: of cache; tokens: that fit in all.
      is_measured: whether a compiler's memory analysis says so; otherwise temporaries are a guess.
    """

    parts: dict[str, int]
    peak: str
    usable: int
    budget: int
    page_size: int
    page_bytes: int
    planned_tokens: int
    is_measured: bool

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.budget

    @property
    def tokens(self) -> int:
        """Tokens of cache that fit, the planned ones included; the null page holds none."""
        pages = (self.budget - (self.total - self.pool_bytes)) // self.page_bytes - 1
        return max(pages, 0) * self.page_size

    @property
    def remaining_tokens(self) -> int:
        """Tokens of cache that fit beside the planned ones; negative where those do not fit."""
        return self.tokens - self.planned_tokens

    @property
    def pool_bytes(self) -> int:
        return self.parts["cache"] + self.parts.get("draft cache", 0)


@dataclass(frozen=True)
class MemoryPlan:
    """Attributes:
    request: what was asked. layout: the mesh. memory: of one device. programs: by name, () where none was compiled.
    counted: by arithmetic. roofline: a decode step by batch, () where the chip's rates are not known; rounds: of
      speculation. notes: what of this is measured, what counted. seconds: of the whole plan.
    """

    request: PlanRequest
    layout: Layout
    memory: Memory
    programs: dict[str, Measured]
    counted: Counted
    roofline: tuple[RooflinePoint, ...]
    rounds: tuple[RoundPoint, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def fits(self) -> bool:
        return self.memory.fits

    @property
    def compile_seconds(self) -> float:
        return sum(one.figures.seconds for one in self.programs.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, as `jaxinfer plan --json` prints it."""
        from jaxinfer.planning.report import to_dict

        return to_dict(self)

    def __str__(self) -> str:
        from jaxinfer.planning.report import to_text

        return to_text(self)


def make_plan(
    request: PlanRequest, *, whole: bool | None = None, compiles: bool = True, told: ProgressCallback = no_progress
) -> MemoryPlan:
    """Compiles the programs for the place and reads them.

    Args:
      whole: as of `measure`. compiles: False counts by arithmetic alone, as for chips without a compiler here.

    Raises ValueError for a mesh that does not divide the model; RuntimeError where the chip's compiler is not
    installed.
    """
    start = time.perf_counter()
    chip = request.place.chip
    notes: list[str] = []
    programs: dict[str, Measured] = {}
    subject = request.subject(compiles=compiles and chip.can_compile)
    if not chip.can_compile:
        notes.append(f"no compiler for {chip.title} here: counted, not compiled; temporaries are a guess")
    elif not compiles:
        notes.append("counted, not compiled: temporaries are a guess")
    else:
        if sum(subject.parts.values()) > request.place.device_bytes:
            whole = False  # the compiler would refuse the whole program, at its end
        try:
            programs = measure(subject, chip_compiler(chip.name, subject.mesh), whole=whole, told=told)
        except OutOfChipMemory as error:
            notes.append(f"the compiler refuses even few layers: {error}; counted, not compiled")
    return assemble(request, subject, programs, chip, request.place.device_bytes, notes, start)


def plan_here(request: PlanRequest, subject: Subject, compiler: Compiler, chip: Chip | None, usable: int) -> MemoryPlan:
    """The plan for devices at hand, of which each has so many usable bytes; `chip` None is one that is not listed."""
    start = time.perf_counter()
    programs = measure(subject, compiler, whole=True)
    return assemble(request, subject, programs, chip, usable, [], start)


def assemble(
    request: PlanRequest,
    subject: Subject,
    programs: dict[str, Measured],
    chip: Chip | None,
    usable: int,
    notes: list[str],
    start: float,
) -> MemoryPlan:
    """The plan from what was compiled."""
    memory = _memory(subject, programs, usable)
    counted = count(subject, subject.config, subject.placed_params, subject.cache)
    layout = request.layout
    points, rounds = (), ()
    if chip is None:
        notes.append("the rates of this device are not known: no roofline")
    else:
        points, rounds = _roofline(request, subject, programs, counted, Rates.of(chip), layout.num_replicas)
    notes += _notes(subject, programs, bool(points))
    seconds = time.perf_counter() - start
    return MemoryPlan(request, layout, memory, programs, counted, points, rounds, tuple(notes), seconds)


def _memory(subject: Subject, programs: dict[str, Measured], usable: int) -> Memory:
    parts = dict(subject.parts)
    peak = PREFILL
    if programs:
        peak = max(programs, key=lambda name: programs[name].figures.total_bytes)
        found = programs[peak].figures
        parts["temporaries"] = round(found.temporary_bytes + found.output_bytes - found.aliased_bytes)
        parts["code"] = round(found.code_bytes)
        # Work arrays, and the padding of layouts; a draft that only looks up has neither weights nor pages.
        parts["padding and inputs"] = max(round(programs[peak].figures.total_bytes) - sum(parts.values()), 0)
    else:
        guess = activation_bytes(subject.config, subject.options, subject.dtype.itemsize)
        parts["temporaries"] = guess // subject.num_devices
    fraction = subject.options.memory_fraction
    return Memory(
        parts=parts,
        peak=peak,
        usable=usable,
        budget=int(fraction * usable),
        page_size=subject.page_size,
        page_bytes=subject.page_bytes,
        planned_tokens=(subject.num_pages - 1) * subject.page_size,
        is_measured=bool(programs),
    )


def _roofline(
    request: PlanRequest,
    subject: Subject,
    programs: dict[str, Measured],
    counted: Counted,
    rates: Rates,
    num_replicas: int,
) -> tuple[tuple[RooflinePoint, ...], tuple[RoundPoint, ...]]:
    options = subject.options
    decoding = programs.get(DECODE)
    batches = request.batches or default_batches(options.max_seqs)

    def point(batch: int, its: Counted, figures: Any) -> RooflinePoint:
        return decode_point(
            rates,
            its,
            figures,
            batch=batch,
            context=options.max_model_len,
            compiled_batch=options.max_seqs,
            compiled_context=subject.pages_per_sequence * subject.page_size,
            num_replicas=num_replicas,
        )

    points = tuple(point(batch, counted, None if decoding is None else decoding.figures) for batch in batches)
    settings = options.speculation
    if subject.draft is None or settings is None:
        return points, ()
    drafts: list[RooflinePoint | None] = [None] * len(points)
    if not isinstance(subject.draft, NgramDraft) and subject.draft_model is not None:
        config, cache = subject.draft_model[0], subject.draft_cache
        cache = subject.cache.first(config.num_layers) if cache is None else cache
        its = count(subject, config, subject.placed_draft or {}, cache)
        drafts = [point(batch, its, None) for batch in batches]
    length = settings.trees[-1].depth
    rounds = (
        round_point(rates, target, draft, num_draft_tokens=length, num_replicas=num_replicas)
        for target, draft in zip(points, drafts, strict=True)
    )
    return points, tuple(rounds)


def default_batches(max_seqs: int) -> tuple[int, ...]:
    """1, 8, 64 and so on, and all slots."""
    return (*(size for size in (1, 8, 64, 512) if size < max_seqs), max_seqs)


def _notes(subject: Subject, programs: dict[str, Measured], has_roofline: bool) -> list[str]:
    notes = []
    if programs:
        notes.append("memory: the compiler's analysis of each program")
        small = next((one for one in programs.values() if not one.is_whole), None)
        if small is not None:
            sizes = ", ".join(map(str, small.num_layers))
            count = subject.config.num_layers
            notes.append(f"of {count} layers, from programs of {sizes} layers: layers of a kind are alike")
        if subject.platform == "tpu":
            notes.append("HBM bytes: read off the compiled program, attention's from its kernels at full length")
        else:
            notes.append("HBM bytes: counted from shapes; only programs for TPUs tell theirs")
    if has_roofline:
        notes.append("FLOPs of the roofline: counted from shapes; times are lower bounds, no measured speed")
        if subject.dtype.name == "float32":
            notes.append("it computes in float32, at a fraction of the rate that the roofline takes (bf16)")
    return notes


def with_options(request: PlanRequest, **changes: Any) -> PlanRequest:
    """The request with other options of the engine."""
    return replace(request, options=replace(request.options, **changes))
