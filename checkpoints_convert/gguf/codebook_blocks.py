"""Blocks of ggml whose codes are indices into 16 values, unpacked: MXFP4, IQ4_NL, IQ4_XS and the other i-quants.

An i-quant of 1 to 3 bits stores a code for 4 or 8 neighbouring weights, whose magnitudes a grid has, and their signs
(IQ1: a shift). No type has more than 16 distinct values beside its scales, so that each weight becomes an index of 4
bits: three bits of magnitude, one of sign or shift. Layouts: ggml-common.h and ggml-quants.c, dequantize_row_iq*.
"""

from collections.abc import Callable

import numpy as np

from checkpoints_convert.gguf.grids import grid
from checkpoints_convert.gguf.unpacking import Unpacked, half, nibbles, signed

# Twice the values of E2M1 (OCP Microscaling 1.0, section 5.3.3), as in ggml, where scales are halved.
_MXFP4 = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]
_IQ4_NL = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
_IQ1 = [-1 + 0.125, 0.125, 1 + 0.125, 0, 0, 0, 0, 0, -1 - 0.125, -0.125, 1 - 0.125, 0, 0, 0, 0, 0]


def _with_signs(*magnitudes: int) -> list[int]:
    half_book = [*magnitudes, *[0] * (8 - len(magnitudes))]
    return half_book + [-value for value in half_book]


_IQ2 = _with_signs(8, 25, 43)
CODEBOOKS = {
    kind: np.array(values, np.float32)
    for kind, values in {
        "MXFP4": _MXFP4,
        "IQ4_NL": _IQ4_NL,
        "IQ4_XS": _IQ4_NL,
        "IQ3_XXS": _with_signs(4, 12, 20, 28, 36, 44, 52, 62),
        "IQ3_S": _with_signs(1, 3, 5, 7, 9, 11, 13, 15),
        "IQ2_XXS": _IQ2,
        "IQ2_XS": _IQ2,
        "IQ2_S": _IQ2,
        "IQ1_S": _IQ1,
        "IQ1_M": _IQ1,
    }.items()
}


