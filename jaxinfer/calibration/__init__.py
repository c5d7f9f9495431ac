"""Quantization calibrated on text (GPTQ, AWQ, SmoothQuant), one decoder layer at a time."""

from jaxinfer.calibration.auto import AutoResult, choose_bits, measure_sensitivity, quantize_within
from jaxinfer.calibration.driver import CalibrationResult, LayerReport, quantize_model
from jaxinfer.calibration.inputs import FloatModel
from jaxinfer.calibration.options import KEEP_AS_IS, METHODS, CalibrationOptions, Keep
from jaxinfer.calibration.quality import Quality

__all__ = [
    "KEEP_AS_IS",
    "METHODS",
    "AutoResult",
    "CalibrationOptions",
    "CalibrationResult",
    "FloatModel",
    "Keep",
    "LayerReport",
    "Quality",
    "choose_bits",
    "measure_sensitivity",
    "quantize_model",
    "quantize_within",
]
