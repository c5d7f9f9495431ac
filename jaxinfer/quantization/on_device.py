"""Weights as a device runs them: packed on a CPU, or float32 copies of quantized ones within a memory budget where it
cannot pack; on a GPU and a TPU in the layouts in which products read group-wise weights without a copy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

from jaxinfer.quantization.array import NestedScales, QuantizedArray
from jaxinfer.quantization.packed import (
    PackedArray,
    can_round_activations,
    pack_weight,
    packed_shapes,
    why_not_packed,
)
from jaxinfer.quantization.side_by_side import separate
from jaxinfer.quantization.tree import is_packed, is_quantized, is_weight, weights
from pallas_kernels.packed_matmul import unsupported
from pallas_kernels.quantized_matmul import GPU_KERNEL_BLOCKS, choose, make_spec

# A constant, so that a model computes alike on every machine with a CPU.
COPY_BYTES = 4 * 2**30
_NOT_COPIED = ("embed", "host_layers")


def why_not_packing(dtype: Any) -> str | None:
    """The reason why the weights of a model that computes in `dtype` are not packed on the default device, or None."""
    if (reason := unsupported(jax.default_backend())) is not None:
        return reason
    name = jnp.dtype(dtype).name
    return None if name == "float32" else f"packed weights are for float32, and the model computes in {name}"


class Packing:
    """Packs the weights of products for a CPU, one by one: linear layers, stacks of experts and the head. A tied
    embedding becomes the head, from which rows are taken too; another one is packed unless it is float32.

    Args:
      is_tied: whether the embedding is the head. activations: "int8" for products with activations rounded to 8 bits;
        with None, weights that are packed already keep what they were packed for.
      select: applied before, as `Selection` is.
    """

    def __init__(
        self,
        *,
        is_tied: bool,
        activations: str | None = None,
        select: Callable[[tuple[str, ...], Any], Any] | None = None,
    ):
        self._is_tied, self._activations, self._select = is_tied, activations, select
        self.takes_host_arrays = select is None  # NumPy arrays of leaves, which need not be on the device

    def __call__(self, path: tuple[str, ...], leaf: Any) -> Any:
        if self._select is not None:
            leaf = self._select(path, leaf)
        is_embedding = path == ("embed",)
        if not self.takes(path) or (
            is_embedding and not self._is_tied and not is_weight(leaf) and leaf.dtype == jnp.float32
        ):
            return leaf
        if isinstance(leaf, PackedArray):
            is_wanted = self._activations in (None, leaf.form.activations)
            if is_wanted or not can_round_activations(leaf.form):
                return leaf
            leaf = leaf.unpacked()
        if why_not_packed(leaf, is_transposed=is_embedding) is not None:
            return leaf if is_weight(leaf) else leaf.astype(jnp.float32)
        pack = packed_shapes if isinstance(jax.tree.leaves(leaf)[0], jax.ShapeDtypeStruct) else pack_weight
        return pack(leaf, is_transposed=is_embedding, activations=self._activations)

    def takes(self, path: Sequence[str]) -> bool:
        """True if the parameter is packed, if it can be."""
        return (path[-1] == "weight" and path[-2].endswith("_proj")) or tuple(path) in (("embed",), ("lm_head",))

    def keeps_16_bits(self, path: Sequence[str]) -> bool:
        """True if a parameter that is stored in 16 bits is held in these."""
        return self.takes(path) and (self._select is None or path[0] in ("embed", "lm_head"))

    def params(self, params: Any) -> Any:
        """Parameters, which may be abstract, with packed weights; the others are shared, not copied."""

        def packed(path: Any, leaf: Any) -> Any:
            names = tuple(key.key for key in path)
            return leaf if names[0] == "host_layers" else self(names, leaf)

        return jax.tree_util.tree_map_with_path(packed, params, is_leaf=is_weight)


def in_whole_bytes(params: Any) -> Any:
    """Abstract parameters as a CPU holds those that are not packed: 4-bit integers in a byte each."""

    def whole(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, jnp.int8) if leaf.dtype == jnp.int4 else leaf

    return jax.tree.map(whole, params)


def rounds_activations(params: Any) -> bool:
    """True if the activations of any product are rounded for packed weights."""
    return any(isinstance(leaf, PackedArray) and leaf.form.activations is not None for leaf in weights(params))


def unpack_params(params: Any) -> Any:
    """The parameters as they were before packing, each weight on its own: `QuantizedArray`s and plain arrays, these in
    the dtype of the norms. What computes gradients or rounds weights needs them."""
    params = separate(params)
    if not any(map(is_packed, weights(params))):
        return params
    dtype = params["final_norm"]["weight"].dtype
    return jax.tree.map(lambda leaf: unpacked(leaf, dtype), params, is_leaf=is_weight)


def dequantize_params(params: Any) -> Any:
    """The parameters as plain arrays in the dtype of the norms, as `bind` takes them where gradients are computed.

    Arrays that are plain are shared, not copied. Quantized weights get the values that they stand for.
    """
    params, dtype = separate(params), params["final_norm"]["weight"].dtype

    def dense(leaf: Any) -> Any:
        leaf = unpacked(leaf, dtype)
        return leaf.dequantize(dtype) if is_quantized(leaf) else leaf

    return jax.tree.map(dense, params, is_leaf=is_weight)


def unpacked(leaf: Any, dtype: Any) -> Any:
    """A weight as it was before packing, on the device; one that was not quantized in `dtype`."""
    if not isinstance(leaf, PackedArray):
        return leaf
    weight = leaf.unpacked()
    return jax.tree.map(jnp.asarray, weight) if is_weight(weight) else jnp.asarray(weight, dtype)


@dataclass(frozen=True)
class Copies:
    """Statistics of `float32_copies`: weights copied and their bytes, weights that could be copied, and the budget in
    bytes."""

    num_copied: int
    num_bytes: int
    num_copyable: int
    budget: int

    def __str__(self) -> str:
        mib = 2**20
        return (
            f"{self.num_copied} of {self.num_copyable} weights, {self.num_bytes / mib:,.1f} MiB of at most "
            f"{self.budget / mib:,.0f} MiB"
        )


def float32_copies(params: Any, budget: int = COPY_BYTES) -> tuple[Any, Copies]:
    """The parameters with quantized weights replaced by float32 ones, in order, up to `budget` bytes.

    XLA:CPU does not fuse the conversion into a product: it converts the full weight on every call, which makes a decode
    step 3 times slower than float32 with int8, and 7 times with int4. Not copied are weights that a kernel multiplies
    as they are stored (`pallas_kernels.quantized_matmul.numba_cpu`), those with quantized activations, whose products
    would change, an embedding, of which a step reads few rows, layers on the host, and models that do not compute in
    float32.
    """
    spent, num_copied, num_copyable = 0, 0, 0

    def copied(path: Any, leaf: Any) -> Any:
        nonlocal spent, num_copied, num_copyable
        if not is_quantized(leaf) or leaf.scheme.activations is not None or path[0].key in _NOT_COPIED:
            return leaf
        if _is_multiplied_as_stored(leaf):
            return leaf
        num_copyable += 1
        size = 4 * leaf.values.size
        if spent + size > budget:
            return leaf
        spent, num_copied = spent + size, num_copied + 1
        return _dequantize(leaf)

    if params["final_norm"]["weight"].dtype == jnp.float32:
        params = jax.tree_util.tree_map_with_path(copied, params, is_leaf=is_quantized)
    return params, Copies(num_copied, spent, num_copyable, budget)


def _is_multiplied_as_stored(leaf: QuantizedArray) -> bool:
    if leaf.ndim != 2 or isinstance(leaf.scales, NestedScales):
        return False
    x = jax.ShapeDtypeStruct((1, leaf.shape[0]), jnp.float32)
    block, arrays = leaf.scheme.block, (leaf.values, leaf.zeros, leaf.codebook, leaf.minima)
    return choose(make_spec(x, *arrays, block=block, activations=None), platform="cpu").implementation != "xla"


@jax.jit
def _dequantize(array: QuantizedArray) -> jax.Array:
    return array.dequantize()


# [K, N] with inputs as the minor dimension: the transposed array is row-major.
OUTPUT_MAJOR = Layout(major_to_minor=(1, 0))
ROW_MAJOR = Layout(major_to_minor=(0, 1))
BY_OUTPUT = Layout(major_to_minor=(0, 2, 1))  # of a stack [E, K, N]
_TILE_ROWS = 8  # of a TPU's tile, in words of 32 bits
Place = Callable[[Any, Layout], Any]


def in_layouts(params: Any, platform: str, *, donate: bool = False) -> Any:
    """The parameters with quantized weights in the layouts of the products on a platform; shapes and values stay.

    Programs keep the layout of their arguments, so the copy here saves one on every call. `donate` frees the original
    arrays one by one.
    """

    def placed(array: Any, layout: Layout) -> Any:
        return jax.device_put(array, Format(layout, array.sharding), donate=donate)

    return jax.tree.map(lambda leaf: laid_out(leaf, platform, placed), params, is_leaf=is_quantized)


def laid_out(leaf: Any, platform: str, place: Place) -> Any:
    """The weight with `place` of the arrays that need a layout, and it; other leaves as they are."""
    by_name = layouts(leaf, platform) if is_quantized(leaf) else {}
    return (
        replace(leaf, **{name: place(getattr(leaf, name), layout) for name, layout in by_name.items()})
        if by_name
        else leaf
    )


def layouts(leaf: QuantizedArray, platform: str) -> dict[str, Layout]:
    """By name, the layouts of a weight's arrays that are not the platform's default."""
    if leaf.ndim == 3 and platform == "gpu":  # a stack of experts, of which products gather the chosen ones
        numbers = ("zeros", "minima") if isinstance(leaf.scales, NestedScales) else ("scales", "zeros", "minima")
        return {name: BY_OUTPUT for name in ("values", *numbers) if getattr(leaf, name) is not None}
    if leaf.ndim != 2:
        return {}
    if platform == "tpu":
        return _tpu_layouts(leaf)
    return dict.fromkeys(_stored_output_major(leaf), OUTPUT_MAJOR) if platform == "gpu" else {}


def _tpu_layouts(leaf: QuantizedArray) -> dict[str, Layout]:
    """Row-major integers of groups, in tiles with rows of one group each. By default a TPU's rows are along the axis
    that needs less padding, which for [1536, 576] and for the embedding [49152, 576] are the columns, and tiles of int4
    have 64 rows, of int8 32. XLA multiplies by groups of fewer rows in tiles of 8, the kernel of a tied embedding reads
    it row by row, and a program copies what lies otherwise: in a decode step of SmolLM2 on a v6e, with groups of 32 in
    int4, 157 of 285 MB that move, and 71 of 105 MB of temporaries.
    """
    (size, across), bits = leaf.scheme.block, jax.dtypes.itemsize_bits(leaf.values.dtype)
    if size == 1 and across < leaf.shape[1]:  # of an embedding [V, D] the groups are along the rows
        return {"values": ROW_MAJOR}
    if not 1 < size < leaf.shape[0]:
        return {}
    packed = 32 // bits  # values of a word
    if bits > 8 or size % (_TILE_ROWS * packed) == 0:
        return {"values": ROW_MAJOR}
    tiling = ((_TILE_ROWS, 128), (packed, 1))
    return {"values": Layout(ROW_MAJOR.major_to_minor, tiling, bits if bits < 8 else 0)}


def _stored_output_major(leaf: QuantizedArray) -> tuple[str, ...]:
    """Names of a weight's arrays that a GPU needs in the layout `OUTPUT_MAJOR`: its integers, and the numbers of
    its groups unless the kernel (`pallas_gpu`), which reads them for 64 outputs at a time, may multiply by it. Of an
    embedding [V, D] the groups are along the rows, which have it already."""
    scheme = leaf.scheme
    if scheme.block[0] == 1:
        return ()
    if scheme.block[0] >= leaf.shape[0]:  # the compiler multiplies these in this layout only, and would copy them
        return ("values",) if leaf.values.dtype == jnp.int4 or scheme.activations == "int8" else ()
    if scheme.kind == "int" and scheme.activations is None and scheme.block in GPU_KERNEL_BLOCKS:
        return ("values",)
    numbers = ("zeros", "minima") if isinstance(leaf.scales, NestedScales) else ("scales", "zeros", "minima")
    return ("values", *(name for name in numbers if getattr(leaf, name) is not None))
