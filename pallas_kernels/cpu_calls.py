"""Calls of kernels in `cpu_kernels`, inside XLA programs."""

import importlib.util
import math
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cpu_kernels import kernels
from pallas_kernels.platform import current_platform, missing_platform

MAX_PARTS = 16  # beyond which the cost of a part itself shows


def unsupported(platform: str) -> str | None:
    """The reason why no such kernel runs on `platform`, or None."""
    if (reason := missing_platform("cpu", platform)) is not None:
        return reason
    if importlib.util.find_spec("numba") is None:
        return "it needs Numba, which is not installed"
    if os.name != "posix":
        return "its threads wait with POSIX's sched_yield"
    if is_divided():
        return "XLA would gather the operands of a custom call from all devices"
    return None


def is_divided() -> bool:
    """Tells whether arrays of the current trace may be divided over devices, outside of `jax.shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(size > 1 and kind != jax.sharding.AxisType.Manual for size, kind in kinds)


def num_parts(num_units: int, units_of_a_part: int = 1) -> int:
    """Into how many parts to divide `num_units` of work of equal size, at least `units_of_a_part` each.

    Threads take them one at a time, so that no program depends on the number of cores.
    """
    return max(1, min(MAX_PARTS, num_units // units_of_a_part))


def call(
    name: str,
    results: Any,
    operands: Sequence[jax.Array],
    *,
    in_place: Mapping[int, int] | None = None,
    **attributes: int,
) -> Any:
    """Calls the kernel that `kernels.register` registered under `name`.

    Args:
      results: `jax.ShapeDtypeStruct` of the result, or a tuple of them.
      in_place: indices of operands, and of the results that have their memory. XLA copies an operand first that
        something else uses.
      attributes: integers, which the kernel reads in alphabetical order of their names.
    """
    function = jax.ffi.ffi_call(name, results, vmap_method="sequential", input_output_aliases=dict(in_place or {}))
    return function(*operands, **{key: np.int64(value) for key, value in attributes.items()})


def materialized(x: jax.Array) -> jax.Array:
    """x, computed once: XLA:CPU fuses what is cheap in its view, such as a cosine, into every operation that uses it,
    and ignores `jax.lax.optimization_barrier`. Where there are no kernels for CPUs, the barrier."""
    if unsupported(current_platform()) is not None or x.dtype != jnp.float32 or x.size == 0:
        return jax.lax.optimization_barrier(x)

    def copy_kernel() -> kernels.Compiled:
        from cpu_kernels.memory import copy_handler

        return copy_handler()

    name = kernels.register("jaxinfer_copy", copy_kernel)
    return call(name, jax.ShapeDtypeStruct((x.size,), x.dtype), [x.reshape(-1)]).reshape(x.shape)


def can_be_untouched(dtype: Any) -> bool:
    """Tells whether `untouched_zeros` makes arrays of a dtype here."""
    return sys.platform == "linux" and unsupported(current_platform()) is None and jnp.dtype(dtype) != jnp.int4


@partial(jax.jit, static_argnums=(0, 1))
def untouched_zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """jnp.zeros(shape, dtype) where `can_be_untouched`: none of its memory is resident before it is written.

    XLA fills zeros, and keeps freed memory, whose pages are resident: the handler gives them back. (A buffer of NumPy
    would be copied by the first program to which it is donated.)
    """

    def zeros_kernel() -> kernels.Compiled:
        from cpu_kernels.zeros import zeros_handler

        return zeros_handler()

    size = math.prod(shape) * jnp.dtype(dtype).itemsize
    name = kernels.register("jaxinfer_zeros", zeros_kernel)
    return call(name, jax.ShapeDtypeStruct(shape, dtype), [], size=size)
