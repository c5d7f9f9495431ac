"""Attention and matmul kernels: raw arrays in, raw arrays out; imports nothing from jaxinfer."""

from pallas_kernels.flash_attention import flash_attention

__all__ = ["flash_attention"]
