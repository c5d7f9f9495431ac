"""A GGUF checkpoint of one or several files, as one table of tensors and one set of metadata."""

import hashlib
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import numpy as np

from checkpoints_convert.errors import CheckpointError, CheckpointNotFoundError
from checkpoints_convert.files import NATIVE_CONFIG, WEIGHTS_INDEX
from checkpoints_convert.gguf.file import GGUFFile, GGUFTensorEntry, Scalar

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf")
MAX_PARTS = 1000


class GGUFIndex:
    """The tensors of a file, or of all parts of a split one, and the metadata of the first part.

    Raises CheckpointError for parts that are missing or do not belong together, a tensor stored twice, and as
    `GGUFFile`.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._files: list[GGUFFile] = []
        self._file_of: dict[str, GGUFFile] = {}
        self.tensors: Mapping[str, GGUFTensorEntry] = {}
        try:
            for part in parts_of(self.path):
                self._files.append(GGUFFile(part))
            self._check_parts()
            self._build_table()
        except BaseException:
            self.close()
            raise

    @property
    def keys(self) -> tuple[str, ...]:
        return self._files[0].keys

    def entry(self, name: str) -> GGUFTensorEntry:
        return self.tensors[name]

    def path_of(self, name: str) -> Path:
        """The file of a tensor."""
        return self._file_of[name].path

    def scalar(self, key: str) -> Scalar | None:
        return self._files[0].scalar(key)

    def text(self, key: str) -> str | None:
        return self._files[0].text(key)

    def numbers(self, key: str) -> np.ndarray | None:
        return self._files[0].numbers(key)

    def texts(self, key: str) -> Iterator[str] | None:
        return self._files[0].texts(key)

    def places(self, key: str, wanted: Collection[str]) -> dict[str, list[int]]:
        return self._files[0].places(key, wanted)

    def count(self, key: str) -> int | None:
        return self._files[0].count(key)

    def describe(self, key: str) -> str:
        return self._files[0].describe(key)

    def read(self, name: str) -> np.ndarray:
        """A tensor as stored: uint8 [rows, bytes], with the leading axes flattened."""
        return self.read_rows(name, 0, math.prod(self.entry(name).shape[:-1]))

    def read_rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Rows [first, last) of `read`: uint8 [last - first, bytes]."""
        entry = self.entry(name)
        row_bytes = entry.shape[-1] // entry.kind.block_size * entry.kind.block_bytes
        raw = np.empty((last - first) * row_bytes, np.uint8)
        self._file_of[name].read_into(name, first * row_bytes, raw.data)
        return raw.reshape(last - first, row_bytes)

    def fingerprint(self) -> str:
        """A digest that changes when a file is replaced, resized or touched."""
        digest = hashlib.sha256()
        for file in self._files:
            status = os.stat(file.path)
            digest.update(f"{file.path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def close(self) -> None:
        for file in self._files:
            file.close()

    def __enter__(self) -> "GGUFIndex":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_parts(self) -> None:
        for number, file in enumerate(self._files):
            count = file.scalar("split.count")
            if len(self._files) == 1:
                if count not in (None, 0, 1):
                    raise CheckpointError(
                        file.path,
                        f"is part of {count}, whose names must end in -00001-of-{int(count):05}{SUFFIX} and so on",
                    )
                continue
            found = (file.scalar("split.no"), count)
            if found != (number, len(self._files)):
                raise CheckpointError(
                    file.path,
                    f"split.no and split.count are {found[0]} and {found[1]}, its name says {number} of"
                    f" {len(self._files)}",
                )

    def _build_table(self) -> None:
        for file in self._files:
            for name in file.tensors:
                if name in self._file_of:
                    other = self._file_of[name].path.name
                    raise CheckpointError(file.path, f"tensor {name!r} is stored in {other} too")
                self._file_of[name] = file
        self.tensors = {name: file.tensors[name] for name, file in self._file_of.items()}
        declared = self._files[0].scalar("split.tensors.count")
        if len(self._files) > 1 and declared is not None and declared != len(self._file_of):
            raise CheckpointError(
                self.path, f"split.tensors.count is {declared}, the {len(self._files)} parts have {len(self._file_of)}"
            )


def parts_of(path: Path) -> list[Path]:
    """The files of the checkpoint that `path` is one of. Raises CheckpointError for missing ones."""
    match = _PART.fullmatch(path.name)
    if not match:
        return [path]
    total = int(match["total"])
    if not 1 <= total <= MAX_PARTS:
        raise CheckpointError(path, f"its name says {total} parts, not 1 to {MAX_PARTS}")
    parts = [path.with_name(f"{match['stem']}-{number:05}-of-{total:05}{SUFFIX}") for number in range(1, total + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(path.parent, *(f"the part {name} is missing" for name in missing))
    return parts


def find_gguf(path: Path) -> Path | None:
    """The path itself if it is a GGUF file, or the GGUF checkpoint of a directory without any other; else None.

    Raises CheckpointError if a directory has several.
    """
    if path.is_file():
        return path if path.suffix == SUFFIX else None
    if (path / NATIVE_CONFIG).exists() or (path / WEIGHTS_INDEX).exists() or any(path.glob("*.safetensors")):
        return None
    return _only_one(path)


def _only_one(directory: Path) -> Path | None:
    first = {}
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        match = _PART.fullmatch(path.name)
        first.setdefault((match["stem"], match["total"]) if match else path.name, path)
    if len(first) > 1:
        names = ", ".join(path.name for path in list(first.values())[:5])
        raise CheckpointNotFoundError(
            directory, f"holds {len(first)} GGUF checkpoints, {names}: pass the path of one of them"
        )
    return next(iter(first.values()), None)
