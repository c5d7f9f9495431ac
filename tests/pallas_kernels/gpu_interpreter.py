"""GPU kernels in the interpreter of JAX, with a check for races."""

import contextlib
from collections.abc import Iterator

import jax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import mosaic_gpu_compat


@contextlib.contextmanager
def interpreted_gpu() -> Iterator[None]:
    """Runs Mosaic GPU kernels traced inside in the interpreter; fails when two accesses of the last one race. An
    exception inside a kernel leaves the interpreter's state, so that is cleared before and after."""
    gpu_callbacks.reset_gpu_interpret_mode_state()
    try:
        with mosaic_gpu_compat.interpreted():
            yield
        jax.effects_barrier()
        assert not gpu_callbacks.get_races().races_found
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()
