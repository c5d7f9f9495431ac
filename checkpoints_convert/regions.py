"""Regions of stored tensors read into host arrays in their final layout, a block of rows at a time.

One pass per block, while it is in the processor's cache: read, count non-finite values, cast, add, transpose into
place. Beside the results only the blocks in flight are held: about 4 MiB times the number of threads, twice.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from checkpoints_convert.arrays import count_nonfinite, empty_aligned, store

BLOCK_BYTES = 4 * 2**20  # a request that a disk or a store answers at its full speed, and a core's cache takes

_thread = threading.local()

# Fills the buffer with the tensor's bytes from an offset on; called from several threads.
Read = Callable[[int, memoryview], None]


@dataclass(frozen=True)
class Region:
    """Some rows of a stored tensor [rows, columns], in C order, and where they go.

    Attributes:
      name: of the tensor. read: its bytes. stored: its dtype. row_length: its columns.
      rows: int64, which rows, in the order of the targets.
      targets: (columns, array [rows, those columns]) of every part; the array's dtype is that of the result, and its
        memory order either.
    """

    name: str
    read: Read
    stored: np.dtype
    row_length: int
    rows: np.ndarray
    targets: tuple[tuple[np.ndarray, np.ndarray], ...]


@dataclass
class CastStats:
    """What was seen of a tensor on the way.

    Attributes:
      size: values read. num_nonfinite: NaN and infinite ones, as stored. num_overflowed: finite ones that the cast made
        infinite. max_relative_error: of the cast, over values that are not zero; 0.0 when nothing was rounded or nobody
        asked.
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


def read_regions(
    regions: Sequence[Region],
    *,
    executor: Executor,
    min_piece_bytes: int = 1,
    add: float = 0.0,
    measure_cast: bool = False,
) -> dict[str, CastStats]:
    """Fills the targets of all regions; what was seen, by tensor.

    Args:
      min_piece_bytes: pieces of rows smaller than this are not read one by one: the rows are read whole. Neighbouring
        runs of rows with less than this between them are read as one.
      add: is added, in float32, to the values after the cast.
    """
    blocks = [block for region in regions for block in _blocks(region, min_piece_bytes)]
    run = _Reading(add, measure_cast).run
    found = _mapped(run, blocks, executor)
    seen: dict[str, CastStats] = {}
    for region in regions:
        seen.setdefault(region.name, CastStats())
    for block, one in zip(blocks, found, strict=True):
        seen[block.region.name].add(one)
    return seen


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
    """A whole tensor stored as C-ordered `shape` of `stored`, cast to `dtype`, transposed if asked (2-D only)."""
    result = empty_aligned(shape[::-1] if transpose else shape, dtype)
    if not result.size:
        return result, CastStats()
    rows = shape[0] if len(shape) else 1
    row_length = result.size // rows
    target = result.T if transpose else result.reshape(rows, row_length)
    region = Region("", read, stored, row_length, np.arange(rows), ((np.arange(row_length), target),))
    return result, read_regions([region], executor=executor, measure_cast=measure_cast)[""]


