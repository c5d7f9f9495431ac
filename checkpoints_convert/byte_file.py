"""A file as bytes that are read by position: on a disk here, in an object store elsewhere."""

import os
import stat
from pathlib import Path
from typing import Protocol

from checkpoints_convert.errors import CheckpointError


class ByteFile(Protocol):
    """An open file of any kind. path: for messages. size: in bytes."""

    path: str | Path
    size: int

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Reads from `offset` on into the buffer's beginning; how many bytes, 0 at the end. Thread-safe."""
        ...

    def version(self) -> str:
        """Changes when the file does."""
        ...

    def close(self) -> None: ...


class LocalFile:
    """A `ByteFile` on a disk. Raises CheckpointError for what cannot be opened, or is a pipe or a device."""

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
    """Fills `buffer` with the file's bytes from `where` on. Raises CheckpointError, saying of `what`, where it ends."""
    while buffer:
        num_read = file.read_into(where, buffer)
        if num_read == 0:
            raise CheckpointError(file.path, f"{what}: the file ends at byte {where}, {len(buffer)} bytes too soon")
        where, buffer = where + num_read, buffer[num_read:]


def fill_from_tensor(
    buffer: memoryview, file: ByteFile, begin: int, end: int, *, offset: int = 0, name: str = ""
) -> None:
    """Fills `buffer` with bytes of a tensor, which has [begin, end) of the file, from its byte `offset` on.

    Raises IndexError for bytes that the tensor does not have, CheckpointError where the file ends.
    """
    buffer = buffer.cast("B")
    size = end - begin
    if offset < 0 or offset + len(buffer) > size:
        raise IndexError(f"bytes [{offset}, {offset + len(buffer)}) of tensor {name!r}, which has {size}")
    fill(buffer, file, begin + offset, f"tensor {name!r}")
