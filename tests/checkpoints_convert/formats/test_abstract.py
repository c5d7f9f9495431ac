"""A checkpoint's shapes from its headers: what loading it gives, in every format, without a weight read."""

import json
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial

import jax
import pytest

from checkpoints_convert import CheckpointError, abstract, convert, load, save_huggingface
from checkpoints_convert.safetensors_files import SafetensorsFile
from jaxinfer.quantization import quantize_params
from jaxinfer.quantization.tree import is_quantized
from tests.checkpoints_convert.family_files import GOLDEN, read
from tests.checkpoints_convert.formats import encoders, tiny


def shapes(params):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), params)


@pytest.fixture(params=tiny.SOME_FORMATS)
def name(request):
    return request.param


@pytest.mark.matrix
def test_shapes_are_those_of_the_loaded_model(name, tmp_path, monkeypatch):
    folder = tiny.tiny(name).write(tmp_path / name)
    config, params = load(folder)
    monkeypatch.setattr(SafetensorsFile, "read_into", None)  # whoever reads a weight fails
    found_config, found = abstract(folder)
    assert found_config == config
    assert jax.tree.structure(found) == jax.tree.structure(params)
    assert shapes(found) == shapes(params)


def test_a_converted_checkpoint_too(tmp_path):
    folder = tiny.tiny("gptq-act-order").write(tmp_path / "gptq")
    convert(folder, tmp_path / "native")
    config, params = load(folder)
    (tmp_path / "native" / "params").rename(tmp_path / "elsewhere")  # its configuration says all
    found_config, found = abstract(tmp_path / "native")
    assert (found_config, shapes(found)) == (config, shapes(params))


def test_config_json_alone(tmp_path):
    config = {**tiny.CONFIG, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found_config, params = abstract(tmp_path)
    assert found_config.dtype == "bfloat16"
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    assert abstract(tmp_path, dtype="float32")[0].dtype == "float32"


@pytest.mark.matrix
def test_config_json_alone_of_a_quantized_model(name, tmp_path, monkeypatch):
    """The shapes are those that the weights beside it give, by the format's rules alone."""
    if name == "nf4-nested":  # as bitsandbytes nests them
        form = replace(tiny.FORMATS[name], encode=partial(encoders.bitsandbytes4, nested=True, inner=256))
        monkeypatch.setitem(tiny.FORMATS, name, form)
    folder = tiny.tiny(name).write(tmp_path / "whole")
    config, params = abstract(folder)
    (folder / "model.safetensors").unlink()
    found_config, found = abstract(folder)
    assert found_config == config
    assert jax.tree.structure(found) == jax.tree.structure(params)
    assert shapes(found) == shapes(params)


# compressed-tensors can express neither GPT-2's Conv1D nor experts that are one tensor.
REFUSED = ("gpt2", "gpt_oss", "gemma4_experts", "granite_hybrid", "llama4", "mistral4")
FAMILIES = [file.stem for file in GOLDEN if file.stem not in REFUSED]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one == "mixtral" else pytest.mark.slow) for one in FAMILIES]
)
def test_config_json_alone_of_every_family(family, tmp_path):
    config, params = load(read(family).write(tmp_path / "source"))
    folder = save_huggingface(config, quantize_params(params, "w8a8"), tmp_path / "w8a8", "auto")
    whole = abstract(folder)
    (folder / "model.safetensors").unlink()
    assert abstract(folder) == whole


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one == "gpt2" else pytest.mark.slow) for one in REFUSED]
)
def test_families_that_compressed_tensors_cannot_express_are_refused(family, tmp_path):
    config, params = load(read(family).write(tmp_path / "source"))
    with pytest.raises(CheckpointError, match="which compressed-tensors cannot express"):
        save_huggingface(config, quantize_params(params, "w8a8"), tmp_path / "w8a8", "auto")
    assert not (tmp_path / "w8a8").exists()


def alone(tmp_path, quantization, **config):
    (tmp_path / "config.json").write_text(json.dumps({**tiny.CONFIG, **config, "quantization_config": quantization}))
    return tmp_path


@pytest.mark.parametrize(
    ("quantization", "dense"),
    [
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*down_proj": {}}}, {"down_proj"}),
        ({"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": [["mlp.up_proj"], ["mlp.gate_proj"]]},
         {"q_proj", "k_proj", "v_proj", "o_proj", "down_proj"}),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["self_attn"]},
         {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"quant_method": "auto-round", "bits": 4, "extra_config": {".*v_proj": {"bits": 16}}}, {"v_proj"}),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head", "k_proj"]},
         {"k_proj"}),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0", "model.layers.1.mlp.*"]},
         {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["q_proj"]}, {"q_proj"}),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*o_proj"]}, {"o_proj"}),
    ],
)  # fmt: skip
def test_modules_that_the_configuration_excludes_are_dense(quantization, dense, tmp_path):
    _, params = abstract(alone(tmp_path, quantization))
    layer = params["layers"]["0"]
    linears = {**layer["attention"], **layer["mlp"]}
    assert {name for name, one in linears.items() if not is_quantized(one["weight"])} == dense
    assert not is_quantized(params["embed"])
    assert not is_quantized(params["lm_head"])


def test_a_head_is_quantized_where_the_configuration_says_so(tmp_path):
    _, params = abstract(alone(tmp_path, {"quant_method": "gptq", "bits": 4, "lm_head": True}))
    assert is_quantized(params["lm_head"])


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({"quant_method": "mxfp4"}, "mxfp4 quantizes no module of this model"),
        ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor load_in_8bit"),
        ({"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": 3}, "must be a list of names"),
    ],
)
def test_a_configuration_that_does_not_tell_is_refused(quantization, reason, tmp_path):
    with pytest.raises(CheckpointError, match=rf"config\.json: quantization_config:? .*{reason}"):
        abstract(alone(tmp_path, quantization))


def test_of_a_hub_id_only_headers_are_fetched(tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub.utils import SafetensorsFileMetadata, SafetensorsRepoMetadata, TensorInfo

    folder = tiny.tiny("gptq-v1").write(tmp_path / ("a" * 40))
    headers = SafetensorsFile(folder / "model.safetensors")
    tensors = {
        name: TensorInfo(dtype=entry.dtype, shape=list(entry.shape), data_offsets=(0, 0))  # type: ignore[arg-type]
        for name, entry in headers.tensors.items()
    }
    headers.close()
    expected = abstract(folder)
    (folder / "model.safetensors").unlink()
    asked = []

    def snapshot_download(repo_id, *, revision, allow_patterns):
        asked.append(allow_patterns)
        return str(folder)

    def get_safetensors_metadata(repo_id, *, revision):
        file = SafetensorsFileMetadata(metadata={}, tensors=tensors)
        return SafetensorsRepoMetadata(None, False, dict.fromkeys(tensors, "x"), {"model.safetensors": file})

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", get_safetensors_metadata)
    config, params = abstract("owner/name")
    assert (config, shapes(params)) == (expected[0], shapes(expected[1]))
    assert len(asked) == 1
    weights = ("model.safetensors", "model-00001-of-00002.safetensors")
    assert not any(fnmatch(name, pattern) for name in weights for pattern in asked[0])
