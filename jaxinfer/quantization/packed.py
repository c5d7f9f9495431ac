"""`PackedArray`: a weight as the kernels of a CPU read it, as a leaf of the parameters."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxinfer.quantization.array import NestedScales, QuantizedArray, Scheme
from pallas_kernels.packed_matmul import (
    CODES,
    LANES,
    STEP,
    PackedArrays,
    PackedForm,
    dequantize,
    pack,
    take_outputs,
    unpack,
    why_not,
)

PACKED_FLOATS = ("bfloat16", "float16", "float32")
_EMPTY = np.zeros(0, np.int8)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays", "permutation"],
    meta_fields=["form", "scheme", "is_transposed", "number_dtypes", "has_zeros"],
)
@dataclass(frozen=True)
class PackedArray:
    """A weight [..., K, N] (inputs, outputs) packed for the products of a CPU; leading axes are experts. A pytree.

    Attributes:
      arrays: as of `pallas_kernels.packed_matmul`, with the leading axes before theirs; None for those that the form
        does not have. A codebook has no leading axes.
      permutation: as of a `QuantizedArray`.
      form: of the matrix of one expert.
      scheme: of the `QuantizedArray` that was packed; None for an array that was not quantized.
      is_transposed: the weight is [N, K], an embedding for example: its rows are the outputs that were packed.
      number_dtypes: of the scales and minima of the `QuantizedArray`, "" for none. has_zeros: whether it has zeros.
    """

    arrays: PackedArrays
    permutation: Any
    form: PackedForm
    scheme: Scheme | None = None
    is_transposed: bool = False
    number_dtypes: tuple[str, str] = ("", "")
    has_zeros: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        leading = self.arrays.codes.shape[: -4 if self.form.codes == "quads" else -3]
        matrix = self.form.inputs, self.form.outputs
        return (*leading, *(matrix[::-1] if self.is_transposed else matrix))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """The weight, with rows in the order of the inputs, computed in float32 and rounded to `dtype`."""
        weight = dequantize(*self.operands)
        if self.permutation is not None:
            order = jnp.argsort(self.permutation, axis=-1)
            weight = jnp.take_along_axis(weight, jnp.broadcast_to(order[..., None], weight.shape), axis=-2)
        return (jnp.swapaxes(weight, -1, -2) if self.is_transposed else weight).astype(dtype)

    @property
    def operands(self) -> tuple[PackedForm, PackedArrays]:
        """The operands of `pallas_kernels.packed_matmul`."""
        return self.form, PackedArrays(*(_EMPTY if array is None else array for array in self.arrays))

    def of_expert(self, expert: int) -> "PackedArray":
        """The matrix of an expert of a stack."""
        permutation, of_all = self.permutation, self.arrays
        if permutation is not None and permutation.ndim > 1:
            permutation = permutation[expert]
        own = (None if array is None else array[expert] for array in of_all._replace(codebook=None))
        arrays = PackedArrays(*own)._replace(codebook=of_all.codebook)
        return replace(self, arrays=arrays, permutation=permutation)

    def rows(self, indices: jax.Array) -> jax.Array:
        """float32 [..., K] of a transposed weight [N, K], an embedding, at int32 indices [...]."""
        return take_outputs(*self.operands, indices)

    def unpacked(self) -> "QuantizedArray | np.ndarray":
        """The weight that was packed, of NumPy arrays; nested scales as plain ones of float32."""
        values, scales, offsets = unpack(*self.operands)
        scheme = self.scheme
        if scheme is None:
            return np.swapaxes(values, -1, -2) if self.is_transposed else values
        block = scheme.block[::-1] if self.is_transposed else scheme.block
        zeros = minima = None
        if self.has_zeros:
            assert offsets is not None
            with np.errstate(invalid="ignore", divide="ignore"):
                units = np.nan_to_num(offsets / scales)
            zeros = (-np.rint(units) - (8 if values.dtype == ml_dtypes.int4 else 0)).astype(np.int8)
        elif scheme.kind == "affine":
            minima = offsets

        def blocks(numbers: np.ndarray | None, dtype: str) -> np.ndarray | None:
            """An entry for each block, in the weight's order."""
            if numbers is None:
                return None
            numbers = numbers[..., :: min(block[1], numbers.shape[-1])]
            return (np.swapaxes(numbers, -1, -2) if self.is_transposed else numbers).astype(jnp.dtype(dtype))

        return QuantizedArray(
            np.swapaxes(values, -1, -2) if self.is_transposed else values,  # pyright: ignore[reportArgumentType]
            blocks(scales, self.number_dtypes[0]),  # pyright: ignore[reportArgumentType]
            blocks(zeros, "int8"),  # pyright: ignore[reportArgumentType]
            self.arrays.codebook,
            self.permutation,
            scheme,
            blocks(minima, self.number_dtypes[1] or "float32"),  # pyright: ignore[reportArgumentType]
        )


