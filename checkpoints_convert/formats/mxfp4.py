"""MXFP4 (OCP Microscaling Formats 1.0): 4-bit floats in blocks of 32 that share a power of two."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints_convert.formats.module import (
    DenseModule,
    FormatError,
    Headers,
    Method,
    ModuleReader,
    WeightForm,
    has_shape,
    host_quantized,
)
from checkpoints_convert.safetensors_files import TensorHeader
from jaxinfer.quantization import QuantizedArray, Scheme

BLOCK = 32
# Suffixes of gpt-oss's parameters, after an underscore.
SUFFIXES = ("blocks", "scales")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def mxfp4_weight(packed: np.ndarray, exponents: np.ndarray) -> QuantizedArray:
    """The weight [..., K, N] of uint8 `packed` [..., N, K / 2], the even element in the low nibble, and uint8 E8M0
    `exponents` [..., N, K / 32]: E2M1[code] * 2^(exponent - 127).

    The scales are bfloat16, which holds every such power of two. Raises FormatError for the exponent 255, a NaN.
    """
    exponents = exponents.view(np.uint8)
    if bad := int((exponents == 255).sum()):
        raise FormatError(f"{bad} of {exponents.size} scales are NaN")
    inputs = packed.shape[-1] * 2
    if inputs % BLOCK or exponents.shape != (*packed.shape[:-1], inputs // BLOCK):
        raise FormatError(f"scales {list(exponents.shape)} do not fit {inputs} inputs in blocks of {BLOCK}")
    codes = nibble_codes(packed)
    # The bits of 2^(e - 127) in bfloat16: e is its exponent; e = 0 is the subnormal 2^-127.
    bits = np.where(exponents == 0, np.uint16(0x40), exponents.astype(np.uint16) << 7)
    return host_quantized(
        Scheme("codebook", 4, (BLOCK, 1)),
        np.ascontiguousarray(np.swapaxes(codes ^ np.uint8(8), -1, -2)).view(ml_dtypes.int4),
        np.ascontiguousarray(np.swapaxes(bits, -1, -2)).view(ml_dtypes.bfloat16),
        codebook=E2M1.copy(),
    )


def nibble_codes(packed: np.ndarray) -> np.ndarray:
    """uint8 [..., K] of bytes [..., K / 2], the even code in the low nibble."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def mxfp4_experts(blocks: np.ndarray, scales: np.ndarray) -> QuantizedArray:
    """gpt-oss's experts [E, K, N], outputs in the order of the file, of `*_blocks` uint8 [E, N, K / 32, 16] and
    `*_scales` uint8 [E, N, K / 32]."""
    if blocks.ndim != 4 or blocks.shape[-1] != BLOCK // 2 or blocks.shape[:-1] != scales.shape:
        raise FormatError(f"blocks {list(blocks.shape)} and scales {list(scales.shape)} are not of one weight")
    return mxfp4_weight(blocks.reshape(*blocks.shape[:2], -1), scales)


def mxfp4_form(shape: tuple[int, ...]) -> WeightForm:
    """The form of a weight [..., K, N]."""
    return WeightForm(shape, Scheme("codebook", 4, (BLOCK, 1)), np.dtype(ml_dtypes.bfloat16))


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
        experts, inputs, outputs = shape
        blocks = (experts, outputs, inputs // BLOCK)
        has_shape(headers, "blocks", ("U8",), (*blocks, BLOCK // 2))
        has_shape(headers, "scales", ("U8", "F8_E8M0"), blocks)
        return ModuleReader(
            SUFFIXES, lambda tensors: mxfp4_experts(tensors["blocks"], tensors["scales"]), mxfp4_form(shape)
        )

    def stored(self, module: DenseModule) -> dict[str, TensorHeader] | None:
        if module.role != "experts":
            return None
        experts, inputs, outputs = module.shape
        blocks = (experts, outputs, inputs // BLOCK)
        return {"blocks": ("U8", (*blocks, BLOCK // 2)), "scales": ("U8", blocks)}


def mxfp4(data: Mapping[str, Any]) -> Mxfp4:
    """`quant_method` "mxfp4"."""
    return Mxfp4()
