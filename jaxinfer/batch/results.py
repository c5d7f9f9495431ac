"""A file of results: one JSON line for each row, appended whole, synced to the disk, held by one process."""

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxinfer.batch.errors import BatchError, BatchWriteError

SYNC_SECONDS = 0.5
_SYNC_SHARE = 20  # on a slow disk, sync no more often than costs a twentieth of the time


class ResultsFile:
    """Opened for appending, and locked, until `close`.

    `read` finds where the last whole line ends; nothing is changed on the disk before `trim`, `clear` or `append`.
    After a kill the file is whole lines and at most one torn one; after a power loss it may lack, or have garbage in
    place of, the last lines that were not synced. Both are cut off by `trim`, and those rows are redone.
    """

    def __init__(self, path: Path):
        """Creates the file if it is missing. Raises BatchError where it is no file or another process writes it."""
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

        Raises:
          BatchError: a damaged line that whole ones follow: no crash does that, so it is not ours to cut.
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
                        f"{self.path} line {damaged} is not a result, and whole ones follow it: "
                        "remove that line, and its row is done again"
                    )
                self._end += len(data)
                yield number, record

    def trim(self) -> int:
        """Cuts off what follows the last whole line that `read` found; returns how many bytes that was."""
        num_cut = self._size() - self._end
        if num_cut:
            self._cut(self._end)
        return num_cut

    def clear(self) -> None:
        """Removes all lines."""
        self._end = 0
        if not self.is_empty:
            self._cut(0)

    def append(self, record: dict[str, Any]) -> None:
        """Adds one line; what was written of it is removed again if the disk does not take all of it.

        Raises:
          BatchWriteError: the disk is full, or the like.
        """
        data = memoryview(json.dumps(record, allow_nan=False).encode() + b"\n")
        try:
            written = 0
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
            if isinstance(error, OSError):
                raise self._write_error(error) from error
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
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._write_error(error) from error
        self._is_dirty = False
        ended = time.monotonic()
        self._next_sync = ended + max(SYNC_SECONDS, _SYNC_SHARE * (ended - started))

    def close(self, *, keep_if_empty: bool = True) -> None:
        """Lets go of the file; closing twice is harmless."""
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
        try:
            os.ftruncate(self._fd, size)
            os.fsync(self._fd)
        except OSError as error:
            raise self._write_error(error) from error

    def _write_error(self, error: OSError) -> BatchWriteError:
        return BatchWriteError(f"{self.path}: {error.strerror or error}")


def write_atomically(path: Path, text: str) -> None:
    """The file has its old content or the new one, whole, whenever the machine stops. Raises BatchWriteError."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        sync_folder(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise BatchWriteError(f"{path}: {error.strerror or error}") from error


def sync_folder(path: Path) -> None:
    """Makes the name of a new file last."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


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
        os.close(fd)  # another process removed it between our opening and our locking


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise BatchError(f"{path} cannot be locked ({error.strerror}): use a file system that has locks") from error
        raise BatchError(f"{path} is being written by another process: wait for it, or end it") from None


def _read_record(data: bytes) -> dict[str, Any] | None:
    if not data.endswith(b"\n"):
        return None
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("custom_id"), str) else None
