"""Paged attention in float64, to keys and values as the cache stores them."""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import SeparatePages, reference, rotation
from pallas_kernels.paged_attention.specs import PagedOperands, PagedSpec
from tests.pallas_kernels.paged_attention.shapes import PagedShape


@cache
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
    matrix = dense_rotation(shape.head_dim) if shape.page().is_rotated else np.eye(1)
    q = np.asarray(arguments["q"].astype(jnp.float32), np.float64)
    if shape.page().key_dtype == "int4":
        q = q @ matrix.T
    with jax.enable_x64(True):
        out = np.asarray(
            _run(
                shape, lambda operands, spec: reference.attention(operands, spec)[0], arguments | {"q": jnp.asarray(q)}
            )
        )
    assert out.dtype == np.float64
    return out @ matrix if shape.page().value_dtype == "int4" else out


def appended_pages(shape: PagedShape, arguments: dict) -> SeparatePages:
    """The cache with the new tokens."""
    return _run(shape, reference.append_new_tokens, arguments)


def _run(shape: PagedShape, call: Callable[[PagedOperands, PagedSpec], Any], arguments: dict) -> Any:
    operands = PagedOperands(**({"sinks": None, "ancestors": None} | arguments))
    return jax.jit(partial(call, spec=shape.spec("separate")))(operands)
