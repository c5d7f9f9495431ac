"""Safetensors files: one file with its header checked in full, and the files of a checkpoint as one table of tensors.

The format: an 8-byte little-endian header length, a JSON header, then the tensors' bytes back to back in C order.
Nothing is mapped into memory: reads go to buffers of the caller, so resident memory is what the caller holds, and
a file that shrinks while it is read is an error rather than a signal.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import WEIGHTS_INDEX, collector_paused, parse_json, read_json
from checkpoints_convert.storage import MIN_PIECE_BYTES as REMOTE_MIN_PIECE_BYTES
from checkpoints_convert.storage import ByteFile, LocalFile, RemoteFile, fill, fill_from_tensor, remote_of
from jaxinfer.checks import did_you_mean
from jaxinfer.files import Closable

# Safetensors dtype and shape of a tensor.
TensorHeader = tuple[str, tuple[int, ...]]

_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
_NUM_OPENED = 8
# A page, the least that is read from a disk: below it, reading a gap costs no more than skipping it.
MIN_PIECE_BYTES = 4096
_PICKLED = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}


@dataclass(frozen=True)
class TensorEntry:
    """dtype, shape, and position of a tensor: bytes [begin, end) after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsIndex(Closable):
    """Every tensor of a repository directory.

    The files are those named by `model.safetensors.index.json`; without it `model.safetensors`; without that
    `model-*.safetensors`. Others (consolidated*, adapter_*, optimizer states) are ignored.

    Raises CheckpointError for missing shards, tensors not where the index says, a tensor stored twice, and names
    that lead out of the directory.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._remote = remote_of(self.directory)
        self.where: str | Path = self._remote.url if self._remote else self.directory
        weight_map = _weight_map(self.directory)
        present = set(self._remote.files) if self._remote else set()
        if not self._remote and self.directory.is_dir():
            present = {path.name for path in self.directory.iterdir() if path.is_file()}
        names = sorted(set(weight_map.values())) if weight_map is not None else _shard_names(self.where, present)
        missing = [name for name in names if name not in present]
        if missing:
            raise CheckpointError(self.where, *(f"the shard {name} is missing" for name in missing))
        self._files: dict[str, SafetensorsFile] = {}
        self._file_of: dict[str, str] = {}
        try:
            if remote := self._remote:
                with ThreadPoolExecutor(_NUM_OPENED) as executor:  # each takes a few round trips
                    opened = executor.map(SafetensorsFile, (RemoteFile(remote, name) for name in names))
                    self._files = dict(zip(names, opened, strict=True))
            else:
                check_inside(self.directory, names)
                for name in names:
                    self._files[name] = SafetensorsFile(self.directory / name)
            self._build_table(weight_map or {})
        except BaseException:
            self.close()
            raise

    @property
    def min_piece_bytes(self) -> int:
        """Size in bytes below which pieces of rows are not read separately."""
        return REMOTE_MIN_PIECE_BYTES if self._remote else MIN_PIECE_BYTES

    @property
    def headers(self) -> dict[str, TensorHeader]:
        """Name to (dtype, shape) of every tensor."""
        return {
            name: (entry.dtype, entry.shape) for file in self._files.values() for name, entry in file.tensors.items()
        }

    def entry(self, name: str) -> TensorEntry:
        return self._files[self._file_of[name]].tensors[name]

    def path_of(self, name: str) -> str | Path:
        """Path of the file of a tensor; a URL in an object store."""
        return self._files[self._file_of[name]].path

    def file_of(self, name: str) -> str:
        """Name of the file of a tensor."""
        return self._file_of[name]

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` with the tensor's bytes from `offset` on. Safe to call from several threads."""
        self._files[self._file_of[name]].read_into(name, offset, buffer)

    def fingerprint(self) -> str:
        """A digest that changes when a file is replaced, resized or touched."""
        digest = hashlib.sha256()
        for name, file in sorted(self._files.items()):
            digest.update(f"{name} {file.version()}\n".encode() + file.header)
        return digest.hexdigest()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _build_table(self, weight_map: Mapping[str, str]) -> None:
        problems = []
        for file_name, file in self._files.items():
            for name in file.tensors:
                if name in self._file_of:
                    problems.append(f"tensor {name!r} is stored twice, in {self._file_of[name]} and {file_name}")
                self._file_of[name] = file_name
        for name, file_name in weight_map.items():
            if self._file_of.get(name) != file_name:
                other = f", it is in {self._file_of[name]}" if name in self._file_of else ""
                problems.append(f"tensor {name!r} is not in {file_name}, where {WEIGHTS_INDEX} puts it{other}")
        if problems:
            raise CheckpointError(self.where, *problems)


