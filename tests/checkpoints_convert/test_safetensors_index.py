import json
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.safetensors_files import SafetensorsIndex, weight_files


def write_index(directory, weight_map):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def save(directory, file, *names, value=0.0):
    save_file({name: np.full((2,), value, np.float32) for name in names}, directory / file)


def read(index, name):
    buffer = bytearray(8)
    index.read_into(name, 0, memoryview(buffer))
    return np.frombuffer(buffer, np.float32)[0]


def test_index_is_preferred_over_a_single_file(tmp_path):
    save(tmp_path, "model.safetensors", "a", "stale")
    save(tmp_path, "model-00001-of-00002.safetensors", "a", value=1)
    save(tmp_path, "model-00002-of-00002.safetensors", "b", value=2)
    write_index(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    with SafetensorsIndex(tmp_path) as index:
        assert index.headers == {"a": ("F32", (2,)), "b": ("F32", (2,))}
        assert (read(index, "a"), read(index, "b")) == (1, 2)
        assert index.path_of("b").name == "model-00002-of-00002.safetensors"


def test_single_file_is_preferred_over_numbered_ones(tmp_path):
    save(tmp_path, "model.safetensors", "a")
    save(tmp_path, "model-00001-of-00001.safetensors", "b")
    with SafetensorsIndex(tmp_path) as index:
        assert set(index.headers) == {"a"}


def test_numbered_files_open_without_an_index_and_others_are_left_alone(tmp_path):
    for file in ("consolidated.safetensors", "adapter_model.safetensors", "optimizer.safetensors"):
        (tmp_path / file).write_bytes(b"not looked at")
    save(tmp_path, "model-00001-of-00002.safetensors", "a")
    save(tmp_path, "model-00002-of-00002.safetensors", "b")
    with SafetensorsIndex(tmp_path) as index:
        assert set(index.headers) == {"a", "b"}


def test_missing_shards_are_all_named(tmp_path):
    write_index(tmp_path, {name: f"model-0000{name}-of-00003.safetensors" for name in "123"})
    save(tmp_path, "model-00002-of-00003.safetensors", "2")
    with pytest.raises(CheckpointError) as caught:
        SafetensorsIndex(tmp_path)
    assert caught.value.problems == (
        "the shard model-00001-of-00003.safetensors is missing",
        "the shard model-00003-of-00003.safetensors is missing",
    )


def test_missing_shard_is_noticed_without_an_index(tmp_path):
    save(tmp_path, "model-00001-of-00002.safetensors", "a")
    with pytest.raises(CheckpointError, match=r"shard model-00002-of-00002\.safetensors is missing"):
        SafetensorsIndex(tmp_path)


def test_shards_of_two_checkpoints_are_refused(tmp_path):
    save(tmp_path, "model-00001-of-00001.safetensors", "a")
    save(tmp_path, "model-00001-of-00002.safetensors", "b")
    with pytest.raises(CheckpointError, match="shards of 1 and of 2 files"):
        SafetensorsIndex(tmp_path)


def test_tensor_not_where_the_index_says_is_refused(tmp_path):
    save(tmp_path, "model-1.safetensors", "a", "c")
    save(tmp_path, "model-2.safetensors", "b")
    write_index(tmp_path, {"a": "model-1.safetensors", "b": "model-1.safetensors", "d": "model-2.safetensors"})
    with pytest.raises(CheckpointError) as caught:
        SafetensorsIndex(tmp_path)
    assert caught.value.problems == (
        "tensor 'b' is not in model-1.safetensors, where model.safetensors.index.json puts it,"
        " it is in model-2.safetensors",
        "tensor 'd' is not in model-2.safetensors, where model.safetensors.index.json puts it",
    )


def test_tensor_stored_twice_is_refused(tmp_path):
    save(tmp_path, "model-00001-of-00002.safetensors", "a")
    save(tmp_path, "model-00002-of-00002.safetensors", "a")
    with pytest.raises(CheckpointError, match="tensor 'a' is stored twice"):
        SafetensorsIndex(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "..",
        ".safetensors",
        "/etc/passwd",
        "/etc/x.safetensors",
        "sub/model.safetensors",
        "..%2fmodel.safetensors",
        "..\\model.safetensors",
        "C:\\model.safetensors",
        "C:model.safetensors",
        "model.safetensors\0.txt",
        "mode\u2025l/x.safetensors",
        "\uff0e\uff0e\uff0fx.safetensors",
        "model.bin",
        "",
    ],
)
def test_shard_names_that_are_not_plain_file_names_are_refused(name, tmp_path):
    inside = tmp_path / "checkpoint"
    inside.mkdir()
    save(tmp_path, "secret.safetensors", "a")
    write_index(inside, {"a": name})
    with pytest.raises(CheckpointError, match="weight_map names the file"):
        SafetensorsIndex(inside)


def test_link_out_of_the_directory_is_refused(tmp_path):
    inside = tmp_path / "checkpoint"
    inside.mkdir()
    save(tmp_path, "elsewhere.safetensors", "a")
    os.symlink(tmp_path / "elsewhere.safetensors", inside / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"is a link to .*elsewhere\.safetensors, outside the checkpoint"):
        SafetensorsIndex(inside)


def test_links_within_the_directory_and_to_hub_blobs_are_followed(tmp_path):
    snapshot, blobs = tmp_path / "models--o--m" / "snapshots" / "abc", tmp_path / "models--o--m" / "blobs"
    snapshot.mkdir(parents=True), blobs.mkdir()
    save(blobs, "0123", "a")
    os.symlink("../../blobs/0123", snapshot / "model.safetensors")
    os.symlink(snapshot, tmp_path / "link-to-all")
    for directory in (snapshot, tmp_path / "link-to-all"):
        with SafetensorsIndex(directory) as index:
            assert set(index.headers) == {"a"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["pytorch_model.bin"], "holds pytorch_model.bin and no safetensors: pickled checkpoints can run code"),
        (["model.pt", "notes.txt"], "holds model.pt and no safetensors"),
        (["adapter_model.safetensors"], "an adapter, not a whole model"),
        (["consolidated.00.safetensors"], "holds consolidated.00.safetensors, but no model.safetensors"),
        (["model-q4.gguf"], "holds model-q4.gguf, but no model.safetensors"),
        ([], "holds no model.safetensors"),
    ],
)
def test_what_lies_there_instead_is_named(files, message, tmp_path):
    for file in files:
        (tmp_path / file).write_bytes(b"")
    with pytest.raises(CheckpointError, match=message):
        SafetensorsIndex(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": {"a": 3}}', "tensor 'a' maps to 3"),
        ('{"weight_map": {"a": "m.safetensors", "a": "n.safetensors"}}', "the key 'a' appears twice"),
        ("[]", "holds list, not a JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_bad_index_is_refused(text, message, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsIndex(tmp_path)


def test_weight_files_lists_each_shard_once(tmp_path):
    assert weight_files(tmp_path) is None
    write_index(tmp_path, {"a": "y.safetensors", "b": "x.safetensors", "c": "y.safetensors"})
    assert weight_files(tmp_path) == ["x.safetensors", "y.safetensors"]


def test_fingerprint_changes_with_the_files(tmp_path):
    save(tmp_path, "model.safetensors", "a")
    with SafetensorsIndex(tmp_path) as index:
        before = index.fingerprint()
        assert index.fingerprint() == before
        os.utime(tmp_path / "model.safetensors", ns=(1, 1))
        assert index.fingerprint() != before
