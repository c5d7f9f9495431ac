"""One safetensors file: its header, checked in full, and its bytes, read where asked.

The format: an 8-byte little-endian header length, a JSON header, then the tensors' bytes back to back in C order.
Nothing is mapped into memory: reads go to buffers of the caller, so resident memory is what the caller holds, and
a file that shrinks while it is read is an error rather than a signal.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints_convert.byte_file import ByteFile, LocalFile, fill, fill_from_tensor
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import parse_json
from jaxinfer.checks import did_you_mean

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation

DTYPE_BITS: dict[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}

# The types weights are computed in; the packed and scaled ones belong to a quantization format.
FLOAT_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

# Those a host array can hold; the others (6 bits, FNUZ) have no reader.
NUMPY_DTYPES: dict[str, np.dtype] = {
    **FLOAT_DTYPES,
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: [begin, end) bytes after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """An open file. `tensors` maps names to entries, `metadata` is the header's free text.

    Raises CheckpointError, naming the file and the tensor, for a file that is not well formed.
    """

    def __init__(self, file: str | Path | ByteFile):
        self._file: ByteFile = LocalFile(file) if isinstance(file, (str, Path)) else file
        self.path = self._file.path
        try:
            size = self._file.size
            self.header = self._read_header(size)
            self._data_start = 8 + len(self.header)
            self.tensors, self.metadata = parse_header(self.header, size - self._data_start, self.path)
        except BaseException:
            self.close()
            raise

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` with the tensor's bytes from `offset` on. Safe to call from several threads."""
        entry, start = self.tensors[name], self._data_start
        fill_from_tensor(buffer, self._file, start + entry.begin, start + entry.end, offset=offset, name=name)

    def version(self) -> str:
        """Changes when the file does."""
        return self._file.version()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read_header(self, size: int) -> bytes:
        if size < 8:
            raise CheckpointError(self.path, f"{size} bytes, too short for the 8-byte header length")
        length = int.from_bytes(self._read(8, 0), "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(self.path, f"header of {length} bytes, the limit is {MAX_HEADER_BYTES}")
        if 8 + length > size:
            raise CheckpointError(self.path, f"header of {length} bytes in a file of {size} bytes: truncated?")
        header = self._read(length, 8)
        if not header.startswith(b"{"):
            raise CheckpointError(self.path, f"the header begins with {header[:8]!r}, not with '{{'")
        return header

    def _read(self, length: int, where: int) -> bytes:
        buffer = bytearray(length)
        fill(memoryview(buffer), self._file, where, "the header")
        return bytes(buffer)


def parse_header(
    header: bytes, num_data_bytes: int, where: str | Path
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Entries and metadata of a header followed by `num_data_bytes` bytes of data; `where` is for messages.

    Raises CheckpointError unless every entry is well typed, has the size of its shape and dtype, and all of them
    together cover the data without a hole or an overlap.
    """
    data = parse_json(header, where, unique_keys=True)
    metadata = data.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(where, "__metadata__ must map strings to strings")
    problems: list[str] = []
    entries: dict[str, TensorEntry] = {}
    for name, value in data.items():
        parsed = _parse_entry(value, num_data_bytes)
        if isinstance(parsed, str):
            problems.append(f"tensor {name!r}: {parsed}")
        else:
            entries[name] = parsed
    if not problems:
        problems = _layout_problems(entries, num_data_bytes)
    if problems:
        raise CheckpointError(where, *problems)
    return entries, metadata


def _parse_entry(value: Any, num_data_bytes: int) -> TensorEntry | str:
    """The entry, or what is wrong with it."""
    if not isinstance(value, Mapping) or set(value) != {"dtype", "shape", "data_offsets"}:
        found = ", ".join(sorted(map(repr, value))) if isinstance(value, Mapping) else type(value).__name__
        return f"has {found or 'nothing'}, not 'dtype', 'shape' and 'data_offsets'"
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return f"unknown dtype {dtype!r}" + did_you_mean(dtype, DTYPE_BITS)
    if not isinstance(shape, list) or not all(_is_count(size) for size in shape):
        return f"shape {shape!r} is not a list of sizes"
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        return f"data_offsets {offsets!r} is not a pair of byte positions"
    begin, end = offsets
    if begin > end:
        return f"begins at byte {begin}, after its end at {end}"
    if end > num_data_bytes:
        return f"ends at byte {end}, the file has {num_data_bytes} bytes of data: truncated?"
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8:
        return f"{dtype}{shape} is {bits} bits, not whole bytes"
    if end - begin != bits // 8:
        return f"{dtype}{shape} is {bits // 8} bytes, its data_offsets hold {end - begin}"
    return TensorEntry(dtype, tuple(shape), begin, end)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _layout_problems(entries: Mapping[str, TensorEntry], num_data_bytes: int) -> list[str]:
    problems = []
    position, previous = 0, None
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin < position:
            problems.append(
                f"tensor {name!r} begins at byte {entry.begin}, inside {previous!r} which ends at {position}"
            )
        elif entry.begin > position:
            problems.append(f"bytes [{position}, {entry.begin}) before tensor {name!r} belong to no tensor")
        position, previous = max(position, entry.end), name
    if position < num_data_bytes:
        problems.append(f"the last {num_data_bytes - position} bytes belong to no tensor")
    return problems
