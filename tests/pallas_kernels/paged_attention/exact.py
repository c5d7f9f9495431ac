"""Paged attention in float64, to keys and values as the cache stores them."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import reference, rotation
from pallas_kernels.paged_attention.specs import PagedOperands
from tests.pallas_kernels.paged_attention.shapes import PagedShape


@functools.cache
def dense_rotation(width: int) -> np.ndarray:
    """The rotation of 4-bit caches, float64 [K, K], from its definition."""
    power = width & -width
    odd = width // power
    rows = np.arange(power)
    parity = np.array([[bin(i & j).count("1") % 2 for j in rows] for i in rows])
    hadamard = (1 - 2 * parity) / math.sqrt(power)
    across = np.eye(odd) - 2 / odd if odd > 1 else np.eye(1)
    return np.kron(across, hadamard) @ np.diag(np.asarray(rotation._signs(width), np.float64))


def exact_output(shape: PagedShape, arguments: dict) -> np.ndarray:
    """float64 [T, Hq, K] from arguments with separate pages."""
    spec, matrix = shape.spec("separate"), dense_rotation(shape.head_dim) if shape.page().is_rotated else None
    q = np.asarray(arguments["q"].astype(jnp.float32), np.float64)
    if shape.page().key_dtype == "int4":
        q = q @ matrix.T
    with jax.enable_x64(True):
        operands = PagedOperands(
            **(arguments | {"q": jnp.asarray(q)}),
            **{name: None for name in ("sinks", "ancestors") if name not in arguments},
        )
        out = np.asarray(jax.jit(lambda operands: reference.attention(operands, spec)[0])(operands))
    assert out.dtype == np.float64
    return out @ matrix if shape.page().value_dtype == "int4" else out
