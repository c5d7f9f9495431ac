"""Meshes from text such as "data=2,model=4", and their replicas along the data axis."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.parallel.sharding import DATA, EXPERT, MODEL, SEQUENCE

AXES = (DATA, SEQUENCE, EXPERT, MODEL)


def parse_mesh(text: str) -> dict[str, int]:
    """Sizes of the axes of "model=4", "data=2,model=4", "sequence=4", in the order of `AXES`.

    Raises ValueError for another form, an unknown or repeated axis, or a size below 1.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if not equals or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"mesh={text!r} is not of the form 'model=4' or 'data=2,model=4'")
        if name not in AXES:
            raise ValueError(f"mesh={text!r}: {name!r} is not one of the axes {', '.join(AXES)}")
        if name in sizes:
            raise ValueError(f"mesh={text!r} has two axes {name!r}")
        sizes[name] = int(size)
    return {name: sizes[name] for name in AXES if name in sizes}


def make_mesh(mesh: str | Mapping[str, int] | Mesh, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over the first of `devices`, all by default; a `jax.sharding.Mesh` is checked and returned.

    Neighbours along the last axis, "model", which communicates most, are neighbouring devices.

    Raises ValueError for an invalid text, an unknown axis, or, with both numbers, too few devices.
    """
    if isinstance(mesh, Mesh):
        unknown = [name for name in mesh.axis_names if name not in AXES]
        if unknown:
            raise ValueError(f"the mesh has an axis {unknown[0]!r}, which is not one of {', '.join(AXES)}")
        # Without explicit axis types: rules place the arrays, and the compiler inserts collectives.
        return Mesh(mesh.devices, mesh.axis_names)
    sizes = parse_mesh(mesh) if isinstance(mesh, str) else dict(mesh)
    devices = jax.devices() if devices is None else list(devices)
    count = math.prod(sizes.values())
    if count > len(devices):
        text = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"mesh {text!r} needs {count} devices, this process has {len(devices)}")
    shape = tuple(sizes.values())
    if count == len(devices) and devices[0].platform == "tpu":
        from jax.experimental import mesh_utils

        return Mesh(mesh_utils.create_device_mesh(shape, devices), tuple(sizes))
    return Mesh(np.array(devices[:count]).reshape(shape), tuple(sizes))


def on_replica(tree: Any, mesh: Mesh) -> Any:
    """The arrays of a pytree as arrays on `mesh`, one of the `replicas` of their mesh, whose data axis shards none of
    them. Copies nothing."""
    devices = set(mesh.local_devices)

    def part(array: jax.Array) -> jax.Array:
        shards = [shard.data for shard in array.addressable_shards if shard.device in devices]
        sharding = array.sharding
        if not isinstance(sharding, NamedSharding):
            raise TypeError(f"an array on a mesh was expected, not one with {sharding}")
        names = [name if name in mesh.axis_names else None for name in (*sharding.spec,)]
        return jax.make_array_from_single_device_arrays(array.shape, NamedSharding(mesh, PartitionSpec(*names)), shards)

    return jax.tree.map(part, tree)


def replicas(mesh: Mesh) -> list[Mesh]:
    """The meshes along the data axis, each with a complete model; only the mesh itself if it has no data axis."""
    if DATA not in mesh.axis_names:
        return [mesh]
    axis = mesh.axis_names.index(DATA)
    rest = {name: size for name, size in mesh.shape.items() if name != DATA} or {MODEL: 1}
    parts = np.split(np.moveaxis(mesh.devices, axis, 0), mesh.shape[DATA])
    return [Mesh(part.reshape(tuple(rest.values())), tuple(rest)) for part in parts]
