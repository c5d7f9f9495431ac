"""Compiling the programs of a plan, whole or from a few layers.

Layers of one kind are alike, so a program of all layers is, but for what happens before and after them, so many times
one of few: two compilations for each kind of layer tell both parts. Memory of arguments and outputs is exact so.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxinfer.planning.figures import Figures, combined, figures_of
from jaxinfer.planning.programs import SPECULATE, Planned, planned_programs
from jaxinfer.planning.subject import Subject, layer_kinds
from pallas_kernels import ahead_of_time

# Compiler of (function, arguments): what a chip, or this machine, makes of a program.
Compiler = Callable[[Callable, tuple[Any, ...]], ahead_of_time.Compilation]
# Layers of each kind in the smaller program, and how many more of one kind in the larger. With a single layer compilers
# keep in fast memory what they do not with many.
BASE_LAYERS, MORE_LAYERS = 2, 2
# What comes before and after the layers takes as long to compile as about so many of them (sampling above all: of a
# decode step for v6e, 25 s of processor time beside 0.7 s a layer). Two small programs pay it twice, a whole one once.
LAYERS_OF_BASE = 36
# Compilations at once. Each runs on about one core.
MAX_WORKERS = 2


class OutOfChipMemory(RuntimeError):
    """The compiler refused a program that needs more memory than the chip has."""


@dataclass(frozen=True)
class Measured:
    """The figures of a program. `num_layers`: of the programs that were compiled, the whole one or the small ones."""

    figures: Figures
    num_layers: tuple[int, ...]
    is_whole: bool


def chip_compiler(chip: str, mesh: Any) -> Compiler:
    """Compiles ahead of time for a chip, raising OutOfChipMemory where the compiler does."""

    def compile_one(function: Callable, arguments: tuple[Any, ...]) -> ahead_of_time.Compilation:
        try:
            return ahead_of_time.compile_for(chip, function, *arguments, chip_mesh=mesh)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                raise OutOfChipMemory(str(error).partition("\n")[0]) from None
            raise

    return compile_one


def measure(
    subject: Subject,
    compiler: Compiler,
    *,
    whole: bool | None = None,
    only: str | None = None,
    told: Callable[[str], None] = lambda name: None,
) -> dict[str, Measured]:
    """The figures of every program by name.

    Args:
      whole: compile all layers (True), or few of each kind (False); None takes few where that leaves out many.
      only: the one program to compile, by name.
      told: is called with a word before each compilation.

    Raises OutOfChipMemory where even few layers do not fit.
    """
    variants = _variants(subject)
    if whole is None:
        whole = variants is None or subject.config.num_layers <= _cost(variants)
    programs = {name: one for name, one in planned_programs(subject).items() if only in (None, name)}
    with _Compilations(subject, compiler, told) as compilations:
        if whole or variants is None:
            wholes = {name: compilations.start(one, subject) for name, one in programs.items()}
            count = (subject.config.num_layers,)
            return {name: Measured(found.result(), count, True) for name, found in wholes.items()}
        started = {name: _start(name, variants, compilations) for name in programs}
        return {
            name: Measured(
                combined(base.result(), [(one.result(), factor) for one, factor in larger]),
                variants.sizes,
                False,
            )
            for name, (base, larger) in started.items()
        }


def _start(name: str, variants: "_Variants", compilations: "_Compilations") -> Any:
    """Starts compiling the small programs of one name."""
    base = compilations.start(planned_programs(variants.base)[name], variants.base)
    larger = []
    for smaller, factor in variants.larger:
        one = planned_programs(smaller)[name]
        if smaller.config.num_layers == variants.base.config.num_layers and name != SPECULATE:
            found: Any = _Beside(base, one.resident_bytes)  # of a draft's layers only rounds know
        else:
            found = compilations.start(one, smaller)
        larger.append((found, factor))
    return base, larger


@dataclass(frozen=True)
class _Beside:
    """The result of a compilation, beside which something else lies there."""

    future: "Future[Figures]"
    resident_bytes: int

    def result(self) -> Figures:
        return replace(self.future.result(), resident_bytes=self.resident_bytes, seconds=0.0)


class _Compilations:
    """Compilations side by side; leaving drops those that have not begun."""

    def __init__(self, subject: Subject, compiler: Compiler, told: Callable[[str], None]):
        self._is_tpu, self._num_devices = subject.platform == "tpu", subject.num_devices
        self._compiler, self._told = compiler, told
        self._executor = ThreadPoolExecutor(min(MAX_WORKERS, os.cpu_count() or 1), thread_name_prefix="compile")

    def start(self, one: Planned, subject: Subject) -> "Future[Figures]":
        return self._executor.submit(self._compile, one, subject.config.num_layers)

    def _compile(self, one: Planned, num_layers: int) -> Figures:
        self._told(f"{one.name}, {num_layers} layers")
        found = self._compiler(one.function, one.arguments)
        figures = figures_of(found, self._num_devices, is_tpu=self._is_tpu)
        return replace(figures, resident_bytes=one.resident_bytes)

    def __enter__(self) -> "_Compilations":
        return self

    def __exit__(self, *exception: object) -> None:
        self._executor.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class _Variants:
    """Small subjects: one of few layers of each kind, and for each kind one of more, with what its surplus counts."""

    base: Subject
    larger: list[tuple[Subject, float]]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Layers of each."""
        return tuple(one.config.num_layers for one in (self.base, *(smaller for smaller, _ in self.larger)))


