"""Prefix pages as files, shared by processes and kept over restarts. Neither JAX nor pickle: bytes with a checksum.

A file is named by a hash of everything that its bytes depend on: the weights and the layout (a fingerprint), the salt,
and all tokens up to the end of the page, in a chain. It is written beside its place, brought to the disk, and renamed,
so that a process that is killed leaves a whole file or none under the name; and it is only used where its checksum is
right. Files that were not used for longest go first, the ends of a text before its beginnings.
"""

import contextlib
import hashlib
import itertools
import os
import queue
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from jaxinfer.files import open_regular

MAGIC = b"jaxinfer page 1\n"
SUFFIX = ".page"
DIGEST_BYTES = 32
SCAN_EVERY = 256  # files written between two looks at what other processes have written
MAX_NOTED = 100_000  # names
STALE_SECONDS = 600  # after which an unfinished file is that of a killed process
MAX_QUEUED_BYTES = 512 * 2**20  # that wait to be written


def chain(fingerprint: bytes, salt: str, keys: Sequence[bytes]) -> list[str]:
    """The name of each page of a sequence, from the bytes of the pages' tokens."""
    digest = hashlib.sha256(fingerprint + salt.encode()).digest()
    names = []
    for key in keys:
        digest = hashlib.sha256(digest + key).digest()
        names.append(digest.hex())
    return names


class PageFiles:
    """The files of a folder.

    Args:
      folder: is made where there is none. max_bytes: of all files; the folder may have a little more for a while.

    Raises OSError, and PermissionError for a folder that others could write.
    """

    def __init__(self, folder: Path, max_bytes: int):
        self.folder, self.max_bytes = folder, max_bytes
        self.num_damaged = self.num_failed = 0
        self._numbers = itertools.count()
        self._sound: set[str] = set()  # names of pages that this process has read or written
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(
                f"prefix_store={str(folder)!r} is another user's or writable by others (mode "
                f"{stat.filemode(status.st_mode)}), who could change answers: chmod 700 it"
            )
        self._num_bytes = self._num_since_scan = 0
        self.trim()

    def has(self, name: str, num_bytes: int) -> bool:
        """Tells whether there is a page; one that this process has neither read nor written is read, and removed if it
        is damaged."""
        return self._path(name).exists() and (name in self._sound or self.read(name, num_bytes) is not None)

    def read(self, name: str, num_bytes: int) -> bytes | None:
        """The bytes of a page; None where there is no file, or a damaged one, which is removed."""
        path = self._path(name)
        try:
            with open_regular(path) as file:
                data = file.read(len(MAGIC) + DIGEST_BYTES + num_bytes + 1)
        except OSError:
            return None
        content = data[len(MAGIC) + DIGEST_BYTES :]
        if len(content) != num_bytes or data[: len(MAGIC) + DIGEST_BYTES] != _head(name, content):
            self.num_damaged += 1
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        self._note(name)
        return content

    def touch(self, names: Sequence[str]) -> None:
        """The pages of a text were used: they go after others, the ends before the beginnings."""
        now = time.time_ns()
        for number, name in enumerate(names):
            with contextlib.suppress(OSError):
                at = now - 1000 * number
                os.utime(self._path(name), ns=(at, at))

    def write(self, name: str, content: bytes) -> None:
        """Writes a page that is not there yet. A full disk, or one that fails, loses the page and nothing else."""
        path = self._path(name)
        temporary = path.with_name(f".{name}.{os.getpid()}.{next(self._numbers)}.part")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(_head(name, content))
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            self.num_failed += 1
            with contextlib.suppress(OSError):
                temporary.unlink()
            return
        self._note(name)
        self._num_bytes += len(content)
        self._num_since_scan += 1
        if self._num_bytes > self.max_bytes or self._num_since_scan >= SCAN_EVERY:
            self.trim()

    def trim(self) -> None:
        """Removes the files that were not used for longest where there is more than `max_bytes`, down to nine tenths of
        it; and what killed processes left unfinished."""
        files, now = [], time.time()
        for path in self.folder.glob("*/*"):
            with contextlib.suppress(OSError):  # another process has removed it
                status = path.stat()
                if path.name.endswith(".part") and now - status.st_mtime > STALE_SECONDS:
                    path.unlink()
                elif path.suffix == SUFFIX:
                    files.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in files)
        if total > self.max_bytes:
            for _, size, path in sorted(files):
                if total <= 0.9 * self.max_bytes:
                    break
                with contextlib.suppress(OSError):
                    path.unlink()
                total -= size
        self._num_bytes, self._num_since_scan = total, 0

    def _note(self, name: str) -> None:
        if len(self._sound) >= MAX_NOTED:
            self._sound = set()
        self._sound.add(name)

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / f"{name}{SUFFIX}"


class PageWriter:
    """Writes pages in a thread of its own, in order; where it cannot keep up, pages are dropped."""

    def __init__(self, files: PageFiles):
        self._files = files
        self.num_dropped = 0
        self._num_put = self._num_written = 0  # bytes
        self._queue: queue.Queue[tuple[str, bytes] | None] = queue.Queue()
        # It only writes files, so the interpreter may end while it does.
        self._thread = threading.Thread(target=self._run, name="jaxinfer pages", daemon=True)
        self._thread.start()

    def put(self, name: str, content: bytes) -> bool:
        """Queues a page; returns whether there was room."""
        if self._num_put - self._num_written > MAX_QUEUED_BYTES:
            self.num_dropped += 1
            return False
        self._num_put += len(content)
        self._queue.put((name, content))
        return True

    def close(self) -> None:
        """Returns when everything queued is written."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            self._files.write(*entry)
            self._num_written += len(entry[1])


def _head(name: str, content: bytes) -> bytes:
    """The header of a page's bytes: the checksum covers the name, so that a file under another's is damaged."""
    digest = hashlib.blake2b(name.encode(), digest_size=DIGEST_BYTES)
    digest.update(content)
    return MAGIC + digest.digest()