def weight_files(directory: Path) -> list[str] | None:
    """The shards `model.safetensors.index.json` names, or None without that file."""
    weight_map = _weight_map(directory)
    return None if weight_map is None else sorted(set(weight_map.values()))


def _weight_map(directory: Path) -> dict[str, str] | None:
    path = directory / WEIGHTS_INDEX
    if not path.exists():
        return None
    weight_map = read_json(path, unique_keys=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(path, "has no weight_map of tensor names to files")
    if len(weight_map) > MAX_TENSORS:
        raise CheckpointError(path, f"weight_map has {len(weight_map)} tensors, the limit is {MAX_TENSORS}")
    problems = []
    names = dict.fromkeys(map(str, weight_map.values()))
    if len(names) > MAX_FILES:
        raise CheckpointError(path, f"weight_map names {len(names)} files, the limit is {MAX_FILES}")
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", name):  # without directory or drive
            problems.append(f"weight_map names the file {name!r}, which is not a plain file name")
        elif not name.endswith(".safetensors"):
            problems.append(f"weight_map names the file {name!r}, which is not a .safetensors file")
    problems += [f"tensor {name!r} maps to {file!r}" for name, file in weight_map.items() if not isinstance(file, str)]
    if problems:
        raise CheckpointError(path, *problems)
    return weight_map


def _shard_names(where: str | Path, present: set[str]) -> list[str]:
    if "model.safetensors" in present:
        return ["model.safetensors"]
    names = sorted(name for name in present if fnmatchcase(name, "model-*.safetensors"))
    if not names:
        raise CheckpointError(where, _nothing_to_open(sorted(present)))
    matches = [match for name in names if (match := _SHARD.fullmatch(name))]
    totals = {int(match[2]) for match in matches}
    if len(totals) > 1:
        raise CheckpointError(where, f"shards of {' and of '.join(map(str, sorted(totals)))} files lie together")
    numbers = {int(match[1]) for match in matches}
    for total in totals:
        width = len(matches[0][1])
        names += [
            f"model-{i:0{width}}-of-{total:0{width}}.safetensors" for i in range(1, total + 1) if i not in numbers
        ]
    return names


def _nothing_to_open(present: list[str]) -> str:
    pickled = [name for name in present if Path(name).suffix in _PICKLED]
    other = [name for name in present if name.endswith((".safetensors", ".gguf"))]
    if pickled:
        return (
            f"holds {pickled[0]} and no safetensors: pickled checkpoints can run code when opened, so they never are."
            " Convert it to safetensors with the library that wrote it, then open that."
        )
    if any(name.startswith("adapter_") for name in other):
        return "holds an adapter, not a whole model: merge it into its base model (jaxinfer convert --merge-lora)"
    if other:
        return f"holds {', '.join(other[:3])}, but no model.safetensors, model-*.safetensors or {WEIGHTS_INDEX}"
    return f"holds no model.safetensors, model-*.safetensors or {WEIGHTS_INDEX}"


def check_inside(directory: Path, names: Iterable[str]) -> None:
    """Raises CheckpointError for a link that leads out of the directory and of the hub cache that it belongs to."""
    root = directory.resolve()
    allowed = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]
    for path in (directory / name for name in names):
        target = path.resolve()
        if not any(map(target.is_relative_to, allowed)):
            raise CheckpointError(path, f"is a link to {target}, outside the checkpoint: put the file in the directory")


