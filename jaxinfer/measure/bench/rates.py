"""The roofline of this machine: measured bandwidth and FLOP/s, and the least times of steps at these rates."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.engine.engine import Engine
from jaxinfer.planning.counted import Counted, count
from jaxinfer.planning.roofline import Rates, RooflinePoint, decode_point, prefill_seconds

# Larger than any cache: of a CPU, of an accelerator.
CPU_BYTES, DEVICE_BYTES = 512 * 2**20, 2**30
CPU_MATMUL, DEVICE_MATMUL = 1536, 8192  # rows and columns
MIN_REPEATS, MIN_SECONDS = 5, 0.3


@dataclass(frozen=True)
class MeasuredRates:
    """Rates of one device, each the best of several runs.

    Attributes:
      bandwidths: bytes/s by access: "copy" (read and write), "read" (a sum) and, on a CPU, "matvec" (a matrix-vector
        product in the weights' dtype). flops: FLOP/s by the type of the operands; "bf16" stands for the compute dtype.
    """

    dtype: str
    bandwidths: dict[str, float]
    flops: dict[str, float]

    @property
    def bandwidth(self) -> float:
        """The highest bandwidth."""
        return max(self.bandwidths.values())

    @property
    def rates(self) -> Rates:
        return Rates(hbm=self.bandwidth, links=float("inf"), flops=self.flops)

    def best(self, other: "MeasuredRates") -> "MeasuredRates":
        """The higher of each rate in two measurements."""
        bandwidths = {name: max(rate, other.bandwidths[name]) for name, rate in self.bandwidths.items()}
        flops = {name: max(rate, other.flops[name]) for name, rate in self.flops.items()}
        return MeasuredRates(self.dtype, bandwidths, flops)

    def to_dict(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "bytes_per_second": self.bandwidth,
            "bytes_per_second_by": self.bandwidths,
            "flops_per_second": {(self.dtype if name == "bf16" else name): rate for name, rate in self.flops.items()},
        }


def measure_rates(
    dtype: Any, kinds: tuple[str, ...] = (), *, num_bytes: int | None = None, size: int | None = None
) -> MeasuredRates:
    """Measures the default device with arrays of `num_bytes` and products of `size` rows and columns.

    By default both are large. `kinds` are further types to multiply: "int8", "fp8"; the dtype's rate stands for those
    that this backend lacks.
    """
    is_cpu = jax.default_backend() == "cpu"
    num_bytes = num_bytes or (CPU_BYTES if is_cpu else DEVICE_BYTES)
    size = size or (CPU_MATMUL if is_cpu else DEVICE_MATMUL)
    dtype = jnp.dtype(dtype)
    width = 1024
    array = _random((max(num_bytes // dtype.itemsize // width, 1), width), dtype)
    bandwidths = {
        "read": array.nbytes / _seconds(jax.jit(lambda x: jnp.sum(x, axis=0, dtype=jnp.float32)), array),
    }
    if is_cpu:
        vector = _random((width, 1), dtype)
        bandwidths["matvec"] = array.nbytes / _seconds(jax.jit(jnp.dot), array, vector)
    bandwidths["copy"] = 2 * array.nbytes / _copy_seconds(array)
    flops = {"bf16": _matmul(dtype, size)}
    for kind in kinds:
        if kind not in flops:
            flops[kind] = _matmul_of(kind, size) or flops["bf16"]
    return MeasuredRates(dtype.name, bandwidths, flops)


def _random(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Random numbers, as weights are: a GPU may multiply constants faster, since they take less power."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(jax.random.key(0), shape, -127, 128, dtype)
    dtype = jnp.dtype(dtype)
    drawn = jax.random.normal(jax.random.key(0), shape, dtype if dtype.itemsize > 1 else jnp.bfloat16)
    return drawn.astype(dtype)


def _matmul_of(kind: str, size: int) -> float | None:
    """FLOP/s of products of 8-bit numbers; None if this backend has none."""
    dtype, result = (jnp.int8, jnp.int32) if kind == "int8" else (jnp.float8_e4m3fn, jnp.float32)
    try:
        return _matmul(dtype, size, result)
    except (NotImplementedError, jax.errors.JaxRuntimeError):
        return None


def _matmul(dtype: Any, size: int, result: Any = None) -> float:
    array = _random((size, size), dtype)
    product = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=result))
    return 2 * size**3 / _seconds(product, array, array)


def _copy_seconds(array: jax.Array) -> float:
    """Seconds of reading and writing an array once, in place, which excludes allocation. The array is donated."""
    negate = jax.jit(lambda x: -x, donate_argnums=0)

    def step() -> jax.Array:
        nonlocal array
        array = negate(array)
        return array

    seconds = _seconds(step)
    array.delete()
    return seconds


def _seconds(function: Callable, *arguments: jax.Array) -> float:
    """The shortest of several runs, in seconds."""
    jax.block_until_ready(function(*arguments))
    times: list[float] = []
    while len(times) < MIN_REPEATS or sum(times) < MIN_SECONDS:
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return min(times)


@dataclass(frozen=True)
class Ideal:
    """The least times of an engine's steps at measured rates."""

    measured: MeasuredRates
    counted: Counted
    num_replicas: int = 1

    @classmethod
    def of(cls, engine: Engine, num_replicas: int = 1, **sizes: Any) -> "Ideal":
        """Counts the engine's bytes and FLOPs, and measures the rates that it needs; `sizes` as for `measure_rates`."""
        spec = engine.spec
        counted = count(spec, spec.config, spec.placed_params, spec.cache)
        return cls(measure_rates(spec.dtype, tuple(counted.token_flops), **sizes), counted, num_replicas)

    def decode(self, batch: float, context: float) -> RooflinePoint:
        """The roofline of a decode step of `batch` sequences of `context` tokens on each replica."""
        return decode_point(
            self.measured.rates,
            self.counted,
            None,
            batch=max(round(batch), 1),
            context=max(round(context), 1),
            compiled_batch=1,
            compiled_context=1,
            num_replicas=self.num_replicas,
        )

    def prefill_seconds(self, lengths: list[int]) -> float:
        """Seconds of the prompts' products and attention at the measured FLOP/s, one after another."""
        return prefill_seconds(self.measured.rates, self.counted, lengths)
