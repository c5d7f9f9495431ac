import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from jax._src import compiler

from cpu_kernels import kernels
from jaxinfer import compilation_cache
from jaxinfer.kept_files import KeptFiles
from pallas_kernels.paged_attention import numba_cpu

# Compiles one program with the cache on; the entries below are those of a process of its own.
SCRIPT = """
import resource, sys, warnings
from jaxinfer import compilation_cache
folder = compilation_cache.enable()
compilation_cache.keep_all()
import jax, jax.numpy as jnp
warnings.simplefilter("always")
program, other = jax.jit(lambda x: jnp.sort(x) @ x), jax.jit(lambda x: jnp.cumsum(x).min() + 1)
x = jax.device_put(__import__("numpy").ones(8, "float32"))
if sys.argv[1] != "0":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))  # as a disk that is full
with compilation_cache.counting() as counts:
    print(float(program(x)), float(other(x)))
print(counts.compiled, counts.hits)
"""


def run(folder, size_limit=0):
    environment = os.environ | {"JAXINFER_CACHE_DIR": str(folder), "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-c", SCRIPT, str(size_limit)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    values, counts = done.stdout.splitlines()
    assert values == "8.0 2.0"
    return tuple(map(int, counts.split())), [line for line in done.stderr.splitlines() if "Warning" in line]


def entries(folder):
    return {path.name: path.stat().st_size for path in (folder / "xla").iterdir()}


def test_entries_that_cannot_be_read_are_compiled_and_kept_again(tmp_path):
    first, _ = run(tmp_path)
    whole = entries(tmp_path)
    assert first == (2, 0)
    assert len(whole) == 2
    (one, other) = (tmp_path / "xla" / name for name in whole)
    one.write_bytes(one.read_bytes()[: one.stat().st_size // 2])
    other.write_bytes(b"")
    assert run(tmp_path) == ((2, 0), [])
    assert entries(tmp_path).keys() == whole.keys()
    assert run(tmp_path) == ((0, 2), [])


def test_a_full_disk_leaves_no_part_of_an_entry_and_one_warning(tmp_path):
    counts, warned = run(tmp_path, size_limit=500)
    assert counts == (2, 0)
    assert entries(tmp_path) == {}
    assert len(warned) == 1
    assert f"compiled programs cannot be kept in {tmp_path / 'xla'}: File too large" in warned[0]


# As above, in a start with a name. Prints which programs were read ahead, and how many of them were not wanted.
START = (
    SCRIPT.replace("with compilation", "compilation_cache.begin_start(sys.argv[2])\nwith compilation")
    + """
print(*(key.split("-")[0] for key in compilation_cache._start._known), len(compilation_cache._start._futures))
"""
)


def start(folder, name):
    environment = os.environ | {"JAXINFER_CACHE_DIR": str(folder), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-c", START, "0", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    values, counts, ahead = done.stdout.splitlines()
    assert values == "8.0 2.0"
    assert "Warning" not in done.stderr
    return counts, ahead


@pytest.mark.slow
def test_a_start_reads_ahead_what_the_last_one_used(tmp_path):
    assert start(tmp_path, "one") == ("2 0", "0")
    assert start(tmp_path, "one") == ("0 2", "jit__lambda jit__lambda 0")
    index = tmp_path / "xla" / "starts.json"
    index.write_text(index.read_text().replace("jit__lambda", "jit_absent", 1))
    assert start(tmp_path, "one") == ("0 2", "jit_absent jit__lambda 1")
    for path in (tmp_path / "xla").glob("*-cache"):
        path.write_bytes(path.read_bytes()[:50])
    assert start(tmp_path, "one") == ("2 0", "jit__lambda jit__lambda 0")
    index.write_text('{"a": 3}')
    assert start(tmp_path, "other") == ("0 2", "0")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of programs, none set in JAX's configuration."""
    monkeypatch.setattr(compilation_cache, "folder", lambda: None)
    monkeypatch.setenv("JAXINFER_CACHE_DIR", str(tmp_path))
    folder = tmp_path / "xla"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def no_update(monkeypatch):
    monkeypatch.setattr(compilation_cache.jax.config, "update", lambda *_: None)


def test_a_folder_of_another_user_is_refused(folder, no_update, monkeypatch):
    monkeypatch.setattr(compilation_cache.os, "geteuid", lambda: 12345)
    if os.getuid() == 0:
        assert compilation_cache.enable() == folder  # root's
        os.chown(folder, 12346, -1)
    with pytest.raises(PermissionError, match=r"xla belongs to another user \(number \d+\).*: remove it or set JAXINF"):
        compilation_cache.enable()


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_folder_that_others_may_write_is_refused(folder, no_update, mode):
    folder.chmod(mode)
    with pytest.raises(PermissionError, match="is writable by others"):
        compilation_cache.enable()


def test_parts_that_killed_processes_left_are_removed(folder, no_update):
    old, new = folder / ".a.part", folder / ".b.part"
    for path in (old, new):
        path.write_bytes(b"")
    os.utime(old, (time.time() - 10**6,) * 2)
    assert compilation_cache.enable() == folder
    assert [path.name for path in folder.iterdir()] == [".b.part"]


@pytest.fixture
def no_kernels(tmp_path, monkeypatch):
    """A process that has loaded no kernel, and a folder that has none; the processes that it starts are not."""
    started, before = [], kernels.store
    monkeypatch.setattr(kernels, "_loaded", {})
    monkeypatch.setattr(kernels, "_expected", {})
    monkeypatch.setattr(compilation_cache, "compiles_beside", True)
    monkeypatch.setattr(kernels.atexit, "register", lambda *_: None)
    monkeypatch.setattr(compilation_cache, "num_cores", lambda: 2)

    def start(command, **_):
        started.append(command)
        return SimpleNamespace(poll=lambda: None)

    monkeypatch.setattr(compilation_cache.subprocess, "Popen", start)
    kernels.keep_in(KeptFiles(tmp_path, 2**20))
    yield started
    kernels.keep_in(before)


def test_a_second_process_compiles_attention_where_it_is_not_kept(no_kernels):
    compilation_cache.compile_attention_beside()
    (command,) = no_kernels
    *start, program = command
    assert start == [sys.executable, "-P", "-c"]  # no file of the working folder is run
    assert program.endswith(f"from {compilation_cache.__name__} import compile_attention; compile_attention()")
    assert list(kernels._expected) == [numba_cpu.NAME]
    compilation_cache.compile_attention_beside()  # another model, while it runs
    assert len(no_kernels) == 1
    kernels._expected[numba_cpu.NAME].poll = lambda: 1  # it has failed
    compilation_cache.compile_attention_beside()
    assert len(no_kernels) == 2


@pytest.mark.parametrize(
    "why", ["it is kept", "nothing is kept", "one core", "no Numba", "one executable", "no interpreter", "none"]
)
def test_no_second_process_is_started(no_kernels, monkeypatch, why):
    if why == "it is kept":
        monkeypatch.setattr(kernels, "_loaded", {numba_cpu.NAME: None})
    elif why == "nothing is kept":
        kernels.keep_in(None)
    elif why == "one core":
        monkeypatch.setattr(compilation_cache, "num_cores", lambda: 1)
    elif why == "no Numba":
        monkeypatch.setattr(compilation_cache.importlib.util, "find_spec", lambda name: None)
    elif why in ("no interpreter", "none"):  # what Python has where it is part of another program
        monkeypatch.setattr(sys, "executable", None if why == "none" else "")
    else:
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    compilation_cache.compile_attention_beside()
    assert no_kernels == []


def test_a_gpu_s_autotuning_is_kept_in_the_folder():
    """XLA:GPU measures which tiles multiply a shape fastest; another choice after a start would change bits."""
    options = compiler.get_compile_options(1, 1)  # its parts do not live longer
    flags = options.executable_build_options.debug_options
    assert Path(flags.xla_gpu_per_fusion_autotune_cache_dir).parent == Path(str(compilation_cache.folder()))
    assert "UPDATE" in str(flags.xla_gpu_experimental_autotune_cache_mode)
    del options
