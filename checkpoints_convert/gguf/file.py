"""One GGUF file: its metadata and its table of tensors, checked in full, and its bytes.

The format (ggml, docs/gguf.md): magic, version, counts; key-value pairs; one entry per tensor; then, from the next
multiple of the alignment on, the tensors' bytes. All sizes are compared with the file's before anything of that size
is read, so a file cannot make this module allocate more than it has bytes. Strings and arrays stay in the file until
they are read."""

import hashlib
import math
import os
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.gguf.blocks import TYPE_NAMES, TYPES, BlockType
from checkpoints_convert.storage import LocalFile, fill_from_tensor
from jaxinfer.files import Closable

_WINDOW = 2**16  # bytes read ahead: small numbers and names come from memory
# Bytes read at once of an array of strings: for each, those of a length and a short text, up to a limit.
_STRING_BYTES, _MAX_WINDOW = 20, 2**22


class FileCursor:
    """A position in an open file of `size` bytes.

    Raises CheckpointError at the end of the file, with `what` was read and the number of missing bytes.
    """

    def __init__(self, descriptor: int, size: int, path: Path, position: int = 0):
        self._descriptor, self._size, self._path, self.position = descriptor, size, path, position
        self._window, self._start = b"", position

    @property
    def num_left(self) -> int:
        """Bytes from here to the end."""
        return self._size - self.position

    def number(self, dtype: Any, what: str) -> Any:
        """Reads one number, as a Python object."""
        dtype = np.dtype(dtype)
        return np.frombuffer(self.take(dtype.itemsize, what), dtype)[0].item()

    def take(self, count: int, what: str) -> bytes:
        self._check(count, what)
        begin = self.position - self._start
        if begin < 0 or begin + count > len(self._window):
            self._window = b""  # freed before the next is read
            self._window = self._pread(max(count, min(_WINDOW, self.num_left)), what)
            self._start, begin = self.position, 0
        self.position += count
        return self._window if (begin, count) == (0, len(self._window)) else self._window[begin : begin + count]

    def skip(self, count: int, what: str) -> None:
        self._check(count, what)
        self.position += count

    def skip_strings(self, count: int, what: str) -> np.ndarray:
        """Skips strings, each a length of 8 bytes and as many bytes. Returns the position of each (int64)."""
        if count * LENGTH.size > self.num_left:
            self._check(count * LENGTH.size, what)
        parts, num_skipped = [np.zeros(0, np.int64)], 0
        while num_skipped < count:
            self._check(LENGTH.size, f"string {num_skipped} of {what}")
            wanted = max(_WINDOW, min((count - num_skipped) * _STRING_BYTES, _MAX_WINDOW))
            begin = self.position
            starts, after = string_starts(self._pread(min(wanted, self.num_left), what), count - num_skipped)
            num_skipped += len(starts)
            last = int(starts[-1])
            self.position = begin + last + LENGTH.size
            self.skip(after - last - LENGTH.size, f"string {num_skipped - 1} of {what}")
            parts.append(starts + begin)
        return np.concatenate(parts)

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


# Strings of an array are a length of 8 bytes and as many bytes each, one after the other. Vocabularies have up to a
# million of them, at which reading them one by one takes most of a start. Nearly all have 1 to 255 bytes, so that seven
# bytes of their lengths are zero: such places are found at once, and are those of strings wherever each begins where
# the one before ends.
LENGTH = struct.Struct("<Q")
_STEPS = 64  # strings that are read one by one before the next place is looked for


def string_starts(raw: bytes, limit: int) -> tuple[np.ndarray, int]:
    """Positions (int64) of the strings of `raw`, which begins with one: those whose length lies in it, at most `limit`.
    And the position after the last of them, which may be beyond the end."""
    likely, after, breaks = _likely(raw)
    parts, position, num_left = [np.zeros(0, np.int64)], 0, limit
    while num_left and position + LENGTH.size <= len(raw):
        first = int(np.searchsorted(likely, position))
        if first < len(likely) and likely[first] == position:
            nearest = int(np.searchsorted(breaks, first))
            last = int(breaks[nearest]) if nearest < len(breaks) else len(likely) - 1
            last = min(last, first + num_left - 1)
            parts.append(likely[first : last + 1])
            position = int(after[last])
        else:
            starts, position = _one_by_one(raw, position, min(num_left, _STEPS))
            parts.append(np.asarray(starts, np.int64))
        num_left -= len(parts[-1])
    return np.concatenate(parts), position


