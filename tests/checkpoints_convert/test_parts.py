"""Which device holds what: against JAX's own index maps, and as properties for meshes larger than this machine."""

import itertools
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from checkpoints_convert.checkpoint import full_bounds, owned_parts, part_of, shape_of, size_of, slices_of

P = PartitionSpec


@pytest.mark.parametrize("axes", [{"a": 2, "b": 1}, {"a": 1, "b": 2}])
@pytest.mark.parametrize("spec", [P(), P("a"), P(None, "b"), P("b", "a"), P(("a", "b")), P(None, ("b", "a"))], ids=str)
def test_as_jax_has_it(axes, spec):
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(*axes.values()), tuple(axes))
    shape = (4, 6)
    wanted = NamedSharding(mesh, spec).devices_indices_map(shape)
    found = owned_parts(mesh, spec, shape, mesh.devices.flat)
    by_device = {device: slices_of(bounds) for bounds, devices in found.items() for device in devices}
    full = {device: tuple(slice(*cut.indices(size)[:2]) for cut, size in zip(index, shape, strict=True))
            for device, index in wanted.items()}  # fmt: skip
    assert by_device == full


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([P("a"), P(None, "b"), P("a", "b"), P(("b", "a"))]),
)
def test_parts_tile_the_array(a, b, scale, spec):
    axes, shape = {"a": a, "b": b}, (12 * scale, 12)
    seen = np.zeros(shape, int)
    bounds = {part_of(spec, axes, shape, place) for place in np.ndindex(a, b)} if 12 * scale % (a * b) == 0 else set()
    for one in bounds:
        seen[slices_of(one)] += 1
        assert seen[slices_of(one)].shape == shape_of(one)
    if bounds:
        assert (seen == 1).all()
        assert sum(map(size_of, bounds)) == math.prod(shape)


def test_devices_that_hold_the_same_share_a_part():
    devices = np.array([f"d{i}" for i in range(8)]).reshape(2, 4)

    # what `owned_parts` looks at of a mesh
    drawn = SimpleNamespace(devices=devices, shape={"data": 2, "model": 4})
    found = owned_parts(drawn, P(None, "model"), (3, 8), ["d1", "d2", "d5"])
    assert found == {((0, 3), (2, 4)): ["d1", "d5"], ((0, 3), (4, 6)): ["d2"]}
    assert list(owned_parts(drawn, P(), (3,), ["d0", "d7"]).items()) == [(full_bounds((3,)), ["d0", "d7"])]


def test_what_does_not_divide_says_so():
    with pytest.raises(ValueError, match=r"axis 1 of shape \(2, 6\) cannot be cut into 4 equal parts"):
        part_of(P(None, "a"), {"a": 4}, (2, 6), (0,))


def test_places_of_an_axis_pair_count_with_the_last_fastest():
    parts = [part_of(P(("a", "b")), {"a": 2, "b": 3}, (6,), place) for place in itertools.product(range(2), range(3))]
    assert parts == [((i, i + 1),) for i in range(6)]
