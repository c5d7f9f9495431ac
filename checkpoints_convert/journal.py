"""The record of a conversion under way: which units are on the disk, with their checksums.

One JSON line per finished unit, made durable after the unit's files are. A line cut off by a crash is no line. The
first line names what is converted, so that a changed source or dtype starts over.
"""

import fcntl
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.manifest import Entries, measure
from checkpoints_convert.native_arrays import Description
from checkpoints_convert.staging import JOURNAL
from jaxinfer.files import sync


@dataclass(frozen=True)
class FinishedUnit:
    """A unit on the disk: its files relative to the checkpoint, the digests of its parameters, the largest relative
    errors of its casts, the descriptions of its quantized parameters, and the errors of those that were rounded
    again."""

    files: Entries
    parameters: dict[str, str]
    cast_errors: dict[str, float] = field(default_factory=dict)
    quantized: dict[str, Description] = field(default_factory=dict)
    requantize_errors: dict[str, float] = field(default_factory=dict)


class ConversionJournal:
    """The journal in `directory`, locked against other processes while open.

    Attributes:
      finished: units an earlier run left whole; those whose files no longer fit their checksums are dropped.
    """

    def __init__(self, directory: Path, fingerprint: str):
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._path = directory, directory / JOURNAL
        self._file = self._path.open("a+b")
        try:
            self._lock()
            self.finished = self._read(fingerprint)
            self._rewrite(fingerprint)
        except BaseException:
            self._file.close()
            raise

    def finish(self, name: str, unit: FinishedUnit) -> None:
        """Records a unit once its files are durable."""
        for file in unit.files:
            sync(self._directory / file)
        for parent in sorted({(self._directory / file).parent for file in unit.files}):
            sync(parent)
        self._append({"unit": name, **asdict(unit)})
        self.finished[name] = unit

    def remove(self) -> None:
        """The conversion is complete."""
        self._path.unlink()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "ConversionJournal":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(self._directory, "another conversion is writing here") from None

    def _read(self, fingerprint: str) -> dict[str, FinishedUnit]:
        self._file.seek(0)
        lines = [_parsed(line) for line in self._file.read().split(b"\n")[:-1]]
        if not lines or lines[0] != {"fingerprint": fingerprint}:
            return {}
        finished = {}
        for line in lines[1:]:
            if line is None:
                break
            unit = FinishedUnit(
                line["files"],
                line["parameters"],
                line["cast_errors"],
                line["quantized"],
                line.get("requantize_errors", {}),
            )
            if self._is_whole(unit):
                finished[line["unit"]] = unit
        return finished

    def _is_whole(self, unit: FinishedUnit) -> bool:
        try:
            return measure(self._directory, unit.files) == unit.files
        except OSError:
            return False

    def _rewrite(self, fingerprint: str) -> None:
        """Keeps the finished units and removes everything else of an earlier run."""
        kept = {(self._directory / file).parts for unit in self.finished.values() for file in unit.files}
        for path in sorted(self._directory.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path != self._path and path.parts not in kept:
                path.unlink()
        self._file.truncate(0)
        self._append({"fingerprint": fingerprint})
        for name, unit in self.finished.items():
            self._append({"unit": name, **asdict(unit)})

    def _append(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_unit = isinstance(record, dict) and {"unit", "files", "parameters", "cast_errors", "quantized"} <= set(record)
    return record if is_unit or (isinstance(record, dict) and set(record) == {"fingerprint"}) else None
