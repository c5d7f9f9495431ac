"""Tensors from bytes on disk to host arrays in their final layout, a block of rows at a time.

One pass per block, while it is in the processor's cache: read, count non-finite values, cast, transpose into place.
Beside the result only the blocks in flight are held: at most 16 MiB times the number of threads. The result is
aligned so that a CPU device takes it over without a copy.
"""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

_BLOCK_BYTES = 16 * 2**20
_ALIGNMENT = 64  # bytes; XLA's CPU client adopts a host buffer only from such an address
_STRIP = 32  # rows transposed at once: their pieces of a destination row fill one 64-byte cache line

# Fills the buffer with the tensor's bytes from an offset on; called from several threads.
Read = Callable[[int, memoryview], None]


@dataclass(frozen=True)
class HostTensor:
    """A tensor in host memory, with what was seen on the way.

    Attributes:
      array: final shape and dtype, C order.
      num_nonfinite: NaN and infinite values as stored. num_overflowed: finite ones that the cast made infinite.
      max_relative_error: of the cast, over values that are not zero; 0.0 when nothing was rounded or nobody asked.
    """

    array: np.ndarray
    num_nonfinite: int = 0
    num_overflowed: int = 0
    max_relative_error: float = 0.0


def read_tensor(
    read: Read,
    shape: tuple[int, ...],
    stored: np.dtype,
    dtype: np.dtype,
    *,
    transpose: bool,
    executor: Executor,
    measure_cast: bool = False,
) -> HostTensor:
    """Reads a tensor stored as C-ordered `shape` of `stored`, cast to `dtype`, transposed if asked (2-D only)."""
    rows, row_shape = (shape[0], shape[1:]) if shape else (1, ())
    result = empty_aligned(shape[::-1] if transpose else shape, dtype)
    by_rows = result.T if transpose else result.reshape(rows, *row_shape)
    row_bytes = int(np.prod(row_shape, dtype=np.int64)) * stored.itemsize
    step = max(1, _BLOCK_BYTES // max(1, row_bytes))

    def place(first: int) -> tuple[int, int, float]:
        target = by_rows[first : first + step]
        in_place = not transpose and stored == dtype
        block = target if in_place else np.empty(target.shape, stored)
        if block.nbytes:
            read(first * row_bytes, block.reshape(-1).view(np.uint8).data)
        num_nonfinite = count_nonfinite(block)
        with np.errstate(over="ignore", invalid="ignore"):  # counted below; a setting of this thread only
            cast = block.astype(dtype, copy=False)
        num_overflowed = 0 if cast is block else max(0, count_nonfinite(cast) - num_nonfinite)
        error = _max_relative_error(block, cast) if measure_cast and cast is not block else 0.0
        if not in_place:
            _store(cast, target)
        return num_nonfinite, num_overflowed, error

    seen = list(executor.map(place, range(0, rows, step)))
    return HostTensor(
        result,
        num_nonfinite=sum(found[0] for found in seen),
        num_overflowed=sum(found[1] for found in seen),
        max_relative_error=max((found[2] for found in seen), default=0.0),
    )


def empty_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """`np.empty` at an address a CPU device can adopt."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def count_nonfinite(array: np.ndarray) -> int:
    """How many values are NaN or infinite."""
    if not array.size:
        return 0
    # Shifting the sign out leaves the exponent on top: all ones, and so the largest, only for NaN and infinity.
    # On bfloat16 this is several times faster than isfinite, and a signalling NaN raises no warning.
    magnitudes = _bits(array) << 1
    infinity = _bits(np.array(np.inf, array.dtype)) << 1
    return 0 if magnitudes.max() < infinity else int(np.count_nonzero(magnitudes >= infinity))


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def _store(block: np.ndarray, target: np.ndarray) -> None:
    """Copies a block of rows into `target`, whose memory order may be the transposed one."""
    block, target = _bits(block), _bits(target)
    if target.ndim != 2:
        target[...] = block
        return
    for first in range(0, len(block), _STRIP):
        target[first : first + _STRIP] = block[first : first + _STRIP]


def _max_relative_error(before: np.ndarray, after: np.ndarray) -> float:
    exact = before.astype(np.float64)
    is_counted = np.isfinite(exact) & (exact != 0)
    if not is_counted.any():
        return 0.0
    exact = exact[is_counted]
    return float(np.max(np.abs(after.astype(np.float64)[is_counted] - exact) / np.abs(exact)))
