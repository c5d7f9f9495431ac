"""Which method a configuration declares, and which are refused."""

import json

import pytest

from checkpoints_convert.formats import METHODS, FormatError, quantization_method, with_side_file


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors"),
        ({"config_groups": {}, "format": "pack-quantized"}, "compressed-tensors"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt"),
        ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, "modelopt"),
        ({"quant_method": "auto-round", "bits": 4}, "auto-round"),
        ({"quant_method": "intel/auto-round", "bits": 4}, "auto-round"),
    ],
)
def test_declared_methods(data, name):
    assert quantization_method({"quantization_config": data}).name == name
    assert quantization_method({"compression_config": data}).name == name


@pytest.mark.parametrize("data", [{}, {"quantization_config": None}, {"quantization_config": {}}])
def test_models_that_are_not_quantized(data):
    assert quantization_method(data) is None


@pytest.mark.parametrize(
    "name", ["hqq", "torchao", "quark", "aqlm", "exl2", "higgs", "gemma", "spqr", "vptq", "qptq", None]
)
def test_other_methods_are_refused_by_name(name):
    with pytest.raises(FormatError, match=f"quant_method {name!r} is not supported"):
        quantization_method({"quantization_config": {"quant_method": name}})


@pytest.mark.parametrize(("name", "reason"), [("hqq", "floating-point zeros"), ("aqlm", "sums of learned vectors")])
def test_a_method_that_cannot_be_held_says_why_and_what_to_do(name, reason):
    with pytest.raises(FormatError, match=f"{reason}.*; open the original model, or quantize it with"):
        quantization_method({"quantization_config": {"quant_method": name}})


def test_a_near_miss_is_named():
    with pytest.raises(FormatError, match="did you mean 'compressed-tensors'"):
        quantization_method({"quantization_config": {"quant_method": "compressed_tensors"}})
    assert "compressed-tensors" in METHODS


def test_mlx_checkpoints_have_no_quant_method():
    with pytest.raises(FormatError, match="'mlx' is not supported"):
        quantization_method({"quantization": {"group_size": 64, "bits": 4}})
    with pytest.raises(FormatError, match="'mlx' is not supported"):
        quantization_method({name: {"group_size": 64, "bits": 4} for name in ("quantization", "quantization_config")})


@pytest.mark.parametrize("data", ["gptq", ["gptq"]])
def test_a_configuration_that_is_no_object_is_refused(data):
    with pytest.raises(FormatError, match="must be an object"):
        quantization_method({"quantization_config": data})


@pytest.mark.parametrize(
    ("file", "data", "name"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "sym": True}, "gptq"),
        ("quant_config.json", {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}, "awq"),
        ("hf_quant_config.json", {"producer": {}, "quantization": {"quant_algo": "FP8"}}, "modelopt"),
    ],
)
def test_side_files_of_older_repositories(file, data, name, tmp_path):
    (tmp_path / file).write_text(json.dumps(data))
    assert quantization_method(with_side_file(tmp_path, {})).name == name
    own = {"quantization_config": {"quant_method": "fp8"}}
    assert with_side_file(tmp_path, own) == own
