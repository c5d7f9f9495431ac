"""Checkpoints at URLs, in fsspec's memory and on disk as if it were a store; no test opens a connection."""

import re
import sys
from pathlib import Path

import fsspec
import jax
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from checkpoints_convert import (
    CheckpointError,
    CheckpointNotFoundError,
    convert,
    load,
    open_checkpoint,
    resolve,
    storage,
)
from checkpoints_convert.huggingface.checkpoint import HuggingFaceCheckpoint
from checkpoints_convert.load import read_ahead
from jaxinfer.data import embedded_path
from jaxinfer.extras import install_hint
from jaxinfer.loading import load_model
from tests.checkpoints_convert.family_files import read


@pytest.fixture
def put(request):
    """put(directory, name): copies a directory to memory://, and gives its URL."""
    system = fsspec.filesystem("memory")
    roots = []

    def make(directory: Path, name: str = "model") -> str:
        root = f"/{abs(hash(request.node.nodeid))}/{name}"
        roots.append(root)
        for path in directory.rglob("*"):
            if path.is_file():
                system.pipe(f"{root}/{path.relative_to(directory).as_posix()}", path.read_bytes())
        return f"memory:/{root}"

    yield make
    for root in roots:
        system.rm(root, recursive=True)


@pytest.fixture
def requests(monkeypatch):
    """(file, bytes given) of every request to the memory store."""
    seen = []
    plain = MemoryFileSystem.cat_file

    def cat_file(self, path, start=None, end=None, **options):
        data = plain(self, path, start=start, end=end, **options)
        seen.append((path.rsplit("/", 1)[-1], len(data)))
        return data

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    return seen


def assert_same(params, others):
    assert jax.tree.structure(params) == jax.tree.structure(others)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(others), strict=True))


@pytest.mark.parametrize("num_shards", [1, 3])
def test_parameters_are_those_of_the_directory(checkpoint, put, num_shards):
    directory = checkpoint("Qwen2ForCausalLM").write(num_shards)
    config, params = load(directory)
    found, others = load(put(directory) + "/")
    assert found == config
    assert_same(params, others)


def test_a_protocol_of_files(checkpoint):
    directory = checkpoint().write()
    assert_same(load(directory)[1], load(f"local://{directory}")[1])


def test_weights_are_read_once_by_ranges_and_nothing_else_is(checkpoint, put, requests):
    source = checkpoint()
    source.files = {"tokenizer.json": "{}", "generation_config.json": '{"eos_token_id": 7}'}
    directory = source.write(3)
    (directory / "pytorch_model.bin").write_bytes(b"pickled" * 1000)
    (directory / "modeling.py").write_text("raise SystemExit")
    url = put(directory)
    local = resolve(url)
    small = {"config.json", "tokenizer.json", "generation_config.json", "model.safetensors.index.json"}
    assert {name for name, _ in requests} == small == {path.name for path in local.iterdir()}
    requests.clear()
    load(url)
    assert {name for name, _ in requests} == {f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)}
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    assert sum(count for _, count in requests) == size  # headers and tensors, each once
    with open_checkpoint(local) as checkpoint:
        assert checkpoint.eos_token_ids == (7, 2)


