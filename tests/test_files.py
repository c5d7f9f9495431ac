"""Durable files: a file has its old content or the new one."""

import pytest

from jaxinfer.files import atomic_writer, write_text_atomically


def test_a_file_is_replaced(tmp_path):
    path = tmp_path / "a.json"
    for text in ("old", "new \N{SNOWMAN}"):
        write_text_atomically(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_content(tmp_path):
    path = tmp_path / "a.json"
    write_text_atomically(path, "old")

    def write():
        with atomic_writer(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_left_is_overwritten(tmp_path):
    (tmp_path / ".a.json.part").write_bytes(b"left over, and longer")
    write_text_atomically(tmp_path / "a.json", "new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["new"]
