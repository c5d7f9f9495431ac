import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints_convert import CheckpointError
from checkpoints_convert.files import bos_token_id, eos_token_ids, generation_config
from checkpoints_convert.huggingface.config import huggingface_config, model_config
from checkpoints_convert.huggingface.families import FAMILIES
from jaxinfer.models import ModelConfig, RopeConfig

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def config(architecture="LlamaForCausalLM", **changes):
    data = {**BASE, "architectures": [architecture], **changes}
    return model_config({key: value for key, value in data.items() if value is not ...})


def test_llama_defaults():
    assert config() == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        rope=RopeConfig(rotary_dim=16),
        norm_eps=1e-6,
        max_position_embeddings=2048,
    )


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("LlamaForCausalLM", {"num_kv_heads": 4, "head_dim": 16, "max_position_embeddings": 2048, "qkv_bias": False}),
        ("MistralForCausalLM", {"num_kv_heads": 8, "head_dim": 4, "max_position_embeddings": 131072}),
        ("Qwen2ForCausalLM", {"num_kv_heads": 32, "head_dim": 2, "max_position_embeddings": 32768, "qkv_bias": True}),
        ("Qwen3ForCausalLM", {"num_kv_heads": 32, "head_dim": 128, "qk_norm": True, "qkv_bias": False}),
    ],
)
def test_family_defaults(architecture, expected):
    heads = {"LlamaForCausalLM": 4, "MistralForCausalLM": 16}.get(architecture, 32)
    found = config(architecture, num_attention_heads=heads)
    assert {name: getattr(found, name) for name in expected} == expected
    assert (found.output_bias, found.mlp_bias, found.tie_word_embeddings) == (False, False, False)


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("MistralForCausalLM", {}, (4096,) * 4),
        ("MistralForCausalLM", {"sliding_window": 7}, (7,) * 4),
        ("MistralForCausalLM", {"sliding_window": None}, ()),
        (
            "MistralForCausalLM",
            {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2},
            (7, None) * 2,
        ),
        ("Qwen2ForCausalLM", {}, ()),
        ("Qwen2ForCausalLM", {"sliding_window": 7, "max_window_layers": 2}, ()),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
            (None,) * 2 + (7,) * 2,
        ),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 0}, (4096,) * 4),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 7}, ()),  # all 4 layers are below 28
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, ()),
        (
            "Qwen3ForCausalLM",
            {
                "use_sliding_window": True,
                "sliding_window": 7,
                "max_window_layers": 0,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (None, 7) * 2,
        ),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention"] * 4}, ()),
        ("LlamaForCausalLM", {"sliding_window": 7, "layer_types": ["full_attention"] * 4}, ()),
    ],
)
def test_sliding_windows(architecture, changes, windows):
    assert config(architecture, num_key_value_heads=4, **changes).sliding_windows == windows


def test_biases_and_activations():
    found = config(attention_bias=True, mlp_bias=True, hidden_act="swish")
    assert (found.qkv_bias, found.output_bias, found.mlp_bias) == (True, True, True)
    found = config("Qwen2ForCausalLM", num_key_value_heads=4, attention_bias=True)
    assert (found.qkv_bias, found.output_bias) == (True, False)
    assert config("Qwen3ForCausalLM", num_key_value_heads=4, attention_bias=True).output_bias


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, "float32"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
    ],
)
def test_declared_dtype(changes, dtype):
    assert config(**changes).dtype == dtype


