"""Quantized blocks of ggml: the types, their integers, scales and minima, and tensors of them as `QuantizedArray`s.

Everything here is exact: a scale of a K-quant is the product of an 11-bit and a 6-bit number (Q6_K: 8-bit), which
float32 holds, and the dequantized weight is that of gguf-py, bit for bit.
"""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np

from checkpoints_convert.gguf import codebook_blocks, unpacking
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
        BlockType("Q2_K", 256, 84),
        BlockType("Q3_K", 256, 110),
        BlockType("Q4_K", 256, 144),
        BlockType("Q5_K", 256, 176),
        BlockType("Q6_K", 256, 210),
        BlockType("TQ1_0", 256, 54),
        BlockType("TQ2_0", 256, 66),
        BlockType("MXFP4", 32, 17),
        BlockType("IQ4_NL", 32, 18),
        BlockType("IQ4_XS", 256, 136),
        BlockType("IQ3_XXS", 256, 98),
        BlockType("IQ3_S", 256, 110),
        BlockType("IQ2_XXS", 256, 66),
        BlockType("IQ2_XS", 256, 74),
        BlockType("IQ2_S", 256, 82),
        BlockType("IQ1_S", 256, 50),
        BlockType("IQ1_M", 256, 56),
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
        codebook_blocks.CODEBOOKS.get(kind),
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


_UNPACK = unpacking.UNPACK | codebook_blocks.UNPACK
FLOATS = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

_CHUNK_BYTES = 2**20  # of stored rows, unpacked at once by each thread

# uint8 [rows, bytes] of the stored rows [first, last); called from several threads.
RowReader = Callable[[int, int], np.ndarray]


def quantized_leaf(
    kind: BlockType, rows: RowReader, num_rows: int, num_columns: int, *, transpose: bool, executor: Executor
) -> QuantizedArray:
    """The `QuantizedArray` of a stored matrix [rows, columns], or of its transpose, as for Linear weights.

    The transpose is a view: JAX transposes while it copies to a device, and packing reads either order.

    Scales are float32, since many of half precision are subnormal, which not every chip converts exactly.
    """
    form = _form(kind)
    size, is_coded = form.group_size, form.minima is not None or form.codebook is not None

    def empty(num: int, dtype: type) -> np.ndarray:
        return empty_aligned((num_rows, num), np.dtype(dtype))

    values, scales = empty(num_columns, np.int8), empty(num_columns // size, np.float32)
    minima = None if form.minima is None else empty(num_columns // size, np.float32)
    step = max(1, _CHUNK_BYTES // (num_columns // kind.block_size * kind.block_bytes))

    def place(first: int) -> None:
        chunk = slice(first, first + step)
        with np.errstate(invalid="ignore", over="ignore"):  # the setting is per thread; values are checked later
            groups = unpack(kind.name, rows(first, min(first + step, num_rows)))
        codes = groups.codes
        if form.bits <= 4:  # an int4 of ml_dtypes is the low half of a byte
            codes = (codes - np.int8(8) if is_coded else codes) & np.int8(15)
        values[chunk], scales[chunk] = codes, groups.scales
        if minima is not None:
            minima[chunk] = groups.minima

    list(executor.map(place, range(0, num_rows, step)))
    arrays: Any = {"values": values.view(ml_dtypes.int4) if form.bits <= 4 else values, "scales": scales}
    arrays["minima"] = minima
    if transpose:
        arrays = {name: None if array is None else array.T for name, array in arrays.items()}
    return QuantizedArray(**arrays, codebook=form.codebook, scheme=_scheme(form, transpose))  # type: ignore[arg-type]


def abstract_leaf(kind: BlockType, shape: tuple[int, ...], *, transpose: bool) -> QuantizedArray:
    """The abstract `QuantizedArray` of a parameter [..., K, N], whose columns are stored as rows with `transpose`."""
    form = _form(kind)
    *leading, inputs, outputs = shape
    size = form.group_size
    groups = (*leading, inputs // size, outputs) if transpose else (*leading, inputs, outputs // size)
    numbers = jax.ShapeDtypeStruct(groups, np.dtype(np.float32))
    minima = None if form.minima is None else numbers
    codebook = None if form.codebook is None else jax.ShapeDtypeStruct(form.codebook.shape, form.codebook.dtype)
    arrays: Any = {
        "values": jax.ShapeDtypeStruct(shape, np.dtype(ml_dtypes.int4 if form.bits <= 4 else np.int8)),
        "scales": numbers,
        "codebook": codebook,
        "minima": minima,
    }
    return QuantizedArray(**arrays, scheme=_scheme(form, transpose))


def _scheme(form: BlockGroups, transpose: bool) -> Scheme:
    kind = "affine" if form.minima is not None else "int" if form.codebook is None else "codebook"
    return Scheme(kind, form.bits, (form.group_size, 1) if transpose else (1, form.group_size))


def _form(kind: BlockType) -> BlockGroups:
    """The groups of a block of zeros, for the attributes of the type."""
    return unpack(kind.name, np.zeros((1, kind.block_bytes), np.uint8))
