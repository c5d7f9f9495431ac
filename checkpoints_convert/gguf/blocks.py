"""Quantized blocks of ggml: the types, their integers, scales and minima, and tensors of them as `QuantizedArray`s.

Layouts: ggml-common.h and ggml-quants.c. Everything here is exact: a scale of a K-quant is the product of an 11-bit and
a 6-bit number (Q6_K: 8-bit), which float32 holds, and the dequantized weight is that of gguf-py, bit for bit.
"""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np

from checkpoints_convert.host_arrays import empty_aligned
from jaxinfer.quantization import QuantizedArray, Scheme

# ggml's types by number. Those not in `TYPES` are listed for error messages.
TYPE_NAMES = {
    **dict(enumerate(("F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1"))),
    **dict(enumerate(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S"), 10)),
    **dict(enumerate(("IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16"), 20)),
    **dict(enumerate(("Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "TQ1_0", "TQ2_0"), 31)),
    **dict(enumerate(("IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8", "MXFP4", "NVFP4", "Q1_0"), 36)),
}


@dataclass(frozen=True)
class BlockType:
    """Attributes:
    name: ggml's. block_size: values of a row per block. block_bytes: bytes per block.
    """

    name: str
    block_size: int
    block_bytes: int

    @property
    def is_quantized(self) -> bool:
        return self.block_size > 1


# Source: ggml-common.h, the block_* structures.
TYPES: dict[str, BlockType] = {
    kind.name: kind
    for kind in (
        BlockType("F32", 1, 4),
        BlockType("F16", 1, 2),
        BlockType("BF16", 1, 2),
        BlockType("Q4_0", 32, 18),
        BlockType("Q4_1", 32, 20),
        BlockType("Q5_0", 32, 22),
        BlockType("Q5_1", 32, 24),
        BlockType("Q8_0", 32, 34),
        BlockType("Q4_K", 256, 144),
        BlockType("Q5_K", 256, 176),
        BlockType("Q6_K", 256, 210),
        BlockType("MXFP4", 32, 17),
    )
}


@dataclass(frozen=True)
class BlockGroups:
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


def unpack(kind: str, rows: np.ndarray) -> BlockGroups:
    """Unpacks uint8 [rows, bytes] of blocks of a quantized type."""
    of_type = TYPES[kind]
    blocks = rows.reshape(-1, of_type.block_bytes)
    codes, scales, minima, bits = _UNPACK[kind](blocks)
    num_rows = len(rows)
    return BlockGroups(
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


# Twice the values of E2M1 (OCP Microscaling 1.0, section 5.3.3), as in ggml, where scales are halved.
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
    """Codes minus `zero` as int8, by wrapping in uint8."""
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


_CHUNK_BYTES = 2**20  # of stored rows, unpacked at once by each thread
_STRIP = 64  # rows transposed at once: their pieces stay in the processor's cache

# uint8 [rows, bytes] of the stored rows [first, last); called from several threads.
RowReader = Callable[[int, int], np.ndarray]


def quantized_leaf(
    kind: BlockType, rows: RowReader, num_rows: int, num_columns: int, *, transpose: bool, executor: Executor
) -> QuantizedArray:
    """The `QuantizedArray` of a stored matrix [rows, columns], or of its transpose, as for Linear weights.

    Scales are float32, since many of half precision are subnormal, which not every chip converts exactly.
    """
    form = _form(kind)
    size, is_coded = form.group_size, form.minima is not None or form.codebook is not None

    def empty(num: int, dtype: type) -> np.ndarray:
        return empty_aligned((num, num_rows) if transpose else (num_rows, num), np.dtype(dtype))

    values, scales = empty(num_columns, np.int8), empty(num_columns // size, np.float32)
    minima = None if form.minima is None else empty(num_columns // size, np.float32)
    step = max(1, _CHUNK_BYTES // (num_columns // kind.block_size * kind.block_bytes))

    def place(first: int) -> None:
        with np.errstate(invalid="ignore", over="ignore"):  # the setting is per thread; values are checked later
            groups = unpack(kind.name, rows(first, min(first + step, num_rows)))
        codes = groups.codes
        if form.bits <= 4:  # an int4 of ml_dtypes is the low half of a byte
            codes = (codes - np.int8(8) if is_coded else codes) & np.int8(15)
        _put(values, codes, first, transpose)
        _put(scales, groups.scales, first, transpose)
        if minima is not None and groups.minima is not None:
            _put(minima, groups.minima, first, transpose)

    list(executor.map(place, range(0, num_rows, step)))
    scheme_kind = "affine" if minima is not None else "int" if form.codebook is None else "codebook"
    scheme = Scheme(scheme_kind, form.bits, (size, 1) if transpose else (1, size))
    arrays: Any = {"values": values.view(ml_dtypes.int4) if form.bits <= 4 else values, "scales": scales}
    return QuantizedArray(**arrays, codebook=form.codebook, scheme=scheme, minima=minima)  # type: ignore[arg-type]


def abstract_leaf(kind: BlockType, shape: tuple[int, ...], *, transpose: bool) -> QuantizedArray:
    """The abstract `QuantizedArray` of a parameter [..., K, N], whose columns are stored as rows with `transpose`."""
    form = _form(kind)
    *leading, inputs, outputs = shape
    size = form.group_size
    groups = (*leading, inputs // size, outputs) if transpose else (*leading, inputs, outputs // size)
    numbers = jax.ShapeDtypeStruct(groups, np.dtype(np.float32))
    minima = None if form.minima is None else numbers
    codebook = None if form.codebook is None else jax.ShapeDtypeStruct(form.codebook.shape, form.codebook.dtype)
    scheme_kind = "affine" if minima is not None else "int" if codebook is None else "codebook"
    arrays: Any = {
        "values": jax.ShapeDtypeStruct(shape, np.dtype(ml_dtypes.int4 if form.bits <= 4 else np.int8)),
        "scales": numbers,
        "codebook": codebook,
        "minima": minima,
    }
    return QuantizedArray(**arrays, scheme=Scheme(scheme_kind, form.bits, (size, 1) if transpose else (1, size)))


def leaf_bytes(kind: BlockType, num_values: int) -> int:
    """Bytes of a `QuantizedArray` on a device, with two 4-bit values per byte."""
    of_one = _form(kind)
    bits = 4 if of_one.bits <= 4 else 8
    return num_values * bits // 8 + _scale_bytes(of_one, num_values)


def leaf_host_bytes(kind: BlockType, num_values: int) -> int:
    """Bytes of a `QuantizedArray` on the host, with one 4-bit value per byte."""
    return num_values + _scale_bytes(_form(kind), num_values)


def _scale_bytes(form: BlockGroups, num_values: int) -> int:
    num_numbers = num_values // form.group_size * (1 if form.minima is None else 2)
    return 4 * (num_numbers + (0 if form.codebook is None else 16))


def _form(kind: BlockType) -> BlockGroups:
    """The groups of a block of zeros, for the attributes of the type."""
    return unpack(kind.name, np.zeros((1, kind.block_bytes), np.uint8))


def _put(whole: np.ndarray, part: np.ndarray, first: int, transpose: bool) -> None:
    """Copies `part` to the rows of `whole` from `first` on or, with `transpose`, to the columns."""
    if not transpose:
        whole[first : first + len(part)] = part
        return
    for strip in range(0, len(part), _STRIP):
        end = min(strip + _STRIP, len(part))
        whole[:, first + strip : first + end] = part[strip:end].T
