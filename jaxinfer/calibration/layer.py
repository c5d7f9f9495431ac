"""Quantizing the linear layers of one decoder layer."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.calibration.capture import LayerProgram
from jaxinfer.calibration.options import CalibrationOptions
from jaxinfer.calibration.scaling import awq, smoothquant
from jaxinfer.calibration.stacks import gptq_stacks
from jaxinfer.calibration.work import Chunks, QuantizedLayer, Work
from jaxinfer.models import Params, keeps_float32
from jaxinfer.quantization import QuantizedArray, quantize
from jaxinfer.quantization.gptq import gptq


def quantize_layer(
    program: LayerProgram, number: int, params: Params, chunks: Chunks, options: CalibrationOptions
) -> QuantizedLayer:
    """Decoder layer `number` with its linear layers quantized.

    Args:
      params: float32. chunks: hidden states [B, T, D] before the layer, which is all that is calibrated on; unused by
        round-to-nearest.
    """
    work = Work(program, number, params, chunks, options)
    {"rtn": _rtn, "gptq": _gptq, "awq": awq, "smoothquant": smoothquant}[options.method](work)

    def stored(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, QuantizedArray) or keeps_float32([key.key for key in path]):
            return leaf
        return leaf.astype(options.dtype).astype(jnp.float32)

    result = jax.tree_util.tree_map_with_path(
        stored, work.result, is_leaf=lambda leaf: isinstance(leaf, QuantizedArray)
    )
    return QuantizedLayer(result, work.errors, work.value_divisors, tuple(work.notes))


def _rtn(work: Work) -> None:
    for names in work.program.groups:
        names = tuple(name for name in names if work.is_quantized(name))
        hessian = work.statistics(names).hessian if names and work.chunks else None
        for name in names:
            recipe = work.options.recipe(work.bits(name))
            work.set(name, quantize(work.weight(name), recipe, scale_dtype=work.options.dtype), hessian)
    for name in filter(work.is_quantized, work.program.stacks):
        recipe = work.options.recipe(work.bits(name))
        work.set(name, quantize(work.weight(name), recipe, scale_dtype=work.options.dtype))


def _gptq(work: Work) -> None:
    """In the order of computation, each with the inputs that the quantized layers before it make ("true
    sequential")."""
    for names in work.program.groups:
        names = tuple(name for name in names if work.is_quantized(name))
        if not names:
            continue
        hessian = work.statistics(names, work.result).hessian
        for name in names:
            grid = work.options.grid(work.bits(name))
            try:
                found, _ = gptq(work.weight(name), hessian, grid, work.options.gptq)
            except ValueError as error:
                raise ValueError(f"layers.{work.number}.{name}: {error}") from None
            work.set(name, found, hessian)
    for names in work.program.stack_groups:
        if names := tuple(filter(work.is_quantized, names)):
            gptq_stacks(work, names)
