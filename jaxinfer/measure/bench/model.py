"""Opening the model to measure: its loading and compilation times, and the roofline of this machine."""

import asyncio
import contextlib
import json
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxinfer import __version__, compilation_cache
from jaxinfer.api.async_engine import AsyncEngine
from jaxinfer.api.llm import LLM
from jaxinfer.loading import LiveModel, load_shapes
from jaxinfer.measure.bench.probe import peak_resident_bytes
from jaxinfer.measure.bench.rates import Ideal
from jaxinfer.models import init_params
from pallas_kernels.platform import num_cores


@dataclass(frozen=True)
class Start:
    """Seconds to load the model and create its engine, and to compile its programs; how many programs were compiled or
    read from the cache; the peak of the process's resident bytes."""

    load_seconds: float
    compile_seconds: float
    programs: int
    compiled: int
    from_cache: int
    peak_rss_bytes: int


@dataclass(frozen=True)
class Bench:
    """An open model. `engine` is None unless it was opened to serve clients; its `llm` is this one."""

    llm: LLM
    engine: AsyncEngine | None
    start: Start
    ideal: Ideal

    @property
    def vocab_size(self) -> int:
        """Number of ids for random prompts: the tokenizer's, since a model may have more rows, else the model's."""
        tokenizer = self.llm.tokenizer
        rows = self.llm.config.vocab_size
        return rows if tokenizer is None else min(rows, tokenizer.vocab_size)


def random_model(model: str, *, dtype: str = "auto", revision: str | None = None) -> LiveModel:
    """A model with random weights from a configuration; a config.json is enough. Raises as `load_shapes`."""
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
    """Opens a model with these arguments of `LLM`, compiles its programs, measures the roofline; closes it at the end.

    Args:
      random_weights: use only the configuration. serves: open an `AsyncEngine`, for many clients. warms_up: False
        compiles nothing here.
      sizes: of the arrays for measuring the roofline, as in `rates.measure_rates`.

    Raises ValueError for cache="contiguous", and as `LLM`.
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
        engines = llm.engine.engines
        yield Bench(llm, engine, start, Ideal.of(engines[0], len(engines), **(sizes or {})))
    finally:
        llm.close() if engine is None else asyncio.run(engine.close())


def machine() -> dict[str, Any]:
    """Kind and number of devices, versions and cores, without the machine's name or any path."""
    return {
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
        "num_cores": num_cores(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxinfer": __version__,
    }


def public_name(text: str) -> str:
    """A model's name for results: only the last part of a path."""
    path = Path(text)
    return path.name if path.is_absolute() or path.exists() or text.startswith((".", "~")) else text


# Options that may be paths.
_PATHS = ("tokenizer", "draft", "dataset", "texts", "calibration")


def public_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are given, as JSON values; of paths only the last part."""
    values = {name: value for name, value in options.items() if value not in (None, [])}
    for name in values.keys() & set(_PATHS):
        path = values[name]
        values[name] = [public_name(str(each)) for each in path] if isinstance(path, list) else public_name(str(path))
    return json.loads(json.dumps(values))
