import logging

import numpy as np
import pytest

from checkpoints_convert import CheckpointError, open_checkpoint
from checkpoints_convert.formats.kv_scales import LayerKVScales, check_kv_scale, kv_scale_names, read_kv_scales
from checkpoints_convert.formats.module import FormatError
from jaxinfer.models import ModelConfig, RopeConfig
from tests.checkpoints_convert.formats.tiny import tiny

CONFIG = ModelConfig("LlamaForCausalLM", 8, 8, 8, 2, 4, 2, 2, RopeConfig(rotary_dim=2))


def read(tensors):
    headers = {name: ("F32", np.shape(value)) for name, value in tensors.items()}
    return read_kv_scales(headers, 2, lambda name: np.asarray(tensors[name], np.float32))


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
        ("mixer.k_proj.k_scale", "mixer.v_proj.v_scale"),
    ],
)
@pytest.mark.parametrize("prefix", ["model.layers", "layers"])
def test_every_name_they_go_by(k, v, prefix):
    tensors = {f"{prefix}.{layer}.{name}": [layer + 1.5] for layer in (0, 1) for name in (k, v)}
    assert read(tensors) == (LayerKVScales((1.5,), (1.5,)), LayerKVScales((2.5,), (2.5,)))


def test_layers_without_attention_have_none(caplog):
    tensors = {f"model.layers.1.self_attn.{side}_scale": 3.0 for side in "kv"}
    headers = dict.fromkeys(tensors, ("F32", ()))
    with caplog.at_level(logging.WARNING):
        found = read_kv_scales(headers, 2, lambda name: np.asarray(tensors[name], np.float32), (1,))
    assert found == (LayerKVScales((1.0,), (1.0,)), LayerKVScales((3.0,), (3.0,)))
    assert not caplog.text


def test_one_scale_for_both():
    tensors = {f"model.layers.{layer}.self_attn.kv_scale": 0.5 for layer in (0, 1)}
    assert read(tensors) == (LayerKVScales((0.5,), (0.5,)),) * 2


@pytest.mark.parametrize(
    ("k", "v", "expected"), [(0.0, 0.5, 0.5), (-1.0, [0.25, 2.0], 2.0), (0.0, 0.0, 1.0), (0.5, None, 0.5)]
)
def test_scales_that_were_not_calibrated_become_the_others_or_1(k, v, expected, caplog):
    tensors = {"model.layers.0.self_attn.k_scale": k} | ({} if v is None else {"model.layers.0.self_attn.v_scale": v})
    tensors |= {f"model.layers.1.self_attn.{side}_scale": 3.0 for side in "kv"}
    with caplog.at_level(logging.WARNING):
        first, second = read(tensors)
    assert max(first.k) == max(first.v) == expected
    assert second == LayerKVScales((3.0,), (3.0,))
    assert "layer 0: scales of the key-value cache are missing or not positive" in caplog.text


def test_scales_of_queries_are_named():
    assert kv_scale_names(["model.layers.0.self_attn.q_scale", "model.layers.0.self_attn.q_proj.weight_scale"]) == {
        "model.layers.0.self_attn.q_scale": (0, "q_scale")
    }


def test_none():
    assert read({}) == ()


@pytest.mark.parametrize(
    ("header", "layer", "message"),
    [
        (("F32", (3,)), 0, r"is F32\[3\], not one number or one for each of 2 heads"),
        (("U8", (1,)), 0, r"is U8\[1\]"),
        (("F32", (1,)), 2, "is of layer 2, the model has 2"),
    ],
)
def test_tensors_that_cannot_be_scales_are_refused(header, layer, message):
    with pytest.raises(FormatError, match=message):
        check_kv_scale(header, layer, CONFIG)


@pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 1, 1)])
def test_tensors_that_can(shape):
    check_kv_scale(("BF16", shape), 1, CONFIG)


def test_a_scheme_that_is_no_object_is_refused(tmp_path):
    checkpoint = tiny("packed")
    checkpoint.config["quantization_config"]["kv_cache_scheme"] = "fp8"
    with (
        open_checkpoint(checkpoint.write(tmp_path / "source")) as opened,
        pytest.raises(
            CheckpointError, match=r"config\.json: quantization_config\.kv_cache_scheme is 'fp8', not an object"
        ),
    ):
        _ = opened.kv_scales
