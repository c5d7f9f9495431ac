"""Modules of base models: all that families have, by the names and shapes that Transformers gives their tensors."""

import numpy as np
import pytest

import checkpoints_convert
from checkpoints_convert.adapters.modules import BaseModules, cut_outputs, forms, join_outputs
from tests.checkpoints_convert.family_files import read

FAMILIES = (
    *("llama", "gemma3", "qwen3_moe", "mixtral", "gpt_oss", "llama4", "phi3", "gpt2", "gpt_neox", "falcon"),
    *("deepseek_v3", "qwen3_5", "qwen3_next", "glm4_moe", "granite_hybrid", "lfm2", "gemma4", "cohere"),
)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    """Stored shapes by name, and the modules of the base."""
    files = read(request.param)
    shapes = {name: x.shape for name, x in files.tensors.items()}
    return shapes, BaseModules(checkpoints_convert.model_config(files.config))


def test_every_matrix_is_a_module_of_its_shape(family):
    shapes, base = family
    matrices = {name for name, shape in shapes.items() if name.endswith(".weight") and len(shape) == 2}
    tables = {name for name in matrices if "embed" in name or ".wpe" in name or ".wte" in name}
    names = {module.tensor for module in base.modules.values()}
    assert matrices - tables <= names
    for module in base.modules.values():
        if module.tensor in shapes:  # experts have two forms, of which a file has one
            assert module.stored == shapes[module.tensor], module.name
            transpose = module.placements[0].transpose
            assert module.in_out == (module.stored[::-1] if transpose else module.stored)
    assert base.modules[base.embedding].is_embedding
    assert base.modules[base.head].is_head


def test_stacks_of_experts_are_in_the_order_of_their_module(family):
    shapes, base = family
    for parent, stack in base.stacks.items():
        names = ("gate_up_proj", "down_proj") if parent.endswith("experts") else ("weight",)  # Granite's have one each
        assert [module.name for module in stack] == [f"{parent}.{name}" for name in names]
        for module in stack:
            assert module.stored == shapes.get(module.tensor, module.stored)
    fused = {name.rpartition(".")[0] for name, shape in shapes.items() if "experts" in name and len(shape) == 3}
    assert fused <= base.stacks.keys()


def test_outputs_that_are_cut_are_joined_again(family):
    """An index that were lost or used twice would show: every output has a number of its own."""
    _, base = family
    for module in base.all_modules():
        outputs = module.in_out[1]
        stack = (module.stored[0],) if module.name == module.tensor else ()
        stored = np.arange(np.prod((*stack, 3, outputs))).reshape(*stack, 3, outputs)
        parts = [cut_outputs(placement, stored) for placement in module.placements]
        assert sum(part.size for part in parts) == stored.size
        np.testing.assert_array_equal(join_outputs(module.placements, parts), stored)


def test_forms_name_the_same_modules(family):
    _, base = family
    for form in forms(base.config):
        other = BaseModules(base.config, form)
        assert len(other.modules) == len(base.modules)
        assert form == f"{other.embedding}.weight"
        assert [module.group for module in other.all_modules()] == [module.group for module in base.all_modules()]
