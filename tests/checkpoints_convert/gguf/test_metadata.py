"""Metadata that change what a model computes: read, or refused by name; never passed over."""

import math

import numpy as np
import pytest

from checkpoints_convert import CheckpointError
from checkpoints_convert.gguf.checkpoint import GGUFCheckpoint
from tests.checkpoints_convert.gguf.gguf_models import metadata_of, tensors_of, write_model
from tests.checkpoints_convert.gguf.gguf_writer import write


def opened(path):
    with GGUFCheckpoint(path) as source:
        return source.config


REFUSED = {
    "attention.causal": (False, "attention.causal is False, which is not supported here, only True is read"),
    "attention.scale": (0.5, r"attention.scale is 0.5, .*only 0 is read"),
    "attention.clamp_kqv": (8.0, "attention.clamp_kqv is 8.0"),
    "attention.max_alibi_bias": (8.0, "attention.max_alibi_bias is 8.0"),
    "logit_scale": (0.5, "logit_scale is 0.5"),
    "embedding_scale": (12.0, "embedding_scale is 12.0"),
    "residual_scale": (0.25, "residual_scale is 0.25"),
    "attn_logit_softcapping": (50.0, "attn_logit_softcapping is 50.0"),
    "final_logit_softcapping": (30.0, "final_logit_softcapping is 30.0"),
    "rope.dimension_sections": (np.array([8, 4, 4], np.int32), "dimension_sections is an array of 3 items"),
    "rope.scaling.attn_factor": (1.2, "attn_factor is 1.2"),
    "rope.scaling.type": ("llama3", "'llama3' is not none, linear or yarn"),
    "rope.freq_base_swa": (1e6, "freq_base_swa is 1000000.0"),
    "some_key_of_the_future": (1, "some_key_of_the_future is 1, which is not supported here"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_keys_that_mean_something_are_refused(checkpoint, tmp_path, name):
    value, message = REFUSED[name]
    path = write_model(tmp_path / "model.gguf", checkpoint(), **{f"llama.{name}": value})
    with pytest.raises(CheckpointError, match=message):
        opened(path)


def test_keys_that_mean_nothing_are_passed_over(checkpoint, tmp_path):
    source = checkpoint()
    plain = opened(write_model(tmp_path / "plain.gguf", source))
    neutral = {
        "attention.causal": True,
        "attention.scale": source.config["head_dim"] ** -0.5,
        "attention.clamp_kqv": 0.0,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.sliding_window": 0,
        "logit_scale": 1.0,
        "final_logit_softcapping": 0.0,
        "expert_count": 0,  # as llama.cpp's own writer stores a dense model
        "expert_used_count": 0,
        "rope.scaling.attn_factor": 1.0,
        "rope.scaling.factor": 0.0,
        "rope.scaling.finetuned": True,
        "tensor_data_layout": "Meta AI original pth",
    }
    keys = {f"llama.{name}": value for name, value in neutral.items()}
    assert opened(write_model(tmp_path / "neutral.gguf", source, **keys)) == plain


@pytest.mark.parametrize("name", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_type_is_linear(checkpoint, tmp_path, name):
    config = opened(write_model(tmp_path / "model.gguf", checkpoint(), **{f"llama.{name}": 4.0}))
    assert (config.rope.kind, config.rope.factor) == ("linear", 4.0)
    none = {f"llama.{name}": 4.0, "llama.rope.scaling.type": "none"}
    assert opened(write_model(tmp_path / "none.gguf", checkpoint(), **none)).rope.kind == "default"


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
TOTAL = 0.1 * math.log(4.0) + 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("attn_factor", 1.0, None),
        ("attn_factor", TOTAL, None),
        ("attn_factor", 2.0, r"attn_factor is 2.0, only 1 or 1.13863 is read"),
        ("yarn_attn_factor", TOTAL, None),
        ("yarn_attn_factor", 0.5, r"yarn_attn_factor is 0.5, only 1.13863 is read"),
        ("yarn_ext_factor", 1.0, None),
        ("yarn_ext_factor", 0.5, "yarn_ext_factor is 0.5, only 1 or -1 is read"),
        ("yarn_beta_fast", 16.0, None),
        ("yarn_log_multiplier", 0.1, "is supported for deepseek2 only"),
    ],
)
def test_settings_of_yarn(checkpoint, tmp_path, name, value, message):
    keys = {f"llama.{key}": given for key, given in {**YARN, f"rope.scaling.{name}": value}.items()}
    path = write_model(tmp_path / "model.gguf", checkpoint(), **keys)
    if message is not None:
        with pytest.raises(CheckpointError, match=message):
            opened(path)
        return
    rope = opened(path).rope
    assert (rope.kind, rope.factor, rope.original_length) == ("yarn", 4.0, 32)
    assert rope.beta_fast == (value if name == "yarn_beta_fast" else 32)


def test_divisors_beside_a_scaling(checkpoint, tmp_path):
    """llama.cpp divides by both; yarn beside them is refused."""
    source = checkpoint()
    divisors = np.linspace(1, 3, source.config["head_dim"] // 2, dtype=np.float32)
    tensors = {**tensors_of(source.config, source.tensors), "rope_freqs.weight": divisors}
    keys = {**metadata_of(source.config), "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    rope = opened(write(tmp_path / "linear.gguf", keys, tensors)).rope
    assert rope.long_factor is not None
    np.testing.assert_allclose(rope.long_factor, 2 * divisors, rtol=1e-6)
    keys["llama.rope.scaling.type"] = "yarn"
    with pytest.raises(CheckpointError, match=r"'yarn' beside the tensor rope_freqs\.weight"):
        opened(write(tmp_path / "yarn.gguf", keys, tensors))


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [
        (np.array([True, False]), (8, None)),
        (np.array([False, False]), ()),
        (2, (8, None)),
        (0, (8, 8)),
        (1, ()),
    ],
)
def test_which_layers_have_a_window(checkpoint, tmp_path, pattern, windows):
    keys = {"llama.attention.sliding_window": 8, "llama.attention.sliding_window_pattern": pattern}
    config = opened(write_model(tmp_path / "model.gguf", checkpoint(), **keys))
    assert config.sliding_windows == windows


def test_a_window_of_a_family_without_one_is_refused(make_checkpoint, tmp_path):
    source = make_checkpoint(tmp_path, "Qwen2ForCausalLM")
    path = write_model(tmp_path / "model.gguf", source, **{"qwen2.attention.sliding_window": 8})
    with pytest.raises(CheckpointError, match=r"qwen2\.attention\.sliding_window is 8, .*only 0 is read"):
        opened(path)
