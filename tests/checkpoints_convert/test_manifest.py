import json

import numpy as np
import pytest

from checkpoints_convert import CheckpointError, verify_manifest
from checkpoints_convert.manifest import measure, write_manifest


@pytest.fixture
def directory(tmp_path):
    for name, content in {"a.bin": b"x" * 100, "sub/b.bin": bytes(range(50)), "c.json": b"{}"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    write_manifest(tmp_path, measure(tmp_path, ["a.bin", "sub/b.bin", "c.json"]), {}, {})
    return tmp_path


def test_untouched_directory_has_no_problems(directory):
    assert verify_manifest(directory) == []


def test_known_checksum(directory):
    files = json.loads((directory / "manifest.json").read_text())["files"]
    digest = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"  # of "{}"
    assert files["c.json"] == {"size": 2, "sha256": digest}


def test_each_kind_of_damage_is_named(directory):
    (directory / "a.bin").write_bytes(b"x" * 99)
    (directory / "sub" / "b.bin").unlink()
    (directory / "c.json").write_bytes(b"[]")
    (directory / "new").write_bytes(b"")
    first, second, third, fourth = verify_manifest(directory)
    assert first == "a.bin: 99 bytes, the manifest says 100"
    assert second == "sub/b.bin: missing"
    assert third.startswith("c.json: its 2 bytes have SHA-256 4f53cda1")
    assert fourth == "new: not in the manifest"


def test_every_flipped_bit_is_found(directory):
    random = np.random.default_rng(0)
    for _ in range(200):
        name = ("a.bin", "sub/b.bin", "c.json")[random.integers(3)]
        good = (directory / name).read_bytes()
        bad = bytearray(good)
        bad[random.integers(len(good))] ^= 1 << random.integers(8)
        (directory / name).write_bytes(bad)
        problems = verify_manifest(directory)
        assert [problem.split(":")[0] for problem in problems] == [name]
        (directory / name).write_bytes(good)
    assert verify_manifest(directory) == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"../a.bin": {"size": 1, "sha256": "0" * 64}}, "a path that leads out"),
        ({"/etc/passwd": {"size": 1, "sha256": "0" * 64}}, "a path that leads out"),
        ({"sub/../../x": {"size": 1, "sha256": "0" * 64}}, "a path that leads out"),
        ({"": {"size": 1, "sha256": "0" * 64}}, "a path that leads out"),
        ({"a.bin": {"sha256": "0" * 64}}, "'a.bin': has no size"),
        ({"a.bin": {"size": 1, "sha256": "xyz"}}, "'a.bin': has no SHA-256"),
        ({"a.bin": 7}, "'a.bin': has no size"),
        ([], "has no table of files"),
        ({}, "has no table of arrays"),
    ],
)
def test_unusable_manifest_is_refused(files, message, tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"format_version": 1, "files": files}))
    with pytest.raises(CheckpointError, match=message):
        verify_manifest(tmp_path)


def test_missing_and_newer_manifests_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"manifest\.json: cannot be read: No such file"):
        verify_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format_version": 2, "files": {}}')
    with pytest.raises(CheckpointError, match="format_version 2, this version reads 1"):
        verify_manifest(tmp_path)
