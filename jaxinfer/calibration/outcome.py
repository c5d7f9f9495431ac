"""What a calibration will make of each weight, from shapes alone: so that what cannot be stored is told before hours of
work."""

from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp

from jaxinfer.calibration.capture import LayerProgram
from jaxinfer.calibration.options import KEEP_AS_IS, CalibrationOptions
from jaxinfer.calibration.work import find, linear_names
from jaxinfer.models import ModelConfig, abstract_params
from jaxinfer.quantization import QuantizedArray, quantize

ParamPath = tuple[str, ...]


def outcome(config: ModelConfig, options: CalibrationOptions) -> dict[ParamPath, QuantizedArray]:
    """The weights that will be quantized, by path, as abstract arrays of the type, shape and scheme they will have."""
    layers = abstract_params(config)["layers"]
    found: dict[ParamPath, QuantizedArray] = {}
    for number in range(config.num_layers):
        for name in linear_names(LayerProgram.of(config, number)):
            bits = options.bits_of(f"layers.{number}.{name}")
            if bits != KEEP_AS_IS:
                shape = find(layers[str(number)], name)["weight"].shape
                found["layers", str(number), *name.split("."), "weight"] = _quantized(shape, bits, options)
    return found


def all_linears(config: ModelConfig) -> list[str]:
    """Names of a model's linear layers, such as "layers.0.mlp.down_proj"."""
    return [
        f"layers.{number}.{name}"
        for number in range(config.num_layers)
        for name in linear_names(LayerProgram.of(config, number))
    ]


@lru_cache(maxsize=64)
def _quantized(shape: tuple[int, ...], bits: int, options: CalibrationOptions) -> QuantizedArray:
    def rounded(weight: jax.Array) -> QuantizedArray:
        return quantize(weight, options.recipe(bits), scale_dtype=options.dtype)

    weight = jax.eval_shape(rounded, jax.ShapeDtypeStruct(shape, jnp.float32))
    is_permuted = options.method == "gptq" and options.gptq.act_order and not options.gptq.static_groups
    if not is_permuted or options.grid(bits).num_groups(shape[-2]) == 1:
        return weight
    return replace(weight, permutation=jax.ShapeDtypeStruct(shape[:-1], jnp.int32))
