from dataclasses import replace

import pytest

from checkpoints_convert.checkpoint import param_shapes
from checkpoints_convert.huggingface.families import FAMILIES
from jaxinfer.models import ModelConfig, RopeConfig
from tests.checkpoints_convert.family_files import source_of

LARGEST = ModelConfig(
    "LlamaForCausalLM",
    8,
    8,
    8,
    12,
    2,
    1,
    4,
    RopeConfig(rotary_dim=4),
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    qk_norm=True,
)


# Those that keep Llama's parameters; for all see tests/checkpoints_convert/test_families.py.
ALIKE = ("LlamaForCausalLM", "MistralForCausalLM", "MinistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@pytest.mark.parametrize("family", [FAMILIES[name] for name in ALIKE], ids=lambda family: family.architecture)
def test_every_parameter_has_one_tensor_of_its_own(family):
    config = replace(LARGEST, architecture=family.architecture)
    sources = [source_of(family, path) for path in param_shapes(config)]
    assert len({name for name, _ in sources}) == len(param_shapes(config))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.architecture)
def test_no_two_rules_have_the_same_source(family):
    sources = [(rule.source, rule.when) for rule in family.tensors]
    assert len(set(sources)) == len(sources)
    assert family.title
    assert family.examples


@pytest.mark.parametrize(
    ("path", "name", "transpose"),
    [
        (("embed",), "model.embed_tokens.weight", False),
        (("lm_head",), "lm_head.weight", True),
        (("final_norm", "weight"), "model.norm.weight", False),
        (("layers", "11", "attention_norm", "weight"), "model.layers.11.input_layernorm.weight", False),
        (("layers", "0", "mlp_norm", "weight"), "model.layers.0.post_attention_layernorm.weight", False),
        (("layers", "3", "attention", "k_proj", "weight"), "model.layers.3.self_attn.k_proj.weight", True),
        (("layers", "3", "attention", "k_proj", "bias"), "model.layers.3.self_attn.k_proj.bias", False),
        (("layers", "3", "attention", "q_norm", "weight"), "model.layers.3.self_attn.q_norm.weight", False),
        (("layers", "3", "mlp", "down_proj", "weight"), "model.layers.3.mlp.down_proj.weight", True),
    ],
)
def test_names_of_llama(path, name, transpose):
    assert source_of(FAMILIES["LlamaForCausalLM"], path) == (name, transpose)


def test_stored_buffers_are_skipped_and_nothing_else():
    family = FAMILIES["LlamaForCausalLM"]
    assert family.is_skipped("model.layers.31.self_attn.rotary_emb.inv_freq")
    assert not any(
        family.is_skipped(name) for name in ("inv_freq", "model.rotary_emb.inv_freq.weight", "lm_head.weight")
    )
