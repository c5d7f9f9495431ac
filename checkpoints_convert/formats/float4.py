"""4-bit floats (E2M1): MXFP4 (OCP Microscaling Formats 1.0), in blocks of 32 that share a power of two, and NVFP4, in
groups of 16 with a scale in FP8 (E4M3) and a float32 scale of the tensor.

MXFP4, with exponents in uint8 or E8M0:

    gpt-oss             blocks uint8 [E, N, K / 32, 16], scales [E, N, K / 32]
    compressed-tensors  weight_packed uint8 [N, K / 2], weight_scale [N, K / 32]

NVFP4:

    ModelOpt            weight uint8 [N, K / 2], weight_scale float8_e4m3fn [N, K / 16], weight_scale_2 float32
                        W = e2m1 * (weight_scale * weight_scale_2)
    compressed-tensors  weight_packed, weight_scale, weight_global_scale = 1 / weight_scale_2
                        W = e2m1 * (weight_scale / weight_global_scale)

Sources: ModelOpt's NVFP4QTensor; compressed-tensors, compressors/nvfp4 and lifecycle/forward_helpers.py. In memory both
scales of NVFP4 are one float32 number, so that a weight takes 6 bits where the file takes 4.5.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

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
    powers_of_two,
)
from checkpoints_convert.safetensors_files import TensorHeader
from jaxinfer.quantization import QuantizedArray, Scheme
from jaxinfer.quantization.rtn import E2M1

BLOCK, GROUP = 32, 16  # inputs that share a scale, of MXFP4 and of NVFP4
EXPONENTS = ("U8", "F8_E8M0")
# Suffixes of gpt-oss's parameters, after an underscore.
SUFFIXES = ("blocks", "scales")


def _scheme(block: int) -> Scheme:
    return Scheme("codebook", 4, (block, 1))


def _weight(packed: np.ndarray, scales: np.ndarray, block: int) -> QuantizedArray:
    """The weight [..., K, N] of uint8 `packed` [..., N, K / 2], the even input in the low nibble, and `scales`
    [..., N, K / block]: E2M1[code] * scale."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    values, scales = (np.ascontiguousarray(np.swapaxes(array, -1, -2)) for array in (codes ^ np.uint8(8), scales))
    return host_quantized(_scheme(block), values.view(ml_dtypes.int4), scales, codebook=E2M1.copy())


