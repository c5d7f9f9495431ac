"""Entry points of products with packed weights."""

from __future__ import annotations

from collections.abc import Sequence
from platform import machine
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from cpu_kernels.packed_matmul.forms import PackedArrays, PackedForm
from pallas_kernels import cpu_calls
from pallas_kernels.packed_matmul import numba_cpu
from pallas_kernels.packed_matmul.packing import dequantize
from pallas_kernels.platform import current_platform

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int32


def packed_matmul(
    x: Float[Array, "*rows K"],
    weights: Sequence[tuple[PackedForm, PackedArrays]],
    counts: Int32[Array, " E"] | None = None,
) -> list[Float32[Array, "*rows N"]]:
    """x [..., K] @ weight [K, N] in float32, for each of several weights of the same inputs, in one call.

    A row's results do not depend, to the bit, on the other rows. Where `unsupported` has a reason (arrays that are
    divided over devices), weights are dequantized and XLA multiplies.

    Args:
      counts: of stacks of E experts [E, K, N] and x [T, K] sorted by expert, how many rows each expert has. Results of
        rows beyond their sum are unspecified.
    """
    leading, rows = x.shape[:-1], x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    if unsupported(current_platform()) is None and rows.size:
        products = numba_cpu.multiply(rows, weights, counts)
    elif counts is not None:
        highest = jax.lax.Precision.HIGHEST
        products = [jax.lax.ragged_dot(rows, dequantize(*weight), counts, precision=highest) for weight in weights]
    else:
        products = [jnp.matmul(rows, dequantize(*weight), precision=jax.lax.Precision.HIGHEST) for weight in weights]
    return [product.reshape(*leading, -1) for product in products]


def unsupported(platform: str) -> str | None:
    """The reason why the kernels cannot run on `platform`, or None."""
    if machine() not in ("x86_64", "AMD64"):
        return f"its loops have instructions of x86-64, and this is {machine()}"
    return cpu_calls.unsupported(platform)
