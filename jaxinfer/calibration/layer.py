"""Quantizing the linear layers of one decoder layer."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.calibration.capture import LayerProgram
from jaxinfer.calibration.layer_state import Chunks, LayerState, QuantizedLayer
from jaxinfer.calibration.options import CalibrationOptions
from jaxinfer.calibration.scaling import awq, smoothquant
from jaxinfer.calibration.stacks import gptq_stacks
from jaxinfer.models import Params, keeps_float32
from jaxinfer.quantization import QuantizedArray, quantize
from jaxinfer.quantization.gptq import gptq


def quantize_layer(
    program: LayerProgram, number: int, params: Params, chunks: Chunks, options: CalibrationOptions
) -> QuantizedLayer:
    """Decoder layer `number` with its linear layers quantized.

    Args:
      params: float32. chunks: hidden states [B, T, D] before the layer, to calibrate on; not used for rounding to
        nearest.
    """
    state = LayerState(program, number, params, chunks, options)
    {"rtn": _rtn, "gptq": _gptq, "awq": awq, "smoothquant": smoothquant}[options.method](state)

    def stored(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, QuantizedArray) or keeps_float32([key.key for key in path]):
            return leaf
        return leaf.astype(options.dtype).astype(jnp.float32)

    result = jax.tree_util.tree_map_with_path(
        stored, state.result, is_leaf=lambda leaf: isinstance(leaf, QuantizedArray)
    )
    return QuantizedLayer(result, state.errors, state.value_divisors, tuple(state.notes))


def _rtn(state: LayerState) -> None:
    for names in state.program.groups:
        names = tuple(name for name in names if state.is_quantized(name))
        hessian = state.statistics(names).hessian if names and state.chunks else None
        for name in names:
            recipe = state.options.recipe(state.bits(name))
            state.set(name, quantize(state.weight(name), recipe, scale_dtype=state.options.dtype), hessian)
    for name in filter(state.is_quantized, state.program.stacks):
        recipe = state.options.recipe(state.bits(name))
        state.set(name, quantize(state.weight(name), recipe, scale_dtype=state.options.dtype))


def _gptq(state: LayerState) -> None:
    """GPTQ in the order of computation, each linear layer with the inputs that the quantized ones before it produce
    ("true sequential")."""
    for names in state.program.groups:
        names = tuple(name for name in names if state.is_quantized(name))
        if not names:
            continue
        hessian = state.statistics(names, state.result).hessian
        for name in names:
            grid = state.options.grid(state.bits(name))
            try:
                found, _ = gptq(state.weight(name), hessian, grid, state.options.gptq)
            except ValueError as error:
                raise ValueError(f"layers.{state.number}.{name}: {error}") from None
            state.set(name, found, hessian)
    for names in state.program.stack_groups:
        if names := tuple(filter(state.is_quantized, names)):
            gptq_stacks(state, names)
