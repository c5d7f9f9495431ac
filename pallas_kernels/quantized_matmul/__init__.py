"""Matrix products with weights quantized to 4 or 8 bits."""

from pallas_kernels.quantized_matmul.api import IMPLEMENTATIONS, choose, form, quantized_matmul, take_rows, weight_reads
from pallas_kernels.quantized_matmul.dequantize import dequantize
from pallas_kernels.quantized_matmul.gathered import GATHERED_ROWS, gathered_matmul, take_expert, take_experts
from pallas_kernels.quantized_matmul.specs import GPU_KERNEL_BLOCKS, MatmulSpec, WeightReads, make_spec

__all__ = [
    "GATHERED_ROWS",
    "GPU_KERNEL_BLOCKS",
    "IMPLEMENTATIONS",
    "MatmulSpec",
    "WeightReads",
    "choose",
    "dequantize",
    "form",
    "gathered_matmul",
    "make_spec",
    "quantized_matmul",
    "take_expert",
    "take_experts",
    "take_rows",
    "weight_reads",
]
