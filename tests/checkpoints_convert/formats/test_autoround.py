import numpy as np
import pytest

from checkpoints_convert.formats import FormatError
from checkpoints_convert.formats.gptq import autoround
from tests.checkpoints_convert.formats import encoders


def weight(outputs=16, inputs=96):
    return np.random.default_rng(0).standard_normal((outputs, inputs)).astype(np.float32)


def config(packing, **changes):
    return {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "packing_format": packing,
        **changes,
    }


@pytest.mark.parametrize(
    ("packing", "version"),
    [
        ("auto_round:auto_gptq", 1),
        ("auto_round:gptq", 1),
        ("auto_round:auto_gptq:exllamav2", 1),
        ("auto_round:gptq:exllamav2", 1),
        ("auto_round", 2),
        ("auto_round:gptqmodel", 2),
        ("auto_round:exllamav2", 2),
        ("auto_round:tritonv2", 2),
    ],
)
@pytest.mark.parametrize("field", ["packing_format", "backend"])
def test_gptq_packings_differ_in_what_is_stored_of_a_zero(packing, version, field):
    zeros = np.random.default_rng(1).integers(1, 16, (16, 3))
    tensors, expected = encoders.gptq(weight(), version=version, symmetric=False, zeros=zeros)
    found = encoders.read(autoround(config(None, sym=False) | {field: packing}), tensors, (16, 96))
    assert np.array_equal(encoders.dense(found), expected)


@pytest.mark.parametrize("version", [1, 2])
def test_symmetric_zeros_need_no_packing(version):
    tensors, expected = encoders.gptq(weight(), version=version, symmetric=True)
    found = encoders.read(autoround(config(None)), tensors, (16, 96))
    assert np.array_equal(encoders.dense(found), expected)


@pytest.mark.parametrize("packing", ["auto_round:auto_awq", "auto_round:awq", "auto_round:auto_awq:gemm"])
def test_awq_packings(packing):
    tensors, expected = encoders.awq(weight())
    found = encoders.read(autoround(config(packing, sym=False)), tensors, (16, 96))
    assert np.array_equal(encoders.dense(found), expected)


def test_layers_with_bits_of_their_own():
    extra = {"model.layers.0.mlp.up_proj": {"bits": 8, "group_size": 48}, ".*down_proj": {"bits": 16}}
    method = autoround(config("auto_round:auto_gptq", extra_config=extra))
    tensors, expected = encoders.gptq(weight(), bits=8, group=48)
    found = encoders.read(method, tensors, (16, 96), "model.layers.0.mlp.up_proj")
    assert np.array_equal(encoders.dense(found), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"packing_format": "auto_round:llm_compressor"},
            "packing_format 'auto_round:llm_compressor' is not supported",
        ),
        ({"packing_format": None, "sym": False}, "neither packing_format nor backend tells how zeros are stored"),
        ({"packing_format": None, "backend": "auto_round:hpu"}, "backend 'auto_round:hpu' is not supported"),
        ({"data_type": "mx_fp4"}, "data_type 'mx_fp4' is not supported"),
        ({"act_bits": 8}, "act_bits 8 is not supported"),
        ({"super_bits": 6}, "super_bits is not supported"),
        ({"extra_config": [1]}, "extra_config must map layers to fields"),
        ({"extra_config": {"a": {"bits": 4, "data_type": "fp8"}}}, "data_type 'fp8' is not supported"),
        ({"bits": 6}, "bits 6 is not supported"),
    ],
)
def test_what_is_not_read_is_refused_by_name(changes, message):
    with pytest.raises(FormatError, match=message):
        autoround({**config("auto_round"), **changes})
