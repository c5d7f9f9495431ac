"""Programs for CPUs are compiled with few of XLA's optimizations: in a fifth of the time, and tests run them briefly.

`conftest.py` says so in XLA_FLAGS, which child processes inherit. Programs for other chips, and those of tests marked
`optimized`, are compiled as users' programs are.
"""

import functools
import os

import jax
from jax._src import compiler

_is_optimized = False


def install() -> None:
    """Has JAX undo these flags where they must not hold."""
    get_compile_options = compiler.get_compile_options

    @functools.wraps(get_compile_options)
    def wrapper(*args, backend=None, **kwargs):
        options = get_compile_options(*args, backend=backend, **kwargs)
        if _is_optimized or (backend is not None and backend.platform != "cpu"):
            debug_options = options.executable_build_options.debug_options
            debug_options.xla_backend_optimization_level = 3
            debug_options.xla_llvm_disable_expensive_passes = False
        if _is_optimized and "xla_cpu_use_fusion_emitters" in os.environ.get("XLA_FLAGS", ""):
            options.env_option_overrides = [*options.env_option_overrides, ("xla_cpu_use_fusion_emitters", True)]
        return options

    compiler.get_compile_options = wrapper


def optimize(is_optimized: bool) -> None:
    """Compiles with all optimizations from here on, or with few; programs compiled the other way are dropped."""
    global _is_optimized
    if is_optimized != _is_optimized:
        _is_optimized = is_optimized
        jax.clear_caches()
