"""Compiling the programs of a plan, with all layers or with a few, and reading memory, FLOPs and bytes from them.

Layers of one kind are alike, so a program costs a constant plus an amount per layer of each kind. Two compilations for
each kind of layer determine both. Memory of arguments and outputs is exact that way.
"""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

import jax

from jaxinfer.chips import chips
from jaxinfer.engine.abstract_work import abstract_decode_work, abstract_rounds, abstract_step_work, layer_kinds
from jaxinfer.engine.programs import paged, program_model
from jaxinfer.engine.programs.speculative import speculate
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.quantization.tree import num_bytes
from pallas_kernels import ahead_of_time
from pallas_kernels.ahead_of_time import Compilation
from pallas_kernels.hbm_traffic import HloProgram, Instruction, through_cache
from pallas_kernels.platform import num_cores


@dataclass(frozen=True)
class Planned:
    """A program with its abstract arguments.

    Attributes:
      resident_bytes: of one device, what lies in its memory while the program runs and is none of its arguments: a
        draft's weights and pages while the target works alone. Negative for arrays that are arguments twice: the layers
        of the target's that draft.
    """

    name: str
    function: Callable
    arguments: tuple[Any, ...]
    resident_bytes: int


PREFILL, DECODE, SPECULATE = "prefill", "decode", "speculate"


# Bytes that a device sends per byte of an operation's result over p devices (ring algorithms; Chan et al. 2007).
_SENT = {
    "all-reduce": lambda p: 2 * (p - 1) / p,
    "all-gather": lambda p: (p - 1) / p,
    "reduce-scatter": lambda p: p - 1,
    "all-to-all": lambda p: (p - 1) / p,
    "collective-permute": lambda p: 1,
}
_KERNEL = re.compile(r"paged_attention_\d+_queries")
_SCOPE = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class ProgramFigures:
    """One program on one device.

    Attributes:
      argument_bytes, output_bytes, aliased_bytes, temporary_bytes, code_bytes: from the compiler's memory analysis.
      flops: counted by the compiler for one run in which loops run once; None if the compiler does not count them.
      moved_bytes: between HBM and the chip in such a run, without attention and without reads that a GPU's cache
        serves. kernel_bytes: moved by attention's kernels if every sequence is as long as its page table. Both are
        None for CPUs.
      host_bytes: copied from the host's memory in such a run.
      num_collectives, sent_bytes: operations between devices, and the bytes that a device sends in them.
      resident_bytes: see `programs.Planned`. seconds: compilation time.
    """

    argument_bytes: float
    output_bytes: float
    aliased_bytes: float
    temporary_bytes: float
    code_bytes: float
    flops: float | None
    moved_bytes: float | None
    kernel_bytes: float | None
    num_collectives: float
    sent_bytes: float
    resident_bytes: float = 0.0
    seconds: float = 0.0
    host_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """Bytes in use on a device while the program runs."""
        held = self.argument_bytes + self.resident_bytes + self.output_bytes - self.aliased_bytes
        return held + self.temporary_bytes + self.code_bytes

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "total_bytes": self.total_bytes}


def read_figures(compilation: Compilation, num_devices: int, platform: str, l2_bytes: int = 0) -> ProgramFigures:
    """Reads the figures of a program that was compiled for `num_devices` devices with a cache of `l2_bytes` bytes."""
    program, moved, kernels = None, None, None
    if platform != "cpu" or num_devices > 1:
        program = HloProgram(compilation.program.as_text())
    if program is not None and platform != "cpu":
        moves = through_cache(program.moves(), l2_bytes)
        attention = [move for move in moves if is_attention(move.instruction)]
        every = sum(move.num_bytes for move in attention)
        moved = sum(move.num_bytes for move in moves) - every
        kernels = every / num_kernels([move.instruction for move in attention])
    exchanged = list(_exchanges(program, num_devices)) if program is not None and num_devices > 1 else []
    return ProgramFigures(
        argument_bytes=compilation.argument_bytes,
        output_bytes=compilation.output_bytes,
        aliased_bytes=compilation.aliased_bytes,
        temporary_bytes=compilation.temporary_bytes,
        code_bytes=compilation.code_bytes,
        flops=compilation.cost.get("flops"),
        moved_bytes=moved,
        kernel_bytes=kernels,
        num_collectives=len(exchanged),
        sent_bytes=sum(exchanged),
        seconds=compilation.seconds,
        host_bytes=0 if program is None else program.host_bytes(),
    )


