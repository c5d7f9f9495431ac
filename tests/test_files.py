"""Durable files: a file has its old content or the new one."""

import errno
import shutil

import pytest

from jaxinfer.files import atomic_writer, exchange, naming, remove_tree, write_text_atomically


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


def test_two_folders_are_exchanged(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "name").write_text(name)
    if not exchange(tmp_path / "one", tmp_path / "other"):
        pytest.skip("this file system cannot")
    assert [(tmp_path / name / "name").read_text() for name in ("one", "other")] == ["other", "one"]
    with pytest.raises(FileNotFoundError, match="gone"):
        exchange(tmp_path / "gone", tmp_path / "one")


def test_a_removal_that_is_killed_leaves_the_marker(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    for name in ("a", "inner/b"):
        (folder / name).touch()

    def kill(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", kill)
        with pytest.raises(KeyboardInterrupt):
            remove_tree(folder, "marker")
    assert (folder / "marker").exists()
    remove_tree(folder, "marker")
    remove_tree(folder, "marker")
    assert not any(tmp_path.iterdir())


def test_of_a_link_only_the_link_is_removed(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    remove_tree(tmp_path / "link", "marker")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_errors_of_writing_name_the_file(tmp_path):
    def fill(path):
        with atomic_writer(path):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device: '.*a\.json'"):
        fill(tmp_path / "a.json")
    with pytest.raises(OSError, match="inner"), naming(tmp_path / "outer"):
        raise OSError(errno.ENOENT, "No such file", "inner")
