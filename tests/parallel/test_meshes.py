"""Meshes by name, and the replicas of a data axis."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer import parallel


def test_sizes_by_name():
    assert parallel.parse_mesh("model=4") == {"model": 4}
    assert list(parallel.parse_mesh("model=4, data=2").items()) == [("data", 2), ("model", 4)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4", "is not of the form"),
        ("model=", "is not of the form"),
        ("model=0", "is not of the form"),
        ("tensor=4", "'tensor' is not one of the axes data, sequence, expert, model"),
        ("model=2,model=2", "two axes 'model'"),
        ("model=1000", "needs 1000 devices, this process has"),
    ],
)
def test_what_is_wrong_is_said(text, message):
    with pytest.raises(ValueError, match=message):
        parallel.make_mesh(text)


def test_meshes_of_others_are_checked():
    devices = np.array(jax.devices()[:2])
    with pytest.raises(ValueError, match="axis 'x'"):
        parallel.make_mesh(Mesh(devices, ("x",)))
    assert parallel.make_mesh(Mesh(devices, ("model",))).shape == {"model": 2}


def test_replicas_share_the_arrays_of_the_whole():
    mesh = parallel.make_mesh("data=2")
    one, other = parallel.replicas(mesh)
    assert (one.shape, other.shape) == ({"model": 1}, {"model": 1})
    assert {*one.devices.flat} != {*other.devices.flat}
    array = jax.device_put(np.arange(6.0), NamedSharding(mesh, PartitionSpec()))
    part = parallel.on_replica({"a": array}, other)["a"]
    assert part.tolist() == array.tolist()
    assert part.sharding.mesh == other
    assert part.unsafe_buffer_pointer() == array.addressable_shards[1].data.unsafe_buffer_pointer()


def test_without_a_data_axis_the_mesh_is_the_replica():
    mesh = parallel.make_mesh({"model": 2})
    assert parallel.replicas(mesh) == [mesh]
