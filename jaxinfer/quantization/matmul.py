"""Matrix products and embedding look-ups with weights that may be quantized."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxinfer.quantization.array import NestedScales, QuantizedArray
from pallas_kernels.dense_matmul import dense_matmul
from pallas_kernels.quantized_matmul import quantized_matmul, take_rows

Weight = jax.Array | QuantizedArray


def matmul(x: jax.Array, weight: Weight, out_dtype=None, *, is_transposed: bool = False) -> jax.Array:
    """x [..., K] @ weight [K, N], in `out_dtype`, x's dtype by default; `is_transposed`: the weight is [N, K].

    float32 operands are multiplied in full precision.
    """
    if isinstance(weight, QuantizedArray):
        return _quantized(x, weight, out_dtype or x.dtype, is_transposed=is_transposed)
    return dense_matmul(x, weight, out_dtype=out_dtype, is_transposed=is_transposed)


def transposed(weight: Weight) -> Weight:
    """The transposed weight [N, K], of an embedding [K, N] for example, to compute logits."""
    if not isinstance(weight, QuantizedArray):
        return weight.T
    scales = _transposable_scales(weight).T
    scheme = replace(weight.scheme, block=weight.scheme.block[::-1])
    zeros = None if weight.zeros is None else weight.zeros.T
    minima = None if weight.minima is None else weight.minima.T
    return replace(weight, values=weight.values.T, scales=scales, zeros=zeros, minima=minima, scheme=scheme)


def _transposable_scales(weight: QuantizedArray) -> jax.Array:
    """The scales. Raises ValueError for a weight that cannot be transposed."""
    if weight.ndim != 2 or weight.permutation is not None or isinstance(weight.scales, NestedScales):
        raise ValueError("a stack, or a weight with permuted inputs or nested scales cannot be transposed")
    return weight.scales


def rows(table: Weight, indices: jax.Array, dtype=None) -> jax.Array:
    """table[indices]: [..., D] of an embedding [V, D], in `dtype` if the table is quantized."""
    if not isinstance(table, QuantizedArray):
        return table[indices]
    block = table.scheme.block
    if block[0] != 1 or table.permutation is not None or isinstance(table.scales, NestedScales):
        raise ValueError(f"an embedding needs a scale per row, blocks (1, D), not {block}")
    flat = indices.reshape(-1)
    arrays = {"scales": table.scales, "zeros": table.zeros, "minima": table.minima}
    numbers = {name: None if array is None else take_rows(array, flat) for name, array in arrays.items()}
    taken = replace(table, values=table.values[flat], **numbers)
    return taken.dequantize(dtype or jnp.float32).reshape(*indices.shape, table.shape[-1])


def _quantized(
    x: jax.Array,
    weight: QuantizedArray,
    out_dtype,
    implementation: str | None = None,
    *,
    is_transposed: bool = False,
) -> jax.Array:
    """x [..., T, K] for a stack of experts [..., K, N]."""
    scales, (size, across) = weight.scales, weight.scheme.block
    if is_transposed:
        scales = _transposable_scales(weight)
    elif isinstance(scales, NestedScales):
        scales = scales.dequantize()
    if weight.ndim > 2:
        codebook = None if weight.codebook is None else jnp.broadcast_to(weight.codebook, (weight.shape[0], 16))
        return jax.vmap(lambda x, w: _quantized(x, w, out_dtype, "xla"))(
            x, replace(weight, scales=scales, codebook=codebook)
        )
    if weight.permutation is not None:
        x = x[..., weight.permutation]
    return quantized_matmul(
        x,
        weight.values,
        scales,
        weight.zeros,
        weight.codebook,
        weight.minima,
        block=(across, size) if is_transposed else (size, across),
        activations=weight.scheme.activations,
        is_transposed=is_transposed,
        out_dtype=out_dtype,
        implementation=implementation,
    )