def _integers(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Little-endian integers [blocks, count] of bytes [blocks, bytes]."""
    return np.ascontiguousarray(raw).view(dtype)


def _fields(numbers: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The `count` lowest fields of some bits of each number, [blocks, numbers * count]."""
    shifts = (np.arange(count) * bits).astype(numbers.dtype)
    return (numbers[..., None] >> shifts & numbers.dtype.type(2**bits - 1)).reshape(len(numbers), -1)


def _from_grid(kind: str, codes: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """int8 [blocks, 256] of codes [blocks, 256 / neighbours] and a sign bit of each value, as 0 or 1 [blocks, 256]."""
    magnitudes = grid(kind)[codes].reshape(len(codes), -1)
    return (magnitudes | signs.astype(np.uint8) << 3).view(np.int8)


# Seven signs are stored, the eighth makes their number even.
_EVEN_SIGNS = np.array([code | (code.bit_count() & 1) << 7 for code in range(128)], np.uint8)


def _bits_of(raw: np.ndarray) -> np.ndarray:
    """uint8 [blocks, 8 * bytes] of 0 and 1, lowest first."""
    return np.unpackbits(raw, axis=-1, bitorder="little")


def _mxfp4(blocks: np.ndarray) -> Unpacked:
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return nibbles(blocks[:, 1:]).view(np.int8), scales, None, 4


def _iq4_nl(blocks: np.ndarray) -> Unpacked:
    return nibbles(blocks[:, 2:]).view(np.int8), half(blocks[:, :2]), None, 4


def _iq4_xs(blocks: np.ndarray) -> Unpacked:
    high = _fields(_integers(blocks[:, 2:4], "<u2"), 2, 8).astype(np.uint8)
    scales = signed(_fields(blocks[:, 4:8], 4, 2) | high << 4, 32).astype(np.float32)
    codes = nibbles(blocks[:, 8:].reshape(len(blocks), 8, 16)).reshape(len(blocks), 256)
    return codes.view(np.int8), half(blocks[:, :2]) * scales, None, 4


def _iq3_xxs(blocks: np.ndarray) -> Unpacked:
    words = _integers(blocks[:, 66:], "<u4")  # four groups of 7 signs, and a scale of 4 bits
    scales = half(blocks[:, :2]) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    signs = _bits_of(_EVEN_SIGNS[_fields(words, 7, 4)])
    return _from_grid("IQ3_XXS", blocks[:, 2:66], signs), scales, None, 4


def _iq3_s(blocks: np.ndarray) -> Unpacked:
    scales = half(blocks[:, :2]) * (1 + 2 * _fields(blocks[:, 106:], 4, 2)).astype(np.float32)
    codes = blocks[:, 2:66] | _bits_of(blocks[:, 66:74]).astype(np.uint16) << 8
    return _from_grid("IQ3_S", codes, _bits_of(blocks[:, 74:106])), scales, None, 4


def _iq2_xxs(blocks: np.ndarray) -> Unpacked:
    words = _integers(blocks[:, 2:], "<u4").reshape(len(blocks), 8, 2)  # four codes; signs and a scale, as in IQ3_XXS
    second = np.ascontiguousarray(words[..., 1])
    scales = half(blocks[:, :2]) * (np.float32(0.5) + (second >> 28).astype(np.float32)) * np.float32(0.25)
    codes = _integers(np.ascontiguousarray(words[..., 0]), "u1")
    return _from_grid("IQ2_XXS", codes, _bits_of(_EVEN_SIGNS[_fields(second, 7, 4)])), scales, None, 4


def _scales_of_iq2(blocks: np.ndarray, raw: np.ndarray) -> np.ndarray:
    return half(blocks[:, :2]) * (np.float32(0.5) + _fields(raw, 4, 2).astype(np.float32)) * np.float32(0.25)


def _iq2_xs(blocks: np.ndarray) -> Unpacked:
    words = _integers(blocks[:, 2:66], "<u2")  # a code of 9 bits and 7 signs
    codes = _from_grid("IQ2_XS", words & 511, _bits_of(_EVEN_SIGNS[words >> 9]))
    return codes, _scales_of_iq2(blocks, blocks[:, 66:]), None, 4


def _iq2_s(blocks: np.ndarray) -> Unpacked:
    codes = blocks[:, 2:34] | _fields(blocks[:, 66:74], 2, 4).astype(np.uint16) << 8
    values = _from_grid("IQ2_S", codes, _bits_of(blocks[:, 34:66]))
    return values, _scales_of_iq2(blocks, blocks[:, 74:]), None, 4


def _iq1_s(blocks: np.ndarray) -> Unpacked:
    words = _integers(blocks[:, 34:], "<u2")  # of 32 values: the upper 3 bits of four codes, a scale, a shift
    scales = half(blocks[:, :2]) * (2 * (words >> 12 & 7) + 1).astype(np.float32)
    codes = blocks[:, 2:34] | _fields(words, 3, 4) << 8
    return _from_grid("IQ1_S", codes, np.repeat(words >> 15, 32, axis=-1)), scales, None, 4


def _iq1_m(blocks: np.ndarray) -> Unpacked:
    # Four words, each with the scales of 4 groups of 16 and, above them, four bits of the half-precision scale.
    words = _integers(blocks[:, 48:], "<u2")
    number = (words >> 12) << np.array([0, 4, 8, 12], np.uint16)
    whole = np.bitwise_or.reduce(number, axis=-1, keepdims=True).view(np.float16).astype(np.float32)
    scales = whole * (2 * _fields(words, 3, 4) + 1).astype(np.float32)
    high = _fields(blocks[:, 32:48], 4, 2).astype(np.uint16)  # of 8 values: the upper 3 bits of the code, the shift
    codes = blocks[:, :32] | (high & 7) << 8
    return _from_grid("IQ1_S", codes, np.repeat(high >> 3, 8, axis=-1)), scales, None, 4


UNPACK: dict[str, Callable[[np.ndarray], Unpacked]] = {
    "MXFP4": _mxfp4,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}
