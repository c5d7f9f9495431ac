"""Files read by position, on a local disk or in an object store (gs://, s3:// and whatever else fsspec opens).

Of a checkpoint in an object store, the files that describe the model (a few MB) are copied to a temporary directory,
which is removed when the process ends; from then on it is a checkpoint directory like any other, except that its
safetensors files stay in the store and are read by ranges. Which directories are such copies is kept in this process
only, never in a file, so that a directory from elsewhere cannot ask for a connection.
"""

import atexit
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol

from checkpoints_convert.errors import CheckpointError, CheckpointNotFoundError
from checkpoints_convert.files import (
    COMPANION_FILES,
    CONFIG,
    MAX_JSON_BYTES,
    NATIVE_CONFIG,
    QUANTIZATION_FILES,
    WEIGHTS_INDEX,
)
from jaxinfer.extras import install_hint


class ByteFile(Protocol):
    """An open file that is read by position. path: for messages. size: in bytes."""

    path: str | Path
    size: int

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Reads from `offset` into the start of the buffer; returns the number of bytes, 0 at the end. Thread-safe."""
        ...

    def version(self) -> str:
        """A text that changes when the file does."""
        ...

    def close(self) -> None: ...


class LocalFile:
    """A `ByteFile` on a local disk. Raises CheckpointError if it cannot be opened, or is a pipe or a device."""

    def __init__(self, path: str | Path):
        self.path: str | Path = Path(path)
        try:
            self.descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for a writer
        except OSError as error:
            raise CheckpointError(self.path, f"cannot be opened: {error.strerror}") from None
        status = os.fstat(self.descriptor)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise CheckpointError(self.path, "is not a regular file")
        self.size = status.st_size

    def read_into(self, offset: int, buffer: memoryview) -> int:
        return os.preadv(self.descriptor, [buffer], offset)

    def version(self) -> str:
        status = os.stat(self.path)
        return f"{status.st_size} {status.st_mtime_ns}"

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def fill(buffer: memoryview, file: ByteFile, where: int, what: str) -> None:
    """Fills `buffer` with the file's bytes from `where` on. Raises CheckpointError, naming `what`, if the file ends."""
    while buffer:
        num_read = file.read_into(where, buffer)
        if num_read == 0:
            raise CheckpointError(file.path, f"{what}: the file ends at byte {where}, {len(buffer)} bytes too soon")
        where, buffer = where + num_read, buffer[num_read:]


def fill_from_tensor(
    buffer: memoryview, file: ByteFile, begin: int, end: int, *, offset: int = 0, name: str = ""
) -> None:
    """Fills `buffer` with bytes of the tensor at [begin, end) of the file, from its byte `offset` on.

    Raises IndexError for bytes beyond the tensor, CheckpointError if the file ends.
    """
    buffer = buffer.cast("B")
    size = end - begin
    if offset < 0 or offset + len(buffer) > size:
        raise IndexError(f"bytes [{offset}, {offset + len(buffer)}) of tensor {name!r}, which has {size}")
    fill(buffer, file, begin + offset, f"tensor {name!r}")


EXTRA = "object-store"
# A request takes some 30 ms to answer, in which a connection of 100 MB/s moves 3 MB: below that size, reading the gap
# between two pieces is cheaper than a second request.
MIN_PIECE_BYTES = 4 * 2**20
_NUM_CONNECTIONS = 8
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.\-:]*://")
_DESCRIBING = (*COMPANION_FILES, *QUANTIZATION_FILES, WEIGHTS_INDEX)
_FOLDERS = tuple(folder for pattern in _DESCRIBING if (folder := pattern.rpartition("/")[0]))
# Fields that identify a version of an object, by the names that stores use.
_VERSION_KEYS = (
    *("etag", "ETag", "generation", "md5Hash", "mtime"),
    *("updated", "LastModified", "last_modified", "created"),
)

_staged: dict[Path, "RemoteDirectory"] = {}


def is_url(name: str) -> bool:
    return _URL.match(name) is not None


