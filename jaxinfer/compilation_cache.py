"""Where compiled programs are kept between processes."""

import contextlib
import importlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax
from jax import monitoring

# JAX's names of what happens (jax._src.dispatch, jax._src.compiler).
_COMPILED_OR_READ = "/jax/core/compile/backend_compile_duration"
_READ = "/jax/compilation_cache/cache_hits"


def enable() -> Path | None:
    """Turns on JAX's persistent compilation cache and returns its folder, readable by this user only.

    A folder set in JAX's own configuration wins; otherwise `JAXINFER_CACHE_DIR` (empty: no cache) or
    ~/.cache/jaxinfer. Raises PermissionError if others may write there: cached programs are code.
    """
    if (current := folder()) is not None:
        return current
    setting = os.environ.get("JAXINFER_CACHE_DIR")
    if setting == "":
        return None
    root = Path(setting) if setting else Path.home() / ".cache" / "jaxinfer"
    path = root / "xla"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = path.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{path} is writable by others (mode {stat.filemode(mode)}): chmod 700 it or set JAXINFER_CACHE_DIR"
        )
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return path


def folder() -> Path | None:
    """The folder in use, or None."""
    current = jax.config.values["jax_compilation_cache_dir"]
    return Path(current) if current else None


def keep_all() -> None:
    """From here on programs are kept however fast they compiled; otherwise those of less than 0.2 s are not."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def fix_trace_context() -> None:
    """Imports Pallas, so that a later import of it does not make programs trace and compile again.

    In JAX 0.12 the import adds a value to the context that every traced program is looked up by.
    """
    importlib.import_module("jax.experimental.pallas.tpu")


@dataclass
class Counts:
    """Programs that were asked for: `compiled`, or read from the cache, `hits`."""

    compiled: int = 0
    hits: int = 0


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Counts the programs of all threads while the block runs; the counts are final when it ends."""
    total, counts = _listening(), Counts()
    before = Counts(total.compiled, total.hits)
    try:
        yield counts
    finally:
        counts.hits = total.hits - before.hits
        counts.compiled = total.compiled - before.compiled - counts.hits


@cache
def _listening() -> Counts:
    """All since the first call; here `compiled` counts those that were read, too. JAX has no way to stop listening."""
    total = Counts()

    def record_duration(event: str, duration_secs: float, **_: object) -> None:
        total.compiled += event == _COMPILED_OR_READ

    def happened(event: str, **_: object) -> None:
        total.hits += event == _READ

    monitoring.register_event_duration_secs_listener(record_duration)
    monitoring.register_event_listener(happened)
    return total
