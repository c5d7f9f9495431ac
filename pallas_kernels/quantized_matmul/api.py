"""Entry points of products with quantized weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from jax.typing import DTypeLike

from pallas_kernels.choice import Implementations, KernelChoice
from pallas_kernels.platform import current_platform
from pallas_kernels.quantized_matmul.specs import MatmulSpec, WeightReads, make_spec

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int, Int8, Num

IMPLEMENTATIONS = ("xla", "pallas_tpu", "pallas_gpu", "numba_cpu")
_BY_PLATFORM = {"tpu": ("pallas_tpu", "xla"), "gpu": ("pallas_gpu", "xla"), "cpu": ("numba_cpu", "xla")}
_MODULES = Implementations("pallas_kernels.quantized_matmul", IMPLEMENTATIONS, _BY_PLATFORM)


def quantized_matmul(
    x: Float[Array, "*rows K"],
    values: Num[Array, "_ _"],
    scales: Float[Array, "A B"],
    zeros: Int8[Array, "A B"] | None = None,
    codebook: Float32[Array, " 16"] | None = None,
    minima: Float[Array, "A B"] | None = None,
    *,
    block: tuple[int, int],
    activations: str | None = None,
    is_transposed: bool = False,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "*rows N"]:
    """x [..., K] @ weight [K, N] for a quantized weight; sums are float32 (int32 for int8 activations).

    Args:
      values: the weight's, as in `dequantize`, and so are `scales`, `zeros`, `codebook` and `minima`.
      block: numbers of inputs and outputs that share a scale; block[0] >= K means one scale per output.
      activations: "int8" or "fp8" quantizes each token of x first (W8A8); None does not.
      is_transposed: the weight's arrays are [N, K], as an embedding's that computes logits; `block` is of [K, N].
      out_dtype: dtype of the result, x's when None.
      implementation: "xla", "pallas_tpu" (tied embeddings with groups of inputs), "pallas_gpu" (Hopper: groups of
        integers, dequantized in registers) or "numba_cpu" (integers on a CPU, read as stored; needs Numba); None
        selects by platform and shape.

    Raises:
      ValueError: shapes or dtypes that do not fit, an unknown implementation.
      NotImplementedError: the named implementation cannot run the call; the message has the reason.
    """
    spec = make_spec(
        x, values, zeros, codebook, minima, block=block, activations=activations, is_transposed=is_transposed
    )
    platform = current_platform()
    name = _MODULES.take(spec, platform, implementation)
    leading, x = x.shape[:-1], x.reshape(spec.rows, -1)
    product = _MODULES[name].matmul(x, values, scales, zeros, codebook, minima, spec, platform)
    return product.astype(out_dtype or x.dtype).reshape(*leading, spec.outputs)


def take_rows(array: Num[Array, "V G"], indices: Int[Array, " rows"]) -> Num[Array, "rows G"]:
    """array[indices] of the scales, zeros or minima of an embedding's groups; on a TPU without a copy of the array."""
    if current_platform() != "tpu" or array.shape[1] == 1 or jax.sharding.get_abstract_mesh().size > 1:
        return array[indices]
    return _MODULES["pallas_tpu"].take_rows(array, indices)


def choose(spec: MatmulSpec, implementation: str | None = None, *, platform: str | None = None) -> KernelChoice:
    """The implementation that `quantized_matmul` selects, and the reasons against the others."""
    return _MODULES.choose(spec, platform or current_platform(), implementation)


def form(spec: MatmulSpec, platform: str | None = None, implementation: str | None = None) -> str:
    """A description of the selected implementation and how it computes the product, for people."""
    platform = platform or current_platform()
    name = _MODULES.take(spec, platform, implementation)
    return f"{name}, {_MODULES[name].form(spec, platform)}"


def weight_reads(spec: MatmulSpec, platform: str | None = None, implementation: str | None = None) -> WeightReads:
    """How the selected implementation reads the weight, a copy that it writes first included."""
    platform = platform or current_platform()
    return _MODULES[_MODULES.take(spec, platform, implementation)].weight_reads(spec, platform)
