"""A profile from a model's name to all its figures."""

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
from jaxinfer.measure.profiling.needed import Model
from jaxinfer.measure.profiling.ops import Programs
from jaxinfer.measure.profiling.phases import PHASES, Workload, run_phase
from jaxinfer.measure.profiling.summary import summarize

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
    told: Callable[[str], None] = lambda step: None,
) -> dict[str, Any]:
    """Profiles the phases of a model that `LLM` opens with these arguments; figures as JSON values.

    Args:
      folder: where traces are kept, one folder for each phase; None keeps none. sizes: as `rates.measure` takes them.

    Raises what `LLM` raises, and as `run_phase` and `summarize`.
    """
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "version": VERSION,
        "model": public_name(model),
        "workload": asdict(workload),
        "machine": machine(),
    }
    told("opening the model, measuring the roofline")
    with (
        _named_programs(),
        _folder(folder) as traces,
        opened(model, arguments, random_weights=random_weights, warms_up=False, sizes=sizes) as bench,
    ):
        engine = engines_of(bench.llm.engine)[0]
        settings = engine.options.speculation
        if settings is not None and settings.is_adaptive:  # any of several programs may be next
            told("compiling")
            bench.llm.warm_up(use_tqdm=False)
        found = [run_phase(bench, name, workload, traces / name, told) for name in phases]
        told("measuring the roofline once more, reading the traces")
        # What else ran on the machine may have slowed down one of the two.
        again = Ideal.of(engine, **(sizes or {})).measured
        ideal = replace(bench.ideal, measured=bench.ideal.measured.best(again))
        result["roofline"] = ideal.measured.to_dict()
        needs = Model(engine, ideal).needs
        programs = Programs()
        result["phases"] = [summarize(phase, programs, needs) for phase in found]
    return result


@contextlib.contextmanager
def _named_programs() -> Iterator[None]:
    """The cache of compiled programs is asked for such as name the operations as this code does: JAX leaves names out
    of its keys, and an older program would tell nothing of layers."""
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
