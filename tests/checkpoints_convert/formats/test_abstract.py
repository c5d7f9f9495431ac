"""A checkpoint's shapes from its headers: what loading it gives, in every format, without a weight read."""

import json

import jax
import pytest

from checkpoints_convert import CheckpointError, abstract, abstract_of, convert, load
from checkpoints_convert.safetensors_files import SafetensorsFile
from tests.checkpoints_convert.formats import tiny


def shapes(params):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), params)


@pytest.fixture(params=tiny.SOME_FORMATS)
def name(request):
    return request.param


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


def test_quantized_weights_without_headers_are_refused():
    config = {**tiny.CONFIG, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
    with pytest.raises(CheckpointError, match="no headers that say which"):
        abstract_of(config, None)


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
    assert not any("safetensors" in pattern and not pattern.endswith(".json") for pattern in asked[0])
