"""Matrix products and embedding look-ups with weights of any kind: arrays, and the leaf types in `KINDS`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.quantization.array import NestedScales, QuantizedArray
from jaxinfer.quantization.packed import PackedArray
from pallas_kernels.dense_matmul import dense_matmul
from pallas_kernels.packed_matmul import packed_matmul
from pallas_kernels.quantized_matmul import gathered_matmul, quantized_matmul, take_experts, take_rows

Weight = Any  # an array, or a leaf of a type in KINDS


@dataclass(frozen=True)
class WeightKind:
    """Operations of models with weights of one leaf type.

    The type is a pytree with the attributes `shape` and `ndim`, of the weight that it stands for, and `scheme`, None if
    it is not quantized. It may hold data for each row of x: rows are those of all the tokens of a pass, in their order.
    Such a type holds adapters, of which each row has one. Number 0 is none, and that of all rows of a leaf as it stands
    in a model's parameters.

    Attributes:
      matmul: as the function of that name, `out_dtype` by position. rows, transposed: likewise; None where a weight of
        the type is no embedding.
      for_rows: the leaf for rows with the adapters int32 [T], or [], that of all rows. num_adapters: how many a leaf
        holds, number 0 included. None for types without data for each row. takes_stacks: whether weights of the type
        with adapters may be stacks [E, K, N]; else only matrices may.
    """

    matmul: Callable[..., jax.Array]
    rows: Callable[..., jax.Array] | None = None
    transposed: Callable[[Any], Any] | None = None
    for_rows: Callable[[Any, jax.Array], Any] | None = None
    num_adapters: Callable[[Any], int] | None = None
    takes_stacks: bool = False


def matmul(x: jax.Array, weight: Weight, out_dtype=None, *, is_transposed: bool = False) -> jax.Array:
    """x [..., K] @ weight [K, N], in `out_dtype`, x's dtype by default; `is_transposed`: the weight is [N, K].

    float32 operands are multiplied in full precision.
    """
    if (kind := KINDS.get(type(weight))) is None:
        return dense_matmul(x, weight, out_dtype=out_dtype, is_transposed=is_transposed)
    return kind.matmul(x, weight, out_dtype or x.dtype, is_transposed=is_transposed)


def _packed_matmul(x: jax.Array, weight: PackedArray, out_dtype, *, is_transposed: bool) -> jax.Array:
    if weight.ndim > 2:
        experts = range(weight.shape[0])
        return jnp.stack([matmul(x[expert], weight.of_expert(expert), out_dtype) for expert in experts])
    if weight.is_transposed != is_transposed:  # its rows are not what was packed for a product
        return dense_matmul(x, weight.dequantize(x.dtype), out_dtype=out_dtype, is_transposed=is_transposed)
    return _packed(x, [weight], out_dtype)[0]


def matmul_several(x: jax.Array, weights: Sequence[Weight]) -> list[jax.Array]:
    """`matmul` of x [..., K] with each of several weights [K, N], in one call where all of them are packed alike."""
    packed = [weight for weight in weights if isinstance(weight, PackedArray) and is_joinable(weight)]
    if len(packed) < len(weights) or len({weight.form.activations for weight in packed}) > 1:
        return [matmul(x, weight) for weight in weights]
    return _packed(x, packed)


def matmul_experts(
    x: jax.Array, stacks: Sequence[PackedArray], counts: jax.Array, expert: jax.Array
) -> list[jax.Array]:
    """Products of rows x [T, K] with their experts' weights, of several stacks [E, K, N].

    x is sorted by expert: int32 [T] the expert of each row, E for none, and int32 [E] rows of each expert. Results of
    rows without an expert are unspecified.
    """
    orders = {id(stack.permutation): stack.permutation for stack in stacks}
    if len(orders) > 1 or len({stack.form.activations for stack in stacks}) > 1:
        return [matmul_experts(x, [stack], counts, expert)[0] for stack in stacks]
    if (order := stacks[0].permutation) is not None:
        order = order if order.ndim == 1 else order.at[expert].get(mode="clip")
        x = x[:, order] if order.ndim == 1 else jnp.take_along_axis(x, order, axis=-1)
    products = packed_matmul(x, [stack.operands for stack in stacks], counts)
    return [product.astype(x.dtype) for product in products]


def matmul_gathered(x: jax.Array, stack: Weight, expert: jax.Array) -> jax.Array:
    """Products of blocks of rows x [B, R, K] with the weights of their experts int32 [B], of a stack [E, K, N] that is
    plain or quantized: [B, R, N] in x's dtype."""
    if not isinstance(stack, QuantizedArray):
        return gathered_matmul(x, expert, stack, block=stack.shape[1:]).astype(x.dtype)
    scales = stack.scales
    if isinstance(scales, NestedScales):
        own = {name: getattr(scales, name)[expert] for name in ("codes", "outer", "offset")}
        scales = replace(scales, **own).dequantize(by_output=True)
    else:
        scales = take_experts(scales, expert)
    if (order := stack.permutation) is not None:
        x = x[..., order] if order.ndim == 1 else jnp.take_along_axis(x, order[expert][:, None], axis=-1)
    product = gathered_matmul(
        x,
        expert,
        stack.values,
        scales,
        stack.zeros,
        stack.codebook,
        stack.minima,
        block=stack.scheme.block,
        activations=stack.scheme.activations,
    )
    return product.astype(x.dtype)


