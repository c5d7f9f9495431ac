"""Compiled programs that are kept between processes."""

import contextlib
import ctypes
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.extend.backend
from jax import monitoring
from jax._src import compilation_cache as jax_cache
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lru_cache import LRUCache

from cpu_kernels import kernels
from jaxinfer.files import OLD_SECONDS, PART, cache_folder, replacing
from jaxinfer.kept_files import KeptFiles
from pallas_kernels.paged_attention import numba_cpu
from pallas_kernels.platform import num_cores

_LOG = logging.getLogger(__name__)

# JAX's names of what happens (jax._src.dispatch, jax._src.compiler).
_COMPILED_OR_READ = "/jax/core/compile/backend_compile_duration"
_READ = "/jax/compilation_cache/cache_hits"
_M_ARENA_MAX = -8  # of glibc's malloc.h
_LARGE_SECONDS = 0.05  # that a large program takes to read, at least


def enable() -> Path | None:
    """Turns on JAX's persistent compilation cache and returns its folder, readable by this user only.

    A folder set in JAX's own configuration wins; otherwise `JAXINFER_CACHE_DIR` (empty: no cache) or
    ~/.cache/jaxinfer. Raises PermissionError if another user owns it or may write there: cached programs are code. (The
    owner may be root, who can change this process anyway.)

    Entries are complete or absent, whatever the disk does, and those that cannot be read are removed. Kernels for CPUs
    are kept in a folder beside it.
    """
    kernels.keep_in(KeptFiles.of("kernels"))
    _give_memory_back()
    _replace_jax_functions()
    if (current := folder()) is not None or not jax.config.values["jax_enable_compilation_cache"]:
        return current
    path = cache_folder("xla")
    if path is None:
        return None
    for part in path.glob(f".*{PART}"):
        with contextlib.suppress(OSError):  # another process may have removed it
            if time.time() - part.stat().st_mtime > OLD_SECONDS:
                part.unlink()
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return path


compiles_beside = True  # the suite, whose processes use all cores, turns it off


def compile_attention_beside() -> None:
    """Starts a process that compiles the attention kernel of CPUs, where it is not kept, while this one loads weights.

    It takes Numba five seconds, a third of what all kernels of a model take.
    """
    # Without an interpreter of its own, this process is a program that has Python inside.
    can_start = compiles_beside and num_cores() > 1 and sys.executable and not getattr(sys, "frozen", False)
    if not can_start or jax.default_backend() != "cpu" or kernels.store is None:
        return
    if importlib.util.find_spec("numba") is None or kernels.is_kept(numba_cpu.NAME):
        return
    # -P: files of the working folder, which may be a model's, are not taken for modules.
    folder = str(Path(__file__).parents[1])
    program = f"import sys; sys.path.append({folder!r}); from {__name__} import compile_attention; compile_attention()"
    nowhere = subprocess.DEVNULL
    with contextlib.suppress(OSError):  # then it is compiled when it is needed
        process = subprocess.Popen([sys.executable, "-P", "-c", program], stdin=nowhere, stdout=nowhere, stderr=nowhere)
        kernels.expect(numba_cpu.NAME, process)


def compile_attention() -> None:
    """Compiles the attention kernel of CPUs and keeps it."""
    kernels.keep_in(KeptFiles.of("kernels"))
    numba_cpu.register()


def folder() -> Path | None:
    """The folder in use, or None: no folder, or the cache is off."""
    current = jax.config.values["jax_compilation_cache_dir"]
    return Path(current) if current and jax.config.values["jax_enable_compilation_cache"] else None