def why_not_packed(leaf: Any, *, is_transposed: bool = False) -> str | None:
    """The reason why a weight, of arrays or of shapes, cannot be packed, or None."""
    if isinstance(leaf, QuantizedArray):
        if (kind := leaf.scheme.activations) is not None:
            return f"its products round activations to {kind}"
        values, block = leaf.values, leaf.scheme.block[::-1] if is_transposed else leaf.scheme.block
    elif (kind := str(getattr(leaf, "dtype", type(leaf).__name__))) in PACKED_FLOATS:
        values, block = leaf, leaf.shape[-2:][::-1] if is_transposed else leaf.shape[-2:]
    else:
        return f"{kind} has no packed form"
    if values.ndim not in (2, 3) or (values.ndim == 3 and is_transposed):
        return f"it has {values.ndim} axes"
    if 0 in values.shape:
        return "the weight is empty"
    inputs, outputs = values.shape[-2:][::-1] if is_transposed else values.shape[-2:]
    # An entry of a block is repeated for each of its outputs.
    across = block[1] if block[0] >= inputs and block[1] >= outputs else 1
    return why_not(jax.ShapeDtypeStruct((inputs, outputs), values.dtype), (block[0], across))


def pack_weight(leaf: Any, *, is_transposed: bool = False, activations: str | None = None) -> PackedArray:
    """Packs a `QuantizedArray` or a floating-point array without loss.

    Args:
      is_transposed: the weight is [N, K], an embedding.
      activations: "int8" for products with activations rounded to 8 bits, of weights of 4 to 8 bits.

    Raises ValueError with the reason where `why_not_packed` has one.
    """
    if (reason := why_not_packed(leaf, is_transposed=is_transposed)) is not None:
        raise ValueError(f"cannot pack: {reason}")
    if not isinstance(leaf, QuantizedArray):
        values = _outputs_last(leaf, is_transposed)
        joined = _joined(values)
        form, arrays = pack(joined, block=joined.shape)
        form = replace(form, outputs=values.shape[-1])
        return PackedArray(_by_expert(arrays, values), None, form, None, is_transposed)
    scheme = leaf.scheme
    block = scheme.block[::-1] if is_transposed else scheme.block
    values = _outputs_last(leaf.values, is_transposed)
    scales = leaf.scales.dequantize() if isinstance(leaf.scales, NestedScales) else leaf.scales

    def by_output(numbers: Any) -> np.ndarray | None:
        """[groups, outputs of all experts]: a number of a block for each of its outputs."""
        if numbers is None:
            return None
        numbers = _outputs_last(numbers, is_transposed)
        if block[1] > 1:
            numbers = np.repeat(numbers, min(block[1], values.shape[-1]), axis=-1)[..., : values.shape[-1]]
        return _joined(numbers)

    form, arrays = pack(
        _joined(values),
        by_output(scales),
        by_output(leaf.zeros),
        None if leaf.codebook is None else np.asarray(leaf.codebook),
        by_output(leaf.minima),
        block=(block[0], 1),
        activations=activations,
    )
    minima_dtype = "" if leaf.minima is None else leaf.minima.dtype.name
    return PackedArray(
        _by_expert(arrays, values),
        leaf.permutation,
        replace(form, outputs=values.shape[-1]),
        scheme,
        is_transposed,
        (scales.dtype.name, minima_dtype),
        leaf.zeros is not None,
    )