def is_joinable(weight: Weight) -> bool:
    """True if a product with the weight can be part of a call with several weights."""
    if not isinstance(weight, PackedArray):
        return False
    return weight.permutation is None and weight.ndim == 2 and not weight.is_transposed


def _packed(x: jax.Array, weights: Sequence[PackedArray], out_dtype=None) -> list[jax.Array]:
    """Products with weights of which only one may have a permutation."""
    if (order := weights[0].permutation) is not None:
        x = x[..., order]
    products = packed_matmul(x, [weight.operands for weight in weights])
    return [product.astype(out_dtype or x.dtype) for product in products]


def transposed(weight: Weight) -> Weight:
    """The transposed weight [N, K], of an embedding [K, N] for example, to compute logits."""
    if (kind := KINDS.get(type(weight))) is None:
        return weight.T
    if kind.transposed is None:
        raise ValueError(f"a {type(weight).__name__} cannot be transposed")
    return kind.transposed(weight)


def _packed_transposed(weight: PackedArray) -> PackedArray:
    if weight.ndim != 2 or weight.permutation is not None:
        raise ValueError("a stack, or a weight with permuted inputs cannot be transposed")
    scheme = weight.scheme
    scheme = None if scheme is None else replace(scheme, block=scheme.block[::-1])
    return replace(weight, scheme=scheme, is_transposed=not weight.is_transposed)


def _quantized_transposed(weight: QuantizedArray) -> QuantizedArray:
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
    """table[indices]: [..., D] of an embedding [V, D], in `dtype`, by default the table's, or float32 of a quantized or
    packed one."""
    if (kind := KINDS.get(type(table))) is None:
        return table[indices].astype(dtype or table.dtype)
    if kind.rows is None:
        raise ValueError(f"a {type(table).__name__} is no embedding")
    return kind.rows(table, indices, dtype or jnp.float32)


def _packed_rows(table: PackedArray, indices: jax.Array, dtype) -> jax.Array:
    embeddings = table.rows(indices) if table.is_transposed else table.dequantize()[indices]
    return embeddings.astype(dtype)


def _quantized_rows(table: QuantizedArray, indices: jax.Array, dtype) -> jax.Array:
    block = table.scheme.block
    if block[0] != 1 or table.permutation is not None or isinstance(table.scales, NestedScales):
        raise ValueError(f"an embedding needs a scale per row, blocks (1, D), not {block}")
    flat = indices.reshape(-1)
    arrays = {"scales": table.scales, "zeros": table.zeros, "minima": table.minima}
    numbers = {name: None if array is None else take_rows(array, flat) for name, array in arrays.items()}
    taken = replace(table, values=table.values[flat], **numbers)
    return taken.dequantize(dtype).reshape(*indices.shape, table.shape[-1])


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


# By leaf type. Another type is one more entry, made before models of it are traced.
KINDS: dict[type, WeightKind] = {
    QuantizedArray: WeightKind(_quantized, _quantized_rows, _quantized_transposed),
    PackedArray: WeightKind(_packed_matmul, _packed_rows, _packed_transposed),
}