def is_attention(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and "paged_attention" in instruction.text


def num_kernels(attention: Sequence[Instruction]) -> float:
    """Kernels of a layer: a step has one for short queries and one for long ones, and a sequence's pages are read by
    one of them. A GPU's have no names of their own; those of a layer have one scope."""
    kinds = {name for call in attention for name in _KERNEL.findall(call.text)[:1]}
    scopes = {name for call in attention for name in _SCOPE.findall(call.text)[:1]}
    return len(kinds) or len(attention) / max(len(scopes), 1) or 1


def _exchanges(program: HloProgram, num_devices: int):
    """Bytes that a device sends in each operation between devices of one run."""
    for instruction, times in program.executed():
        opcode = instruction.opcode.removesuffix("-start")
        if opcode not in _SENT:
            continue
        # The first results of an asynchronous gather or scatter are its operands.
        count = max(1, len(instruction.operands))
        first = count if instruction.opcode in ("all-gather-start", "reduce-scatter-start") else 0
        size = sum(array.num_bytes for array in instruction.results[first : first + count])
        for _ in range(times):
            yield size * _SENT[opcode](num_devices)


def extrapolate(base: ProgramFigures, more: Sequence[tuple[ProgramFigures, float]]) -> ProgramFigures:
    """base + sum of factor * (larger - base): the figures of the program with all layers, from those of small ones.

    `seconds` is the sum of all compilation times. A figure that one of them lacks is None.
    """
    values: dict[str, float | None] = {}
    for field in fields(base):
        first = getattr(base, field.name)
        others = [(getattr(larger, field.name), factor) for larger, factor in more]
        if first is None or any(value is None for value, _ in others):
            values[field.name] = None
        else:
            values[field.name] = first + sum(factor * (value - first) for value, factor in others)
    seconds = base.seconds + sum(larger.seconds for larger, _ in more)
    every = [base, *(larger for larger, _ in more)]
    # A smaller program may need more scratch memory than a larger one: at least the largest that was seen.
    temporaries = max([values["temporary_bytes"] or 0.0, *(figures.temporary_bytes for figures in every)])
    # Code does not grow with the layers: beyond some size the compiler stops inlining (decoding with Llama-3-8B for
    # v6e: 9, 13, 27 and 10 MB with 2, 4, 12 and 32 layers).
    code = max(figures.code_bytes for figures in every)
    values |= {"temporary_bytes": temporaries, "code_bytes": code}
    return replace(base, **{**values, "seconds": seconds})  # type: ignore[arg-type]


ProgressCallback = Callable[[str], None]
# Compiles (function, arguments) for a chip or for this machine.
Compiler = Callable[[Callable, tuple[Any, ...]], ahead_of_time.Compilation]
# Layers of each kind in the smaller program, and additional layers of one kind in the larger. With a single layer,
# compilers keep arrays in fast memory that they do not keep there with many.
BASE_LAYERS, MORE_LAYERS = 2, 2
# Compiling what comes before and after the layers takes as long as about so many layers (mostly sampling: 25 s of a
# decode step for v6e, against 0.7 s a layer). Two small programs pay it twice, the whole program once.
LAYERS_OF_BASE = 36
# Concurrent compilations; each uses about one core.
MAX_WORKERS = 2


class OutOfChipMemory(RuntimeError):
    """The compiler refused a program that needs more memory than the chip has."""


@dataclass(frozen=True)
class CompiledProgram:
    """The figures of a program, and the numbers of layers of the programs that were compiled for them."""

    figures: ProgramFigures
    num_layers: tuple[int, ...]
    is_whole: bool


def chip_compiler(chip: str, mesh: Any, compiler_options: Mapping[str, Any] | None = None) -> Compiler:
    """A compiler for a chip, ahead of time; it raises OutOfChipMemory where the program does not fit."""

    def compile_one(function: Callable, arguments: tuple[Any, ...]) -> ahead_of_time.Compilation:
        try:
            options = {"chip_mesh": mesh, "compiler_options": compiler_options}
            return ahead_of_time.compile_for(chip, function, *arguments, **options)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                raise OutOfChipMemory(str(error).partition("\n")[0]) from None
            raise

    return compile_one


def compile_programs(
    spec: EngineSpec,
    compiler: Compiler,
    *,
    whole: bool | None = None,
    only: str | None = None,
    progress: ProgressCallback = lambda step: None,
) -> dict[str, CompiledProgram]:
    """Compiles a spec's programs; returns their figures by name.

    Args:
      whole: compile all layers (True) or a few of each kind (False); None takes the faster of the two.
      only: compile the program of this name only.
      progress: called with a description before each compilation.

    Raises OutOfChipMemory if not even a few layers fit.
    """
    variants = _variants(spec)
    if whole is None:
        # The small programs cost their layers, and the constant part of a program once more for each variant.
        whole = variants is None or (
            spec.config.num_layers <= sum(variants.sizes) + LAYERS_OF_BASE * len(variants.larger)
        )
    programs = {name: program for name, program in planned_programs(spec).items() if only in (None, name)}
    chip = chips().get(spec.chip or "")
    l2_bytes = (chip and chip.l2_bytes) or 0

    def compile_one(program: Planned, num_layers: int) -> ProgramFigures:
        progress(f"{program.name}, {num_layers} layers")
        compilation = compiler(program.function, program.arguments)
        figures = read_figures(compilation, spec.num_devices, spec.platform, l2_bytes)
        return replace(figures, resident_bytes=program.resident_bytes)

    def as_base(base: "Future[ProgramFigures]", program: Planned) -> ProgramFigures:
        return replace(base.result(), resident_bytes=program.resident_bytes, seconds=0.0)

    with contextlib.ExitStack() as stack:
        executor = ThreadPoolExecutor(min(MAX_WORKERS, num_cores()), thread_name_prefix="compile")
        stack.callback(executor.shutdown, cancel_futures=True)
        if whole or variants is None:
            count = spec.config.num_layers
            futures = {name: executor.submit(compile_one, program, count) for name, program in programs.items()}
            return {name: CompiledProgram(future.result(), (count,), True) for name, future in futures.items()}
        base_layers, started = variants.base.config.num_layers, {}
        for name in programs:
            base = executor.submit(compile_one, planned_programs(variants.base)[name], base_layers)
            larger = []
            for variant, factor in variants.larger:
                program, count = planned_programs(variant)[name], variant.config.num_layers
                if count == base_layers and name != SPECULATE:  # only rounds run the draft's layers
                    larger.append((executor.submit(as_base, base, program), factor))
                else:
                    larger.append((executor.submit(compile_one, program, count), factor))
            started[name] = base, larger
        return {
            name: CompiledProgram(
                extrapolate(base.result(), [(future.result(), factor) for future, factor in larger]),
                variants.sizes,
                False,
            )
            for name, (base, larger) in started.items()
        }


@dataclass(frozen=True)
class _Variants:
    """Small subjects: `base` has a few layers of each kind; each of `larger` has more of one kind, and a factor: the
    layers of that kind that `base` lacks, divided by those that this one has more."""

    base: EngineSpec
    larger: list[tuple[EngineSpec, float]]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of layers."""
        return tuple(spec.config.num_layers for spec in (self.base, *(smaller for smaller, _ in self.larger)))


def _variants(spec: EngineSpec) -> _Variants | None:
    """None if the model has too few layers to leave any out."""
    kinds = _layer_kinds(spec)
    drafted = [kind for model in spec.draft_models for kind in layer_kinds(*model).values()]
    base = _few(kinds, None)
    if len(base) >= spec.config.num_layers:
        return None
    if spec.draft.in_cache:  # first layers of the target's
        return _variants_of_layers_draft(spec, kinds)
    draft_base = _few(drafted, None) if drafted else None
    larger = []
    for index, of_kind in enumerate(kinds):
        layers = _few(kinds, index)
        if surplus := len(layers) - len(base):
            factor = (len(of_kind) - _count(base, of_kind)) / surplus
            larger.append((spec.with_layers(layers, draft_base), factor))
    for index, of_kind in enumerate(drafted):
        layers = _few(drafted, index)
        if draft_base is not None and (surplus := len(layers) - len(draft_base)):
            factor = (len(of_kind) - _count(draft_base, of_kind)) / surplus
            larger.append((spec.with_layers(base, layers), factor))
    return _Variants(spec.with_layers(base, draft_base), larger)


def _variants_of_layers_draft(spec: EngineSpec, kinds: list[list[int]]) -> _Variants | None:
    """For a draft that is the target's first layers: a variant with one more of them, others with more layers."""
    wanted = sum(config.num_layers for config, _ in spec.draft_models)
    base, one, two = _few(kinds, None), (0,), (0, 1)
    if len(base) <= len(two):  # a draft has fewer layers than its target
        base = sorted({*base, *max(kinds, key=len)[: len(two) + 1]})
    larger = [(spec.with_layers(base, two), float(wanted - 1))]
    for of_kind in kinds:
        first = _count(base, of_kind)
        layers = sorted({*base, *of_kind[: first + MORE_LAYERS]})
        if surplus := len(layers) - len(base):
            larger.append((spec.with_layers(layers, one), (len(of_kind) - first) / surplus))
    return _Variants(spec.with_layers(base, one), larger)


def _layer_kinds(spec: EngineSpec) -> list[list[int]]:
    """The layers by kind; layers whose pages a policy treats differently are of different kinds."""
    kinds: dict[tuple[int, str], list[int]] = {}
    for number, kind in enumerate(layer_kinds(spec.config, spec.params).values()):
        for layer in kind:
            kinds.setdefault((number, spec.layers[layer].kind), []).append(layer)
    return list(kinds.values())


def _few(kinds: Sequence[list[int]], more: int | None) -> list[int]:
    """Layer numbers in order: BASE_LAYERS of each kind, and MORE_LAYERS in addition of the kind with index `more`."""
    counts = (BASE_LAYERS + (MORE_LAYERS if index == more else 0) for index in range(len(kinds)))
    return sorted(layer for of_kind, count in zip(kinds, counts, strict=True) for layer in of_kind[:count])


def _count(layers: Sequence[int], of_kind: list[int]) -> int:
    return len(set(layers) & set(of_kind))


def planned_programs(spec: EngineSpec) -> dict[str, Planned]:
    """By name: "prefill", a step of the most tokens; "decode" of all slots; "speculate" with the longest draft.

    Raises ValueError for a mesh that does not divide the model.
    """
    model, weights = program_model(spec.config, spec.placed_params, spec.program_mesh, spec.policy, spec.taps)
    common = (model, weights, spec.cache, *spec.slots)
    tables = spec.pages_per_sequence, len(spec.windows), spec.ends_prompts
    resident = num_bytes(spec.own_draft_params) + num_bytes(spec.draft_cache)
    lengths = {"has_prompt_lengths": spec.policy.needs_prompt_lengths}
    work = abstract_step_work(spec.token_buckets[-1], spec.step_slots[-1], *tables, **lengths)
    models, draft_weights = _drafting(spec)
    observer = spec.observer(models, draft_weights)
    observed = observer, observer and spec.draft_cache
    step = (model, weights, spec.cache, spec.slots[0], work, spec.is_deterministic, None, *observed)
    decoding = abstract_decode_work(spec.decode_slots[-1], *tables)
    static = spec.steps_per_dispatch, spec.tables, *(spec.determinism.rows or (None,))
    decode = (*common, decoding, *static, *observed)
    programs = [Planned(PREFILL, paged.step, step, resident), Planned(DECODE, paged.decode, decode, resident)]
    if spec.trees:
        twice = num_bytes(spec.own_draft_params) - num_bytes(spec.placed_draft)  # weights that are the target's
        programs.append(Planned(SPECULATE, speculate, _rounds(spec, model, weights), twice))
    return {program.name: program for program in programs}


def _drafting(spec: EngineSpec) -> tuple[list[Any], tuple[Any, ...]]:
    """The models of a draft as programs take them, and their leaves."""
    models = [program_model(config, spec.placed_draft, spec.program_mesh) for config, _ in spec.draft_models]
    return [model for model, _ in models], tuple(leaf for _, leaves in models for leaf in leaves)


def _rounds(spec: EngineSpec, model: Any, weights: Any) -> tuple[Any, ...]:
    models, draft_weights = _drafting(spec)
    drafter = spec.drafters(*models)[len(spec.trees) - 1]
    tables = spec.pages_per_sequence, len(spec.windows), spec.ends_prompts
    work = abstract_rounds(spec.decode_slots[-1], *tables)
    arrays = spec.cache, spec.draft_cache, *spec.slots
    return model, weights, drafter, draft_weights, *arrays, work, spec.max_rounds, spec.tables
