"""Meshes: written ones are checked, and the default cuts the model over as many devices as divide it."""

from dataclasses import replace

import pytest

from jaxinfer.planning import parse_place
from jaxinfer.planning.chips import layout_of
from tests.planning.plan_models import LLAMA_3_8B, MIXTRAL_8X7B, TINY


@pytest.mark.parametrize(
    ("place", "mesh", "expected", "replicas"),
    [
        ("v6e:1x1", None, "model=1", 1),
        ("v5e:2x2", None, "model=4", 1),
        ("v5e:4x4", None, "data=2,model=8", 2),  # 8 key heads
        ("v5e:2x2", "data=4", "data=4,model=1", 4),
        ("v5e:2x2", "data=2,model=2", "data=2,model=2", 2),
        ("h200x8", "model=8", "model=8", 1),
    ],
)
def test_layouts(place, mesh, expected, replicas):
    layout = layout_of(parse_place(place), LLAMA_3_8B, mesh=mesh)
    assert (str(layout), layout.num_replicas) == (expected, replicas)
    assert layout.num_replicas * layout.num_devices == parse_place(place).num_devices


def test_a_draft_must_divide_too():
    place = parse_place("v5e:2x2")
    assert str(layout_of(place, LLAMA_3_8B, TINY)) == "data=2,model=2"
    assert str(layout_of(place, LLAMA_3_8B, replace(TINY, num_kv_heads=4))) == "model=4"


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("model=2", "has 2 devices, and v5e:2x2 has 4"),
        ("rows=4", "'rows' is not one of the axes data, sequence, expert, model"),
        ("model", "is not of the form"),
        ("model=0", "is not of the form"),
        ("model=2,model=2", "has two axes 'model'"),
    ],
)
def test_what_is_refused(mesh, message):
    with pytest.raises(ValueError, match=message):
        layout_of(parse_place("v5e:2x2"), LLAMA_3_8B, mesh=mesh)


def test_what_does_not_divide_is_made_to_fit_or_refused(ask):
    """Key heads are repeated; experts are not."""
    config = replace(TINY, num_layers=2)
    two, four = (ask(config, "v5e:2x2", mesh=mesh).spec() for mesh in ("model=2,data=2", "model=4"))
    assert four.config.num_kv_heads == 4
    assert four.parts["cache"] == two.parts["cache"]
    assert four.parts["weights"] < two.parts["weights"]
    with pytest.raises(ValueError, match="num_experts=8 cannot be cut into 16"):
        layout_of(parse_place("v5e:4x4"), MIXTRAL_8X7B, mesh="model=16")
