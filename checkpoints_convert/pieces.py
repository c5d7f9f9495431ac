"""Where a part of a parameter lies in the tensors of a checkpoint: index maps only, no file is touched."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from checkpoints_convert.parts import Bounds, size_of
from checkpoints_convert.plan import TensorPlan


@dataclass(frozen=True)
class TensorPiece:
    """A part's share of one stored tensor, looked at as [rows, columns]: its axes before the last one are one.

    Attributes:
      source: the tensor. row_length: its columns in all.
      rows, columns: int64, which of them, in the part's order.
      place: index into the part that gives [rows, columns], or [columns, rows] where the plan transposes.
    """

    source: str
    row_length: int
    rows: np.ndarray
    columns: np.ndarray
    place: tuple[int, ...]

    def target(self, part: np.ndarray, *, transpose: bool) -> np.ndarray:
        """The view [rows, columns] of the part that the piece fills."""
        found = part[self.place]
        if transpose and found.ndim == 2:
            return found.T
        return found.reshape(len(self.rows), len(self.columns))


def pieces_of(tensor: TensorPlan, bounds: Bounds) -> Iterator[TensorPiece]:
    """Where a part of a dense parameter lies in the tensors it is read from."""
    stored = tensor.view or tensor.source_shape
    if not tensor.stacked:
        yield from _pieces_of_one(tensor, tensor.source, stored, bounds, ())
        return
    (first, last), *rest = bounds
    for number in range(first, last):
        yield from _pieces_of_one(tensor, tensor.stacked[number], stored, tuple(rest), (number - first,))


def _pieces_of_one(
    tensor: TensorPlan, source: str, stored: tuple[int, ...], bounds: Bounds, place: tuple[int, ...]
) -> Iterator[TensorPiece]:
    """One tensor's, which lie at `place` of the part."""
    is_swapped = tensor.transpose and len(stored) > 1
    if is_swapped:
        bounds = (*bounds[:-2], bounds[-1], bounds[-2])
    indices = [np.arange(start, stop) for start, stop in bounds]
    if tensor.outputs is not None:
        axis = -2 if is_swapped else -1
        indices[axis] = tensor.outputs.index[slice(*bounds[axis])]
    *leading, columns = indices or [np.zeros(1, np.int64)]
    *shape, row_length = list(stored) or [1]
    if is_swapped:  # one matrix at a time: several, transposed, are not one matrix
        *leading, within = leading
        *shape, num_rows = shape
        for number, index in enumerate(_flat(leading, shape)):
            here = np.unravel_index(number, tuple(map(len, leading))) if leading else ()
            yield TensorPiece(source, row_length, index * num_rows + within, columns, (*place, *map(int, here)))
    else:
        yield TensorPiece(source, row_length, _flat(leading, shape), columns, place)


def _flat(indices: Sequence[np.ndarray], shape: Sequence[int]) -> np.ndarray:
    """Numbers of the rows at all combinations of the indices of the axes before the last."""
    if not indices:
        return np.zeros(1, np.int64)
    return np.ravel_multi_index(np.ix_(*indices), tuple(shape)).reshape(-1)


def regions_of(tensor: TensorPlan, parts: Sequence[Bounds]) -> list[list[tuple[int, TensorPiece]]]:
    """The pieces of all parts, each with its part's number; together those of the same rows of one tensor, which lie
    side by side and are read at once."""
    found: dict[tuple, list[tuple[int, TensorPiece]]] = {}
    for number, bounds in enumerate(parts):
        for piece in pieces_of(tensor, bounds):
            if len(piece.rows) and len(piece.columns):
                # Rows of parts are runs of the same list, so that its start and length tell them.
                key = (piece.source, int(piece.rows[0]), len(piece.rows))
                found.setdefault(key, []).append((number, piece))
    return list(found.values())


def split_parts(tensor: TensorPlan, parts: Sequence[Bounds], itemsize: int, limit: int) -> list[list[Bounds]]:
    """The parts in runs of at most `limit` bytes, if it can be; in one where they share rows, which are read once."""
    sizes = [size_of(bounds) * itemsize for bounds in parts]
    if sum(sizes) <= limit or any(len({number for number, _ in region}) > 1 for region in regions_of(tensor, parts)):
        return [list(parts)]
    runs: list[list[Bounds]] = []
    room = -1
    for bounds, size in zip(parts, sizes, strict=True):
        if size > room:
            runs.append([])
            room = limit
        runs[-1].append(bounds)
        room -= size
    return runs