def _cost(variants: _Variants) -> int:
    """What the small programs cost to compile more than the whole one's base, in layers."""
    return sum(variants.sizes) + LAYERS_OF_BASE * len(variants.larger)


def _variants(subject: Subject) -> _Variants | None:
    """None where there are too few layers of some kind to leave any out."""
    kinds = list(layer_kinds(subject.config, subject.params).values())
    drafted = [] if subject.draft_model is None else list(layer_kinds(*subject.draft_model).values())
    base = _few(kinds, None)
    if len(base) >= subject.config.num_layers:
        return None
    if subject.draft_model is not None and not subject.has_own_draft:  # first layers of the target's
        return _variants_of_layers_draft(subject, kinds)
    draft_base = _few(drafted, None) if drafted else None
    larger = []
    for index, of_kind in enumerate(kinds):
        layers = _few(kinds, index)
        if surplus := len(layers) - len(base):
            factor = (len(of_kind) - _count(base, of_kind)) / surplus
            larger.append((subject.with_layers(layers, draft_base), factor))
    for index, of_kind in enumerate(drafted):
        layers = _few(drafted, index)
        if draft_base is not None and (surplus := len(layers) - len(draft_base)):
            factor = (len(of_kind) - _count(draft_base, of_kind)) / surplus
            larger.append((subject.with_layers(base, layers), factor))
    return _Variants(subject.with_layers(base, draft_base), larger)


def _variants_of_layers_draft(subject: Subject, kinds: list[list[int]]) -> _Variants | None:
    """A draft that is the target's first layers: one more of them, and more of the target's."""
    wanted = subject.draft_model[0].num_layers if subject.draft_model is not None else 0
    base, one, two = _few(kinds, None), (0,), (0, 1)
    if len(base) <= len(two):  # a draft has fewer layers than its target
        base = sorted({*base, *max(kinds, key=len)[: len(two) + 1]})
    larger = [(subject.with_layers(base, two), float(wanted - 1))]
    for of_kind in kinds:
        first = _count(base, of_kind)
        layers = sorted({*base, *of_kind[: first + MORE_LAYERS]})
        if surplus := len(layers) - len(base):
            larger.append((subject.with_layers(layers, one), (len(of_kind) - first) / surplus))
    return _Variants(subject.with_layers(base, one), larger)


def _few(kinds: Sequence[list[int]], more: int | None) -> list[int]:
    """Layers, in their order: some of each kind, and some more of kind number `more`."""

    def chosen() -> Iterator[int]:
        for index, of_kind in enumerate(kinds):
            yield from of_kind[: BASE_LAYERS + (MORE_LAYERS if index == more else 0)]

    return sorted(chosen())


def _count(layers: Sequence[int], of_kind: list[int]) -> int:
    return len(set(layers) & set(of_kind))