def keep_all() -> None:
    """From here on programs are kept however fast they compiled; otherwise those of less than 0.2 s are not."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class _AtomicCache(LRUCache):
    """JAX's cache of files, with entries that are written beside their place and renamed.

    JAX writes them in place: a full disk leaves a part of one, which is then read, with a warning, by every process.
    """

    def put(self, key: str, value: bytes) -> None:
        folder = Path(str(self.path))
        if self.eviction_enabled or not folder.is_dir():  # it also keeps times of access; or an object store
            super().put(key, value)
            return
        path = folder / f"{key}-cache"
        if path.exists():
            return
        try:
            with replacing(path) as file:
                file.write(value)
        except OSError as error:
            if folder not in _told:
                _told.add(folder)
                warnings.warn(f"compiled programs cannot be kept in {folder}: {error.strerror}", stacklevel=2)
            return
        if _start is not None:
            _start.uses(key)


_told: set[Path] = set()  # folders of which a warning has said that they cannot be written


class _Start:
    """A start under a name: reads the programs that the last one used first, and notes which this one does.

    One file has the cache keys of the last `_MAX_STARTS` names. It says only what may be wanted: a program is taken if
    JAX asks for its key.
    """

    def __init__(self, folder: Path, name: str):
        self._path = folder / "starts.json"
        self._name = hashlib.sha256(name.encode()).hexdigest()[:32]
        self._known = self._read().get(self._name, [])
        self._used: list[str] = []
        pool = ThreadPoolExecutor(1, "jaxinfer-programs")
        backend, devices = jax.extend.backend.get_backend(), xla_client.DeviceList(tuple(jax.devices()))
        self._futures: dict[str, Future[Any]] = {
            key: pool.submit(_read_from_cache, key, None, backend, devices) for key in self._known
        }
        pool.shutdown(wait=False)

    def take(self, key: str) -> Any:
        """The program and the seconds that it took to compile, or None if it was not read or cannot be."""
        future = self._futures.pop(key, None)
        if future is None or future.cancel():
            return None
        with contextlib.suppress(Exception):  # the caller then reads it itself, and handles the error
            program = future.result()
            return program if program[0] is not None else None
        return None

    def uses(self, key: str) -> None:
        """Notes one of the first programs that are used."""
        if len(self._used) == _MAX_READ_AHEAD or key in self._used:
            return
        self._used.append(key)
        if self._used != self._known[: len(self._used)]:
            others = {name: keys for name, keys in self._read().items() if name != self._name}
            kept = dict([*others.items(), (self._name, self._used)][-_MAX_STARTS:])
            # A full disk: the next start reads what this one did.
            with contextlib.suppress(OSError), replacing(self._path) as file:
                file.write(json.dumps(kept).encode())

    def _read(self) -> dict[str, list[str]]:
        try:
            recorded = json.loads(self._path.read_bytes())
            return {str(name): [str(key) for key in keys][:_MAX_READ_AHEAD] for name, keys in recorded.items()}
        except (OSError, ValueError, AttributeError, TypeError):  # absent or damaged
            return {}


_MAX_READ_AHEAD, _MAX_STARTS = 4, 64
_start: _Start | None = None


def begin_start(name: str) -> None:
    """Begins to read, in a thread, the programs that the last start under `name` used first. Only on a CPU with one
    device, where reading one takes a second: elsewhere a program belongs to its devices."""
    global _start
    current = folder()
    is_one_cpu = jax.default_backend() == "cpu" and jax.device_count() == 1
    _start = _Start(current, name) if is_one_cpu and current is not None and current.is_dir() else None


def end_start() -> None:
    """Ends the start: programs compiled from here on are not those that it needs first."""
    global _start
    _start = None


_read_from_cache = jax_cache.get_executable_and_time


@cache
def _replace_jax_functions() -> None:
    """Makes JAX use `_AtomicCache` and what was read ahead, and removes entries that cannot be read. JAX has no public
    way to do so."""

    def read_or_remove(cache_key: str, *arguments: Any, **options: Any) -> Any:
        start = _start
        try:
            entry = (start and start.take(cache_key)) or _read_from_cache(cache_key, *arguments, **options)
        except Exception as error:  # of zlib, zstd, or XLA
            current = folder()
            if current is None or not (path := current / f"{cache_key}-cache").is_file():
                raise
            path.unlink(missing_ok=True)
            _LOG.info("%s could not be read (%s) and is compiled again", path, error)
            return None, None
        if start is not None and entry[0] is not None:
            start.uses(cache_key)
        return entry

    jax_cache.get_executable_and_time = read_or_remove
    setattr(jax_cache, "LRUCache", _AtomicCache)  # noqa: B010 - a name that jax_cache imports


@cache
def _give_memory_back() -> None:
    """From here on the memory that a compiler has freed goes back to the system. The C library of Linux keeps it: 70 MB
    for each large program that is read, and 230 for one that is compiled. Threads that allocate in few places leave
    less behind that cannot go back: 200 MB less after eight programs."""
    if sys.platform == "win32":  # whose programs have no names of their own
        return
    library = ctypes.CDLL(None)
    if (trim := getattr(library, "malloc_trim", None)) is None:
        return
    if "MALLOC_ARENA_MAX" not in os.environ and "arena_max" not in os.environ.get("GLIBC_TUNABLES", ""):
        library.mallopt(_M_ARENA_MAX, 2)

    def record_duration(event: str, duration_secs: float, **_: object) -> None:
        if event == _COMPILED_OR_READ and duration_secs > _LARGE_SECONDS:
            trim(0)

    monitoring.register_event_duration_secs_listener(record_duration)


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
    total, lock = Counts(), threading.Lock()  # programs may be compiled in several threads

    def record_duration(event: str, duration_secs: float, **_: object) -> None:
        with lock:
            total.compiled += event == _COMPILED_OR_READ

    def happened(event: str, **_: object) -> None:
        with lock:
            total.hits += event == _READ

    monitoring.register_event_duration_secs_listener(record_duration)
    monitoring.register_event_listener(happened)
    return total
