"""Where a GPU's kernel wants the values of group-wise weights: those of each output side by side in memory."""

from typing import Any

import jax
from jax.experimental.layout import Format, Layout

from jaxinfer.quantization.array import QuantizedArray
from jaxinfer.quantization.tree import is_quantized

# [K, N] with the inputs running fastest, so that an output's weights, seen transposed, are a row.
OUTPUTS_TOGETHER = Layout(major_to_minor=(1, 0))


def outputs_together(params: Any, *, donate: bool = False) -> Any:
    """The parameters with the integers of group-wise weights laid out so; shapes and values are the same.

    A program takes its arguments as they lie, so what is transposed once here is not transposed on every call. With
    `donate` the arrays that are moved are freed one by one.
    """

    def placed(leaf: Any) -> Any:
        if not is_quantized(leaf) or not is_laid_out(leaf):
            return leaf
        values = jax.device_put(leaf.values, Format(OUTPUTS_TOGETHER, leaf.values.sharding), donate=donate)
        return type(leaf)(values, leaf.scales, leaf.zeros, leaf.codebook, leaf.permutation, leaf.scheme)

    return jax.tree.map(placed, params, is_leaf=is_quantized)


def is_laid_out(leaf: QuantizedArray) -> bool:
    """Whether the kernel multiplies by this weight; XLA takes others as they are."""
    if leaf.ndim != 2 or leaf.scheme.kind != "int" or leaf.scheme.block[1] != 1:
        return False
    return leaf.scheme.block[0] < leaf.shape[0] and leaf.scheme.activations is None