# The checkpoints with the most experts have 200,000 tensors in 60 files.
MAX_TENSORS, MAX_TENSORS_OF_FILE, MAX_FILES = 500_000, 100_000, 10_000
_MAX_PROBLEMS = 100  # more are not looked for
MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation

DTYPE_BITS: dict[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}

# The dtypes of dense weights; others belong to a quantization format.
FLOAT_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

# The dtypes that NumPy has, with ml_dtypes; the others (6 bits, FNUZ) are not read.
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


class SafetensorsFile(Closable):
    """An open file. `tensors` maps names to entries, `metadata` is the header's free text.

    Raises CheckpointError, naming the file and the tensor, for a file that is not well formed, or whose header has more
    than `max_header_bytes`.
    """

    def __init__(self, file: str | Path | ByteFile, *, max_header_bytes: int = MAX_HEADER_BYTES):
        self._max_header_bytes = max_header_bytes
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
        """A text that changes when the file does."""
        return self._file.version()

    def close(self) -> None:
        self._file.close()

    def _read_header(self, size: int) -> bytes:
        def read(length: int, where: int) -> bytes:
            buffer = bytearray(length)
            fill(memoryview(buffer), self._file, where, "the header")
            return bytes(buffer)

        if size < 8:
            raise CheckpointError(self.path, f"{size} bytes, too short for the 8-byte header length")
        length = int.from_bytes(read(8, 0), "little")
        if length > self._max_header_bytes:
            raise CheckpointError(self.path, f"header of {length} bytes, the limit is {self._max_header_bytes}")
        if 8 + length > size:
            raise CheckpointError(self.path, f"header of {length} bytes in a file of {size} bytes: truncated?")
        header = read(length, 8)
        if not header.startswith(b"{"):
            raise CheckpointError(self.path, f"the header begins with {header[:8]!r}, not with '{{'")
        return header


@collector_paused()
def parse_header(
    header: bytes, num_data_bytes: int, where: str | Path
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Entries and metadata of a header followed by `num_data_bytes` bytes of data; `where` is for messages.

    Raises CheckpointError unless every entry is well typed, has the size of its shape and dtype, and all of them
    together cover the data without a hole or an overlap.
    """
    data = parse_json(header, where, unique_keys=True)
    if len(data) > MAX_TENSORS_OF_FILE:
        raise CheckpointError(where, f"{len(data)} tensors, the limit of a file is {MAX_TENSORS_OF_FILE}")
    metadata = data.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(where, "__metadata__ must map strings to strings")
    problems: list[str] = []
    entries: dict[str, TensorEntry] = {}
    for name, value in data.items():
        parsed = _parse_entry(value, num_data_bytes)
        if isinstance(parsed, str):
            problems.append(f"tensor {name!r}: {parsed}")
            if len(problems) == _MAX_PROBLEMS:
                break
        else:
            entries[name] = parsed
    if not problems:
        problems = _layout_problems(entries, num_data_bytes)
    if problems:
        raise CheckpointError(where, *problems)
    return entries, metadata


def _parse_entry(value: Any, num_data_bytes: int) -> TensorEntry | str:
    """The entry, or a text with what is wrong with it."""
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        fields = ", ".join(sorted(map(repr, value))) if isinstance(value, dict) else type(value).__name__
        return f"has {fields or 'nothing'}, not 'dtype', 'shape' and 'data_offsets'"
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return f"unknown dtype {dtype!r}" + did_you_mean(dtype, DTYPE_BITS)
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        return f"shape {shape!r} is not a list of sizes"
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
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
    return type(value) is int and 0 <= value < 2**63


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
