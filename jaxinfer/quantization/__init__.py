"""Weights of few bits: the leaf, the schemes, and what makes them."""

from jaxinfer.quantization.array import NestedScales, QuantizedArray, Scheme, check

__all__ = ["NestedScales", "QuantizedArray", "Scheme", "check"]