def cast_array(
    array: np.ndarray, dtype: np.dtype, *, executor: Executor, measure_cast: bool = False
) -> tuple[np.ndarray, CastStats]:
    """An array that is in memory, in C order, cast to `dtype`; itself where it has it."""
    flat = array.reshape(-1)
    result = flat if array.dtype == dtype else empty_aligned(flat.shape, dtype)
    step = max(1, BLOCK_BYTES // array.dtype.itemsize)

    def cast(first: int) -> CastStats:
        block, target = flat[first : first + step], result[first : first + step]
        seen = CastStats(block.size, count_nonfinite(block))
        if result is not flat:
            with np.errstate(over="ignore", invalid="ignore"):  # counted below; a setting of this thread only
                target[...] = block.astype(dtype)
            seen.num_overflowed = max(0, count_nonfinite(target) - seen.num_nonfinite)
            seen.max_relative_error = _max_relative_error(block, target) if measure_cast else 0.0
        return seen

    seen = CastStats()
    for one in _mapped(cast, range(0, flat.size, step), executor):
        seen.add(one)
    return result.reshape(array.shape), seen


def bytes_to_read(
    rows: np.ndarray, columns: Sequence[np.ndarray], row_length: int, itemsize: int, min_piece_bytes: int
) -> int:
    """Bytes that `read_regions` reads for a region of these rows and the columns of its targets."""
    _, width = _columns(len(rows), columns, row_length, itemsize, min_piece_bytes)
    if width < row_length:
        return len(rows) * width * itemsize
    gap = min_piece_bytes // (row_length * itemsize)
    return sum(last - first for first, last in _runs(np.sort(rows), gap)) * row_length * itemsize


def _mapped(run: Callable, items: Sequence, executor: Executor) -> Iterable:
    """One block, as of all small tensors, is not worth another thread."""
    return executor.map(run, items) if len(items) > 1 else map(run, items)


@dataclass(frozen=True)
class _Block:
    """Rows that one thread reads: ascending, with their numbers in the targets."""

    region: Region
    rows: np.ndarray
    places: np.ndarray
    first_column: int
    width: int
    max_gap: int  # of rows between runs that are read as one


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
    """The first column read, and how many."""
    first = min(int(index.min()) for index in columns)
    width = max(int(index.max()) for index in columns) + 1 - first
    is_worth_it = num_rows == 1 or width * itemsize >= min_piece_bytes
    return (first, width) if is_worth_it else (0, row_length)


def _runs(values: np.ndarray, max_gap: int = 0) -> Iterator[tuple[int, int]]:
    """[first, last) of runs of ascending numbers with at most so many others between neighbours."""
    breaks = np.flatnonzero(np.diff(values) > max_gap + 1) + 1
    for run in np.split(values, breaks):
        yield int(run[0]), int(run[-1]) + 1


@dataclass(frozen=True)
class _Reading:
    add: float
    measure_cast: bool

    def run(self, block: _Block) -> CastStats:
        region = block.region
        seen = CastStats()
        if (direct := self._direct(block)) is not None:
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
            seen.size += values.size
            num_nonfinite = count_nonfinite(values)
            with np.errstate(over="ignore", invalid="ignore"):  # counted below; a setting of this thread only
                cast = values.astype(target.dtype, copy=False)
                if cast is not values:
                    seen.num_overflowed += max(0, count_nonfinite(cast) - num_nonfinite)
                    if self.measure_cast:
                        seen.max_relative_error = max(seen.max_relative_error, _max_relative_error(values, cast))
                if self.add:
                    cast = (cast.astype(np.float32) + np.float32(self.add)).astype(cast.dtype)
            seen.num_nonfinite += num_nonfinite
            done = 0
            for first, last in _runs(places):
                store(cast[done : done + last - first], target[first:last])
                done += last - first
        return seen

    def _direct(self, block: _Block) -> np.ndarray | None:
        """Where the bytes can be read to, when they are the result as they are."""
        region = block.region
        if len(region.targets) != 1 or self.add or (np.diff(block.places) != 1).any():
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
    """Memory of this thread, until it asks again: fresh memory costs as much as reading a block from a fast disk."""
    num_bytes = shape[0] * shape[1] * dtype.itemsize
    if getattr(_thread, "scratch", None) is None or _thread.scratch.nbytes < num_bytes:
        _thread.scratch = np.empty(num_bytes, np.uint8)
    return _thread.scratch[:num_bytes].view(dtype).reshape(shape)


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _index(numbers: np.ndarray) -> slice | np.ndarray:
    """A slice where the numbers are one: it takes no copy."""
    step = int(numbers[1] - numbers[0]) if len(numbers) > 1 else 1
    if step > 0 and (np.diff(numbers) == step).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1, step)
    return numbers


def _max_relative_error(before: np.ndarray, after: np.ndarray) -> float:
    exact = before.astype(np.float64)
    is_counted = np.isfinite(exact) & (exact != 0)
    if not is_counted.any():
        return 0.0
    exact = exact[is_counted]
    return float(np.max(np.abs(after.astype(np.float64)[is_counted] - exact) / np.abs(exact)))
