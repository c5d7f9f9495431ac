"""Host arrays: aligned memory, and tensors read into their final layout, a block of rows at a time.

One pass per block, while it is in the processor's cache: read, count non-finite values, cast, transpose into place.
Beside the results only the blocks in flight are held: about 4 MiB times the number of threads, twice.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np

BLOCK_BYTES = 4 * 2**20  # large enough for the full speed of a disk or a store, small enough for a core's cache

_thread = threading.local()

# Fills the buffer with the tensor's bytes from an offset on; called from several threads.
Read = Callable[[int, memoryview], None]


@dataclass(frozen=True)
class Region:
    """Some rows of a stored tensor [rows, columns], in C order, and the arrays they are written to.

    Attributes:
      name: of the tensor. read: reads its bytes. stored: its dtype. row_length: its number of columns.
      rows: int64 row numbers, in the order of the targets.
      targets: (columns, array [rows, those columns]) of every part; the array has the dtype of the result, and any
        memory order.
    """

    name: str
    read: Read
    stored: np.dtype
    row_length: int
    rows: np.ndarray
    targets: tuple[tuple[np.ndarray, np.ndarray], ...]


@dataclass
class CastStats:
    """Statistics of the values of a tensor that was read and cast.

    Attributes:
      size: values read. num_nonfinite: NaN and infinite values, as stored. num_overflowed: finite values that the cast
        made infinite. max_relative_error: of the cast, over nonzero values; 0.0 if not measured or nothing was rounded.
    """

    size: int = 0
    num_nonfinite: int = 0
    num_overflowed: int = 0
    max_relative_error: float = 0.0

    def add(self, other: "CastStats") -> None:
        self.size += other.size
        self.num_nonfinite += other.num_nonfinite
        self.num_overflowed += other.num_overflowed
        self.max_relative_error = max(self.max_relative_error, other.max_relative_error)

    def cast(self, values: np.ndarray, dtype: np.dtype, *, measure_cast: bool) -> np.ndarray:
        """The values in a dtype, themselves if they have it; they are counted."""
        stats = CastStats(values.size, count_nonfinite(values))
        with np.errstate(over="ignore", invalid="ignore"):  # overflows are counted; the setting is per thread
            cast = values.astype(dtype, copy=False)
        if cast is not values:
            stats.num_overflowed = max(0, count_nonfinite(cast) - stats.num_nonfinite)
            stats.max_relative_error = max_relative_error(values, cast) if measure_cast else 0.0
        self.add(stats)
        return cast


def read_regions(
    regions: Sequence[Region], *, executor: Executor, min_piece_bytes: int = 1, measure_cast: bool = False
) -> dict[str, CastStats]:
    """Fills the targets of all regions; returns statistics by tensor.

    Args:
      min_piece_bytes: if the pieces of rows are smaller, whole rows are read. Runs of rows with a smaller gap between
        them are read as one.
    """
    blocks = [block for region in regions for block in _blocks(region, min_piece_bytes)]
    run = partial(_read_block, measure_cast=measure_cast)
    # A single block, as of all small tensors, is read on this thread.
    of_blocks = executor.map(run, blocks) if len(blocks) > 1 else map(run, blocks)
    stats = {region.name: CastStats() for region in regions}
    for block, of_block in zip(blocks, of_blocks, strict=True):
        stats[block.region.name].add(of_block)
    return stats


def read_tensor(
    read: Read,
    shape: tuple[int, ...],
    stored: np.dtype,
    dtype: np.dtype,
    *,
    transpose: bool,
    executor: Executor,
    measure_cast: bool = False,
) -> tuple[np.ndarray, CastStats]:
    """A whole tensor stored as C-ordered `shape` of `stored`, cast to `dtype`; with `transpose` (2-D) its transpose."""
    result = empty_aligned(shape[::-1] if transpose else shape, dtype)
    if not result.size:
        return result, CastStats()
    rows = shape[0] if len(shape) else 1
    row_length = result.size // rows
    target = result.T if transpose else result.reshape(rows, row_length)
    region = Region("", read, stored, row_length, np.arange(rows), ((np.arange(row_length), target),))
    return result, read_regions([region], executor=executor, measure_cast=measure_cast)[""]


def bytes_to_read(
    rows: np.ndarray, columns: Sequence[np.ndarray], row_length: int, itemsize: int, min_piece_bytes: int
) -> int:
    """Bytes that `read_regions` reads for a region of these rows and the columns of its targets."""
    _, width = _columns(len(rows), columns, row_length, itemsize, min_piece_bytes)
    if width < row_length:
        return len(rows) * width * itemsize
    gap = min_piece_bytes // (row_length * itemsize)
    return sum(last - first for first, last in _runs(np.sort(rows), gap)) * row_length * itemsize


@dataclass(frozen=True)
class _Block:
    """Rows that one thread reads: ascending, with their places in the targets."""

    region: Region
    rows: np.ndarray
    places: np.ndarray
    first_column: int
    width: int
    max_gap: int  # rows between two runs that are read as one


def _blocks(region: Region, min_piece_bytes: int) -> Iterator[_Block]:
    itemsize = region.stored.itemsize
    columns = [columns for columns, _ in region.targets]
    first, width = _columns(len(region.rows), columns, region.row_length, itemsize, min_piece_bytes)
    order = np.argsort(region.rows, kind="stable")
    rows = region.rows[order]
    step = max(1, BLOCK_BYTES // max(1, width * itemsize))
    gap = min_piece_bytes // (region.row_length * itemsize)
    for start in range(0, len(rows), step):
        yield _Block(region, rows[start : start + step], order[start : start + step], first, width, gap)


def _columns(
    num_rows: int, columns: Sequence[np.ndarray], row_length: int, itemsize: int, min_piece_bytes: int
) -> tuple[int, int]:
    """The first column that is read, and the number of columns."""
    first = min(int(index.min()) for index in columns)
    width = max(int(index.max()) for index in columns) + 1 - first
    is_worth_it = num_rows == 1 or width * itemsize >= min_piece_bytes
    return (first, width) if is_worth_it else (0, row_length)


def _runs(values: np.ndarray, max_gap: int = 0) -> Iterator[tuple[int, int]]:
    """[first, last) of runs of ascending numbers with at most so many others between neighbours."""
    breaks = np.flatnonzero(np.diff(values) > max_gap + 1) + 1
    for run in np.split(values, breaks):
        yield int(run[0]), int(run[-1]) + 1


def _read_block(block: _Block, *, measure_cast: bool) -> CastStats:
    region = block.region
    stats = CastStats()
    if (direct := _direct(block)) is not None:
        _fetch(block, direct)
        return CastStats(direct.size, count_nonfinite(direct))
    fetched = _scratch((len(block.rows), block.width), region.stored)
    _fetch(block, fetched)
    # Targets are written in their own order, which differs from the file's where heads are rearranged.
    order = np.argsort(block.places)
    places = block.places[order]
    if (np.diff(order) != 1).any():
        fetched = fetched[order]
    for columns, target in region.targets:
        values = fetched[:, _index(columns - block.first_column)]
        cast = stats.cast(values, target.dtype, measure_cast=measure_cast)
        done = 0
        for first, last in _runs(places):
            store(cast[done : done + last - first], target[first:last])
            done += last - first
    return stats


def _direct(block: _Block) -> np.ndarray | None:
    """The memory of the result, if the stored bytes are the result and can be read into it; else None."""
    region = block.region
    if len(region.targets) != 1 or (np.diff(block.places) != 1).any():
        return None
    columns, target = region.targets[0]
    target = target[block.places[0] : block.places[0] + len(block.places)]
    is_same = target.dtype == region.stored and len(columns) == block.width and target.flags.c_contiguous
    return target if is_same and (np.diff(columns) == 1).all() else None


def _fetch(block: _Block, buffer: np.ndarray) -> None:
    """Reads the block's rows into a C-ordered array [rows, width]."""
    region, itemsize = block.region, block.region.stored.itemsize
    if block.width < region.row_length:
        for number, row in enumerate(block.rows):
            region.read((int(row) * region.row_length + block.first_column) * itemsize, _bytes(buffer[number]))
        return
    done = 0
    for first, last in _runs(block.rows, block.max_gap):
        offset = first * region.row_length * itemsize
        wanted = block.rows[done : np.searchsorted(block.rows, last)]
        if len(wanted) == last - first:
            region.read(offset, _bytes(buffer[done : done + len(wanted)]))
        else:
            run = np.empty((last - first, region.row_length), region.stored)
            region.read(offset, _bytes(run))
            buffer[done : done + len(wanted)] = run[wanted - first]
        done += len(wanted)


