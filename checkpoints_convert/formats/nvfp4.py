"""NVFP4: 4-bit floats (E2M1) in groups of 16 inputs with a scale in FP8 (E4M3), and a float32 scale of the tensor.

    ModelOpt            weight uint8 [N, K / 2], weight_scale float8_e4m3fn [N, K / 16], weight_scale_2 float32
                        W = e2m1 * (weight_scale * weight_scale_2)
    compressed-tensors  weight_packed, weight_scale, weight_global_scale = 1 / weight_scale_2
                        W = e2m1 * (weight_scale / weight_global_scale)

Sources: ModelOpt's NVFP4QTensor; compressed-tensors, compressors/nvfp4 and lifecycle/forward_helpers.py. In memory both
scales are one float32 number, so that a weight takes 6 bits where the file takes 4.5.
"""

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

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
)
from checkpoints_convert.formats.mxfp4 import E2M1, nibble_codes
from checkpoints_convert.safetensors_files import TensorHeader
from jaxinfer.quantization import QuantizedArray, Scheme

GROUP = 16
_SCHEME = Scheme("codebook", 4, (GROUP, 1))


def nvfp4_weight(packed: np.ndarray, scales: np.ndarray) -> QuantizedArray:
    """The weight [K, N] of uint8 `packed` [N, K / 2], the even input in the low nibble, and float32 `scales`
    [N, K / 16]: E2M1[code] * scale."""
    values = np.ascontiguousarray((nibble_codes(packed) ^ np.uint8(8)).T).view(ml_dtypes.int4)
    return host_quantized(_SCHEME, values, np.ascontiguousarray(scales.T), codebook=E2M1.copy())


def _names(is_modelopt: bool) -> tuple[str, str]:
    """The tensors of the packed weight and of its float32 scale."""
    return ("weight", "weight_scale_2") if is_modelopt else ("weight_packed", "weight_global_scale")


def nvfp4_reader(shape: tuple[int, ...], headers: Headers, *, is_modelopt: bool) -> ModuleReader:
    """The reader of a module with a weight [N, K], stored as ModelOpt or as compressed-tensors do.

    Raises FormatError for tensors that are missing, or of a wrong dtype or shape.
    """
    weight, global_scale = _names(is_modelopt)
    outputs, inputs = shape
    if inputs % GROUP:
        raise FormatError(f"NVFP4 has groups of {GROUP} inputs, which do not divide {inputs}", weight)
    has_shape(headers, weight, ["U8"], (outputs, inputs // 2))
    has_shape(headers, "weight_scale", ["F8_E4M3"], (outputs, inputs // GROUP))
    has_shape(headers, global_scale, ["F32"], (), (1,))
    static = tuple(suffix for suffix in ("input_scale", "input_global_scale") if suffix in headers)
    for name in static:
        has_shape(headers, name, FLOATS, (), (1,))

    def read(tensors: Tensors) -> QuantizedArray:
        scales, of_tensor = tensors["weight_scale"].astype(np.float32), np.float32(tensors[global_scale].reshape(()))
        if not is_modelopt and of_tensor == 0:
            raise FormatError("is 0, and scales are divided by it", global_scale)
        return nvfp4_weight(tensors[weight], scales * of_tensor if is_modelopt else scales / of_tensor)

    return ModuleReader((weight, "weight_scale", global_scale, *static), read, WeightForm((inputs, outputs), _SCHEME))


def nvfp4_headers(shape: tuple[int, ...], *, is_modelopt: bool) -> dict[str, TensorHeader]:
    """Headers of the tensors, by suffix, of a module with a weight [N, K]."""
    weight, global_scale = _names(is_modelopt)
    outputs, inputs = shape
    return {
        weight: ("U8", (outputs, inputs // 2)),
        "weight_scale": ("F8_E4M3", (outputs, inputs // GROUP)),
        global_scale: ("F32", () if is_modelopt else (1,)),
    }


@dataclass(frozen=True)
class ModelOptNvfp4(Method):
    """excluded: names of modules that stay dense, with wildcards."""

    excluded: tuple[str, ...] = ()
    name: str = "modelopt"

    def reader(self, module: str, shape: tuple[int, ...], headers: Headers, kind: str) -> ModuleReader | None:
        if headers.get("weight", ("U8",))[0] != "U8" or not {"weight", "weight_scale"} & headers.keys():
            return None
        if is_named(module, self.excluded):
            raise FormatError("is stored as U8, and the configuration excludes the module", "weight")
        reader = nvfp4_reader(shape, headers, is_modelopt=True)
        notes = ("activations declared as 4-bit float stay floating-point",) if "input_scale" in headers else ()
        return replace(reader, notes=notes)

    def stored(self, module: DenseModule) -> dict[str, TensorHeader] | None:
        if module.role != "linear" or is_named(module.name, self.excluded):
            return None
        return nvfp4_headers(module.shape, is_modelopt=True)
