"""What a config accepts, refuses, and writes down."""

import json
from dataclasses import FrozenInstanceError, replace

import pytest

from jaxinfer.models import ModelConfig, RopeConfig

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope=RopeConfig(rotary_dim=16),
    sliding_windows=(None, 24, 24),
)
LONGROPE = RopeConfig(
    kind="longrope", rotary_dim=4, original_length=128, short_factor=(1.0, 1.5), long_factor=(2.0, 8.0), factor=4.0
)
POSITIVE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)


@pytest.mark.parametrize("name", POSITIVE_FIELDS)
@pytest.mark.parametrize("value", [0, -1, 2.0, "4", True, None])
def test_sizes_must_be_positive_integers(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be a positive integer, got {value!r}$"):
        replace(CONFIG, **{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 6, "num_kv_heads": 4}, "num_heads=6 is not a multiple of num_kv_heads=4"),
        ({"sliding_windows": (24, 24)}, "2 sliding_windows for 3 layers"),
        ({"rope": RopeConfig(rotary_dim=15)}, "rotary_dim=15 must be even and at most head_dim=16"),
        ({"rope": RopeConfig(rotary_dim=18)}, "rotary_dim=18 must be even and at most head_dim=16"),
        ({"rope": RopeConfig(rotary_dim=0)}, "rotary_dim=0 must be even"),
        ({"norm_eps": 0.0}, "norm_eps must be positive, got 0.0"),
        ({"norm_eps": -1e-5}, "norm_eps must be positive"),
        ({"norm_eps": float("nan")}, "norm_eps must be positive, got nan"),
        ({"norm_eps": float("inf")}, "norm_eps must be positive, got inf"),
    ],
)
def test_fields_that_do_not_fit_each_other_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **changes)


def test_heads_need_not_fill_the_hidden_size_nor_rotate_whole():
    config = replace(CONFIG, head_dim=48, rope=RopeConfig(rotary_dim=12))
    assert config.num_heads * config.head_dim != config.hidden_size


def test_windows_by_layer():
    assert [CONFIG.window(layer) for layer in range(3)] == [None, 24, 24]
    assert [replace(CONFIG, sliding_windows=()).window(layer) for layer in range(3)] == [None] * 3


def test_a_config_is_frozen_and_hashes_by_value():
    # It is a static argument of jitted programs: equal configs share them.
    same = replace(CONFIG, rope=RopeConfig(rotary_dim=16))
    assert same == CONFIG
    assert hash(same) == hash(CONFIG)
    assert hash(replace(CONFIG, rope=LONGROPE)) == hash(replace(CONFIG, rope=replace(LONGROPE)))
    with pytest.raises(FrozenInstanceError):
        CONFIG.head_dim = 8


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, rope=LONGROPE, sliding_windows=(), dtype="bfloat16")])
def test_from_dict_is_the_inverse_of_to_dict(config):
    assert ModelConfig.from_dict(config.to_dict()) == config
    through_json = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert through_json == config
    assert hash(through_json) == hash(config)


def test_fields_of_a_newer_version_are_refused():
    with pytest.raises(ValueError, match="ModelConfig has no field num_experts: written by a newer jaxinfer"):
        ModelConfig.from_dict({**CONFIG.to_dict(), "num_experts": 8})
    rope = {**CONFIG.to_dict()["rope"], "sections": [1, 2], "axial": True}
    with pytest.raises(ValueError, match="RopeConfig has no field axial, sections"):
        ModelConfig.from_dict({**CONFIG.to_dict(), "rope": rope})


def test_a_dict_is_checked_like_a_config():
    with pytest.raises(ValueError, match="num_layers must be a positive integer, got 0"):
        ModelConfig.from_dict({**CONFIG.to_dict(), "num_layers": 0})


GEMMA = replace(
    CONFIG,
    local_rope=RopeConfig(rotary_dim=16, theta=1e4),
    rotated_layers=(True, True, False),
    norm="rms_zero_centred",
    attention_softcap=50.0,
)


