"""Attention over contiguous keys and values."""

from pallas_kernels.flash_attention.api import flash_attention

__all__ = ["flash_attention"]