def test_a_host_asks_for_its_part(put, requests, tmp_path):
    """Whole rows, as pieces of rows are too small for a request: of q, k, v, gate, up and embeddings its own ones."""
    files = read("llama")
    url = put(files.write(tmp_path))
    with HuggingFaceCheckpoint(resolve(url)) as source:
        path = ("layers", "0", "mlp", "gate_proj", "weight")
        inputs, outputs = source._plan_of[path].shape
        parts = {path: [((0, inputs), (0, outputs // 4))]}
        requests.clear()
        (found,) = source.read_param(path, parts[path])
    assert [count for _, count in requests] == [inputs * outputs // 4 * 4]
    stored = files.tensors["model.layers.0.mlp.gate_proj.weight"]
    assert np.array_equal(found, stored[: outputs // 4].T)


def test_what_stands_for_a_url_is_kept_until_it_changes(checkpoint, put):
    source = checkpoint()
    url = put(source.write())
    first = resolve(url)
    assert resolve(url) == first
    fsspec.filesystem("memory").pipe(url.removeprefix("memory:/") + "/generation_config.json", b"{}")
    second = resolve(url)
    assert second != first
    assert (second / "generation_config.json").exists()
    assert "jaxinfer-store-" in first.name


def test_a_directory_of_somebody_else_is_no_url(checkpoint, put, tmp_path):
    """A directory that a process copied from a store is a store's for this process only."""
    import shutil

    local = resolve(put(checkpoint().write()))
    copy = tmp_path / "copy"
    shutil.copytree(local, copy)
    with pytest.raises(CheckpointError, match=r"holds no model\.safetensors"):
        load(copy)


def test_language_models_open_urls(put):
    embedded = load_model("demo-draft")
    url = put(embedded_path("demo-draft"))
    model = load_model(url)
    assert model.name == url
    assert model.tokenizer is not None
    assert embedded.config == model.config
    assert_same(embedded.params, model.params)


def test_conversion_from_a_url(checkpoint, put, tmp_path):
    directory = checkpoint().write()
    report = convert(put(directory), tmp_path / "native", progress=None)
    assert report.num_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(load(directory)[1]))
    assert_same(load(directory)[1], load(tmp_path / "native")[1])


def test_experts_and_tied_heads(put, tmp_path):
    for name in ("mixtral", "gemma"):
        directory = read(name).write(tmp_path / name)
        assert_same(load(directory)[1], load(put(directory, name))[1])


def test_errors_name_the_url(checkpoint, put, tmp_path, monkeypatch):
    system = fsspec.filesystem("memory")
    url = put(checkpoint().write(3))
    root = url.removeprefix("memory:/")

    with pytest.raises(CheckpointNotFoundError, match=r"memory://\S+/none: nothing is there"):
        load(f"{url}/none")
    with pytest.raises(ValueError, match="revision='main' is for hub ids; memory://"):
        load(url, revision="main")

    shard = f"{root}/model-00002-of-00003.safetensors"
    data = system.cat_file(shard)
    resolve(url)
    system.store[shard] = type(system.store[shard])(system, shard, data[:-100])  # after it was listed
    local = resolve(url)
    with pytest.raises(CheckpointError, match=rf"{url}/model-00002-of-00003\.safetensors: .*truncated\?"):
        load(url)
    assert local.exists()
    system.rm(shard)
    with pytest.raises(CheckpointError, match=rf"{url}: the shard model-00002-of-00003\.safetensors is missing"):
        load(url)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", denied)
    system.pipe(f"{root}/generation_config.json", b"{}")
    with pytest.raises(CheckpointError, match=rf"{url}/\S+: no access: the bucket is private"):
        load(url)


def denied(self, path, **options):
    raise PermissionError("the bucket is private")


def test_an_object_that_is_cut_while_it_is_read(checkpoint, put):
    system = fsspec.filesystem("memory")
    url = put(checkpoint().write())
    with HuggingFaceCheckpoint(resolve(url)) as source:
        shard = url.removeprefix("memory:/") + "/model.safetensors"
        system.pipe(shard, system.cat_file(shard)[:-100])
        with pytest.raises(CheckpointError, match=rf"{url}/model\.safetensors: tensor '.*': the file ends at byte"):
            list(read_ahead(source, {}, lambda _, found: None))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (OSError("connection reset\nand more"), "could not be read, OSError: connection reset$"),
        (RuntimeError(), "could not be read, RuntimeError: RuntimeError"),
        (FileNotFoundError("x"), "nothing is there"),
    ],
)
def test_whatever_a_store_raises_is_one_error(checkpoint, put, monkeypatch, kind, message):
    url = put(checkpoint().write())
    with HuggingFaceCheckpoint(resolve(url)) as source:

        def fail(self, path, **options):
            raise kind

        monkeypatch.setattr(MemoryFileSystem, "cat_file", fail)
        with pytest.raises(CheckpointError, match=rf"model\.safetensors: {message}"):
            list(source.read("embed"))


def test_forms_that_are_read_from_disks_only(checkpoint, put, tmp_path):
    native = tmp_path / "native"
    convert(checkpoint().write(), native, progress=None)
    with pytest.raises(CheckpointError, match="is a converted checkpoint, which is read from a disk: copy it"):
        load(put(native, "native"))
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model.gguf").write_bytes(b"GGUF")
    url = put(tmp_path / "gguf", "gguf")
    with pytest.raises(CheckpointError, match="holds a GGUF file, which is read from a disk: copy it"):
        load(url)
    with pytest.raises(CheckpointError, match=r"model\.gguf: is a file: GGUF files are read from disks"):
        load(f"{url}/model.gguf")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("")
    with pytest.raises(CheckpointNotFoundError, match=r"holds no config\.json"):
        load(put(tmp_path / "empty", "empty"))


def test_what_is_not_installed_is_named(monkeypatch):
    with pytest.raises(CheckpointNotFoundError, match=r"gs:// needs a package of its own .*gcsfs"):
        load_without("gs://bucket/model", "gcsfs", monkeypatch)
    with pytest.raises(CheckpointNotFoundError, match=re.escape(install_hint("object-store"))):
        load_without("gs://bucket/model", "fsspec", monkeypatch)


def load_without(url, package, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, package, None)
        load(url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nothing://bucket/model", "is not a URL that fsspec opens: Protocol not known"),
        ("simplecache::memory://x", "chained URLs are not read"),
        ("memory://never/was", "nothing is there"),
    ],
)
def test_urls_that_are_refused(url, message):
    with pytest.raises(CheckpointNotFoundError, match=message):
        load(url)


def test_a_path_is_not_a_url():
    with pytest.raises(CheckpointNotFoundError, match="a URL is a string, which a Path takes a slash from"):
        load(Path("gs://bucket/model"))


def test_small_files_that_are_large_are_not_copied(checkpoint, put, monkeypatch):
    monkeypatch.setattr(storage, "MAX_JSON_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"config\.json: \d+ bytes, the limit is 100"):
        load(put(checkpoint().write()))
