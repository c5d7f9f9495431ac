"""The arrays of a unit of the native form, read chunk by chunk and compared with their checksums.

They are read by TensorStore alone. Files that only Orbax needs (_METADATA, sharding) are not opened. A checksum is the
xxh3 of a stored chunk, computed while the chunk is in the processor's cache. It finds damage, in every chunk with odds
of 1 in 2**64 of missing it; it is no protection against intent. A core hashes 34 GiB/s with it, 7 with CRC-32C and 1
with SHA-256 (Xeon, 2.8 GHz).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from checkpoints_convert.checkpoint import Bounds, full_bounds, shape_of, slices_of
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.host_arrays import CastStats, empty_aligned
from checkpoints_convert.manifest import Entries, file_problems

_METADATA_KEY = b"/.zarray"
_OPEN = {"driver": "zarr", "fill_missing_data_reads": False}  # a chunk that is missing is an error, not zeros
# Hashed, tested and cast at once: half of a core's second-level cache, and large enough that Python's part is small.
_BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class ArrayChecksums:
    """Attributes:
    chunk: shape of the chunks, which are smaller at the array's ends.
    digests: hexadecimal xxh3 (64 bits) of the bytes of each chunk, both the bytes and the chunks in C order.
    """

    chunk: tuple[int, ...]
    digests: tuple[str, ...]

    @classmethod
    def from_json(cls, data: Any, shape: Sequence[int]) -> "ArrayChecksums":
        """Raises ValueError for what `to_json` does not return for an array of that shape."""
        if not isinstance(data, Mapping) or not isinstance(data.get("chunk"), list):
            raise ValueError("has no chunk shape")
        chunk, digests = data["chunk"], data.get("xxh3")
        if len(chunk) != len(shape) or not all(type(size) is int and size > 0 for size in chunk):
            raise ValueError(f"chunks of shape {chunk} do not fit an array of shape {list(shape)}")
        count = math.prod(-(-size // step) for size, step in zip(shape, chunk, strict=True))
        if not isinstance(digests, list) or [type(digest) for digest in digests] != [str] * count:
            raise ValueError(f"needs the xxh3 of {count} chunks")
        return cls(tuple(chunk), tuple(digests))

    def to_json(self) -> dict[str, Any]:
        return {"chunk": list(self.chunk), "xxh3": list(self.digests)}


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype that an array must have. checksums: None if they are not compared."""

    shape: tuple[int, ...]
    dtype: np.dtype
    checksums: ArrayChecksums | None = None


