"""Which part of an array is whose: pure functions of shapes and the places of devices in a mesh."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, PartitionSpec

# [start, stop) along every axis of a parameter.
Bounds = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int]) -> Bounds:
    """The part that is everything."""
    return tuple((0, size) for size in shape)


def shape_of(bounds: Bounds) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in bounds)


def size_of(bounds: Bounds) -> int:
    """Values in a part."""
    return math.prod(shape_of(bounds))


def slices_of(bounds: Bounds) -> tuple[slice, ...]:
    return tuple(slice(*pair) for pair in bounds)


def cut(array: np.ndarray, bounds: Bounds) -> np.ndarray:
    """A part of an array, as a view; of one without axes itself."""
    return array[(..., *slices_of(bounds))]


def part_of(spec: PartitionSpec, axes: Mapping[str, int], shape: Sequence[int], place: Sequence[int]) -> Bounds:
    """What one device holds of an array.

    Args:
      spec: how the array is cut. axes: size of each mesh axis, in the mesh's order. place: the device's index along
        each of them.

    Raises ValueError for an axis of the array that does not fall into equal parts.
    """
    index = dict(zip(axes, place, strict=True))
    bounds = []
    for axis, size in enumerate(shape):
        entry = spec[axis] if axis < len(spec) else None
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        count, number = 1, 0
        for name in names:
            count, number = count * axes[name], number * axes[name] + index[name]
        if size % count:
            raise ValueError(f"axis {axis} of shape {tuple(shape)} cannot be cut into {count} equal parts")
        bounds.append((size // count * number, size // count * (number + 1)))
    return tuple(bounds)


def owned_parts(mesh: Mesh, spec: PartitionSpec, shape: Sequence[int], devices: Iterable[Any]) -> dict[Bounds, list]:
    """The different parts of an array that some devices of a mesh hold, each with its devices, in the array's order."""
    wanted = set(devices)
    found: dict[Bounds, list] = {}
    for place, device in np.ndenumerate(mesh.devices):
        if device in wanted:
            found.setdefault(part_of(spec, mesh.shape, shape, place), []).append(device)
    return dict(sorted(found.items()))