def mxfp4_weight(packed: np.ndarray, exponents: np.ndarray, suffix: str | None = None) -> QuantizedArray:
    """The weight [..., K, N] of uint8 `packed` [..., N, K / 2] and uint8 E8M0 `exponents` [..., N, K / 32], the tensor
    `suffix`: E2M1[code] * 2^(exponent - 127).

    The scales are bfloat16, which holds every such power of two. Raises FormatError for the exponent 255, a NaN.
    """
    scales, inputs = powers_of_two(exponents, suffix).astype(ml_dtypes.bfloat16), packed.shape[-1] * 2
    if inputs % BLOCK or exponents.shape != (*packed.shape[:-1], inputs // BLOCK):
        raise FormatError(f"scales {list(exponents.shape)} do not fit {inputs} inputs in blocks of {BLOCK}", suffix)
    return _weight(packed, scales, BLOCK)


def mxfp4_experts(blocks: np.ndarray, scales: np.ndarray) -> QuantizedArray:
    """gpt-oss's experts [E, K, N], outputs in the order of the file, of `*_blocks` uint8 [E, N, K / 32, 16] and
    `*_scales` uint8 [E, N, K / 32]."""
    if blocks.ndim != 4 or blocks.shape[-1] != BLOCK // 2 or blocks.shape[:-1] != scales.shape:
        raise FormatError(f"blocks {list(blocks.shape)} and scales {list(scales.shape)} are not of one weight")
    return mxfp4_weight(blocks.reshape(*blocks.shape[:2], -1), scales)


def _mxfp4_form(shape: tuple[int, ...]) -> WeightForm:
    """The form of a weight [..., K, N]."""
    return WeightForm(shape, _scheme(BLOCK), np.dtype(ml_dtypes.bfloat16))


def mxfp4_reader(shape: tuple[int, ...], headers: Headers) -> ModuleReader:
    """The reader of a module with a weight [N, K], stored as compressed-tensors do.

    Raises FormatError for tensors that are missing, or of a wrong dtype or shape.
    """
    outputs, inputs = shape
    has_shape(headers, "weight_packed", ["U8"], (outputs, inputs // 2))
    has_shape(headers, "weight_scale", EXPONENTS, (outputs, inputs // BLOCK))

    def read(tensors: Tensors) -> QuantizedArray:
        return mxfp4_weight(tensors["weight_packed"], tensors["weight_scale"], "weight_scale")

    return ModuleReader(("weight_packed", "weight_scale"), read, _mxfp4_form((inputs, outputs)))


@dataclass(frozen=True)
class Mxfp4(Method):
    """gpt-oss's: experts [E, N, K / 32, 16] with scales [E, N, K / 32]; nothing else is quantized."""

    name: str = "mxfp4"

    def reader(self, module: str, shape: tuple[int, ...], headers: Headers, kind: str) -> ModuleReader | None:
        """As of `Method`, of an expert parameter, whose dense form is `shape` [E, K, N]."""
        if not set(SUFFIXES) & set(headers):
            return None
        if len(shape) != 3 or shape[1] % BLOCK:
            raise FormatError(f"of shape {list(shape)} is no stack of experts with inputs in blocks of {BLOCK}")
        wanted = self._headers(shape)
        has_shape(headers, "blocks", ("U8",), wanted["blocks"][1])
        has_shape(headers, "scales", EXPONENTS, wanted["scales"][1])
        return ModuleReader(
            SUFFIXES, lambda tensors: mxfp4_experts(tensors["blocks"], tensors["scales"]), _mxfp4_form(shape)
        )

    def stored(self, module: DenseModule) -> dict[str, TensorHeader] | None:
        return self._headers(module.shape) if module.role == "experts" else None

    def _headers(self, shape: tuple[int, ...]) -> dict[str, TensorHeader]:
        experts, inputs, outputs = shape
        blocks = (experts, outputs, inputs // BLOCK)
        return {"blocks": ("U8", (*blocks, BLOCK // 2)), "scales": ("U8", blocks)}


def mxfp4(data: Mapping[str, Any]) -> Mxfp4:
    """`quant_method` "mxfp4"."""
    return Mxfp4()


def _nvfp4_names(is_modelopt: bool) -> tuple[str, str]:
    """The tensors of the packed weight and of its float32 scale."""
    return ("weight", "weight_scale_2") if is_modelopt else ("weight_packed", "weight_global_scale")


def _read_nvfp4(is_modelopt: bool, tensors: Tensors) -> QuantizedArray:
    weight, global_scale = _nvfp4_names(is_modelopt)
    scales, of_tensor = tensors["weight_scale"].astype(np.float32), np.float32(tensors[global_scale].reshape(()))
    if not is_modelopt and of_tensor == 0:
        raise FormatError("is 0, and scales are divided by it", global_scale)
    return _weight(tensors[weight], scales * of_tensor if is_modelopt else scales / of_tensor, GROUP)


def nvfp4_reader(shape: tuple[int, ...], headers: Headers, *, is_modelopt: bool) -> ModuleReader:
    """The reader of a module with a weight [N, K], stored as ModelOpt or as compressed-tensors do.

    Raises FormatError for tensors that are missing, or of a wrong dtype or shape.
    """
    weight, global_scale = _nvfp4_names(is_modelopt)
    outputs, inputs = shape
    if inputs % GROUP:
        raise FormatError(f"NVFP4 has groups of {GROUP} inputs, which do not divide {inputs}", weight)
    has_shape(headers, weight, ["U8"], (outputs, inputs // 2))
    has_shape(headers, "weight_scale", ["F8_E4M3"], (outputs, inputs // GROUP))
    static = tuple(suffix for suffix in ("input_scale", "input_global_scale") if suffix in headers)
    has_shape(headers, global_scale, ["F32"], (), (1,))
    for name in static:
        has_shape(headers, name, FLOATS, (), (1,))
    form = WeightForm((inputs, outputs), _scheme(GROUP))
    return ModuleReader((weight, "weight_scale", global_scale, *static), partial(_read_nvfp4, is_modelopt), form)


def nvfp4_headers(shape: tuple[int, ...], *, is_modelopt: bool) -> dict[str, TensorHeader]:
    """Headers of the tensors, by suffix, of a module with a weight [N, K]."""
    weight, global_scale = _nvfp4_names(is_modelopt)
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