def _scratch(shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """A buffer of this thread, reused by the next call: fresh memory costs as much as reading from a fast disk."""
    num_bytes = shape[0] * shape[1] * dtype.itemsize
    if getattr(_thread, "scratch", None) is None or _thread.scratch.nbytes < num_bytes:
        _thread.scratch = np.empty(num_bytes, np.uint8)
    return _thread.scratch[:num_bytes].view(dtype).reshape(shape)


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _index(numbers: np.ndarray) -> slice | np.ndarray:
    """The numbers as a slice if they have a constant step, so that indexing copies nothing."""
    step = int(numbers[1] - numbers[0]) if len(numbers) > 1 else 1
    if step > 0 and (np.diff(numbers) == step).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1, step)
    return numbers


def max_relative_error(before: np.ndarray, after: np.ndarray) -> float:
    exact = before.astype(np.float64)
    is_counted = np.isfinite(exact) & (exact != 0)
    if not is_counted.any():
        return 0.0
    exact = exact[is_counted]
    return float(np.max(np.abs(after.astype(np.float64)[is_counted] - exact) / np.abs(exact)))


_ALIGNMENT = 64  # bytes; XLA's CPU client uses a host buffer without a copy only at such an address
_STRIP = 128  # rows transposed at once
_TILE_BYTES = 2**18  # of a strip, so that it stays in a core's second-level cache
_PAD_BYTES = 64


