"""Attention over contiguous keys and values."""

from pallas_kernels.choice import KernelChoice
from pallas_kernels.flash_attention.api import explain, flash_attention

__all__ = ["KernelChoice", "explain", "flash_attention"]