class ArrayStore:
    """One unit opened for reading; arrays, or parts, are read directly into their final memory. Thread-safe.

    Raises CheckpointError if names, shapes or dtypes are not those of `specs`, and for damage, naming the file.

    Attributes:
      directory: of the unit. specs: its arrays, by name.
    """

    def __init__(
        self, root: Path, unit: str, specs: Mapping[str, ArraySpec], files: Entries, executor: Executor | None = None
    ):
        """
        Args:
          root: the checkpoint's directory. unit: path of the unit's directory in it.
          files: the unit's part of the manifest, to find the file that is damaged. executor: reads chunks.
        """
        self.directory, self.specs = root / unit, specs
        self._root, self._files, self._executor = root, files, executor
        with self._explained(unit):
            handles = self._arrays.items()
            stored = {name: (tuple(array.shape), np.dtype(array.dtype.numpy_dtype)) for name, array in handles}
            wanted = {name: (spec.shape, spec.dtype) for name, spec in specs.items()}
            if stored != wanted:
                raise CheckpointError(self.directory, *_differences(wanted, stored))

    def read(
        self, name: str, bounds: Bounds | None = None, *, dtype: np.dtype | None = None, measure_cast: bool = False
    ) -> tuple[np.ndarray, CastStats]:
        """An array, or a part of it, cast to `dtype`; statistics as of `read_regions`, only if a dtype is given."""
        spec = self.specs[name]
        bounds = full_bounds(spec.shape) if bounds is None else bounds
        result = empty_aligned(shape_of(bounds), dtype or spec.dtype)
        read = _Reading(self._arrays[name], spec, bounds, result, dtype is not None, measure_cast)
        stats = CastStats()
        with self._explained(f"array {name!r}"):
            tasks = list(read.tasks(self.chunk_shape(name)))
            run = self._executor.map if self._executor is not None and len(tasks) > 1 else map
            for of_chunk in run(read.run, tasks):
                stats.add(of_chunk)
        return result, stats

    def chunk_shape(self, name: str) -> tuple[int, ...]:
        """The shape of the chunks that an array is read in: the one that its checksums have, or it is stored in."""
        spec = self.specs[name]
        stored = self._arrays[name].chunk_layout.read_chunk.shape or ()  # None of a scalar
        return spec.checksums.chunk if spec.checksums is not None else tuple(max(1, size) for size in stored)

    @cached_property
    def _arrays(self) -> dict[str, Any]:
        """TensorStore's handles of all arrays of the unit."""
        import tensorstore as ts

        kvstore = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{self.directory.absolute()}/"}}
        context = ts.Context()
        keys = ts.KvStore.open(kvstore, context=context).result().list().result()
        names = [key.removesuffix(_METADATA_KEY).decode() for key in keys if key.endswith(_METADATA_KEY)]
        opening = {
            name: ts.open(_OPEN | {"kvstore": kvstore | {"path": f"{name}/"}}, open=True, read=True, context=context)
            for name in names
        }
        return {name: future.result() for name, future in opening.items()}

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turns errors into CheckpointError; if a file does not match the manifest, into one that names it."""
        try:
            yield
        except Exception as error:  # TensorStore raises many kinds for damaged files
            problems = file_problems(self._root, self._files)
            if problems:
                raise CheckpointError(self._root, *(f"{text}; found in reading {what}" for text in problems)) from None
            if isinstance(error, CheckpointError):
                raise
            reason = str(error).strip().split("\n")[0]
            raise CheckpointError(self.directory, f"cannot be read, {type(error).__name__}: {reason}") from error


@dataclass(frozen=True)
class _Reading:
    """One array that is read into `result`, which has the part `bounds`. is_dense: statistics are counted."""

    array: Any
    spec: ArraySpec
    bounds: Bounds
    result: np.ndarray
    is_dense: bool
    measure_cast: bool

    def tasks(self, chunk: tuple[int, ...]) -> Iterator[tuple[Bounds, str | None]]:
        """The chunks that overlap the part, with their checksums."""
        known = self.spec.checksums
        for number, bounds in enumerate(chunks(self.spec.shape, chunk)):
            if all(a < stop and start < b for (a, b), (start, stop) in zip(bounds, self.bounds, strict=True)):
                yield bounds, known.digests[number] if known is not None else None

    def run(self, task: tuple[Bounds, str | None]) -> CastStats:
        """Reads a chunk and writes its part to the result; without a checksum only that part is read."""
        chunk, known = task
        part = tuple((max(a, start), min(b, stop)) for (a, b), (start, stop) in zip(chunk, self.bounds, strict=True))
        target = self.result[_inside(part, self.bounds)]
        read = part if known is None else chunk
        is_direct = read == part and target.dtype == self.spec.dtype
        stored = target if is_direct else np.empty(shape_of(read), self.spec.dtype)
        _fetch(self.array, read, stored)
        hasher = None if known is None else xxhash.xxh3_64()
        copy = partial(copy_blocks, is_dense=self.is_dense, measure_cast=self.measure_cast)
        if read == part:
            stats = copy(stored, target if not is_direct else stored, hasher=hasher)
        else:
            copy_blocks(stored, stored, hasher=hasher, is_dense=False)
            stats = copy(stored[_inside(part, read)], target)
        if hasher is not None and (digest := hasher.hexdigest()) != known:
            raise ValueError(f"values {chunk} have the checksum {digest}, the manifest says {known}")
        return stats


def _inside(part: Bounds, whole: Bounds) -> tuple[Any, ...]:
    """The index of a part in an array that has the values of `whole`."""
    return (..., *(slice(a - first, b - first) for (a, b), (first, _) in zip(part, whole, strict=True)))


def _fetch(array: Any, bounds: Bounds, target: np.ndarray) -> None:
    import tensorstore as ts

    view = array[slices_of(bounds)].translate_to[(0,) * len(bounds)] if bounds else array
    ts.array(target).write(view).result()


def _differences(wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    problems = [f"tensor {name!r} is missing" for name in wanted if name not in stored]
    problems += [f"tensor {name!r} is not of this model" for name in stored if name not in wanted]
    for name in wanted.keys() & stored.keys():
        if stored[name] != wanted[name]:
            (shape, dtype), (other_shape, other_dtype) = wanted[name], stored[name]
            problems.append(f"tensor {name!r} is {other_dtype}{list(other_shape)}, not {dtype}{list(shape)}")
    return problems


def checksums(array: np.ndarray, chunk: Sequence[int]) -> ArrayChecksums:
    """Checksums of an array that is stored in chunks of a shape."""
    digests = []
    for bounds in chunks(array.shape, chunk):
        hasher, part = xxhash.xxh3_64(), array[slices_of(bounds)]
        copy_blocks(part, part, hasher=hasher, is_dense=False)
        digests.append(hasher.hexdigest())
    return ArrayChecksums(tuple(map(int, chunk)), tuple(digests))


def chunks(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[Bounds]:
    """The bounds of the chunks of an array, in C order."""
    axes = (
        [(start, min(start + step, size)) for start in range(0, size, step)]
        for size, step in zip(shape, chunk, strict=True)
    )
    return product(*axes)


def copy_blocks(
    source: np.ndarray,
    target: np.ndarray,
    *,
    hasher: xxhash.xxh3_64 | None = None,
    is_dense: bool = True,
    measure_cast: bool = False,
) -> CastStats:
    """Casts an array into another of its shape, or only examines it if both are the same memory; a block at a time.

    Args:
      hasher: gets the bytes of `source` in C order. is_dense: values are floating point and are counted in the
        statistics. measure_cast: as of `read_regions`.
    """
    stats, is_copied = CastStats(), source is not target
    for index in _blocks(source.shape, source.dtype.itemsize):
        block = source[index]
        if hasher is not None:
            block = np.ascontiguousarray(block)
            hasher.update(block.reshape(-1).view(np.uint8).data)
        if is_dense:
            block = stats.cast(block, target.dtype, measure_cast=measure_cast)
        if is_copied:
            target[index] = block.astype(target.dtype, copy=False)
    return stats


def _blocks(shape: Sequence[int], itemsize: int) -> Iterator[tuple[Any, ...]]:
    """Indices of an array's blocks in C order, each of at most _BLOCK_BYTES unless a single row is larger."""
    if math.prod(shape) * itemsize <= _BLOCK_BYTES or not shape:
        yield (...,)
        return
    row_bytes = max(1, math.prod(shape[1:]) * itemsize)
    if row_bytes > _BLOCK_BYTES and len(shape) > 1:
        for row in range(shape[0]):
            for index in _blocks(shape[1:], itemsize):
                yield (row, *index)
        return
    step = max(1, _BLOCK_BYTES // row_bytes)
    for first in range(0, shape[0], step):
        yield (slice(first, first + step), ...)
