"""Quantization calibrated on text (GPTQ, AWQ, SmoothQuant), one decoder layer at a time."""

# ruff: noqa: F401

from jaxinfer.calibration.auto import AutoResult, choose_bits, measure_sensitivity, quantize_within
from jaxinfer.calibration.driver import CalibrationResult, LayerReport, quantize_model
from jaxinfer.calibration.inputs import FloatModel
from jaxinfer.calibration.options import KEEP_AS_IS, METHODS, CalibrationOptions, Keep
from jaxinfer.calibration.quality import Quality
