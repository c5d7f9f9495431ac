"""How work is divided into calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cpu_calls


def test_no_more_parts_than_work():
    assert [cpu_calls.num_parts(units, 4) for units in (1, 4, 12, 1000)] == [1, 1, 3, cpu_calls.MAX_PARTS]


def test_parts_do_not_depend_on_cores(monkeypatch):
    """Programs have them as constants, and are kept for machines of any number of cores."""
    found = []
    for num_cores in (1, 64):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, num_cores=num_cores: set(range(num_cores)))
        found.append([cpu_calls.num_parts(units) for units in (1, 5, 1000)])
    assert found[0] == found[1]


def test_reasons(monkeypatch):
    assert cpu_calls.unsupported("gpu") == "it needs a CPU, and this is a gpu"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cpu_calls.unsupported("cpu") == "it needs Numba, which is not installed"


def test_arrays_of_a_mesh_are_divided_outside_of_shard_map():
    kinds = jax.sharding.AxisType
    found = []
    for kind, size in ((kinds.Auto, 2), (kinds.Explicit, 2), (kinds.Manual, 2), (kinds.Auto, 1)):
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((size,), ("model",), axis_types=(kind,))):
            found.append(cpu_calls.is_divided())
    assert found == [True, True, False, False]


def test_a_materialized_cosine_is_computed_once():
    pytest.importorskip("numba", reason="kernels for CPUs need Numba")
    x = jnp.arange(6.0).reshape(2, 3)

    def scaled_twice(x):
        cosine = cpu_calls.materialized(jnp.cos(x))
        return cosine * 2, jnp.sum(cosine[:, :, None] * x[:, None], axis=1)

    np.testing.assert_array_equal(jax.jit(scaled_twice)(x)[0], jax.jit(jnp.cos)(x) * 2)
    assert jax.jit(scaled_twice).lower(x).compile().as_text().count(" cosine(") == 1
