"""Shared by all tests: a CPU with several devices, one compilation cache, and what runs only when asked for."""

import ctypes
import gc
import importlib.metadata
import os
import tempfile
from pathlib import Path

# Before JAX starts: several CPU devices, as an accelerator host has.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
# A device that waits for another aborts the process after 40 s unless told otherwise. The others: tests/compilation.py.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_collective_call_terminate_timeout_seconds=280 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1"
    # A flag that XLA does not know ends the process; newer ones have no other way than fusion emitters.
    + (" --xla_cpu_use_fusion_emitters=false" if importlib.metadata.version("jaxlib").startswith("0.10.") else ""),
)
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # programs need not say where their operations come from
os.environ.setdefault("JAXINFER_TPU_CHECKS", "1")  # copies of TPU kernels are checked, where there is a TPU
os.environ.setdefault("JAXINFER_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"jaxinfer-tests-{os.getuid()}"))

import pytest

from tests import compilation, shape_checks

compilation.install()
shape_checks.install("pallas_kernels", "cpu_kernels", "jaxinfer", "checkpoints_convert")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run tests that take more than half a minute")
    parser.addoption("--oracle", action="store_true", help="run tests that need torch and transformers")
    parser.addoption("--real", action="store_true", help="run tests of published models, which make models fetches")


def pytest_configure(config):
    global BUCKETS
    from jaxinfer import compilation_cache
    from jaxinfer.engine import kept_programs, spec

    kept_programs.is_on = False
    compilation_cache.compiles_beside = False  # all cores are busy
    compilation_cache.enable()
    compilation_cache.keep_all()  # small programs too: a second run of 95 tests took 12 s of a CPU, 23 s without them
    BUCKETS = spec.buckets


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        items[:] = quick_cases(items, config.hook.pytest_deselected)
    for item in items:
        for marker in ("slow", "oracle", "real"):
            if item.get_closest_marker(marker) and not config.getoption(f"--{marker}"):
                item.add_marker(pytest.mark.skip(reason=f"{marker}: run with --{marker}"))


def quick_cases(items, deselect):
    """Without the cases of a matrix: of its parametrized test stay the cases with the named ids, or the first one that
    is not slow."""
    seen, kept, left_out = set(), [], []
    for item in items:
        function, _, case = item.nodeid.partition("[")
        marker = item.get_closest_marker("matrix")
        if marker is None or item.get_closest_marker("slow"):
            is_kept = True
        elif marker.args:
            is_kept = case.removesuffix("]") in marker.args
        else:
            is_kept = function not in seen
            seen.add(function)
        (kept if is_kept else left_out).append(item)
    deselect(items=left_out)
    return kept


def pytest_collection_finish(session):
    """What is loaded by now lives until the end: the collector, which took 1.8 of 26 s, need not look at it again."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    from jaxinfer.engine import spec

    compilation.optimize(item.get_closest_marker("optimized") is not None)
    spec.buckets = BUCKETS if item.get_closest_marker("all_buckets") else lambda _, largest: (largest,)


CRASHED = set()


@pytest.hookimpl(optionalhook=True, trylast=True)
def pytest_handlecrashitem(crashitem, report, sched):
    """A test that crashes its process runs once more: compilers are native code, and one has crashed where it starts.

    The option --reruns does the same, and takes longer than most tests: each asks the main process how often it ran.
    """
    if crashitem not in CRASHED and report.outcome == "failed":
        CRASHED.add(crashitem)
        sched.mark_test_pending(crashitem)
        report.outcome = "rerun"


MAX_MAPPINGS = 45_000  # Linux gives a process 65,530 memory mappings and kills it, without a word, at the next
MAX_RESIDENT_BYTES = 3 * 2**30
PROGRAMS_BETWEEN_LOOKS = 20  # to read 30,000 mappings takes 40 ms, more than most tests


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    """Drops compiled programs before there are too many: on a CPU each of their functions takes three mappings."""
    maps = Path("/proc/self/maps")
    if compilation.num_programs < PROGRAMS_BETWEEN_LOOKS or not maps.exists():
        return
    compilation.num_programs = 0
    resident = int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resident > MAX_RESIDENT_BYTES or maps.read_bytes().count(b"\n") > MAX_MAPPINGS:
        import jax

        jax.clear_caches()
        gc.collect()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc keeps what is freed: two thirds of the memory
            libc.malloc_trim(0)
