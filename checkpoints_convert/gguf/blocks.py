"""The integers, scales and minima of quantized blocks, as ggml-common.h and ggml-quants.c lay them out.

Everything here is exact: a scale of a K-quant is the product of an 11-bit and a 6-bit number (Q6_K: 8-bit), which
float32 holds.
"""

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from checkpoints_convert.gguf.types import TYPES


@dataclass(frozen=True)
class Groups:
    """Rows of values whose weights are code * scale + minimum, without minima code * scale, or codebook[code] * scale.

    Attributes:
      codes: int8 [rows, columns]; 0 to 2^bits - 1 with minima or a codebook, else -2^(bits-1) to 2^(bits-1) - 1.
      scales, minima: float32 [rows, columns / group_size]. bits: of a code. codebook: float32 [16].
    """

    codes: np.ndarray
    scales: np.ndarray
    minima: np.ndarray | None
    bits: int
    codebook: np.ndarray | None = None

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]


def unpack(kind: str, rows: np.ndarray) -> Groups:
    """The groups of uint8 [rows, bytes], whole blocks of a quantized type."""
    of_type = TYPES[kind]
    blocks = rows.reshape(-1, of_type.block_bytes)
    codes, scales, minima, bits = _UNPACK[kind](blocks)
    num_rows = len(rows)
    return Groups(
        codes.reshape(num_rows, -1),
        scales.reshape(num_rows, -1),
        None if minima is None else minima.reshape(num_rows, -1),
        bits,
        MXFP4 if kind == "MXFP4" else None,
    )


def dequantize(kind: str, rows: np.ndarray) -> np.ndarray:
    """float32 [rows, columns] of uint8 [rows, bytes], bit for bit what gguf-py computes."""
    if kind in FLOATS:
        return np.ascontiguousarray(rows).view(FLOATS[kind]).astype(np.float32)
    groups = unpack(kind, rows)
    codes = groups.codes.reshape(*groups.scales.shape, -1)
    codes = codes.astype(np.float32) if groups.codebook is None else groups.codebook[codes]
    codes *= groups.scales[..., None]
    if groups.minima is not None:
        codes += groups.minima[..., None]
    return codes.reshape(groups.codes.shape)


# Twice the values of E2M1 (OCP Microscaling 1.0, section 5.3.3), as ggml has them: scales are half of theirs.
MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
FLOATS = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

_Unpacked = tuple[np.ndarray, np.ndarray, np.ndarray | None, int]


def _half(raw: np.ndarray) -> np.ndarray:
    """float32 [blocks, 1] of two bytes [blocks, 2]."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """uint8 [blocks, 2 * bytes]: the low halves of all bytes, then the high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _fifth_bits(raw: np.ndarray) -> np.ndarray:
    """uint8 [blocks, 32]: bit j of four bytes, as 16 or 0."""
    return np.unpackbits(raw, axis=-1, bitorder="little") << 4


def _signed(codes: np.ndarray, zero: int) -> np.ndarray:
    """Codes less their zero, which wraps in uint8 to what int8 reads."""
    return (codes - np.uint8(zero)).view(np.int8)


def _q4_0(blocks: np.ndarray) -> _Unpacked:
    return _signed(_nibbles(blocks[:, 2:]), 8), _half(blocks[:, :2]), None, 4


def _q4_1(blocks: np.ndarray) -> _Unpacked:
    return _nibbles(blocks[:, 4:]).view(np.int8), _half(blocks[:, :2]), _half(blocks[:, 2:4]), 4


def _q5_0(blocks: np.ndarray) -> _Unpacked:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _signed(codes, 16), _half(blocks[:, :2]), None, 5


def _q5_1(blocks: np.ndarray) -> _Unpacked:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return codes.view(np.int8), _half(blocks[:, :2]), _half(blocks[:, 2:4]), 5


def _q8_0(blocks: np.ndarray) -> _Unpacked:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _half(blocks[:, :2]), None, 8


def _scales_and_minima(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [blocks, 8] each: d * sc and -(dmin * m), with sc and m of 6 bits in the 12 bytes after d and dmin."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=-1)
    return _half(blocks[:, :2]) * scales.astype(np.float32), -(_half(blocks[:, 2:4]) * minima.astype(np.float32))


def _k_nibbles(raw: np.ndarray) -> np.ndarray:
    """uint8 [blocks, 256] of 128 bytes: of every 32 the low halves, then the high ones."""
    return _nibbles(raw.reshape(len(raw), 4, 32)).reshape(len(raw), 256)


def _q4_k(blocks: np.ndarray) -> _Unpacked:
    return _k_nibbles(blocks[:, 16:]).view(np.int8), *_scales_and_minima(blocks), 4


def _q5_k(blocks: np.ndarray) -> _Unpacked:
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _k_nibbles(blocks[:, 48:]) | (high << 4).reshape(-1, 256)
    return codes.view(np.int8), *_scales_and_minima(blocks), 5


def _q6_k(blocks: np.ndarray) -> _Unpacked:
    # Two halves of 128 values: each has 64 bytes of low nibbles and 32 bytes with two more bits of four values.
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = low | (high << 4).reshape(-1, 2, 128)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return _signed(codes.reshape(-1, 256), 32), _half(blocks[:, 208:]) * scales, None, 6


def _mxfp4(blocks: np.ndarray) -> _Unpacked:
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return _nibbles(blocks[:, 1:]).view(np.int8), scales, None, 4


_UNPACK: dict[str, Callable[[np.ndarray], _Unpacked]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
