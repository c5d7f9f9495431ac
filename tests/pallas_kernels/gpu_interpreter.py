"""GPU kernels in the interpreter of JAX, with a check for races."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import mosaic_gpu_compat


@contextlib.contextmanager
def interpreted_gpu() -> Iterator[None]:
    """Runs Mosaic GPU kernels traced inside in the interpreter; fails when two accesses of any of them race. An
    exception inside a kernel leaves the interpreter's state, so that is cleared before and after."""
    # The interpreter keeps the races of the last kernel only. JAX 0.12 has a class for GPUs.
    name = next(name for name in ("GPURaceDetectionState", "RaceDetectionState") if hasattr(gpu_callbacks, name))
    found, new = [], getattr(gpu_callbacks, name)
    every = mock.patch.object(gpu_callbacks, name, lambda **fields: found.append(new(**fields)) or found[-1])
    gpu_callbacks.reset_gpu_interpret_mode_state()
    try:
        with every, mosaic_gpu_compat.interpreted():
            yield
            jax.effects_barrier()
        assert found, "no kernel ran"
        assert not any(races.races_found for races in found), "two accesses race"
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()
