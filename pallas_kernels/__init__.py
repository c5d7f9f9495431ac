"""Attention and matrix products on TPU, GPU and CPU: raw arrays in and out, no import of jaxinfer."""

from pallas_kernels.dense_matmul import dense_matmul
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.page_copy import copy_pages
from pallas_kernels.paged_attention import new_pages, paged_attention
from pallas_kernels.platform import portable
from pallas_kernels.quantized_matmul import quantized_matmul

__all__ = [
    "copy_pages",
    "dense_matmul",
    "flash_attention",
    "new_pages",
    "paged_attention",
    "portable",
    "quantized_matmul",
]
