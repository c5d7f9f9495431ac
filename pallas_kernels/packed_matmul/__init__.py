"""Products with weights that are packed for CPUs, read as they are stored: integers, codebooks and 16-bit floats."""

from cpu_kernels.packed_matmul.forms import CODES, LANES, STEP, PackedArrays, PackedForm
from pallas_kernels.packed_matmul.api import packed_matmul, unsupported
from pallas_kernels.packed_matmul.packing import dequantize, pack, take_outputs, unpack, why_not

__all__ = [
    "CODES",
    "LANES",
    "STEP",
    "PackedArrays",
    "PackedForm",
    "dequantize",
    "pack",
    "packed_matmul",
    "take_outputs",
    "unpack",
    "unsupported",
    "why_not",
]
