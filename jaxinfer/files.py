"""Closing at a block's end; lines of JSON; durable files: replaced atomically, on the disk before a call returns."""

import ctypes
import errno
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, Self

PART = ".part"  # ends the names of files that are being written
OLD_SECONDS = 24 * 3600  # after which such a file was left by a killed process


class Closable:
    """A context manager that calls its `close` when the block ends."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    """Places and values of the lines that are not blank. Raises ValueError, with these, for a line
    that is not JSON; FileNotFoundError."""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        where = f"{file.name}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON: {error}") from None
        yield where, row


def cache_folder(name: str) -> Path | None:
    """The folder of a kind of files that are kept between processes, made if missing, for this user only.

    It is in `JAXINFER_CACHE_DIR` (empty: None, nothing is kept) or ~/.cache/jaxinfer. Raises PermissionError if another
    user owns it or may write there; the owner may be root, who can change this process anyway. Raises OSError.
    """
    setting = os.environ.get("JAXINFER_CACHE_DIR")
    if setting == "":
        return None
    path = (Path(setting) if setting else Path.home() / ".cache" / "jaxinfer") / name
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(
            f"{path} belongs to another user (number {status.st_uid}), who could put programs there: remove it or set "
            "JAXINFER_CACHE_DIR"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{path} is writable by others (mode {stat.filemode(status.st_mode)}): chmod 700 it or set "
            "JAXINFER_CACHE_DIR"
        )
    return path


def open_regular(path: Path) -> BufferedReader:
    """Opens a file for reading. Raises OSError, for pipes, sockets, devices and directories too, which it never waits
    for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """OSErrors of the block name the path: those of writing to an open file, as on a full disk, name none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """A binary file that replaces `path` when the block ends without an exception, and is removed otherwise.

    Readers see the old content or the new one, also after a crash. The temporary file is `path` with a leading dot and
    the suffix ".part", so that the one a killed process left is overwritten. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        with naming(path), temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """As `atomic_writer`, with a temporary file of its own for each process, and without waiting for the disk. The
    temporary file ends with `PART`, and stays if the process is killed. Raises OSError."""
    descriptor, part = tempfile.mkstemp(prefix=".", suffix=PART, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise


def write_text_atomically(path: Path, text: str) -> None:
    """Replaces the file's content by `text` in UTF-8, as `atomic_writer`. Raises OSError."""
    with atomic_writer(path) as file:
        file.write(text.encode())


def sync(path: Path) -> None:
    """Waits until a file's content, or the entries of a directory, are on the disk (fsync). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange(path: Path, other: Path) -> bool:
    """Gives two files or folders of one file system each other's name, in one step (Linux's renameat2).

    Returns False, and changes nothing, where the system has no such step. Raises OSError.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    here, flag = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2(here, os.fsencode(path), here, os.fsencode(other), flag) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(path), None, str(other))


def remove_tree(folder: Path, marker: str) -> None:
    """Removes a folder, if it exists, and the empty file `marker` in it last, so that a killed removal leaves it.

    Of a symbolic link only the link is removed. Raises OSError.
    """
    if folder.is_symlink():
        folder.unlink()
        return
    if not folder.exists():
        return
    with suppress(OSError):  # the disk may be full, which is why the folder goes
        (folder / marker).touch()
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != marker:
            path.unlink()
    shutil.rmtree(folder)