def _likely(raw: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places that look like the lengths of short strings, where such strings end, and the indices of those that end
    elsewhere than where the next one is."""
    data = np.frombuffer(raw, np.uint8)
    num_places = max(len(data) - LENGTH.size + 1, 0)
    is_likely = data[:num_places] != 0
    for byte in range(1, LENGTH.size):
        is_likely &= data[byte : byte + num_places] == 0
    places = np.flatnonzero(is_likely)
    after = places + LENGTH.size + data[places]
    return places, after, np.flatnonzero(after[:-1] != places[1:])


def _one_by_one(raw: bytes, position: int, limit: int) -> tuple[list[int], int]:
    starts = []
    while len(starts) < limit and position + LENGTH.size <= len(raw):
        starts.append(position)
        position += LENGTH.size + LENGTH.unpack_from(raw, position)[0]
    return starts, position


VERSIONS = (2, 3)
# Far above any model; they bound time and memory for malformed tables.
MAX_KEYS = 2**16
MAX_TENSORS = 2**16
MAX_STRINGS = 2**20  # of one array: the largest vocabularies have 2**18 tokens and 2**19 merges
MAX_NAME_BYTES = 2**10
MAX_ALIGNMENT = 2**20

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = (
    *((0, np.uint8), (1, np.int8), (2, np.uint16), (3, np.int16), (4, np.uint32), (5, np.int32), (6, np.float32)),
    *((_BOOL, np.uint8), (10, np.uint64), (11, np.int64), (12, np.float64)),
)
_NUMPY = {number: np.dtype(scalar).newbyteorder("<") for number, scalar in _SCALARS}
# Smallest entries: an empty name, type and a value of one byte; name, dimensions, type and offset.
_LEAST_KEY_BYTES, _LEAST_TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8

Scalar = bool | int | float


@dataclass(frozen=True, slots=True)
class GGUFTensorEntry:
    """Type, shape in C order, and position of a tensor: bytes [begin, end) of the file."""

    kind: BlockType
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class _Stored:
    """A string of `count` bytes, or an array of `count` items of a type, that begins at a byte of the file; `starts`
    has the positions of strings in an array."""

    item_type: int
    is_array: bool
    count: int
    begin: int
    end: int
    starts: np.ndarray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Header:
    """The part before the tensors' bytes: `num_bytes` with this digest, of a file of `size` bytes."""

    size: int
    num_bytes: int
    digest: str
    values: dict[str, Scalar | _Stored]
    tensors: dict[str, GGUFTensorEntry]
    alignment: int


_MAX_HEADERS = 4
_headers: dict[Path, _Header] = {}  # the last that this process read: a start opens a file several times


class GGUFFile(Closable):
    """An open file. `tensors` maps names to entries; metadata is read by `scalar`, `text`, `numbers` and `texts`.
    `metadata_digest` (SHA-256, hex) is of the metadata and the table of tensors, as stored.

    Raises CheckpointError, naming the file and the key or tensor, for a file that is not well formed or has a tensor
    of a type that is not read.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._file = LocalFile(path)
        self.size = self._file.size
        try:
            header = self._header()
        except BaseException:
            self.close()
            raise
        self._values, self.tensors, self.alignment = header.values, header.tensors, header.alignment
        self.metadata_digest = header.digest

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._values)

    def scalar(self, key: str) -> Scalar | None:
        """A number or boolean; None where the key is missing, an array or a string."""
        value = self._values.get(key)
        return None if isinstance(value, _Stored) else value

    def text(self, key: str) -> str | None:
        """A string; None where the key is missing or not a string. Raises CheckpointError unless it is UTF-8."""
        value = self._values.get(key)
        if not isinstance(value, _Stored) or value.is_array:
            return None
        return self._decoded(self._cursor(value.begin).take(value.count, "the value"), key)

    def numbers(self, key: str) -> np.ndarray | None:
        """An array of numbers or booleans; None where the key is missing or something else."""
        value = self._values.get(key)
        if not isinstance(value, _Stored) or not value.is_array or value.item_type == _STRING:
            return None
        return np.frombuffer(self._array(value), _NUMPY[value.item_type])

    def texts(self, key: str) -> list[str] | None:
        """An array of strings; None where the key is missing or something else. Raises CheckpointError unless all are
        UTF-8."""
        value = self._values.get(key)
        if not isinstance(value, _Stored) or value.starts is None:
            return None
        raw = self._array(value)
        begins = value.starts - (value.begin - LENGTH.size)
        ends = np.append(begins[1:] - LENGTH.size, len(raw))[: value.count]
        places = zip(begins.tolist(), ends.tolist(), strict=True)
        try:
            return [str(raw[begin:end], "utf-8") for begin, end in places]
        except UnicodeDecodeError:
            for index, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
                self._decoded(raw[begin:end], f"item {index} of {key}")
            raise

    def places(self, key: str, wanted: Collection[str]) -> dict[str, list[int]]:
        """Indices of the items of an array of strings that are in `wanted`; {} if there is no such array. Other items
        are not decoded."""
        value = self._values.get(key)
        if not isinstance(value, _Stored) or value.starts is None:
            return {}
        raw, places = self._array(value), {}
        for text in wanted:
            item = text.encode()
            item, at = LENGTH.pack(len(item)) + item, -1
            while (at := raw.find(item, at + 1)) >= 0:
                index = int(np.searchsorted(value.starts, value.begin + at))
                if index < value.count and value.starts[index] == value.begin + at:  # else inside of a text
                    places.setdefault(text, []).append(index)
        return places

    def count(self, key: str) -> int | None:
        """Items of an array, without reading it; None where the key is missing or no array."""
        value = self._values.get(key)
        return value.count if isinstance(value, _Stored) and value.is_array else None

    def describe(self, key: str) -> str:
        """A value in words, for messages."""
        value = self._values.get(key)
        if not isinstance(value, _Stored):
            return "missing" if value is None else repr(value)
        return f"an array of {value.count} items" if value.is_array else f"a string of {value.count} bytes"

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` with the tensor's bytes from `offset` on. Safe to call from several threads."""
        entry = self.tensors[name]
        fill_from_tensor(buffer, self._file, entry.begin, entry.end, offset=offset, name=name)

    def close(self) -> None:
        self._file.close()

    def _cursor(self, position: int) -> FileCursor:
        return FileCursor(self._file.descriptor, self.size, self.path, position)

    def _header(self) -> _Header:
        """The header, parsed unless this process has parsed the same bytes before."""
        known = _headers.get(self.path)
        if known is not None and known.size == self.size and self._digest(known.num_bytes) == known.digest:
            return known
        header = self._read_header()
        _headers.pop(self.path, None)
        for path in list(_headers)[: 1 - _MAX_HEADERS]:
            _headers.pop(path, None)
        _headers[self.path] = header
        return header

    def _digest(self, num_bytes: int) -> str:
        return hashlib.sha256(self._cursor(0).take(num_bytes, "the metadata")).hexdigest()

    def _read_header(self) -> _Header:
        cursor = self._cursor(0)
        magic = cursor.take(min(4, self.size), "the magic")
        if magic != b"GGUF":
            raise CheckpointError(self.path, f"begins with {magic!r}, not with b'GGUF': not a GGUF file")
        version = cursor.number("<u4", "the version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            why = "a big-endian file" if swapped in VERSIONS else f"this version reads {VERSIONS[0]} and {VERSIONS[1]}"
            raise CheckpointError(self.path, f"GGUF version {version}: {why}")
        num_tensors = cursor.number("<u8", "the number of tensors")
        num_keys = cursor.number("<u8", "the number of keys")
        self._check_count("tensors", num_tensors, MAX_TENSORS, _LEAST_TENSOR_BYTES, cursor)
        self._check_count("keys", num_keys, MAX_KEYS, _LEAST_KEY_BYTES, cursor)
        self._values: dict[str, Scalar | _Stored] = {}
        for index in range(num_keys):
            self._read_pair(cursor, index)
        self.alignment = self._alignment()
        tensors = self._read_table(cursor, num_tensors)
        size, end = self.size, cursor.position
        return _Header(size, end, self._digest(end), self._values, tensors, self.alignment)

    def _check_count(self, what: str, count: int, limit: int, least: int, cursor: FileCursor) -> None:
        if count > limit:
            raise CheckpointError(self.path, f"{count} {what}, the limit is {limit}")
        if count * least > cursor.num_left:
            raise CheckpointError(
                self.path, f"{count} {what} take at least {count * least} bytes, {cursor.num_left} follow: truncated?"
            )

    def _read_pair(self, cursor: FileCursor, index: int) -> None:
        key = self._name(cursor, f"key {index}")
        what = f"key {key!r}"
        if key in self._values:
            raise CheckpointError(self.path, f"{what} appears twice")
        kind = cursor.number("<u4", what)
        if kind == _ARRAY:
            self._values[key] = self._skip_array(cursor, what)
        elif kind == _STRING:
            length = cursor.number("<u8", what)
            begin = cursor.position
            cursor.skip(length, what)
            self._values[key] = _Stored(_STRING, False, length, begin, cursor.position)
        elif kind in _NUMPY:
            value = cursor.number(_NUMPY[kind], what)
            if kind == _BOOL and value > 1:
                raise CheckpointError(self.path, f"{what} is a boolean of value {value}")
            self._values[key] = bool(value) if kind == _BOOL else value
        else:
            raise CheckpointError(self.path, f"{what} has the value type {kind}, which does not exist")

    def _skip_array(self, cursor: FileCursor, what: str) -> _Stored:
        kind, count = cursor.number("<u4", what), cursor.number("<u8", what)
        begin, starts = cursor.position, None
        if kind in _NUMPY:
            cursor.skip(count * _NUMPY[kind].itemsize, what)
        elif kind == _STRING:
            if count > MAX_STRINGS:
                raise CheckpointError(self.path, f"{what} has {count} strings, the limit is {MAX_STRINGS}")
            starts = cursor.skip_strings(count, what)
        elif kind == _ARRAY:
            raise CheckpointError(self.path, f"{what} is an array of arrays, which is not read")
        else:
            raise CheckpointError(self.path, f"{what} is an array of type {kind}, which does not exist")
        return _Stored(kind, True, count, begin, cursor.position, starts)

    def _name(self, cursor: FileCursor, what: str) -> str:
        length = cursor.number("<u8", what)
        if not 0 < length <= MAX_NAME_BYTES:
            raise CheckpointError(self.path, f"{what} has a name of {length} bytes, not 1 to {MAX_NAME_BYTES}")
        return self._decoded(cursor.take(length, what), what)

    def _decoded(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(self.path, f"{what} is not UTF-8: {error.reason} at byte {error.start}") from None

    def _array(self, value: _Stored) -> bytes:
        return self._cursor(value.begin).take(value.end - value.begin, "the array")

    def _alignment(self) -> int:
        key = "general.alignment"
        value = self._values.get(key, 32)
        is_power = type(value) is int and 0 < value <= MAX_ALIGNMENT and not value & (value - 1)
        if not is_power:
            raise CheckpointError(self.path, f"{key} is {self.describe(key)}, not a power of two up to {MAX_ALIGNMENT}")
        return int(value)  # type: ignore[arg-type]  # an int, as just checked

    def _read_table(self, cursor: FileCursor, num_tensors: int) -> dict[str, GGUFTensorEntry]:
        table: dict[str, tuple[BlockType, tuple[int, ...], int]] = {}
        for index in range(num_tensors):
            name = self._name(cursor, f"tensor {index}")
            if name in table:
                raise CheckpointError(self.path, f"tensor {name!r} appears twice")
            table[name] = self._read_entry(cursor, f"tensor {name!r}")
        start = -(-cursor.position // self.alignment) * self.alignment
        entries = {}
        for name, (kind, shape, offset) in table.items():
            begin = start + offset
            end = begin + math.prod(shape) // kind.block_size * kind.block_bytes
            if end > self.size:
                raise CheckpointError(
                    self.path, f"tensor {name!r} ends at byte {end}, the file has {self.size} bytes: truncated?"
                )
            entries[name] = GGUFTensorEntry(kind, shape, begin, end)
        self._check_layout(entries)
        return entries

    def _read_entry(self, cursor: FileCursor, what: str) -> tuple[BlockType, tuple[int, ...], int]:
        num_dims = cursor.number("<u4", what)
        if not 1 <= num_dims <= 4:
            raise CheckpointError(self.path, f"{what} has {num_dims} dimensions, not 1 to 4")
        shape = tuple(cursor.number("<u8", what) for _ in range(num_dims))[::-1]  # the file has the rows' length first
        number, offset = cursor.number("<u4", what), cursor.number("<u8", what)
        name = TYPE_NAMES.get(number)
        if name is None:
            raise CheckpointError(self.path, f"{what} has the type {number}, which ggml does not have")
        if name not in TYPES:
            known = ", ".join(TYPES)
            raise CheckpointError(self.path, f"{what} is stored as {name}, which is not read; read are {known}")
        kind = TYPES[name]
        if not all(0 < size < 2**63 for size in shape) or math.prod(shape) >= 2**63:
            raise CheckpointError(self.path, f"{what} has the shape {list(shape)}")
        if shape[-1] % kind.block_size:
            raise CheckpointError(
                self.path, f"{what} has rows of {shape[-1]} values, not a multiple of {name}'s {kind.block_size}"
            )
        if offset % self.alignment or offset >= 2**63:
            raise CheckpointError(
                self.path, f"{what} begins at offset {offset}, not a multiple of the alignment {self.alignment}"
            )
        return kind, shape, offset

    def _check_layout(self, entries: dict[str, GGUFTensorEntry]) -> None:
        position, previous = 0, ""
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin < position:
                raise CheckpointError(
                    self.path,
                    f"tensor {name!r} begins at byte {entry.begin}, inside {previous!r} which ends at {position}",
                )
            position, previous = entry.end, name