def test_model_type_stands_in_for_missing_architectures():
    assert config(architectures=..., model_type="qwen3", num_key_value_heads=4).architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["LlamaForCasualLM"]},
            "'LlamaForCasualLM' is not supported: did you mean 'LlamaForCausalLM'",
        ),
        (
            {"architectures": ["Zamba2ForCausalLM"]},
            "'Zamba2ForCausalLM' is not supported; `jaxinfer models` lists",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "'LlamaForSequenceClassification' is not supported; `jax",
        ),
        (
            {"architectures": ["MambaForCausalLM"]},
            "'MambaForCausalLM' is not supported; `jaxinfer models` lists those that are",
        ),
        (
            {"architectures": ["DeepThoughtLM"], "auto_map": {"AutoModelForCausalLM": "modeling.DeepThoughtLM"}},
            "'DeepThoughtLM' is not supported.*auto_map asks for code from the repository, which is never run",
        ),
        ({"architectures": ..., "model_type": "bert"}, "architectures is missing, and model_type 'bert' does not"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of names"),
        ({"architectures": []}, "architectures must be a list of names"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"vocab_size": None}, "vocab_size is null"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers must be an integer of at least 1, got '4'"),
        ({"num_hidden_layers": 4.5}, "num_hidden_layers must be an integer"),
        ({"num_attention_heads": True}, "num_attention_heads must be an integer"),
        ({"num_attention_heads": 0}, "num_attention_heads must be an integer of at least 1, got 0"),
        ({"num_key_value_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number, got nan"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a positive number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
        ({"attention_bias": 1}, "attention_bias must be true or false"),
        ({"torch_dtype": "int8"}, "torch_dtype 'int8' is not one of"),
        ({"hidden_act": "relu2"}, "hidden_act 'relu2' is not supported for LlamaForCausalLM, only 'silu'"),
        (
            {"quantization_config": {"quant_method": "aqlm"}},
            "quantization_config: quant_method 'aqlm' is not supported",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 5}}, "quantization_config: bits 5 is not supported"),
        ({"quantization_config": {"bits": 4}}, "quant_method None is not supported"),
        ({"partial_rotary_factor": 0.5}, "LlamaForCausalLM rotates whole heads, this asks for 8 of 16"),
        ({"layer_types": ["sliding_attention"] * 4}, "names 'sliding_attention', LlamaForCausalLM has full_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers=4"),
        ({"layer_types": 4}, "layer_types must be a list"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(changes, message):
    with pytest.raises(CheckpointError, match=message):
        config(**changes)


def test_sliding_layers_without_a_window_are_refused():
    with pytest.raises(CheckpointError, match="names sliding_attention layers, but no sliding_window is in use"):
        config("Qwen3ForCausalLM", num_key_value_heads=4, layer_types=["sliding_attention"] * 4)


def test_all_problems_are_listed_at_once():
    with pytest.raises(CheckpointError) as caught:
        config(hidden_size=..., vocab_size=-1, hidden_act="relu2", rope_scaling={"type": "yarnn"})
    assert len(caught.value.problems) == 4


def test_code_of_the_repository_is_ignored_for_a_known_architecture():
    assert config(auto_map={"AutoModelForCausalLM": "modeling.Own"}) == config()


windows = st.none() | st.integers(1, 100)
rope_kinds = st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn", "longrope"])
positive = st.floats(0.125, 1e6)


@st.composite
def model_configs(draw):
    # For the others see tests/checkpoints_convert/test_families.py.
    family = FAMILIES[draw(st.sampled_from([f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")]))]
    num_layers, kv_heads, head_dim = draw(st.integers(1, 4)), draw(st.integers(1, 3)), 2 * draw(st.integers(1, 8))
    per_layer = {
        "none": (None,) * num_layers,
        "all": (draw(windows),) * num_layers,
        "late": tuple(draw(st.lists(st.sampled_from([None, 9]), min_size=num_layers, max_size=num_layers))),
    }[family.windows]
    bias = draw(st.booleans())
    max_positions = draw(st.integers(1, 10**6))
    kind = draw(rope_kinds)
    rope = RopeConfig(kind=kind, theta=draw(positive), rotary_dim=head_dim)
    if kind != "default":
        rope = replace(rope, factor=draw(positive), original_length=None if kind == "linear" else max_positions)
    if kind in ("llama3", "yarn", "longrope"):
        rope = replace(rope, original_length=draw(st.integers(1, 10**6)))
    if kind == "llama3":
        rope = replace(rope, low_freq_factor=draw(st.floats(0.1, 2)), high_freq_factor=draw(st.floats(2.5, 8)))
    if kind == "yarn":
        rope = replace(rope, beta_fast=draw(positive), mscale=draw(st.none() | positive), truncate=draw(st.booleans()))
    if kind == "longrope":
        factors = tuple(draw(st.lists(positive, min_size=head_dim // 2, max_size=head_dim // 2)))
        rope = replace(rope, short_factor=factors, long_factor=factors[::-1])
    if kind in ("yarn", "longrope"):
        rope = replace(rope, attention_factor=draw(st.none() | positive))
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=draw(st.integers(1, 1000)),
        hidden_size=draw(st.integers(1, 100)),
        intermediate_size=draw(st.integers(1, 100)),
        num_layers=num_layers,
        num_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope,
        norm_eps=draw(st.floats(1e-8, 1e-2)),
        tie_word_embeddings=draw(st.booleans()),
        qkv_bias=bias if isinstance(family.qkv_bias, str) else family.qkv_bias,
        output_bias=bias if isinstance(family.output_bias, str) else family.output_bias,
        mlp_bias=draw(st.booleans()) if isinstance(family.mlp_bias, str) else family.mlp_bias,
        qk_norm=family.qk_norm,
        sliding_windows=per_layer if any(per_layer) else (),
        max_position_embeddings=max_positions,
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
    )


@given(model_configs())
def test_what_is_written_reads_back_equal(wanted):
    data = json.loads(json.dumps(huggingface_config(wanted)))
    assert model_config(data) == wanted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_windows": (7,) * 4}, r"LlamaForCausalLM cannot express sliding_windows=\(7, 7, 7, 7\), only \(\)"),
        ({"qk_norm": True}, "cannot express qk_norm=True"),
        ({"qkv_bias": True}, "cannot express qkv_bias=True, only False"),
        ({"architecture": "LlamaForCasualLM"}, "no architecture 'LlamaForCasualLM': did you mean 'LlamaForCausalLM'"),
        ({"rope": RopeConfig(rotary_dim=16, factor=2.0)}, "cannot express rope="),
    ],
)
def test_what_the_architecture_cannot_express_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        huggingface_config(replace(config(), **changes))


def test_end_of_sequence_ids_are_those_of_both_files(tmp_path):
    assert (generation_config(tmp_path), eos_token_ids(tmp_path), bos_token_id(tmp_path)) == ({}, (), None)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2, "bos_token_id": 1}))
    assert (eos_token_ids(tmp_path), bos_token_id(tmp_path)) == ((2,), 1)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2], "temperature": 0.6}))
    assert (eos_token_ids(tmp_path), bos_token_id(tmp_path)) == ((7, 2), 1)
    assert generation_config(tmp_path) == {"eos_token_id": [7, 2], "temperature": 0.6}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ["</s>"]}))
    with pytest.raises(CheckpointError, match="eos_token_id must be a token id or a list"):
        eos_token_ids(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_minus_one_and_null_are_no_token(tmp_path, name):
    (tmp_path / name).write_text(json.dumps({"eos_token_id": [None, -1, 7.0], "bos_token_id": -1}))
    assert (eos_token_ids(tmp_path), bos_token_id(tmp_path)) == ((7,), None)


# Outer fields, those of `text_config`, and what counts: as Transformers' GenerationConfig.from_model_config.
NESTED = [
    ({}, {"eos_token_id": [3, 5], "bos_token_id": 4}, ([3, 5], 4)),
    ({"eos_token_id": 2}, {"eos_token_id": [3, 5], "bos_token_id": 4}, (2, 4)),
    ({"eos_token_id": 2, "bos_token_id": 1}, {"eos_token_id": 3, "bos_token_id": 4}, (2, 1)),
    ({"eos_token_id": None, "bos_token_id": 0}, {"eos_token_id": 3, "bos_token_id": 4}, (3, 0)),
    ({"eos_token_id": 2}, None, (2, None)),
]


@pytest.mark.parametrize(("outer", "inner", "wanted"), NESTED)
def test_token_ids_of_a_model_with_images_may_be_those_of_its_text(tmp_path, outer, inner, wanted):
    (tmp_path / "config.json").write_text(json.dumps({**outer, "text_config": inner}))
    eos, bos = wanted
    assert eos_token_ids(tmp_path) == tuple(eos if isinstance(eos, list) else [eos])
    assert bos_token_id(tmp_path) == bos
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": "</s>"}}))
    with pytest.raises(CheckpointError, match="eos_token_id must be a token id or a list"):
        eos_token_ids(tmp_path)


@pytest.mark.oracle
@pytest.mark.parametrize(("outer", "inner", "wanted"), NESTED)
def test_nested_token_ids_are_those_of_transformers(outer, inner, wanted):
    from transformers import GenerationConfig

    found = GenerationConfig.from_model_config({**outer, "text_config": inner})
    assert (found.eos_token_id, found.bos_token_id) == wanted
