"""Files that are kept between processes: intact or missing, whatever happens to them; bounded."""

import logging
import os
import subprocess
import sys

import pytest

from jaxinfer import kept_files
from jaxinfer.kept_files import KeptFiles, key_of, sources_key


@pytest.fixture
def kept(tmp_path):
    return KeptFiles(tmp_path, 10_000)


def only_file(folder):
    (path,) = folder.iterdir()
    return path


def test_content_comes_back_by_its_key(kept):
    assert kept.read("a") is None
    kept.write("a", b"one")
    kept.write("b", b"")
    kept.write("a", b"two")
    assert (kept.read("a"), kept.read("b"), kept.read("c")) == (b"two", b"", None)
    assert kept.usage()[0] == 2


def flip(raw, at):
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


DAMAGES = {
    **{f"bit of byte {at}": lambda raw, at=at: flip(raw, at) for at in (0, 20, 22, 52, 53, -1 % 353)},
    "cut": lambda raw: raw[:-1],
    "cut in the header": lambda raw: raw[:30],
    "empty": lambda raw: b"",
    "longer": lambda raw: raw + b"\0",
    "foreign": lambda raw: b"something else entirely" * 40,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_entries_are_missing_and_one_line_says_so(kept, caplog, damage):
    kept.write("a", bytes(300))
    path = only_file(kept.folder)
    path.write_bytes(damage(path.read_bytes()))
    assert kept.read("a") is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(path) in caplog.text
    assert not path.exists()
    kept.write("a", b"again")
    assert kept.read("a") == b"again"


def test_an_entry_of_another_key_is_not_taken(kept):
    kept.write("a", b"of a")
    path = only_file(kept.folder)
    kept.write("b", b"of b")
    (other,) = set(kept.folder.iterdir()) - {path}
    other.write_bytes(path.read_bytes())
    assert kept.read("b") is None
    assert kept.read("a") == b"of a"


def test_the_least_recently_used_are_dropped(tmp_path):
    kept = KeptFiles(tmp_path, 3_500)
    for number, key in enumerate("abc"):
        kept.write(key, bytes(1_000))
        newest = max(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (number, number))
    assert kept.read("a") is not None
    kept.write("d", bytes(1_000))
    assert [kept.read(key) is not None for key in "abcd"] == [True, False, True, True]
    kept.write("e", bytes(3_501))
    assert kept.read("e") is None
    assert kept.usage()[1] <= 3_500


def test_what_killed_processes_left_goes_and_what_is_being_written_stays(kept):
    old, young = kept.folder / ".old.part", kept.folder / ".young.part"
    old.touch(), young.touch()
    os.utime(old, (0, 0))
    kept.write("a", b"one")
    assert not old.exists()
    assert young.exists()


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path, caplog):
    kept = KeptFiles(tmp_path / "missing", 1_000)
    for _ in range(2):
        kept.write("a", b"one")
    assert kept.read("a") is None
    assert kept.usage() == (0, 0)
    assert len(caplog.records) == 1


def test_the_folder_is_the_users_and_may_be_turned_off(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("JAXINFER_CACHE_DIR", str(tmp_path))
    kept = KeptFiles.of("tokenizers")
    assert kept is not None
    assert kept.folder == tmp_path / "tokenizers"
    assert kept.folder.stat().st_mode & 0o777 == 0o700
    kept.folder.chmod(0o777)
    monkeypatch.setattr(kept_files, "_told", set())
    assert KeptFiles.of("tokenizers") is None
    assert "writable by others" in caplog.text
    monkeypatch.setenv("JAXINFER_CACHE_DIR", "")
    assert KeptFiles.of("tokenizers") is None


WRITER = """
import sys
from pathlib import Path
from jaxinfer.kept_files import KeptFiles
kept = KeptFiles(Path(sys.argv[1]), 3_000_000)
for turn in range(60):
    for key in "ab":
        content = kept.read(key)
        assert content is None or content == key.encode() * 1_000_000, (key, content[:10])
        kept.write(key, key.encode() * 1_000_000)
"""


@pytest.mark.slow
def test_processes_that_write_at_once_read_whole_entries(tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in running:
        assert process.communicate(timeout=60)[1] == ""
        assert process.returncode == 0
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".kept", ".kept"]


def test_keys_and_sources(tmp_path):
    assert len({key_of("ab", "c"), key_of("a", "bc"), key_of("abc"), key_of("a", "b", "c"), key_of(b"abc", b"")}) == 5
    source = tmp_path / "one.py"
    source.write_text("x = 1")
    keys = [sources_key(tmp_path)]
    for text in ("x = 2", "x = 1"):
        source.write_text(text)
        sources_key.cache_clear()
        keys.append(sources_key(tmp_path))
    assert keys[0] == keys[2] != keys[1]
