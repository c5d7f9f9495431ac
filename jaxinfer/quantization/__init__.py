"""Quantized weights: the array type, its schemes, and quantization methods."""

from jaxinfer.quantization.array import NestedScales, QuantizedArray, Scheme, check
from jaxinfer.quantization.on_device import dequantize_params
from jaxinfer.quantization.rtn import RECIPES, Recipe, Selection, quantize, quantize_params, recipe

__all__ = [
    "RECIPES",
    "NestedScales",
    "QuantizedArray",
    "Recipe",
    "Scheme",
    "Selection",
    "check",
    "dequantize_params",
    "quantize",
    "quantize_params",
    "recipe",
]
