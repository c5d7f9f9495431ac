"""Memory layout of group-wise weights for the GPU kernel: the values of an output are contiguous."""

from typing import Any

import jax
from jax.experimental.layout import Format, Layout

from jaxinfer.quantization.array import QuantizedArray
from jaxinfer.quantization.tree import is_quantized

# [K, N] with inputs as the minor dimension: the transposed array is row-major.
OUTPUTS_TOGETHER = Layout(major_to_minor=(1, 0))


def outputs_together(params: Any, *, donate: bool = False) -> Any:
    """The parameters with the integers of group-wise weights in the layout `OUTPUTS_TOGETHER`; shapes and values stay.

    Programs keep the layout of their arguments, so the transposition here saves one on every call. `donate` frees the
    original arrays one by one.
    """

    def placed(leaf: Any) -> Any:
        if not is_quantized(leaf) or not is_laid_out(leaf):
            return leaf
        values = jax.device_put(leaf.values, Format(OUTPUTS_TOGETHER, leaf.values.sharding), donate=donate)
        return type(leaf)(values, leaf.scales, leaf.zeros, leaf.codebook, leaf.permutation, leaf.scheme)

    return jax.tree.map(placed, params, is_leaf=is_quantized)


def is_laid_out(leaf: QuantizedArray) -> bool:
    """Whether a weight is multiplied by the kernel, and therefore needs the layout; XLA multiplies by the others."""
    if leaf.ndim != 2 or leaf.scheme.kind != "int" or leaf.scheme.block[1] != 1:
        return False
    return leaf.scheme.block[0] < leaf.shape[0] and leaf.scheme.activations is None
