"""MXFP4 (OCP Microscaling Formats 1.0): 4-bit floats in blocks of 32 that share a power of two."""

import ml_dtypes
import numpy as np

from checkpoints_convert.formats.module import FormatError, host_quantized
from jaxinfer.quantization import QuantizedArray, Scheme

BLOCK = 32
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
    codes = np.empty((*packed.shape[:-1], inputs), np.uint8)
    codes[..., 0::2], codes[..., 1::2] = packed & 15, packed >> 4
    # The bits of 2^(e - 127) in bfloat16: e is its exponent; e = 0 is the subnormal 2^-127.
    bits = np.where(exponents == 0, np.uint16(0x40), exponents.astype(np.uint16) << 7)
    return host_quantized(
        Scheme("codebook", 4, (BLOCK, 1)),
        np.ascontiguousarray(np.swapaxes(codes ^ np.uint8(8), -1, -2)).view(ml_dtypes.int4),
        np.ascontiguousarray(np.swapaxes(bits, -1, -2)).view(ml_dtypes.bfloat16),
        codebook=E2M1.copy(),
    )


def mxfp4_experts(blocks: np.ndarray, scales: np.ndarray) -> QuantizedArray:
    """gpt-oss's experts [E, K, N] of `*_blocks` uint8 [E, N, K / 32, 16] and `*_scales` uint8 [E, N, K / 32]."""
    if blocks.ndim != 4 or blocks.shape[-1] != BLOCK // 2 or blocks.shape[:-1] != scales.shape:
        raise FormatError(f"blocks {list(blocks.shape)} and scales {list(scales.shape)} are not of one weight")
    return mxfp4_weight(blocks.reshape(*blocks.shape[:2], -1), scales)


def mxfp4_gate_up(blocks: np.ndarray, scales: np.ndarray) -> tuple[QuantizedArray, QuantizedArray]:
    """Gate and up [E, K, F] of gpt-oss's `gate_up_proj`, whose 2 F rows alternate: gate first."""
    if blocks.ndim != 4 or blocks.shape[1] % 2:
        raise FormatError(f"blocks {list(blocks.shape)} are not gates and ups in turn")
    gate, up = (mxfp4_experts(blocks[:, first::2], scales[:, first::2]) for first in (0, 1))
    return gate, up
