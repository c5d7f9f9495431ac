"""FP8 checkpoints: `fp8` (DeepSeek-V3, Qwen3-FP8 and others), `fbgemm_fp8` (Llama 3.1) and `modelopt` FP8.

`weight` float8_e4m3fn [N, K] times a scale: of the tensor, of an output, or of a block of 128x128, whose last rows and
columns are cut off. `weight_scale_inv` multiplies, despite its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from checkpoints_convert.formats.float4 import EXPONENTS, GROUP, ModelOptNvfp4
from checkpoints_convert.formats.module import (
    FLOATS,
    DenseModule,
    FormatError,
    Headers,
    Method,
    ModuleReader,
    Tensors,
    WeightForm,
    has_shape,
    host_quantized,
    is_named,
    names_list,
    powers_of_two,
    transposed,
    two_sizes,
)
from checkpoints_convert.safetensors_files import NUMPY_DTYPES, TensorHeader
from jaxinfer.quantization import QuantizedArray, Scheme

_WEIGHTS = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}
# Names that configurations have for them.
_FORMATS = {"e4m3": "e4m3", "float8_e4m3fn": "e4m3", "e5m2": "e5m2", "float8_e5m2": "e5m2"}
_SCALES = ("weight_scale_inv", "weight_scale", "qscale_weight", "scale")
_ACTIVATION_SCALES = ("activation_scale", "input_scale", "qscale_act", "input_scale_ub")
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4")  # of ModelOpt


@dataclass(frozen=True)
class Fp8(Method):
    """block: (outputs, inputs) of a scale, None for one per tensor or per output (`is_per_output`, which the tensors
    decide where there are some). is_dynamic: whether activations are quantized per token as they come."""

    name: str
    block: tuple[int, int] | None = None
    fmt: str = "e4m3"
    is_dynamic: bool = False
    excluded: tuple[str, ...] = ()
    is_per_output: bool = False

    def reader(self, module: str, shape: tuple[int, ...], headers: Headers, kind: str) -> ModuleReader | None:
        dtype = headers.get("weight", ("F32",))[0]
        if not dtype.startswith("F8") and dtype not in ("U8", "I8"):
            return None
        allowed = [name for name, fmt in _WEIGHTS.items() if fmt == self.fmt]
        has_shape(headers, "weight", allowed, shape)
        if is_named(module, self.excluded):
            raise FormatError(f"is stored as {dtype}, and the configuration excludes the module", "weight")
        suffix = next((suffix for suffix in _SCALES if suffix in headers), "weight_scale")
        outputs, inputs = shape
        if self.block is not None:
            bn, bk = self.block
            has_shape(headers, suffix, (*FLOATS, *EXPONENTS), (-(-outputs // bn), -(-inputs // bk)))
            block = (bk, bn)
        else:
            shapes = ((), (1,), (1, 1), (outputs,), (outputs, 1))
            which = has_shape(headers, suffix, (*FLOATS, *EXPONENTS), *shapes)
            block = (inputs, outputs) if which < 3 else (inputs, 1)
        static = tuple(suffix for suffix in _ACTIVATION_SCALES if suffix in headers)
        for name in static:
            has_shape(headers, name, FLOATS, (), (1,), (1, 1))
        activations = "fp8" if self.is_dynamic and not static and self.block is None and self.fmt == "e4m3" else None
        declared = "declared scales of activations are not applied" if static else "activations are not quantized"
        notes = (f"{declared}: the products of these layers are floating-point",)
        scheme = Scheme("float", 8, block, activations)
        # Exponents become float32.
        scales = NUMPY_DTYPES["F32" if headers[suffix][0] in EXPONENTS else headers[suffix][0]]
        return ModuleReader(
            ("weight", suffix, *static),
            partial(read_fp8, suffix, scheme),
            WeightForm((inputs, outputs), scheme, scales, NUMPY_DTYPES[dtype]),
            notes=notes if activations is None else (),
        )

    def stored(self, module: DenseModule) -> dict[str, TensorHeader] | None:
        if module.role != "linear" or is_named(module.name, self.excluded):
            return None
        outputs, inputs = module.shape
        weight = next(name for name, fmt in _WEIGHTS.items() if fmt == self.fmt)
        if self.block is None:
            scale = {"weight_scale": ("F32", (outputs, 1) if self.is_per_output else ())}
        else:
            scale = {"weight_scale_inv": ("F32", (-(-outputs // self.block[0]), -(-inputs // self.block[1])))}
        return {"weight": (weight, module.shape), **scale}


def fp8(data: Mapping[str, Any]) -> Fp8:
    """`quant_method` "fp8". Raises FormatError for unsupported float types and blocks, by name."""
    name = str(data.get("fmt") or "e4m3").lower()
    if name not in _FORMATS:
        raise FormatError(f"fmt {name!r} is not supported, {' and '.join(_WEIGHTS.values())} are")
    activations = data.get("activation_scheme") or "dynamic"
    if activations not in ("dynamic", "static"):
        raise FormatError(f"activation_scheme {activations!r} is neither 'dynamic' nor 'static'")
    if (scale_fmt := data.get("scale_fmt")) not in (None, "ue8m0", "float"):
        raise FormatError(f"scale_fmt {scale_fmt!r} is not supported, 'ue8m0' is")
    excluded = tuple(
        name for key in ("modules_to_not_convert", "ignored_layers") for name in names_list(key, data.get(key))
    )
    size = data.get("weight_block_size")
    block = None if size is None else two_sizes("weight_block_size", size)
    return Fp8("fp8", block, _FORMATS[name], activations == "dynamic", excluded)


def fbgemm_fp8(data: Mapping[str, Any]) -> Fp8:
    """`quant_method` "fbgemm_fp8". Raises FormatError for a malformed list of exceptions."""
    key = "modules_to_not_convert"
    return Fp8("fbgemm_fp8", excluded=names_list(key, data.get(key)), is_per_output=True)


def modelopt(data: Mapping[str, Any]) -> Fp8 | ModelOptNvfp4:
    """NVIDIA ModelOpt, by config.json or by hf_quant_config.json. Raises FormatError for all but FP8 and NVFP4, by
    name."""
    fields = data.get("quantization")
    if not isinstance(fields, Mapping):
        fields = data
    algorithm = fields.get("quant_algo")
    if algorithm not in _ALGORITHMS:
        raise FormatError(f"quant_algo {algorithm!r} is not supported, {', '.join(_ALGORITHMS)} are")
    excluded = names_list("exclude_modules", fields.get("exclude_modules") or data.get("ignore"))
    if algorithm == "NVFP4":
        if (size := fields.get("group_size")) not in (None, GROUP):
            raise FormatError(f"group_size {size!r} is not supported, NVFP4 has groups of {GROUP}")
        return ModelOptNvfp4(excluded)
    is_dynamic = algorithm == "FP8_PER_CHANNEL_PER_TOKEN"
    return Fp8("modelopt", excluded=excluded, is_dynamic=is_dynamic, is_per_output=is_dynamic)


def read_fp8(suffix: str, scheme: Scheme, tensors: Tensors) -> QuantizedArray:
    """The weight of `weight` [N, K] and the scales `suffix`: a number, one per output, or [N blocks, K blocks]."""
    scales = tensors[suffix]
    if scales.dtype.itemsize == 1:
        scales = powers_of_two(scales, suffix)
    weight = tensors["weight"]
    inputs, outputs = weight.shape[::-1]
    blocks = (-(-inputs // scheme.block[0]), -(-outputs // scheme.block[1]))
    scales = np.ascontiguousarray(scales.reshape(blocks[::-1]).T)
    return host_quantized(scheme, transposed(weight), scales)
