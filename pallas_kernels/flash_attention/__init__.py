"""Attention over contiguous keys and values."""

from pallas_kernels.flash_attention.api import Choice, explain, flash_attention

__all__ = ["Choice", "explain", "flash_attention"]
