"""Every implementation made to run on a CPU, with blocks so small that short sequences have several; and the oracle."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.flash_attention import api, pallas_gpu, pallas_tpu, reference, xla
from pallas_kernels.flash_attention.specs import FlashOperands, make_spec
from tests.pallas_kernels.flash_attention.shapes import FlashShape
from tests.pallas_kernels.gpu_interpreter import interpreted_gpu
from tests.pallas_kernels.relative_norm import assert_near
from tests.pallas_kernels.tpu_interpreter import interpreted_tpu


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


def _wide(arguments: dict) -> dict:
    """Queries, keys and values in float64, inside `jax.enable_x64`."""
    wide = {name: jnp.asarray(np.asarray(arguments[name].astype(jnp.float32), np.float64)) for name in "qkv"}
    return arguments | wide


def _dense(shape: FlashShape):
    """The dense reference as `shape.call`, for float64 too."""

    def call(arguments: dict):
        segments = arguments.get("segment_ids", (None, None))
        names = ("q", "k", "v", "sinks", "query_offset", "kv_lengths")
        operands = FlashOperands(*(arguments.get(name) for name in names), *segments)
        out, lse = reference.attention(operands, make_spec(operands, **shape.options))
        return (out, lse) if shape.return_lse else out

    return call


@functools.cache
def exact(shape: FlashShape):
    """The dense reference in float64, as NumPy arrays; once for all implementations."""
    arguments = shape.arguments()
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(_dense(shape))(_wide(arguments)))


def gradients(run, operands: dict, arguments: dict, weights) -> dict:
    """Gradients of a sum of the results times `weights`, one for each, so that no gradient cancels."""

    def loss(operands):
        found = run(arguments | operands)
        # The lse of a query that sees nothing is -inf.
        return sum(
            jnp.sum(jnp.where(jnp.isneginf(x), 0, x).astype(w.dtype) * w)
            for x, w in zip(jax.tree.leaves(found), jax.tree.leaves(weights), strict=True)
        )

    return jax.grad(loss)(operands)


def check_gradients(shape: FlashShape, attend) -> None:
    """Gradients of q, k, v and sinks are those of the dense reference in float64, in relative norm.

    Weights, gradients of scores, the output that these are computed from and the result are rounded: four independent
    errors, 0.8 roundings together.
    """
    arguments = shape.arguments()
    names = [name for name in ("q", "k", "v", "sinks") if name in arguments]
    rng = np.random.default_rng(0)
    weights = jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape, np.float32)),
        jax.eval_shape(shape.call("reference"), arguments),
    )
    with jax.enable_x64(True):
        wide = _wide(arguments)
        wide_weights = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), weights)
        dense = jax.jit(lambda operands: gradients(_dense(shape), operands, wide, wide_weights))
        wanted = jax.tree.map(np.asarray, dense({name: wide[name] for name in names}))
    operands = {name: arguments[name] for name in names}
    found = gradients(lambda given: attend.trace(shape, given), operands, arguments, weights)
    for name in names:
        assert found[name].dtype == arguments[name].dtype
        print(name, end=": ")
        assert_near(np.asarray(found[name]).reshape(1, -1), wanted[name].reshape(1, -1), shape.dtype, roundings=2)