def empty_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """`np.empty` at an address that a CPU device uses without a copy."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def aligned(array: np.ndarray) -> np.ndarray:
    """The array, or a copy, in C order at an address that a CPU device uses without a copy."""
    if array.flags.c_contiguous and array.ctypes.data % _ALIGNMENT == 0:
        return array
    result = empty_aligned(array.shape, array.dtype)
    result[...] = array
    return result


def count_nonfinite(array: np.ndarray) -> int:
    """Number of values that are NaN or infinite."""
    if not array.size:
        return 0
    # NaN and infinity have an exponent of all ones: their bits, the sign left out, are the largest. Those of positive
    # values are compared as signed numbers, those of negative ones as unsigned: on bfloat16 several times faster than
    # isfinite, without a copy, and a signalling NaN raises no warning.
    bits = _bits(array)
    infinity = _bits(np.array(np.inf, array.dtype))
    sign = np.array(1 << (8 * array.dtype.itemsize - 1), bits.dtype)
    if bits.max() < sign | infinity and bits.view(f"i{bits.itemsize}").max() < infinity.astype(np.int64):
        return 0
    return int(np.count_nonzero((bits & ~sign) >= infinity))


def store(block: np.ndarray, target: np.ndarray) -> None:
    """Copies a matrix into `target`, whose memory order may be the transposed one."""
    block, target = _bits(block), _bits(target)
    if abs(target.strides[0]) >= abs(target.strides[1]):
        target[...] = block
        return
    # Rows whose length is a power of two map to the same few cache lines, so a strip is copied with padding first:
    # 0.7 ns a value on a Zen core, against 2.1 for a transposition from strips of 32 rows in place.
    width = max(1, _TILE_BYTES // (_STRIP * block.itemsize))
    strip = np.empty((min(_STRIP, len(block)), width + _PAD_BYTES // block.itemsize), block.dtype)
    for first in range(0, len(block), _STRIP):
        for left in range(0, block.shape[1], width):
            tile = block[first : first + _STRIP, left : left + width]
            apart = strip[: tile.shape[0], : tile.shape[1]]
            apart[...] = tile
            target[first : first + _STRIP, left : left + width] = apart


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))
