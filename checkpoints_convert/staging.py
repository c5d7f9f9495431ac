"""Writing a checkpoint beside its destination and renaming it: readers see the old one, the new one, or none.

The journal of a conversion under way lists the units that are on the disk, with their checksums: one JSON line per
finished unit, written after the unit's files are durable. A line cut off by a crash is ignored. The first line names
what is converted, so that a changed source or dtype starts over.
"""

import fcntl
import fnmatch
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import (
    COMPANION_FILES,
    CONFIG,
    MANIFEST,
    NATIVE_CONFIG,
    PARAMS,
    QUANTIZATION_FILES,
    files_below,
)
from checkpoints_convert.manifest import Entries, measure
from checkpoints_convert.store import Description
from jaxinfer.checks import format_bytes
from jaxinfer.files import Closable, exchange, naming, remove_tree, sync

JOURNAL = "journal.jsonl"  # marks a directory as a checkpoint being written
# Files of a checkpoint, and those that model hubs put beside it. A directory with any other file, such as a GGUF file,
# is never removed.
_OWN_FILES = (
    *COMPANION_FILES,
    *QUANTIZATION_FILES,
    *(NATIVE_CONFIG, MANIFEST, JOURNAL, f"{PARAMS}/*"),
    *("*.safetensors", "*.safetensors.index.json", "README.md", ".gitattributes"),
    *("MODEL_CARD.md", "*.png"),  # model cards of the embedded models and of `jaxinfer distill`, with their plots
    ".*.json.part",  # left by a killed process
)
_NUM_NAMED = 3
_SPARE_BYTES = 16 * 2**20  # configuration, tokenizer and bookkeeping


def partial_path(destination: Path) -> Path:
    """The directory in which a checkpoint is written until it is complete."""
    return destination.with_name(destination.name + ".partial")


