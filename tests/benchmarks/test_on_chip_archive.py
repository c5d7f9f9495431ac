"""The archive for a machine with a chip: its bytes, its size, and what runs from it alone."""

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.on_chip import archive, check

ROOT = Path(__file__).parents[2]
IS_CHECKOUT = (ROOT / ".git").exists()
pytestmark = pytest.mark.skipif(not IS_CHECKOUT, reason="the archive is made of a git checkout")


def unpacked(folder: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(archive.make(ROOT))) as content:
        content.extractall(folder, filter="data")
    return folder / archive.FOLDER


@pytest.mark.slow
def test_the_archive_is_reproducible_and_small():
    content = archive.make(ROOT)
    assert content == archive.make(ROOT)
    assert len(content) <= archive.MAX_BYTES
    with tarfile.open(fileobj=io.BytesIO(content)) as members:
        infos = members.getmembers()
    names = [info.name.removeprefix("on_chip/") for info in infos]
    assert names == sorted(names)
    assert {info.mtime for info in infos} == {0}
    assert {"README.txt", "pyproject.toml", "benchmarks/on_chip/__main__.py", "jaxinfer/chips.json"} <= {*names}
    assert not any(name.endswith((".safetensors", "tokenizer.json")) for name in names)
    assert not any(name.startswith(("tests/", "docs/", "notebooks/", "benchmarks/results/")) for name in names)


@pytest.mark.slow
def test_pieces_run_from_the_archive_alone(tmp_path):
    """A comparison and an engine's start need no demo weights, and nothing of this checkout."""
    root = unpacked(tmp_path)
    command = [sys.executable, "-m", "benchmarks.on_chip", "--tiny", "--out", "out"]
    command += ["--only", "parity states", "--only", "8b prompt"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX"))}
    variables |= {"PYTHONPATH": str(root), "HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    assert "2 pieces, 0 that did not end well; of the figures with a bound 3 ok" in ended.stdout
    assert not (root / "jaxinfer/data/demo").exists()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_planted_failures_and_ten_interruptions(tmp_path, monkeypatch):
    """As `make on-chip-check`, without its limit in seconds."""
    monkeypatch.setattr(check, "MAX_SECONDS", 1200.0)
    assert check.check(tmp_path, Path(sys.executable), check.NUM_KILLS, 0) == 0
