"""Plans of a head's training: memory by arithmetic, and by the compilers of chips that are not here."""

import jax.numpy as jnp
import pytest

from jaxinfer.models import abstract_params
from jaxinfer.planning import parse_place
from jaxinfer.planning.head_training import HeadTrainingRequest, plan_head_training
from jaxinfer.training.heads import HeadOptions
from pallas_kernels import ahead_of_time
from tests.planning.plan_models import LLAMA_3_8B

OPTIONS = HeadOptions("eagle3", num_steps=1000, draft_vocab_size=8192, compute_dtype="bfloat16")
BOUND = 0.10  # between what is counted and what the compiler says, of a device's memory


def request(place, mesh=None, options=OPTIONS):
    params = abstract_params(LLAMA_3_8B, jnp.bfloat16)
    return HeadTrainingRequest("llama-3-8b", LLAMA_3_8B, params, parse_place(place), options, mesh)


@pytest.mark.slow
def test_parts_are_sharded_along_the_models_axis_alone():
    alone = plan_head_training(request("h100"), compiles=False)
    parts = {
        mesh: plan_head_training(request("v6e:2x4", mesh), compiles=False).parts for mesh in (None, "data=2,model=4")
    }
    assert alone.fits
    num_params = 8_030_261_248
    assert alone.parts["target"] == 2 * num_params
    for mesh, model in ((None, 8), ("data=2,model=4", 4)):
        assert parts[mesh]["target"] == pytest.approx(2 * num_params / model, rel=0.001)
        assert parts[mesh]["head and optimizer"] < alone.parts["head and optimizer"] / 2
    assert "fits on h100 (1 x" in alone.to_text()
    assert alone.to_dict()["bytes"]["total"] == sum(alone.parts.values())


def test_rows_that_the_mesh_does_not_divide_are_refused():
    with pytest.raises(ValueError, match="batch_size=8 rows cannot be cut into 16 equal parts"):
        plan_head_training(request("v6e:4x4", "data=16"), compiles=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("place", "mesh"), [("v6e:2x4", "data=2,model=4"), ("h100", None)])
def test_the_compilers_say_what_is_counted(place, mesh):
    asked = request(place, mesh)
    if (reason := ahead_of_time.missing_compiler(asked.place.chip.name)) is not None:
        pytest.skip(reason)
    counted, compiled = plan_head_training(asked, compiles=False), plan_head_training(asked)
    print(compiled.to_text(), f"counted: {counted.total:,}, compiled: {compiled.total:,}", flush=True)
    assert compiled.fits
    assert counted.total == pytest.approx(compiled.total, rel=BOUND)
    assert (compiled.programs["step"].moved_bytes or 0) > compiled.parts["head and optimizer"]
