"""Matrix products with weights quantized to 4 or 8 bits."""

from pallas_kernels.quantized_matmul.api import IMPLEMENTATIONS, choose, form, quantized_matmul, take_rows, weight_reads
from pallas_kernels.quantized_matmul.dequantize import dequantize
from pallas_kernels.quantized_matmul.specs import GPU_KERNEL_BLOCKS, MatmulSpec, WeightReads, make_spec

__all__ = [
    "GPU_KERNEL_BLOCKS",
    "IMPLEMENTATIONS",
    "MatmulSpec",
    "WeightReads",
    "choose",
    "dequantize",
    "form",
    "make_spec",
    "quantized_matmul",
    "take_rows",
    "weight_reads",
]
