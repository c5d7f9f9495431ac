"""config.json of the dense families: forms before and since Transformers 5, defaults, and what is refused."""

import pytest

from checkpoints_convert import CheckpointError
from checkpoints_convert.huggingface.config import huggingface_config, model_config
from jaxinfer.models import RopeConfig

BASE = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 100, "n_embd": 64, "n_layer": 2, "n_head": 4}


def config(architecture, **changes):
    data = {**BASE, "architectures": [architecture], **changes}
    return model_config({key: value for key, value in data.items() if value is not ...})


def refusal(architecture, **changes):
    with pytest.raises(CheckpointError) as caught:
        config(architecture, **changes)
    return str(caught.value)


def test_gemma_3_of_before_and_since_transformers_5():
    old = config(
        "Gemma3ForCausalLM",
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window=512,
        sliding_window_pattern=6,
        head_dim=32,
    )
    new = config(
        "Gemma3ForCausalLM",
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        sliding_window=512,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        head_dim=32,
    )
    assert old == new
    assert old.rope == RopeConfig("linear", 1e6, 32, factor=8.0)
    assert old.local_rope == RopeConfig("default", 1e4, 32)
    assert old.sliding_windows == (512,) * 5 + (None,)
    assert (old.embedding_multiplier, old.attention_scale) == (8.0, 1 / 16)
    assert huggingface_config(old)["rope_local_base_freq"] == 1e4