def can_round_activations(form: PackedForm) -> bool:
    """True if products with such a weight can round activations to 8 bits."""
    return form.codes in ("nibbles", "int8", "quads")


def packed_shapes(leaf: Any, *, is_transposed: bool = False, activations: str | None = None) -> PackedArray:
    """`pack_weight` of a weight of shapes. Scales and minima have their own dtypes; those of arrays may be smaller."""
    is_weight = isinstance(leaf, QuantizedArray)
    values = leaf.values if is_weight else leaf
    *leading, inputs, outputs = values.shape
    if is_transposed:
        inputs, outputs = outputs, inputs
    kind, dtypes, scheme = values.dtype.name, ["", ""], None
    group, scales, offsets = -(-inputs // STEP) * STEP, "none", "none"
    if is_weight:
        scheme, dtypes[0] = leaf.scheme, "float32" if isinstance(leaf.scales, NestedScales) else leaf.scales.dtype.name
        block = scheme.block[::-1] if is_transposed else scheme.block
        group, scales = min(block[0], group), dtypes[0]
        if kind == "int4":
            kind = "nibbles" if leaf.codebook is None else "codebook"
        elif kind == "int8" and activations is not None:
            kind = "quads"
        if leaf.minima is not None:
            offsets = dtypes[1] = leaf.minima.dtype.name
        elif leaf.zeros is not None:
            offsets = "units"
        elif kind == "nibbles":
            offsets = "unit"
    form = PackedForm(inputs, outputs, group, kind, scales, offsets, -8 if offsets == "unit" else 0)
    if can_round_activations(form):
        form = replace(form, activations=activations)
    padded = form.padded_inputs
    codes = {"nibbles": (padded // 8, LANES), "codebook": (padded // 8, LANES), "quads": (padded // 4, LANES, 4)}

    def shape(dtype: str, *own: int) -> jax.ShapeDtypeStruct:
        bits = {"float16": "uint16", "bfloat16": "uint16"}.get(dtype, dtype)
        return jax.ShapeDtypeStruct((*leading, form.panels, *own), jnp.dtype(bits))

    arrays = PackedArrays(
        shape(CODES[kind].name, *codes.get(kind, (padded, LANES))),
        None if scales == "none" else shape(scales, form.groups, LANES),
        None,
        None if offsets in ("none", "unit") else shape({"units": "int8"}.get(offsets, offsets), form.groups, LANES),
        None,
        leaf.codebook if is_weight else None,
    )
    permutation = leaf.permutation if is_weight else None
    has_zeros = is_weight and leaf.zeros is not None
    return PackedArray(arrays, permutation, form, scheme, is_transposed, (dtypes[0], dtypes[1]), has_zeros)


def _outputs_last(array: Any, is_transposed: bool) -> np.ndarray:
    array = np.asarray(array)
    return array.T if is_transposed else array


def _joined(array: np.ndarray) -> np.ndarray:
    """[K, outputs of all experts] of [..., K, N], each expert's padded to whole panels: packed at once, all have scales
    of one kind."""
    if array.ndim == 2:
        return array
    width = -(-array.shape[-1] // LANES) * LANES
    joined = np.zeros((array.shape[1], array.shape[0], width), array.dtype)
    joined[..., : array.shape[-1]] = array.swapaxes(0, 1)
    return joined.reshape(array.shape[1], -1)


def _by_expert(arrays: PackedArrays, values: np.ndarray) -> PackedArrays:
    """The arrays on the device, of a stack with the experts as their first axis; None for empty ones."""

    def place(name: str, array: np.ndarray) -> jax.Array | None:
        if array.size == 0:
            return None
        is_stack = values.ndim == 3 and name != "codebook"
        return jax.device_put(array.reshape(len(values), -1, *array.shape[1:]) if is_stack else array)

    return PackedArrays(*map(place, PackedArrays._fields, arrays))
