"""TPU kernels in the interpreter of JAX, with every check on."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu


@contextlib.contextmanager
def interpreted_tpu() -> Iterator[None]:
    """Runs Pallas TPU kernels in the interpreter; fails when two accesses of any of them race.

    DMAs finish as late as they may, memory that was never written is NaN, a read out of bounds raises. By default all
    DMAs share one entry of the vector clocks, so that waiting for one hides a missing wait for another.
    """
    parameters = pltpu.InterpretParams(
        detect_races=True,
        dma_execution_mode="on_wait",
        uninitialized_memory="nan",
        out_of_bounds_reads="raise",
        vector_clock_size=64,
    )
    # The interpreter keeps the races of the last kernel only.
    found, new = [], interpreter.RaceDetectionState
    every = mock.patch.object(
        interpreter, "RaceDetectionState", lambda **fields: found.append(new(**fields)) or found[-1]
    )
    pltpu.reset_tpu_interpret_mode_state()
    try:
        with every, pltpu.force_tpu_interpret_mode(parameters):
            yield
            jax.effects_barrier()
        assert not any(races.races_found for races in found), "two accesses race"
    finally:
        pltpu.reset_tpu_interpret_mode_state()
