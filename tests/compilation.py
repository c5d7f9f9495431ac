"""Programs for CPUs are compiled with few of XLA's optimizations: in a fifth of the time, and tests run them briefly.

`conftest.py` says so in XLA_FLAGS, which child processes inherit. Programs for other chips, and those of tests marked
`optimized`, are compiled as users' programs are. Many programs are lowered in one MLIR context: a context takes longer
to make than most programs of tests take to lower, and JAX makes one for each.
"""

import functools
import itertools
import os
import threading

import jax
from jax._src import compiler
from jax._src.interpreters import mlir

PROGRAMS_PER_CONTEXT = 200  # a context keeps the constants of all its programs
num_programs = 0  # compiled, or read from the cache, since a reader set it to 0


def install() -> None:
    """Has JAX share MLIR contexts, and undo the flags where they must not hold."""
    mlir.make_ir_context = _shared(mlir.make_ir_context)
    get_compile_options = compiler.get_compile_options

    @functools.wraps(get_compile_options)
    def wrapper(*args, backend=None, **kwargs):
        global num_programs
        num_programs += 1
        options = get_compile_options(*args, backend=backend, **kwargs)
        is_optimized = _is_optimized()
        if is_optimized or (backend is not None and backend.platform != "cpu"):
            debug_options = options.executable_build_options.debug_options
            debug_options.xla_backend_optimization_level = 3
            debug_options.xla_llvm_disable_expensive_passes = False
        if is_optimized and "xla_cpu_use_fusion_emitters" in os.environ.get("XLA_FLAGS", ""):
            options.env_option_overrides = [*options.env_option_overrides, ("xla_cpu_use_fusion_emitters", True)]
        return options

    compiler.get_compile_options = wrapper


def _shared(make_context):
    """The function with one result for many calls of a thread."""
    own = threading.local()

    @functools.wraps(make_context)
    def shared():
        if not hasattr(own, "calls"):
            own.calls = itertools.count()
        if next(own.calls) % PROGRAMS_PER_CONTEXT == 0:
            own.context = make_context()
        return own.context

    return shared


# Part of the key by which JAX finds a compiled program, and of no other use here: programs compiled one way stay beside
# those compiled the other way.
_SETTING = "jax_xla_profile_version"


def _is_optimized() -> bool:
    return getattr(jax.config, _SETTING) > 0


def optimize(is_optimized: bool) -> None:
    """Compiles with all optimizations from here on, or with few."""
    if is_optimized != _is_optimized():
        jax.config.update(_SETTING, int(is_optimized))