def check_destination(
    destination: Path, *, overwrite: bool, source: Path | None = None, also_own: Iterable[str] = ()
) -> None:
    """Raises CheckpointError if `destination` exists and may not be overwritten, or if it is or contains the source.

    Only checkpoints, complete or being written, are ever removed, there or at `partial_path`. A destination inside the
    source's directory is allowed.

    Args:
      source: the file or directory that is read. also_own: names of further files that a checkpoint there may have.
    """
    partial = partial_path(destination)
    if source is not None:
        _check_apart(destination, source)
        _check_apart(partial, source)
    if partial.exists() and (reason := _not_removable(partial, also_own)):
        raise CheckpointError(partial, f"exists and is not a checkpoint being written, as it {reason}: move it away")
    if not destination.exists():
        return
    if not destination.is_dir():
        raise CheckpointError(destination, "exists and is not a directory")
    if not any(destination.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(
            destination, "exists: choose another destination, or replace it with --overwrite (overwrite=True in Python)"
        )
    if reason := _not_removable(destination, also_own):
        raise CheckpointError(destination, f"{reason}: not overwriting what may be no checkpoint")


def check_free_space(destination: Path, num_bytes: int) -> None:
    """Raises CheckpointError, with both numbers, if the file system of `destination` has not enough free space."""
    parent = next(path for path in destination.resolve().parents if path.exists())
    needed, free = num_bytes + _SPARE_BYTES, shutil.disk_usage(parent).free
    if needed > free:
        raise CheckpointError(
            destination,
            f"needs {format_bytes(needed)} ({needed} bytes), {parent} has {format_bytes(free)} ({free} bytes) free",
        )


def publish(partial: Path, destination: Path) -> None:
    """Renames a complete checkpoint to its destination; an earlier one there is removed afterwards.

    Where the system cannot exchange two folders in one step, a process killed in between leaves the earlier checkpoint
    at `partial`.old, and nothing at the destination.
    """
    sync(partial)
    old = partial
    if not destination.exists():
        os.rename(partial, destination)
    elif not exchange(partial, destination):
        old = partial.with_name(partial.name + ".old")
        os.rename(destination, old)
        os.rename(partial, destination)
    sync(destination.parent)
    remove_tree(old, JOURNAL)


@contextmanager
def staged(
    destination: Path, num_bytes: int, *, overwrite: bool, source: Path | None = None, also_own: Iterable[str] = ()
) -> Iterator[Path]:
    """An empty directory that becomes `destination` when the block ends, and is removed if it raises.

    Raises CheckpointError as `check_destination` and `check_free_space` do, before anything is written.
    """
    check_destination(destination, overwrite=overwrite, source=source, also_own=also_own)
    check_free_space(destination, num_bytes)
    partial = partial_path(destination)
    remove_tree(partial, JOURNAL)
    partial.mkdir(parents=True)
    (partial / JOURNAL).touch()
    try:
        yield partial
        (partial / JOURNAL).unlink()
        publish(partial, destination)
    except BaseException:
        with suppress(OSError):
            remove_tree(partial, JOURNAL)
        raise


def _check_apart(removed: Path, source: Path) -> None:
    """Raises CheckpointError if removing a directory would remove the source."""
    place, read = removed.resolve(), source.resolve()
    if place == read:
        raise CheckpointError(removed, "is the source itself: name another destination")
    if place in read.parents:
        raise CheckpointError(removed, f"holds the source {source}: name another destination")


def _not_removable(directory: Path, also_own: Iterable[str]) -> str | None:
    """Why a directory may not be removed (it is no checkpoint, or holds other files), or None if it may."""
    if not directory.is_dir():
        return "is not a directory"
    if not any(directory.iterdir()):
        return None
    if not any((directory / name).is_file() for name in (CONFIG, NATIVE_CONFIG, JOURNAL)):
        return f"holds neither {CONFIG} nor {NATIVE_CONFIG}"
    patterns = (*_OWN_FILES, *also_own)
    others = [name for name in files_below(directory) if not any(_is_like(name, pattern) for pattern in patterns)]
    if others:
        rest = f" and {len(others) - _NUM_NAMED} more" if len(others) > _NUM_NAMED else ""
        return f"holds files that are not a checkpoint's, {', '.join(others[:_NUM_NAMED])}{rest}"
    return None


def _is_like(name: str, pattern: str) -> bool:
    """True if a relative path fits a pattern; one without a slash fits only files in the directory itself."""
    return fnmatch.fnmatchcase(name, pattern) and ("/" in pattern or "/" not in name)


class FinishedUnit(msgspec.Struct, frozen=True):
    """A unit that is on the disk: a line of the journal.

    Attributes:
      files: manifest entries, by path relative to the checkpoint. parameters: digests, by name.
      cast_errors, requantize_errors: as of `ConvertReport`. quantized: descriptions of quantized parameters, by name.
      arrays: as of `Manifest`.
    """

    unit: str
    files: Entries
    parameters: dict[str, str]
    cast_errors: dict[str, float]
    quantized: dict[str, Description]
    requantize_errors: dict[str, float]
    arrays: dict[str, Any]


class ConversionJournal(Closable):
    """The journal in `directory`, locked against other processes while open.

    Attributes:
      finished: units that an earlier run completed, except those whose files no longer match their checksums.
    """

    def __init__(self, directory: Path, fingerprint: str):
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._path = directory, directory / JOURNAL
        self._file = self._path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.finished = self._read(fingerprint)
            self._rewrite(fingerprint)
        except BlockingIOError:
            self.close()
            raise CheckpointError(self._directory, "another conversion is writing here") from None
        except BaseException:
            self.close()
            raise

    def finish(self, unit: FinishedUnit) -> None:
        """Makes the files of a unit durable and records it."""
        for file in unit.files:
            sync(self._directory / file)
        for parent in sorted({(self._directory / file).parent for file in unit.files}):
            sync(parent)
        self._append(unit)
        self.finished[unit.unit] = unit

    def remove(self) -> None:
        """Removes the journal of a complete conversion."""
        self._path.unlink()

    def close(self) -> None:
        with naming(self._path):  # what could not be written before is tried again
            self._file.close()

    def _read(self, fingerprint: str) -> dict[str, FinishedUnit]:
        self._file.seek(0)
        first, *lines = self._file.read().split(b"\n")
        if first != msgspec.json.encode({"fingerprint": fingerprint}):
            return {}
        finished = {}
        for line in lines[:-1]:  # what is after the last line end was cut off
            try:
                unit = msgspec.json.decode(line, type=FinishedUnit)
            except msgspec.DecodeError:
                break
            if self._is_whole(unit):
                finished[unit.unit] = unit
        return finished

    def _is_whole(self, unit: FinishedUnit) -> bool:
        try:
            return measure(self._directory, unit.files) == unit.files
        except OSError:
            return False

    def merged(self, name: str) -> dict[str, Any]:
        """A field of `FinishedUnit`, of all units together."""
        return {key: value for unit in self.finished.values() for key, value in getattr(unit, name).items()}

    def _rewrite(self, fingerprint: str) -> None:
        """Rewrites the journal with the finished units, and removes all other files of an earlier run."""
        kept = {(self._directory / file).parts for unit in self.finished.values() for file in unit.files}
        for path in sorted(self._directory.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path != self._path and path.parts not in kept:
                path.unlink()
        self._file.truncate(0)
        self._append({"fingerprint": fingerprint})
        for unit in self.finished.values():
            self._append(unit)

    def _append(self, record: Any) -> None:
        with naming(self._path):
            self._file.write(msgspec.json.encode(record) + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
