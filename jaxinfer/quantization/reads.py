"""How products and look-ups with a weight are computed, and the bytes of it that a step reads, for people and tests."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxinfer.quantization.array import NestedScales, QuantizedArray
from jaxinfer.quantization.matmul import Weight
from jaxinfer.quantization.packed import PackedArray
from jaxinfer.quantization.tree import is_weight, num_bytes
from pallas_kernels.dense_matmul import choose as choose_dense
from pallas_kernels.dense_matmul import make_spec as make_dense_spec
from pallas_kernels.packed_matmul import unsupported
from pallas_kernels.platform import current_platform
from pallas_kernels.quantized_matmul import form, make_spec, weight_reads

# A step that reads more of a weight than this times its bytes is slower than its format promises.
MOST_READ = 1.15
# Rows of one expert that a product takes at once (`models.experts`), at least.
_EXPERT_ROWS = 8


@dataclass(frozen=True)
class WeightUse:
    """How a weight is used in one step.

    Attributes:
      form: the implementation and how it computes, as text.
      stored_bytes: of the weight in memory, the least that a step reads. read_bytes: what it reads.
      copy: dtype of a copy of the weight that every call writes first, or None.
    """

    form: str
    stored_bytes: int
    read_bytes: int
    copy: str | None = None

    @property
    def is_wasteful(self) -> bool:
        return self.read_bytes > MOST_READ * self.stored_bytes


def product_use(
    weight: Weight, rows: int, dtype, *, is_transposed: bool = False, platform: str | None = None
) -> WeightUse:
    """How x [rows, K] of `dtype` is multiplied by a weight, which may be abstract: [K, N], [N, K] with
    `is_transposed`, or a stack [E, K, N], whose experts are all counted."""
    platform = platform or current_platform()
    stored = num_bytes(weight)
    if isinstance(weight, PackedArray):
        return _packed_use(weight, stored, platform)
    if not is_weight(weight):
        return _dense_use(weight, rows, dtype, stored, is_transposed, platform)
    if not isinstance(weight, QuantizedArray):
        return WeightUse(f"products of {type(weight).__name__}", stored, stored)
    is_stack = weight.ndim > 2
    first, second = weight.scheme.block
    block = (second, first) if is_transposed else (first, second)
    values = jax.ShapeDtypeStruct(weight.shape[-2:], weight.values.dtype)
    x = jax.ShapeDtypeStruct((_EXPERT_ROWS if is_stack else rows, values.shape[-1 if is_transposed else -2]), dtype)
    spec = make_spec(
        x,
        values,
        weight.zeros,
        weight.codebook,
        weight.minima,
        block=block,
        activations=weight.scheme.activations,
        is_transposed=is_transposed,
    )
    named = "xla" if is_stack else None
    reads = weight_reads(spec, platform, named)
    scales = 4 * math.prod(weight.scales.shape) if isinstance(weight.scales, NestedScales) else 0
    copy = reads.copy
    if is_stack and platform == "gpu" and x.dtype != jnp.float32:  # `models.experts`, "gathered"
        text = "xla, chosen experts to float32 in registers, products of each row summed"
        return WeightUse(text, stored, stored + scales)
    read = reads.passes * stored + scales + _copy_bytes(copy, weight.size)
    text = form(spec, platform, named)
    return WeightUse(f"{text}, expert by expert" if is_stack else text, stored, read, copy)


def _packed_use(weight: PackedArray, stored: int, platform: str) -> WeightUse:
    if unsupported(platform) is not None:
        return WeightUse("xla, weights to float32, then product", stored, stored + 4 * weight.size, "float32")
    rounded = "" if weight.form.activations is None else f"tokens to {weight.form.activations}, "
    return WeightUse(f"numba_cpu, {rounded}codes converted in registers", stored, stored)


def lookup_use(table: Weight, platform: str | None = None) -> str:
    """How rows of an embedding are taken."""
    if isinstance(table, PackedArray):
        return "xla, rows are taken, then unpacked"
    if not isinstance(table, QuantizedArray):
        return "xla, rows are taken"
    is_kernel = (platform or current_platform()) == "tpu" and table.scales.shape[-1] > 1
    return f"{'pallas_tpu' if is_kernel else 'xla'}, rows are taken, then dequantized"


def _dense_use(weight, rows: int, dtype, stored: int, is_transposed: bool, platform: str) -> WeightUse:
    if weight.ndim > 2:
        name = "xla"
    else:
        name = choose_dense(_dense_spec(weight, rows, dtype, is_transposed), platform=platform).implementation
    copy = "float32" if platform == "cpu" and name == "xla" and weight.dtype != jnp.float32 else None
    text = "product" if copy is None else "weights to float32, then product"
    return WeightUse(f"{name}, {text}", stored, stored + _copy_bytes(copy, weight.size), copy)


def _dense_spec(weight, rows: int, dtype, is_transposed: bool):
    x = jax.ShapeDtypeStruct((rows, weight.shape[-1 if is_transposed else -2]), dtype)
    return make_dense_spec(x, weight, is_transposed=is_transposed)


def _copy_bytes(dtype: str | None, size: int) -> int:
    return 0 if dtype is None else size * jax.dtypes.itemsize_bits(jnp.dtype(dtype)) // 8
