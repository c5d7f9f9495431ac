"""A file of results: one JSON line per row, appended completely, synced to the disk, locked by one process."""

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxinfer.batch.errors import BatchError, BatchWriteError
from jaxinfer.files import atomic_writer, write_text_atomically

SYNC_SECONDS = 0.5
_SYNC_SHARE = 20  # on a slow disk, syncing takes at most a twentieth of the time


class ResultsFile:
    """A file opened for appending, and locked until `close`.

    `read` finds the end of the last complete line; the file is not changed before `trim`, `clear` or `append`.
    After a kill the file has complete lines and at most one partial line. After a power loss the last lines that were
    not synced may be missing or damaged. `trim` removes both, and their rows are served again.
    """

    def __init__(self, path: Path):
        """Creates the file if it is missing. Raises BatchError if it is not a file or another process has locked it."""
        self.path = path
        if path.exists() and not path.is_file():
            raise BatchError(f"{path} must be a file: a batch is resumed from it")
        self._fd = _open_locked(path)
        self._end = self._size()
        self._is_dirty = False
        self._next_sync = 0.0

    @property
    def is_empty(self) -> bool:
        return self._size() == 0

    def read(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Line numbers, from 1, with the records.

        Raises BatchError: a damaged line before complete ones, which no crash leaves behind, so it is not removed.
        """
        damaged = None
        self._end = 0
        with self.path.open("rb") as file:
            for number, data in enumerate(file, 1):
                record = _read_record(data)
                if record is None:
                    damaged = damaged or number
                    continue
                if damaged is not None:
                    raise BatchError(
                        f"{self.path} line {damaged} is not a result, and complete ones follow it: "
                        "remove that line, and its row is served again"
                    )
                self._end += len(data)
                yield number, record

    def trim(self) -> int:
        """Removes what follows the last complete line that `read` found; returns the number of removed bytes."""
        num_cut = self._size() - self._end
        if num_cut:
            self._cut(self._end)
        return num_cut

    def clear(self) -> None:
        """Removes all lines."""
        self._end = 0
        if not self.is_empty:
            self._cut(0)

    def sort(self, key: Callable[[dict[str, Any]], int]) -> None:
        """Orders the lines by a key of their records. The file is replaced in one step, and stays locked.

        Raises BatchWriteError: there is no room for a second copy; the file is then as it was.
        """
        places: list[tuple[int, int, int]] = []  # key, offset, bytes
        offset, fd = 0, -1
        try:
            with _writing(self.path), self.path.open("rb") as file:
                for data in file:
                    places.append((key(json.loads(data)), offset, len(data)))
                    offset += len(data)
                ordered = sorted(places)
                if ordered == places:
                    return
                with atomic_writer(self.path.resolve()) as sorted_file:
                    # Locked before it has the file's name, which another process could lock first.
                    fd = os.open(sorted_file.name, os.O_RDWR | os.O_APPEND)
                    _lock(fd, self.path)
                    for _, start, size in ordered:
                        file.seek(start)
                        sorted_file.write(file.read(size))
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise
        os.close(self._fd)
        self._fd = fd

    def append(self, record: dict[str, Any]) -> None:
        """Adds one line, or none if it cannot be written completely.

        Raises BatchWriteError: for example, the disk is full.
        """
        data = memoryview(json.dumps(record, allow_nan=False).encode() + b"\n")
        try:
            with _writing(self.path):
                written = 0
                while written < len(data):
                    written += os.write(self._fd, data[written:])
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
            raise
        self._end += len(data)
        self._is_dirty = True
        if time.monotonic() >= self._next_sync:
            self.sync()

    def sync(self) -> None:
        """Waits until all lines are on the disk. Raises BatchWriteError."""
        if not self._is_dirty:
            return
        started = time.monotonic()
        with _writing(self.path):
            os.fsync(self._fd)
        self._is_dirty = False
        ended = time.monotonic()
        self._next_sync = ended + max(SYNC_SECONDS, _SYNC_SHARE * (ended - started))

    def close(self, *, keep_if_empty: bool = True) -> None:
        """Closes and unlocks the file; closing twice is harmless."""
        if self._fd < 0:
            return
        try:
            if not keep_if_empty and self.is_empty:
                with contextlib.suppress(OSError):
                    os.unlink(self.path)
        finally:
            os.close(self._fd)
            self._fd = -1

    def _size(self) -> int:
        return os.fstat(self._fd).st_size

    def _cut(self, size: int) -> None:
        with _writing(self.path):
            os.ftruncate(self._fd, size)
            os.fsync(self._fd)


def write_atomically(path: Path, text: str) -> None:
    """Replaces the file's content; after a crash it has the old or the new one. Raises BatchWriteError."""
    with _writing(path):
        write_text_atomically(path, text)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BatchWriteError(f"{path}: {error.strerror or error}") from error


def _open_locked(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            _lock(fd, path)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # another process removed the file between opening and locking


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise BatchError(f"{path} cannot be locked ({error.strerror}): use a file system with locks") from error
        raise BatchError(f"{path} is being written by another process: wait for it or end it") from None


def _read_record(data: bytes) -> dict[str, Any] | None:
    if not data.endswith(b"\n"):
        return None
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("custom_id"), str) else None
