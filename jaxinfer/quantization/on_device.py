"""Quantized weights as a device runs them: float32 copies on a CPU, within a memory budget; on a GPU the layout of
group-wise weights in which the values of an output are contiguous."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

from jaxinfer.quantization.array import NestedScales, QuantizedArray
from jaxinfer.quantization.tree import is_quantized
from pallas_kernels.quantized_matmul import GPU_KERNEL_BLOCKS, choose, make_spec

# A constant, so that a model computes alike on every machine with a CPU.
COPY_BYTES = 4 * 2**30
_NOT_COPIED = ("embed", "host_layers")


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
OUTPUTS_TOGETHER = Layout(major_to_minor=(1, 0))


def outputs_together(params: Any, *, donate: bool = False) -> Any:
    """The parameters with group-wise weights in the layout `OUTPUTS_TOGETHER`; shapes and values stay.

    Programs keep the layout of their arguments, so the transposition here saves one on every call. `donate` frees the
    original arrays one by one.
    """

    def placed(array: Any) -> Any:
        return jax.device_put(array, Format(OUTPUTS_TOGETHER, array.sharding), donate=donate)

    return jax.tree.map(lambda leaf: laid_out(leaf, placed), params, is_leaf=is_quantized)


def laid_out(leaf: Any, place: Callable[[Any], Any]) -> Any:
    """The weight with `place` of the arrays that a GPU needs in the layout; other leaves as they are."""
    names = arrays_laid_out(leaf) if is_quantized(leaf) else ()
    return replace(leaf, **{name: place(getattr(leaf, name)) for name in names}) if names else leaf


def arrays_laid_out(leaf: QuantizedArray) -> tuple[str, ...]:
    """Names of a weight's arrays that need the layout: its integers, and the numbers of its groups unless the kernel
    for a GPU (`pallas_gpu`), which reads them for 64 outputs at a time, may multiply by it. Of an embedding [V, D] the
    groups are along the rows, which have it already."""
    scheme = leaf.scheme
    if leaf.ndim != 2 or scheme.block[0] == 1:
        return ()
    if scheme.block[0] >= leaf.shape[0]:  # the compiler multiplies these in this layout only, and would copy them
        return ("values",) if leaf.values.dtype == jnp.int4 or scheme.activations == "int8" else ()
    if scheme.kind == "int" and scheme.activations is None and scheme.block in GPU_KERNEL_BLOCKS:
        return ("values",)
    numbers = ("zeros", "minima") if isinstance(leaf.scales, NestedScales) else ("scales", "zeros", "minima")
    return ("values", *(name for name in numbers if getattr(leaf, name) is not None))
