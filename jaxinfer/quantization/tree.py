"""Traversal and description of parameters that may be quantized, or packed for a CPU."""

import math
from collections import Counter
from typing import Any

import jax

from jaxinfer.quantization.array import NestedScales, QuantizedArray, Scheme
from jaxinfer.quantization.matmul import KINDS
from jaxinfer.quantization.packed import PackedArray
from jaxinfer.quantization.side_by_side import separate


def is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedArray)


def is_packed(leaf: Any) -> bool:
    return isinstance(leaf, PackedArray)


def is_weight(leaf: Any) -> bool:
    """Tells whether a node of the parameters is one weight of several arrays: quantized, packed, or of another type
    that products take."""
    return type(leaf) in KINDS


def scheme_of(leaf: Any) -> Scheme | None:
    """The scheme of a quantized weight, packed or not; None for one that is not quantized."""
    return leaf.scheme if is_weight(leaf) else None


def weights(params: Any) -> list[Any]:
    """All leaves of the parameters, biases and norms too; a weight of several arrays is one leaf."""
    return jax.tree.leaves(params, is_leaf=is_weight)


def for_rows(params: Any, adapters: jax.Array) -> Any:
    """The parameters with each row's adapter bound to the weights that hold adapters: `adapters` is int32 [T], a number
    for each row, or a scalar for all. Parameters without such weights are returned unchanged."""

    def of_leaf(leaf: Any) -> Any:
        kind = KINDS.get(type(leaf))
        return leaf if kind is None or kind.for_rows is None else kind.for_rows(leaf, adapters)

    return jax.tree.map(of_leaf, params, is_leaf=is_weight)


def num_adapters(params: Any) -> int:
    """Number of adapters that each weight holds, counting number 0, no adapter; 0 if no weight holds adapters.

    Raises ValueError, with names, for weights that hold different numbers of them, and for those of experts.
    """
    counts: dict[int, str] = {}
    if all(kind.num_adapters is None for kind in KINDS.values()):
        return 0  # every spec calls this: the tree is not walked unless a registered type has adapters
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_weight):
        kind = KINDS.get(type(leaf))
        if kind is None or kind.num_adapters is None:
            continue
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if leaf.ndim != 2 and not kind.takes_stacks:
            raise ValueError(f"{name}: adapters are for matrices, not for {type(leaf).__name__} of {list(leaf.shape)}")
        counts.setdefault(kind.num_adapters(leaf), name)
    if len(counts) > 1:
        told = ", ".join(f"{name} {count}" for count, name in counts.items())
        raise ValueError(f"all weights with adapters must hold the same number of them: {told}")
    return next(iter(counts), 0)


def check_plain(params: Any, purpose: str) -> None:
    """Raises ValueError, with `purpose` and the first quantized weight, if there is one."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_weight):
        if scheme_of(leaf) is not None:
            name = ".".join(str(key.key) for key in path)
            raise ValueError(f"{purpose} needs floating-point parameters, but {name} is quantized: {leaf.scheme}")


def num_parameters(params: Any) -> int:
    """Number of parameters of the model; scales, zeros and codebooks are not counted."""
    return sum(math.prod(leaf.shape) for leaf in weights(params))


def num_bytes(params: Any) -> int:
    """Bytes per device: a 4-bit value takes a byte on a CPU, half a byte on a TPU or GPU and in abstract arrays."""
    return sum(_num_bytes(leaf) for leaf in jax.tree.leaves(params))


def describe(params: Any) -> str:
    """Text that counts quantized matrices by scheme; empty if none is quantized."""
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), params)
    matrices = [leaf for leaf in weights(separate(shapes)) if leaf.ndim > 1]
    names = Counter(describe_scheme(leaf) for leaf in matrices if scheme_of(leaf) is not None)
    return "; ".join(f"{count} of {len(matrices)} matrices in {name}" for name, count in names.items())


def describe_scheme(array: QuantizedArray | PackedArray) -> str:
    """Text such as "int4, 128 inputs a scale", of a weight that is quantized."""
    scheme, (inputs, outputs) = array.scheme, array.shape[-2:]
    if scheme is None:
        raise ValueError("the weight is not quantized")
    is_nested = isinstance(array, QuantizedArray) and isinstance(array.scales, NestedScales)
    rows, columns = min(scheme.block[0], inputs), min(scheme.block[1], outputs)
    dtype = array.form.codes if isinstance(array, PackedArray) else array.values.dtype.name
    named = {"codebook": "4-bit codebook", "float": dtype}
    kind = named.get(scheme.kind, f"int{scheme.bits}")
    if (rows, columns) == (inputs, outputs):
        scales = "one scale"
    elif columns > 1:
        scales = f"{rows} x {columns} a scale"
    else:
        scales = "a scale per output" if rows == inputs else f"{rows} inputs a scale"
    parts = [kind, scales]
    if is_nested:
        parts.append("scales in 8 bits")
    if array.has_zeros:
        parts.append("with zeros")
    if scheme.kind == "affine":
        parts.append("with minima")
    if array.permutation is not None:
        parts.append("inputs permuted")
    if scheme.activations is not None:
        parts.append(f"activations {scheme.activations}")
    return ", ".join(parts)


def _num_bytes(array: Any) -> int:
    bits, sharding = jax.dtypes.itemsize_bits(array.dtype), getattr(array, "sharding", None)
    shape = array.shape if sharding is None else sharding.shard_shape(array.shape)
    if isinstance(array, jax.Array) and next(iter(array.sharding.device_set)).platform == "cpu":
        bits = max(bits, 8)
    return -(-math.prod(shape) * bits // 8)
