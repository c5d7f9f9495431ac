"""Profiling a model: opening it, running the phases, summarizing the traces."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax

from jaxinfer.measure.bench.model import machine, opened, public_name
from jaxinfer.measure.bench.probe import engines_of
from jaxinfer.measure.bench.rates import Ideal
from jaxinfer.measure.profiling.ops import Programs
from jaxinfer.measure.profiling.phases import PHASES, Workload, run_phase
from jaxinfer.measure.profiling.summary import WorkModel, summarize

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
        engine = engines_of(bench.llm.engine)[0]
        if engine.spec.draft is not None and engine.spec.options.is_adaptive:  # any program may be next
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
