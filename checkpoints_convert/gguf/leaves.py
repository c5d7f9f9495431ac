"""Quantized tensors as `QuantizedArray`s, exactly: the leaf's dequantized weight is gguf-py's, bit for bit."""

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import jax
import ml_dtypes
import numpy as np

from checkpoints_convert.arrays import empty_aligned
from checkpoints_convert.gguf.blocks import Groups, unpack
from checkpoints_convert.gguf.types import BlockType
from jaxinfer.quantization import QuantizedArray, Scheme

_CHUNK_BYTES = 2**20  # of stored rows, unpacked at once by each thread
_STRIP = 64  # rows transposed at once: their pieces stay in the processor's cache

# uint8 [rows, bytes] of the stored rows [first, last); called from several threads.
RowReader = Callable[[int, int], np.ndarray]


def quantized_leaf(
    kind: BlockType, rows: RowReader, num_rows: int, num_columns: int, *, transpose: bool, executor: Executor
) -> QuantizedArray:
    """The stored matrix [rows, columns] as a leaf, or its transpose, as Linear weights are.

    Scales are float32: those of half precision are often below its normal numbers, which not every chip converts
    exactly.
    """
    form = _form(kind)
    size, is_coded = form.group_size, form.minima is not None or form.codebook is not None

    def empty(num: int, dtype: type) -> np.ndarray:
        return empty_aligned((num, num_rows) if transpose else (num_rows, num), np.dtype(dtype))

    values, scales = empty(num_columns, np.int8), empty(num_columns // size, np.float32)
    minima = None if form.minima is None else empty(num_columns // size, np.float32)
    step = max(1, _CHUNK_BYTES // (num_columns // kind.block_size * kind.block_bytes))

    def place(first: int) -> None:
        with np.errstate(invalid="ignore", over="ignore"):  # a setting of this thread; numbers are checked afterwards
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
    """The shapes of the leaf of a parameter [..., K, N] whose stored matrices have its rows, or with `transpose` its
    columns, as rows."""
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
    """Bytes of a leaf on a device, where two 4-bit values share a byte."""
    of_one = _form(kind)
    bits = 4 if of_one.bits <= 4 else 8
    return num_values * bits // 8 + _scale_bytes(of_one, num_values)


def leaf_host_bytes(kind: BlockType, num_values: int) -> int:
    """Bytes of a leaf on the host, where a 4-bit value takes a byte."""
    return num_values + _scale_bytes(_form(kind), num_values)


def _scale_bytes(form: Groups, num_values: int) -> int:
    num_numbers = num_values // form.group_size * (1 if form.minima is None else 2)
    return 4 * (num_numbers + (0 if form.codebook is None else 16))


def _form(kind: BlockType) -> Groups:
    """What the groups of a type are like, of one block."""
    return unpack(kind.name, np.zeros((1, kind.block_bytes), np.uint8))


def _put(whole: np.ndarray, part: np.ndarray, first: int, transpose: bool) -> None:
    """Rows from `first` on, or as many columns."""
    if not transpose:
        whole[first : first + len(part)] = part
        return
    for strip in range(0, len(part), _STRIP):
        end = min(strip + _STRIP, len(part))
        whole[:, first + strip : first + end] = part[strip:end].T
