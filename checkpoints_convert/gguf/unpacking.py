"""Blocks of ggml whose codes are integers, unpacked: Q4_0 to Q8_0, the K-quants and the ternary types.

Layouts: ggml-common.h and the dequantize_row_* functions of ggml-quants.c.
"""

from collections.abc import Callable

import numpy as np

# Codes [blocks, values], float32 scales and minima [blocks, groups], bits of a code: see `BlockGroups`.
Unpacked = tuple[np.ndarray, np.ndarray, np.ndarray | None, int]


def half(raw: np.ndarray) -> np.ndarray:
    """float32 [blocks, 1] of two bytes [blocks, 2]."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def nibbles(raw: np.ndarray) -> np.ndarray:
    """uint8 [blocks, 2 * bytes]: the low halves of all bytes, then the high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _fifth_bits(raw: np.ndarray) -> np.ndarray:
    """uint8 [blocks, 32]: bit j of four bytes, as 16 or 0."""
    return np.unpackbits(raw, axis=-1, bitorder="little") << 4


def signed(codes: np.ndarray, zero: int) -> np.ndarray:
    """Codes minus `zero` as int8, by wrapping in uint8."""
    return (codes - np.uint8(zero)).view(np.int8)


def _q4_0(blocks: np.ndarray) -> Unpacked:
    return signed(nibbles(blocks[:, 2:]), 8), half(blocks[:, :2]), None, 4


def _q4_1(blocks: np.ndarray) -> Unpacked:
    return nibbles(blocks[:, 4:]).view(np.int8), half(blocks[:, :2]), half(blocks[:, 2:4]), 4


def _q5_0(blocks: np.ndarray) -> Unpacked:
    codes = nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return signed(codes, 16), half(blocks[:, :2]), None, 5


def _q5_1(blocks: np.ndarray) -> Unpacked:
    codes = nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return codes.view(np.int8), half(blocks[:, :2]), half(blocks[:, 2:4]), 5


def _q8_0(blocks: np.ndarray) -> Unpacked:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8), half(blocks[:, :2]), None, 8


def _scales_and_minima(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [blocks, 8] each: d * sc and -(dmin * m), with sc and m of 6 bits in the 12 bytes after d and dmin."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=-1)
    return half(blocks[:, :2]) * scales.astype(np.float32), -(half(blocks[:, 2:4]) * minima.astype(np.float32))


def _k_nibbles(raw: np.ndarray) -> np.ndarray:
    """uint8 [blocks, 256] of 128 bytes: of every 32 the low halves, then the high ones."""
    return nibbles(raw.reshape(len(raw), 4, 32)).reshape(len(raw), 256)


def _crumbs(raw: np.ndarray) -> np.ndarray:
    """uint8 [blocks, 4 * bytes] of two bits each: of every 32 bytes the lowest pairs, then the next ones."""
    parts = raw.reshape(len(raw), -1, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return parts.reshape(len(raw), -1)


def _q2_k(blocks: np.ndarray) -> Unpacked:
    scales, minima = blocks[:, :16] & 15, blocks[:, :16] >> 4
    codes = _crumbs(blocks[:, 16:80])
    return (
        codes.view(np.int8),
        half(blocks[:, 80:82]) * scales.astype(np.float32),
        -(half(blocks[:, 82:]) * minima.astype(np.float32)),
        2,
    )


def _q3_k(blocks: np.ndarray) -> Unpacked:
    # The third bit of code j is bit j // 32 of byte j % 32; the code is stored plus 4.
    third = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _crumbs(blocks[:, 32:96]) | (third << 2).reshape(-1, 256)
    low = nibbles(blocks[:, 96:104])
    high = (blocks[:, None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(-1, 16)
    scales = signed(low | high << 4, 32).astype(np.float32)
    return signed(codes, 4), half(blocks[:, 108:]) * scales, None, 3


def _q4_k(blocks: np.ndarray) -> Unpacked:
    return _k_nibbles(blocks[:, 16:]).view(np.int8), *_scales_and_minima(blocks), 4


def _q5_k(blocks: np.ndarray) -> Unpacked:
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _k_nibbles(blocks[:, 48:]) | (high << 4).reshape(-1, 256)
    return codes.view(np.int8), *_scales_and_minima(blocks), 5


def _q6_k(blocks: np.ndarray) -> Unpacked:
    # Two halves of 128 values: each has 64 bytes of low nibbles and 32 bytes with two more bits of four values.
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64))
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = low | (high << 4).reshape(-1, 2, 128)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return signed(codes.reshape(-1, 256), 32), half(blocks[:, 208:]) * scales, None, 6


def _tq1_0(blocks: np.ndarray) -> Unpacked:
    # Five digits of base 3 in a byte, as the first digits of byte / 256: in 32 bytes, then 16, and four digits in 4.
    def digits(raw: np.ndarray, count: int) -> np.ndarray:
        shifted = raw[:, None] * np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
        return shifted.reshape(len(raw), -1)

    shifted = np.concatenate([digits(blocks[:, :32], 5), digits(blocks[:, 32:48], 5), digits(blocks[:, 48:52], 4)], -1)
    codes = (shifted.astype(np.uint16) * 3 >> 8).astype(np.uint8)
    return signed(codes, 1), half(blocks[:, 52:]), None, 2


def _tq2_0(blocks: np.ndarray) -> Unpacked:
    # 3 bits, since a file may have the value 2, which no quantizer writes.
    return signed(_crumbs(blocks[:, :64]), 1), half(blocks[:, 64:]), None, 3


UNPACK: dict[str, Callable[[np.ndarray], Unpacked]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}
