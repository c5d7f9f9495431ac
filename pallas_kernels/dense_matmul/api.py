"""Entry points of products with weights that are not quantized."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
from jax.typing import DTypeLike

from pallas_kernels.choice import Implementations, KernelChoice
from pallas_kernels.platform import current_platform

if TYPE_CHECKING:
    from jaxtyping import Array, Float

IMPLEMENTATIONS = ("xla", "numba_cpu", "bfloat16_cpu")
_BY_PLATFORM = {"tpu": ("xla",), "gpu": ("xla",), "cpu": ("numba_cpu", "bfloat16_cpu", "xla")}
_MODULES = Implementations("pallas_kernels.dense_matmul", IMPLEMENTATIONS, _BY_PLATFORM)


@dataclass(frozen=True)
class DenseSpec:
    """Static facts of one call.

    rows, inputs, outputs: x is [rows, inputs], the result [rows, outputs].
    num_axes: of the weight; more than two are a batch of weights.
    dtypes: of x, the weight and the result.
    is_transposed: the weight is stored as [outputs, inputs].
    """

    rows: int
    inputs: int
    outputs: int
    num_axes: int
    dtypes: tuple[str, str, str]
    is_transposed: bool = False


def dense_matmul(
    x: Float[Array, "*rows K"],
    weight: Float[Array, "_ _"],
    *,
    is_transposed: bool = False,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "*rows N"]:
    """x [..., K] @ weight [K, N]; float32 operands are multiplied in full precision.

    Args:
      weight: [K, N], [N, K] with `is_transposed`, or [..., K, N] for x [..., T, K].
      out_dtype: dtype of the result, x's when None.
      implementation: "xla", "numba_cpu" (float32 on a CPU; needs Numba) or "bfloat16_cpu" (bfloat16 on a CPU); None
        selects by platform and shape.

    Raises:
      ValueError: an unknown implementation.
      NotImplementedError: the named implementation cannot run the call; the message has the reason.
    """
    spec = make_spec(x, weight, is_transposed=is_transposed, out_dtype=out_dtype)
    name = _MODULES.take(spec, current_platform(), implementation)
    return _MODULES[name].matmul(x, weight, spec)


def make_spec(
    x: jax.Array | jax.ShapeDtypeStruct,
    weight: jax.Array | jax.ShapeDtypeStruct,
    *,
    is_transposed: bool = False,
    out_dtype: DTypeLike | None = None,
) -> DenseSpec:
    inputs, outputs = weight.shape[-2:][::-1] if is_transposed else weight.shape[-2:]
    dtypes = x.dtype.name, weight.dtype.name, str(jax.numpy.dtype(out_dtype or x.dtype))
    return DenseSpec(math.prod(x.shape[:-1]), inputs, outputs, weight.ndim, dtypes, is_transposed)


def choose(spec: DenseSpec, implementation: str | None = None, *, platform: str | None = None) -> KernelChoice:
    """The implementation that `dense_matmul` selects, and the reasons against the others."""
    return _MODULES.choose(spec, platform or current_platform(), implementation)
