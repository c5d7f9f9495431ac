"""Quantized checkpoints of other libraries, read into `QuantizedArray`s: a file per format."""

from checkpoints_convert.formats.kv_scales import LayerKVScales
from checkpoints_convert.formats.method import METHODS, quantization_method, with_side_file
from checkpoints_convert.formats.module import FormatError, Method, ModuleReader
from checkpoints_convert.formats.mxfp4 import mxfp4_experts, mxfp4_weight

__all__ = [
    "METHODS",
    "FormatError",
    "LayerKVScales",
    "Method",
    "ModuleReader",
    "mxfp4_experts",
    "mxfp4_weight",
    "quantization_method",
    "with_side_file",
]