def test_the_rotation_of_a_layer():
    assert [GEMMA.rope_of(layer) for layer in range(3)] == [GEMMA.rope, GEMMA.local_rope, None]
    assert [CONFIG.rope_of(layer) for layer in range(3)] == [CONFIG.rope] * 3


def test_a_model_of_some_layers():
    found = GEMMA.with_layers([2, 0])
    assert (found.num_layers, found.sliding_windows, found.rotated_layers) == (2, (24, None), (False, True))
    assert CONFIG.with_layers(range(1)).rotated_layers == ()


def test_layers_that_read_the_keys_of_others():
    config = replace(CONFIG, sliding_windows=(), kv_sources=(0, 0, 2), has_double_mlp=True)
    assert (config.cached_layers, config.attention_layers) == ((0, 2), (0, 1, 2))
    assert [config.mlp_size(layer) for layer in range(3)] == [size * CONFIG.intermediate_size for size in (1, 2, 1)]
    assert config.with_layers([0, 2]).kv_sources == (0, 1)
    with pytest.raises(ValueError, match="layer 1 reads the keys and values of layer 0, which is not there"):
        config.with_layers([1, 2])
    for sources in ((1, 1, 2), (0, 0, 1)):
        with pytest.raises(ValueError, match="cannot read the keys and values of layer 1"):
            replace(CONFIG, sliding_windows=(), kv_sources=sources)


def test_rotations_that_change_with_the_length_are_made_for_one():
    config = replace(GEMMA, rope=replace(LONGROPE, original_length=128), local_rope=RopeConfig(rotary_dim=16))
    found = config.for_length(300)
    assert (found.rope.sequence_length, found.local_rope) == (300, config.local_rope)
    assert found.for_length(500) == found  # once it is made, it stays
    assert CONFIG.for_length(300) == CONFIG


def test_sequences_are_not_longer_than_a_chunk_of_attention():
    config = replace(CONFIG, attention_chunk=512)
    assert (config.max_length, config.for_length(512)) == (512, config)
    with pytest.raises(ValueError, match=r"sequences of 513 tokens .* chunks of attention_chunk_size=512"):
        config.for_length(513)
    assert CONFIG.max_length == CONFIG.max_position_embeddings


def test_new_fields_go_through_json_and_old_files_lack_them():
    data = json.loads(json.dumps(GEMMA.to_dict()))
    assert ModelConfig.from_dict(data) == GEMMA
    old = {name: value for name, value in CONFIG.to_dict().items() if name not in ("local_rope", "norm", "block")}
    assert ModelConfig.from_dict(old) == CONFIG
    with pytest.raises(ValueError, match="RopeConfig has no field speed"):
        ModelConfig.from_dict({**data, "local_rope": {"speed": 2}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "batch"}, "norm must be one of rms, rms_float32, rms_zero_centred, layer, got 'batch'"),
        ({"block": "post"}, "block must be one of pre_norm, post_norm"),
        ({"activation": "tanh"}, "activation must be one of silu"),
        ({"qk_norm_span": "all"}, "qk_norm_span must be one of head"),
        ({"rotated_layers": (True,)}, "1 rotated_layers for 3 layers"),
        ({"local_rope": RopeConfig(rotary_dim=32)}, "rotary_dim=32 must be even and at most head_dim=16"),
        ({"norm_bias": True}, "norm_bias: only norms of kind 'layer' have a bias, not 'rms'"),
        ({"attention_softcap": 0.0}, "attention_softcap must be positive, got 0.0"),
        ({"residual_multiplier": -1.0}, "residual_multiplier must be positive"),
        ({"qkv_clip": 0.0}, "qkv_clip must be positive, got 0.0"),
        ({"attention_chunk": 0}, "attention_chunk must be positive, got 0"),
        ({"activation": "xielu"}, "only MLPs without gate and experts have it"),
        ({"is_qk_norm_after_rotation": True, "qk_norm_span": "all_heads"}, "all heads together is before the rotation"),
        ({"has_qk_norm_weight": False, "qk_norm_span": "all_heads"}, "only RMSNorms of a head have none"),
    ],
)
def test_bad_values_of_new_fields_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **changes)
