"""Files that are kept between processes: what is slow to make, found again by a key.

A kind of files has a folder beside the compiled programs (`jaxinfer.files.cache_folder`) and a limit in bytes, in
`KINDS`. An entry is one file: a line that names the format, the SHA-256 of key and content, and the content. It is
written beside its place and renamed, so that processes that start at once read a complete entry or none. An entry that
is damaged, cut off, or another key's is removed, with a line in the log, and counts as missing. Entries that were used
least recently are dropped when the limit is passed.

Nothing here knows what the content is: its reader checks that it fits, and never unpickles it.
"""

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from jaxinfer.files import OLD_SECONDS, PART, cache_folder, open_regular, replacing

_LOG = logging.getLogger(__name__)
_FORMAT = b"jaxinfer kept file 1\n"
_HEADER_BYTES = len(_FORMAT) + hashlib.sha256().digest_size
_SUFFIX = ".kept"

KINDS = {
    "kernels": 64 * 2**20,
    "programs": 256 * 2**20,
    "tokenizers": 256 * 2**20,
}
"""The most bytes of each kind of files."""


def key_of(*parts: str | bytes) -> str:
    """One key of several parts: other parts, or the same ones cut elsewhere, give another key."""
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(f"{len(raw)}:".encode())
        digest.update(raw)
    return digest.hexdigest()


@cache
def sources_key(*paths: Path) -> str:
    """The contents of Python files, and of all that are in folders: a part of the keys of what they make."""
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    return key_of(*(part for file in files for part in (file.name, file.read_bytes())))


class KeptFiles:
    """The entries in a folder, of at most `max_bytes` together.

    No method raises OSError: a disk that is full or cannot be written keeps nothing, and the log says so once.
    """

    def __init__(self, folder: Path, max_bytes: int):
        self.folder, self.max_bytes = folder, max_bytes

    @classmethod
    def of(cls, kind: str) -> "KeptFiles | None":
        """The files of a kind in `KINDS`; None where nothing is kept, or where others could write to the folder."""
        try:
            folder = cache_folder(kind)
        except OSError as error:
            _tell(kind, f"{kind} are not kept: {error}")
            return None
        return None if folder is None else cls(folder, KINDS[kind])

    def read(self, key: str) -> bytes | None:
        """The content, or None where there is no entry that is intact."""
        path = self._path(key)
        try:
            with open_regular(path) as file:
                header, content = file.read(_HEADER_BYTES), file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            _tell(str(path), f"{path} could not be read ({error.strerror}) and is made again")
            return None
        if header != _FORMAT + _checksum(key, content):
            self.remove(key, "damaged or of another version")
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used now
        return content

    def write(self, key: str, content: bytes) -> None:
        """Keeps the content, in place of an earlier one. One of more bytes than the limit is not kept."""
        if len(content) > self.max_bytes:
            return
        try:
            with replacing(self._path(key)) as file:
                file.writelines((_FORMAT, _checksum(key, content), content))
        except OSError as error:
            _tell(str(self.folder), f"nothing can be kept in {self.folder}: {error.strerror}")
            return
        self._drop()

    def remove(self, key: str, why: str) -> None:
        """Removes an entry whose content is of no use, with a line in the log that says why."""
        path = self._path(key)
        _LOG.warning("%s is %s and is made again", path, why)
        with contextlib.suppress(OSError):
            path.unlink()

    def usage(self) -> tuple[int, int]:
        """How many entries there are, and their bytes."""
        sizes = [status.st_size for path, status in self._files() if path.suffix == _SUFFIX]
        return len(sizes), sum(sizes)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key_of(key)[:40]}{_SUFFIX}"

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                with contextlib.suppress(OSError):  # another process may have removed it
                    yield path, path.stat()

    def _drop(self) -> None:
        """Removes files that killed processes left and, down to the limit, the entries not used for longest."""
        files = sorted(self._files(), key=lambda item: item[1].st_mtime_ns, reverse=True)
        size, now = 0, time.time()
        for path, status in files:
            size += status.st_size
            is_left = path.suffix == PART and now - status.st_mtime > OLD_SECONDS
            if is_left or (path.suffix == _SUFFIX and size > self.max_bytes):
                size -= status.st_size
                with contextlib.suppress(OSError):
                    path.unlink()


def _checksum(key: str, content: bytes) -> bytes:
    digest = hashlib.sha256(f"{key_of(key)}\n".encode())
    digest.update(content)
    return digest.digest()


_told: set[str] = set()


def _tell(what: str, text: str) -> None:
    """Logs a warning the first time that it is about `what`."""
    if what not in _told:
        _told.add(what)
        _LOG.warning("%s", text)