class RemoteFile:
    """An object in a store, a `ByteFile`. path: its URL. size: bytes, as listed."""

    def __init__(self, directory: "RemoteDirectory", name: str):
        self.path: str | Path = f"{directory.url}/{name}"
        self.size = int(directory.files[name]["size"])
        self._directory, self._name = directory, name

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """As `ByteFile.read_into`, in one request. Raises CheckpointError."""
        data = self._directory.read(self._name, offset, offset + len(buffer))
        if len(data) > len(buffer):
            raise CheckpointError(self.path, f"{len(buffer)} bytes were requested, the store gave {len(data)}")
        buffer[: len(data)] = data
        return len(data)

    def version(self) -> str:
        return self._directory.version(self._name)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class RemoteDirectory:
    """A directory in an object store, as listed.

    Attributes:
      url: without a slash at the end. system: fsspec's file system. root: the directory's name in it.
      files: the store's metadata of each file, by name.
    """

    url: str
    system: Any
    root: str
    files: Mapping[str, Mapping[str, Any]]

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file, in one request. Raises CheckpointError."""
        with _explained(f"{self.url}/{name}"):
            return self.system.cat_file(f"{self.root}/{name}", start=start, end=stop)

    def version(self, name: str) -> str:
        info = self.files[name]
        return " ".join([str(info["size"]), *(f"{key}={info[key]}" for key in _VERSION_KEYS if key in info)])


def remote_of(directory: Path) -> RemoteDirectory | None:
    """The store that a local directory was copied from by `stage` in this process; None for any other directory."""
    return _staged.get(directory)


def stage(url: str) -> Path:
    """Copies the small files of a Hugging Face checkpoint in a store; returns the local directory.

    Raises:
      CheckpointNotFoundError: nothing there, or a missing package, with the extra to install.
      CheckpointError: no access; a converted checkpoint or a GGUF file, which are read from disks only.
    """
    remote = _listed(url.rstrip("/"))
    for directory, known in _staged.items():
        if known.url == remote.url and known.files == remote.files:
            return directory
    _check_form(remote)
    directory = Path(tempfile.mkdtemp(prefix="jaxinfer-store-")).resolve()
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    names = [name for name in remote.files if any(fnmatch(name, pattern) for pattern in _DESCRIBING)]
    for name in names:
        if (size := remote.files[name]["size"]) > MAX_JSON_BYTES:
            raise CheckpointError(f"{remote.url}/{name}", f"{size} bytes, the limit is {MAX_JSON_BYTES}")

    def copy(name: str) -> None:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(remote.read(name, 0, remote.files[name]["size"]))

    with ThreadPoolExecutor(_NUM_CONNECTIONS) as executor:
        list(executor.map(copy, names))
    _staged[directory] = remote
    return directory


def _listed(url: str) -> RemoteDirectory:
    try:
        import fsspec
    except ImportError:
        raise CheckpointNotFoundError(
            url, f"object stores need the package fsspec, which is not installed: {install_hint(EXTRA)}"
        ) from None
    if "::" in url:
        raise CheckpointNotFoundError(url, "chained URLs are not read: name the directory itself")
    try:
        system, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        protocol = url.split(":")[0]
        raise CheckpointNotFoundError(
            url,
            f"{protocol}:// needs a package of its own beside 'jaxinfer[{EXTRA}]': {str(error).strip()} "
            "(gcsfs for gs://, s3fs for s3://, adlfs for az://)",
        ) from None
    except ValueError as error:
        raise CheckpointNotFoundError(url, f"is not a URL that fsspec opens: {error}") from None
    with _explained(url):
        entries = system.ls(root, detail=True)
        files = _files(entries)
        for entry in entries:
            name = entry["name"].rstrip("/").rsplit("/", 1)[-1]
            if entry["type"] == "directory" and any(fnmatch(name, folder) for folder in _FOLDERS):
                files |= {
                    f"{name}/{inner}": info for inner, info in _files(system.ls(entry["name"], detail=True)).items()
                }
    return RemoteDirectory(url, system, root.rstrip("/"), files)


def _files(entries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {entry["name"].rsplit("/", 1)[-1]: entry for entry in entries if entry["type"] == "file"}


def _check_form(remote: RemoteDirectory) -> None:
    if remote.url.endswith((".gguf", ".safetensors")) and len(remote.files) <= 1:
        is_gguf = remote.url.endswith(".gguf")
        what = "GGUF files are read from disks: copy it to one" if is_gguf else "pass its directory"
        raise CheckpointError(remote.url, f"is a file: {what}")
    if NATIVE_CONFIG in remote.files:
        raise CheckpointError(
            remote.url,
            "is a converted checkpoint, which is read from a disk: copy it to one, or store the Hugging Face form",
        )
    if CONFIG in remote.files:
        return
    if any(name.endswith(".gguf") for name in remote.files):
        raise CheckpointError(remote.url, "holds a GGUF file, which is read from a disk: copy it to one")
    raise CheckpointNotFoundError(remote.url, f"holds no {CONFIG}: not a checkpoint")


@contextmanager
def _explained(url: str) -> Iterator[None]:
    """Turns the errors of fsspec's packages, which are of many types, into CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointNotFoundError(url, "nothing is there") from None
    except PermissionError as error:
        raise CheckpointError(url, f"no access: {_first_line(error)}") from error
    except Exception as error:
        raise CheckpointError(url, f"could not be read, {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().split("\n")), "") or type(error).__name__
