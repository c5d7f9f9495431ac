"""Every implementation made to run on a CPU, with blocks so small that short sequences have several."""

import contextlib
from dataclasses import replace

import jax
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.flash_attention import api, pallas_gpu, pallas_tpu, xla
from tests.pallas_kernels.gpu_interpreter import interpreted_gpu


def compiled(programs: dict, function, options: dict, arguments):
    """Runs a function of its arguments, compiled once for equal options and shapes."""
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype.name), arguments)
    key = repr((options, shapes))
    if key not in programs:
        programs[key] = jax.jit(function).lower(arguments).compile()
    return programs[key](arguments)


class Xla:
    name = "xla"

    def __init__(self, monkeypatch):
        for block in ("QUERY_BLOCK", "KEY_BLOCK", "DECODE_KEY_BLOCK"):
            monkeypatch.setattr(xla, block, 16)

    def nearest(self, shape):
        return shape

    def __call__(self, shape, arguments):
        return jax.jit(shape.call(self.name))(arguments)

    trace = __call__


class PallasTpu:
    """The TPU interpreter: a race, a read out of bounds or of uninitialized memory fails the test."""

    name = "pallas_tpu"

    def __init__(self, monkeypatch):
        self.programs = {}
        monkeypatch.setattr(api, "current_platform", lambda: "tpu")
        monkeypatch.setattr(pallas_tpu, "BLOCK_ROWS", 128)
        monkeypatch.setattr(pallas_tpu, "BLOCK_KEYS", 128)

    def nearest(self, shape):
        return shape

    def __call__(self, shape, arguments):
        with interpreted_tpu():
            return compiled(self.programs, shape.call(self.name), shape.options, arguments)

    def trace(self, shape, arguments):
        """For use inside a transformation."""
        with interpreted_tpu():
            return jax.jit(shape.call(self.name))(arguments)


@contextlib.contextmanager
def interpreted_tpu():
    parameters = pltpu.InterpretParams(
        detect_races=True,
        dma_execution_mode="on_wait",
        uninitialized_memory="nan",
        out_of_bounds_reads="raise",
        # By default all DMAs share an entry of the clocks, and waiting for one hides a missing wait for another.
        vector_clock_size=64,
    )
    try:
        with pltpu.force_tpu_interpret_mode(parameters):
            yield
        jax.effects_barrier()
        assert not interpret_pallas_call.races.races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()


class PallasGpu:
    """The GPU interpreter. What the kernel cannot take is brought to the nearest it can."""

    name = "pallas_gpu"

    def __init__(self, monkeypatch):
        self.programs = {}
        monkeypatch.setattr(api, "current_platform", lambda: "gpu")
        monkeypatch.setattr(pallas_gpu, "BLOCK_KEYS", 64)

    def nearest(self, shape):
        head_dim = next(size for size in pallas_gpu.HEAD_DIMS if size >= shape.head_dim)
        # The interpreter compiles the kernel anew for each head, and takes a second for it.
        heads = (2, 1) if shape.sinks else (1, 1)
        return replace(shape, dtype="bfloat16", head_dim=head_dim, heads=heads)

    def __call__(self, shape, arguments):
        with interpreted_gpu():
            return compiled(self.programs, shape.call(self.name), shape.options, arguments)

    def trace(self, shape, arguments):
        with interpreted_gpu():
            return jax.jit(shape.call(self.name))(arguments)


HARNESSES = {harness.name: harness for harness in (Xla, PallasTpu, PallasGpu)}


@pytest.fixture(params=["xla", "pallas_tpu", pytest.param("pallas_gpu", marks=pytest.mark.slow)])
def attend(request, monkeypatch):
    """Runs (shape, arguments) with one implementation; the test is repeated for each."""
    return HARNESSES[request.param](monkeypatch)


@pytest.fixture
def race_check():
    """The context in which the TPU kernels run."""
    return interpreted_tpu


@pytest.fixture
def attend_xla(monkeypatch):
    return Xla(monkeypatch)


_expected = {}


@pytest.fixture
def expected():
    """What the dense float32 reference gives; once for all implementations."""

    def run(shape):
        if shape not in _expected:
            _expected[shape] = jax.jit(shape.call("reference"))(shape.arguments())
        return _expected[shape]

    return run
