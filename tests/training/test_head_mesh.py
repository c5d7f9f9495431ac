"""Heads trained on a mesh are those of one device; what a mesh does not divide is refused."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from jaxinfer.parallel import make_mesh
from jaxinfer.training.head_mesh import HeadPlacement, check_fit, state_shardings
from jaxinfer.training.heads import HeadTraining, train_head
from jaxinfer.training.loop import TrainOptions, make_optimizer
from tests.tiny import TINY
from tests.training import test_heads as one_device
from tests.training.process import run_python

KINDS = {
    kind: replace(options, num_steps=5, warmup_steps=1, evaluate_every=1, checkpoint_every=2)
    for kind, options in one_device.KINDS.items()
}
TOLERANCE = 1e-4


def run(folder, kind, mesh):
    texts = one_device.texts_in(folder)
    training = HeadTraining(one_device.TARGET, one_device.target_params(), texts, KINDS[kind], mesh)
    return train_head(training, work_dir=folder, show_progress=False)


def losses(result):
    return [values["loss"] for _, values in result.history]


def compare(folder, kind, axes, *, is_interrupted):
    """Raises AssertionError unless the mesh trains the head of one device, with the same loss at each step."""
    alone, mesh = run(folder / "alone", kind, None), make_mesh(axes)
    found = run(folder / "mesh", kind, mesh)
    assert len(losses(found)) == 5
    np.testing.assert_allclose(losses(found), losses(alone), rtol=TOLERANCE)
    assert found.before == alone.before
    for here, there in zip(jax.tree.leaves(found.params), jax.tree.leaves(alone.params), strict=True):
        np.testing.assert_allclose(here, there, atol=2e-3)
    print(kind, axes, losses(alone), losses(found), flush=True)
    if not is_interrupted:
        return
    newest = sorted((folder / "mesh" / "checkpoints").iterdir())
    newest[-1].unlink()
    again = run(folder / "mesh", kind, mesh)
    jax.tree.map(np.testing.assert_array_equal, again.params, found.params)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axes", ["data=2,model=2", "data=4,model=2"])
def test_a_mesh_trains_the_head_of_one_device(tmp_path, kind, axes):
    code = f"""
        from pathlib import Path
        from tests.training.test_head_mesh import compare
        compare(Path({str(tmp_path)!r}), {kind!r}, {axes!r}, is_interrupted=True)
    """
    assert run_python(code, num_devices=8).returncode == 0


def test_two_devices_train_the_head_of_one(tmp_path):
    if jax.device_count() < 2:
        pytest.skip("1 device, 2 are needed")
    compare(tmp_path, "eagle3", "data=2", is_interrupted=False)


def test_the_optimizer_keeps_what_is_of_a_parameter_beside_it():
    mesh = AbstractMesh((2, 2), ("data", "model"))
    shape = {"lm_head": jax.ShapeDtypeStruct((8, 16), "float32"), "norm": jax.ShapeDtypeStruct((8,), "float32")}
    spec = {"lm_head": PartitionSpec(None, "model"), "norm": PartitionSpec()}
    params = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(mesh, spec)),
        shape,
        spec,
    )
    optimizer = make_optimizer(TrainOptions(10))
    state = jax.eval_shape(lambda params: {"params": params, "optimizer": optimizer.init(params)}, shape)
    leaves = jax.tree_util.tree_leaves_with_path(state_shardings(state, params))
    found = {jax.tree_util.keystr(path): leaf.spec for path, leaf in leaves}
    large = {path: spec for path, spec in found.items() if "lm_head" in path}
    assert len(large) == 3, "the parameter and its two moments"
    assert set(large.values()) == {PartitionSpec(None, "model")}
    assert {spec for path, spec in found.items() if path not in large} == {PartitionSpec()}
    assert state_shardings(state, jax.tree.map(np.zeros_like, {"lm_head": 0.0})) is None


def test_what_a_mesh_does_not_divide_is_refused():
    mesh = AbstractMesh((2, 4), ("data", "model"))
    with pytest.raises(ValueError, match="batch_size=5 rows cannot be cut into 2 equal parts"):
        HeadPlacement(mesh, batch_size=5)
    with pytest.raises(ValueError, match=r"does not divide the target \(num_kv_heads: 2 become 4\): choose a smaller"):
        HeadPlacement(mesh, TINY)
    with pytest.raises(ValueError, match="none by 'sequence'"):
        HeadPlacement(AbstractMesh((2,), ("sequence",)))
    check_fit(None)
