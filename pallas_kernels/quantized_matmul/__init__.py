"""Matrix products with weights quantized to 4 or 8 bits."""

from pallas_kernels.quantized_matmul.api import IMPLEMENTATIONS, choose, form, quantized_matmul
from pallas_kernels.quantized_matmul.dequantize import dequantize
from pallas_kernels.quantized_matmul.specs import MatmulSpec, make_spec

__all__ = ["IMPLEMENTATIONS", "MatmulSpec", "choose", "dequantize", "form", "make_spec", "quantized_matmul"]
