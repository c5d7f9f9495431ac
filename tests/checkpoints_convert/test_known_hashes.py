import hashlib
import os
import subprocess

import pytest

from checkpoints_convert import CheckpointError, CheckpointNotFoundError, load, open_checkpoint, verify_files
from checkpoints_convert.known_hashes import FilesReport


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def source(checkpoint):
    return checkpoint().write()


@pytest.fixture
def snapshot(checkpoint, tmp_path):
    """The files as in the hub's cache: links to blobs, weights by SHA-256 and the others by their hash in Git."""
    blobs = tmp_path / "models--a--b" / "blobs"
    folder = tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    plain = checkpoint(name="plain").write()
    folder.mkdir(parents=True)
    blobs.mkdir()
    for path in plain.iterdir():
        raw = path.read_bytes()
        name = hashlib.sha256(raw).hexdigest()
        if path.suffix == ".json":
            name = hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest()
        path.rename(blobs / name)
        (folder / path.name).symlink_to(os.path.relpath(blobs / name, folder))
    return folder


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_files_of_the_cache_have_the_hashes_of_their_names(snapshot):
    assert verify_files(snapshot) == FilesReport(("config.json", "model.safetensors"), (), ())
    load(snapshot, verify=True)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_damage_in_the_cache_is_found(snapshot, name):
    flip(snapshot / name)
    with pytest.raises(CheckpointError, match=rf"{name}: is damaged: it has"):
        open_checkpoint(snapshot, verify=True)
    assert len(verify_files(snapshot).problems) == 1


def test_files_of_sha256sum_are_read(source):
    command = ["sha256sum", "model.safetensors", "config.json"]
    text = subprocess.run(command, cwd=source, capture_output=True, check=True, text=True).stdout
    (source / "files.sha256").write_text("# comment\n\n" + text)
    assert verify_files(source) == FilesReport(("config.json", "model.safetensors"), (), ())
    flip(source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is damaged: it has SHA-256"):
        load(source, verify=True)
    load(source)


def test_a_hash_beside_the_file_needs_no_name(source):
    (source / "model.safetensors.sha256").write_text(digest(source / "model.safetensors") + "\n")
    assert verify_files(source) == FilesReport(("model.safetensors",), ("config.json",), ())
    load(source, verify=True)


def test_a_folder_downloaded_to_has_the_hubs_hashes(source):
    folder = source / ".cache" / "huggingface" / "download"
    folder.mkdir(parents=True)
    (folder / "model.safetensors.metadata").write_text(f"{'0' * 40}\n{digest(source / 'model.safetensors')}\n1.5\n")
    (folder / "config.json.metadata").write_text('damaged\n"etag"\n')
    assert verify_files(source) == FilesReport(("model.safetensors",), ("config.json",), ())


def test_verify_refuses_weights_of_which_no_checksum_is_known(source, tmp_path):
    with pytest.raises(
        CheckpointError, match=r"no checksum is known of model\.safetensors: .* model\.safetensors\.sha"
    ):
        open_checkpoint(source, verify=True)
    with pytest.raises(CheckpointNotFoundError, match="no files of a checkpoint"):
        verify_files(tmp_path)


def test_a_list_that_is_none_is_refused(source):
    (source / "model.safetensors.sha256").write_text("hello\n")
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.sha256: is no list of SHA-256: 'hello'"):
        verify_files(source)


def test_a_gguf_file_is_checked(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    (tmp_path / "model.gguf.sha256").write_text(f"{digest(path)}  model.gguf\n")
    assert verify_files(path) == FilesReport(("model.gguf",), (), ())
    flip(path)
    with pytest.raises(CheckpointError, match=r"model\.gguf: is damaged"):
        open_checkpoint(path, verify=True)