def test_a_sparse_text_part_has_the_defaults_of_gemma_3():
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    found = model_config({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    assert (found.architecture, found.num_heads, found.num_kv_heads, found.head_dim) == ("Gemma3ForCausalLM", 8, 4, 256)
    assert (found.vocab_size, found.tie_word_embeddings, found.local_rope.theta) == (262208, True, 1e4)
    assert found.sliding_windows[:6] == (1024,) * 5 + (None,)


def test_the_text_part_of_mistral_3():
    text = {**BASE, "model_type": "ministral3", "num_key_value_heads": 4}
    found = model_config({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text})
    assert (found.architecture, found.rope.kind, found.rope.query_scale_beta) == ("Ministral3ForCausalLM", "yarn", 0.1)
    text = {**BASE, "num_key_value_heads": 4}
    plain = model_config({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text})
    assert plain.architecture == "MistralForCausalLM"


def test_a_text_part_we_do_not_have_is_refused_by_name():
    data = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {**BASE, "model_type": "mamba"}}
    with pytest.raises(CheckpointError, match="'mamba' is not supported"):
        model_config(data)


def test_gemma_means_the_tanh_form_by_gelu():
    assert config("GemmaForCausalLM", hidden_act="gelu", num_key_value_heads=4).activation == "gelu_tanh"
    assert config("FalconForCausalLM", activation="gelu").activation == "gelu"
    assert config("PhiForCausalLM").activation == "gelu_tanh"


def test_null_turns_a_cap_off_and_absence_does_not():
    found = config("Gemma2ForCausalLM")
    assert (found.attention_softcap, found.logit_softcap, found.sliding_windows[:2]) == (50.0, 30.0, (4096, None))
    found = config("Gemma2ForCausalLM", attn_logit_softcapping=None)
    assert (found.attention_softcap, found.logit_softcap) == (None, 30.0)


def test_olmo_3_stretches_full_layers_only():
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    found = config("Olmo3ForCausalLM", rope_theta=5e5, rope_scaling=yarn)
    assert (found.rope.kind, found.local_rope) == ("yarn", RopeConfig("default", 5e5, 16))
    assert config("Olmo3ForCausalLM").local_rope is None  # the same in all layers


@pytest.mark.parametrize(
    ("changes", "rotated", "windows"),
    [
        ({}, (True, True, True, False, True, True), ()),
        ({"no_rope_layer_interval": 3}, (True, True, False) * 2, ()),
        ({"no_rope_layers": [1, 0, 1, 1, 1, 1]}, (True, False, True, True, True, True), ()),
        ({"no_rope_layers": [1] * 6}, (), ()),
        (
            {"no_rope_layer_interval": 3, "use_sliding_window": True, "sliding_window": 9},
            (True, True, False) * 2,
            (None, None, 9) * 2,
        ),
    ],
)
def test_layers_of_smollm_3_without_rotation(changes, rotated, windows):
    found = config("SmolLM3ForCausalLM", **changes)
    assert (found.rotated_layers, found.sliding_windows, found.rope.theta) == (rotated, windows, 2e6)


def test_cohere_2_rotates_layers_with_a_window():
    found = config("Cohere2ForCausalLM", sliding_window=7)
    assert found.sliding_windows == (7, 7, 7, None, 7, 7)
    assert found.rotated_layers == (True, True, True, False, True, True)


@pytest.mark.parametrize(
    ("changes", "kv_heads", "block"),
    [
        ({}, 1, "parallel_one_norm"),
        ({"multi_query": False}, 4, "parallel_one_norm"),
        ({"multi_query": False, "parallel_attn": False}, 4, "pre_norm"),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2, "parallel_two_norms"),
        ({"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}, 2, "parallel_one_norm"),
        ({"new_decoder_architecture": True}, 4, "parallel_two_norms"),
    ],
)
def test_falcon_of_each_generation(changes, kv_heads, block):
    found = config("FalconForCausalLM", intermediate_size=..., **changes)
    assert (found.num_kv_heads, found.block, found.intermediate_size) == (kv_heads, block, 256)
    assert model_config(huggingface_config(found)) == found


def test_gpt_2_of_its_own_names():
    found = model_config(GPT2)
    assert (found.hidden_size, found.num_layers, found.intermediate_size) == (64, 2, 256)
    assert (found.has_position_embedding, found.rope_of(0), found.max_position_embeddings) == (True, None, 1024)
    assert model_config({**GPT2, "n_inner": 96}).intermediate_size == 96
    with pytest.raises(CheckpointError, match="n_embd is missing"):
        model_config({key: value for key, value in GPT2.items() if key != "n_embd"})


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("FalconForCausalLM", {"alibi": True}, "alibi is true, which is not supported: ALiBi adds a slope"),
        ("GemmaForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        ("Phi3ForCausalLM", {"hidden_act": "relu2"}, "hidden_act 'relu2' is not supported"),
        ("Gemma2ForCausalLM", {"hidden_activation": "tanh"}, "hidden_activation 'tanh' is not supported"),
        ("OlmoForCausalLM", {}, "'OlmoForCausalLM' is not supported; `jaxinfer models` lists those that are"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 2]}, "no_rope_layers must list a 0 or 1 for each of 6 layers"),
        ("CohereForCausalLM", {"partial_rotary_factor": 0.5}, "CohereForCausalLM rotates whole heads"),
        ("MistralForCausalLM", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta is not a"),
        ("PhiForCausalLM", {"num_attention_heads": 5}, "hidden_size 64 is not a multiple of the 5 attention heads"),
        ("Gemma2ForCausalLM", {"layer_types": ["chunked_attention"] * 6}, "layer_types names 'chunked_attention'"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(architecture, changes, message):
    import re

    assert re.search(message, refusal(architecture, **changes))


@pytest.mark.parametrize("name", ["scale_attn_by_inverse_layer_idx", "add_cross_attention"])
def test_what_gpt_2_may_ask_for_and_we_do_not_do(name):
    with pytest.raises(CheckpointError, match=f"{name} is true, which is not supported"):
        model_config({**GPT2, name: True})


@pytest.mark.parametrize("value", [0.0625, 0.1, 3.0, 49.0, 13.0, 6.0])
def test_reciprocals_and_roots_come_back_as_they_were(value):
    granite = config("GraniteForCausalLM", logits_scaling=value)
    assert huggingface_config(granite)["logits_scaling"] == value
    scalar = int(value) or 7
    gemma = config("Gemma2ForCausalLM", query_pre_attn_scalar=scalar)
    assert huggingface_config(gemma)["query_pre_attn_scalar"] == scalar


@pytest.mark.parametrize(
    ("published", "ours"),
    [("PhiMoEForCausalLM", "PhimoeForCausalLM"), ("Ernie4_5_ForCausalLM", "Ernie4_5ForCausalLM")],
)
def test_names_of_architectures_in_repositories(published, ours):
    assert config(published, num_key_value_heads=4) == config(ours, num_key_value_heads=4)


@pytest.mark.parametrize("architecture", ["SeedOssForCausalLM", "Ernie4_5ForCausalLM"])
def test_null_sizes_of_heads_follow_from_the_others(architecture):
    found = model_config(
        {**BASE, "architectures": [architecture], "num_key_value_heads": None, "head_dim": None, "hidden_size": 96}
    )
    assert (found.num_kv_heads, found.head_dim) == (4, 24)
    absent = model_config({**BASE, "architectures": [architecture], "num_attention_heads": 8})
    assert (absent.num_kv_heads, absent.head_dim) == (8 if "Seed" in architecture else 2, 128)


def test_an_empty_list_of_layers_with_experts_is_none():
    assert config("Llama4ForCausalLM", num_key_value_heads=4, moe_layers=[]).moe.layers == ()
    assert config("Llama4ForCausalLM", num_key_value_heads=4).moe.layers == tuple(range(6))
