"""The model that is measured, opened and warm: how long that took, and what its least times are."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxinfer import compilation_cache
from jaxinfer.async_engine import AsyncEngine
from jaxinfer.llm import LLM
from jaxinfer.loading import LiveModel, load_shapes
from jaxinfer.measure.bench.probe import engines_of, peak_resident_bytes
from jaxinfer.measure.bench.rates import Ideal
from jaxinfer.models import init_params


@dataclass(frozen=True)
class Start:
    """Seconds to load the model and make its engine, to compile its programs, and what of these was compiled or read
    from the cache; the process's resident bytes then."""

    load_seconds: float
    compile_seconds: float
    programs: int
    compiled: int
    from_cache: int
    peak_rss_bytes: int


@dataclass(frozen=True)
class Bench:
    """An open model. `engine` serves clients where the runs need that; its `llm` is this one."""

    llm: LLM
    engine: AsyncEngine | None
    start: Start
    ideal: Ideal

    @property
    def vocab_size(self) -> int:
        """Ids that a prompt can have: those of the tokenizer where there is one, for a model may have more rows."""
        tokenizer = self.llm.tokenizer
        rows = self.llm.config.vocab_size
        return rows if tokenizer is None else min(rows, tokenizer.vocab_size)


def random_model(model: str, *, dtype: str = "auto", revision: str | None = None) -> LiveModel:
    """A model of random weights from what describes it: a config.json alone will do. Raises as `load_shapes`."""
    if dtype == "auto" and jax.default_backend() == "cpu":
        dtype = "float32"
    config, _ = load_shapes(model, dtype=dtype, revision=revision)
    return config, init_params(config, jax.random.key(0))


@contextlib.contextmanager
def opened(
    model: str,
    arguments: dict[str, Any],
    *,
    random_weights: bool = False,
    serves: bool = False,
    warms_up: bool = True,
    sizes: dict[str, int] | None = None,
) -> Iterator[Bench]:
    """Opens a model with these arguments of `LLM`, compiles every program, measures the roofline; closes it after.

    Args:
      random_weights: from the configuration alone. serves: as an `AsyncEngine`, for many clients. warms_up: whether
        programs are compiled at all here.
      sizes: of the roofline's arrays, as `rates.measure` takes them.

    Raises ValueError for cache="contiguous", and what `LLM` raises.
    """
    if arguments.get("cache", "paged") != "paged":
        raise ValueError("bench measures cache='paged' only")
    begin = time.perf_counter()
    source: Any = model
    if random_weights:
        source = random_model(model, dtype=arguments.get("dtype", "auto"), revision=arguments.pop("revision", None))
    engine = AsyncEngine(source, **arguments) if serves else None
    llm = LLM(source, **arguments) if engine is None else engine.llm
    try:
        loaded = time.perf_counter()
        with compilation_cache.counting() as counts:
            num_programs = llm.warm_up(use_tqdm=False) if warms_up else 0
        start = Start(
            load_seconds=loaded - begin,
            compile_seconds=time.perf_counter() - loaded,
            programs=num_programs,
            compiled=counts.compiled,
            from_cache=counts.hits,
            peak_rss_bytes=peak_resident_bytes(),
        )
        engines = engines_of(llm.engine)
        yield Bench(llm, engine, start, Ideal.of(engines[0], len(engines), **(sizes or {})))
    finally:
        llm.close() if engine is None else _closed(engine)


def _closed(engine: AsyncEngine) -> None:
    import asyncio

    asyncio.run(engine.close())


def machine() -> dict[str, Any]:
    """What ran: kind and number of devices, versions, cores. No name of the machine, no path."""
    import os
    import platform

    from jaxinfer import __version__

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
        "num_cores": cores,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxinfer": __version__,
    }


def public_name(text: str) -> str:
    """A model as results name it: of a path its last part, so that no result tells where it lay."""
    path = Path(text)
    return path.name if path.is_absolute() or path.exists() or text.startswith((".", "~")) else text
