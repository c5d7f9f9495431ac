"""Reading a file from front to back, never past its end, and never more at once than it has."""

import os
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints_convert.errors import CheckpointError

_WINDOW = 2**16  # bytes read ahead: small numbers and names come from memory
_LENGTH = struct.Struct("<Q")


class Cursor:
    """A position in an open file of `size` bytes.

    Raises CheckpointError, with `what` was to be read and how many bytes are missing, at the end of the file.
    """

    def __init__(self, descriptor: int, size: int, path: Path, position: int = 0):
        self._descriptor, self._size, self._path, self.position = descriptor, size, path, position
        self._window, self._start = b"", position

    @property
    def num_left(self) -> int:
        """Bytes from here to the end."""
        return self._size - self.position

    def number(self, dtype: Any, what: str) -> Any:
        """One number as Python has it."""
        dtype = np.dtype(dtype)
        return np.frombuffer(self.take(dtype.itemsize, what), dtype)[0].item()

    def take(self, count: int, what: str) -> bytes:
        self._check(count, what)
        begin = self.position - self._start
        if begin < 0 or begin + count > len(self._window):
            self._window = b""  # not held beside the next one
            self._window, self._start, begin = (
                self._pread(max(count, min(_WINDOW, self.num_left)), what),
                self.position,
                0,
            )
        self.position += count
        return self._window if (begin, count) == (0, len(self._window)) else self._window[begin : begin + count]

    def skip(self, count: int, what: str) -> None:
        self._check(count, what)
        self.position += count

    def skip_strings(self, count: int, what: str, wanted: Collection[bytes] = ()) -> dict[bytes, list[int]]:
        """Goes past strings, each a length of 8 bytes and as many bytes. Returns where those wanted are, by number."""
        lengths, found = frozenset(map(len, wanted)), {}
        if count * _LENGTH.size > self.num_left:
            self._check(count * _LENGTH.size, what)
        window, start, position, size = b"", self.position, self.position, self._size
        for index in range(count):
            begin = position - start
            if begin + _LENGTH.size > len(window):
                self.position = position
                self._check(_LENGTH.size, f"string {index} of {what}")
                window, start, begin = self._pread(min(_WINDOW, self.num_left), what), position, 0
            (length,) = _LENGTH.unpack_from(window, begin)
            position += _LENGTH.size + length
            if position > size:
                self.position = position - length
                self._check(length, f"string {index} of {what}")
            if length in lengths:
                text = window[begin + _LENGTH.size : begin + _LENGTH.size + length]
                if len(text) < length:
                    text = os.pread(self._descriptor, length, position - length)
                if text in wanted:
                    found.setdefault(text, []).append(index)
        self.position = position
        return found

    def _check(self, count: int, what: str) -> None:
        if count > self.num_left:
            raise CheckpointError(
                self._path,
                f"{what} takes {count} bytes from byte {self.position} on, {self.num_left} are left: truncated?",
            )

    def _pread(self, count: int, what: str) -> bytes:
        parts, where = [], self.position
        while count:
            part = os.pread(self._descriptor, count, where)
            if not part:
                raise CheckpointError(self._path, f"{what}: the file ends at byte {where}, {count} bytes too soon")
            parts.append(part)
            where, count = where + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
