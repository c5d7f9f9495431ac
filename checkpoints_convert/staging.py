"""A new checkpoint is written beside its destination and renamed: a reader finds the old, the new, or none."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import CONFIG, NATIVE_CONFIG, in_words, make_durable

JOURNAL = "journal.jsonl"  # its presence marks a directory as a checkpoint being written
_SPARE_BYTES = 16 * 2**20  # configuration, tokenizer and bookkeeping


def partial_path(destination: Path) -> Path:
    """Where a checkpoint is written until it is whole."""
    return destination.with_name(destination.name + ".partial")


def check_destination(destination: Path, *, overwrite: bool, source: Path | None = None) -> None:
    """Raises CheckpointError if `destination` is taken, is not something to overwrite, or is the source itself.

    Nothing is ever removed but checkpoints and checkpoints being written, there or at `partial_path`.
    """
    if source is not None and destination.resolve() == source.resolve():
        raise CheckpointError(destination, "is the source itself: name another destination")
    partial = partial_path(destination)
    if partial.exists() and not _is_removable(partial):
        raise CheckpointError(partial, "exists and is not a checkpoint being written: move it away")
    if not destination.exists():
        return
    if not destination.is_dir():
        raise CheckpointError(destination, "exists and is not a directory")
    if not any(destination.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(destination, "exists: choose another destination, or ask to overwrite it")
    if not _is_removable(destination):
        raise CheckpointError(
            destination, f"holds neither {CONFIG} nor {NATIVE_CONFIG}: not overwriting what may be no checkpoint"
        )


def check_free_space(destination: Path, num_bytes: int) -> None:
    """Raises CheckpointError, with both numbers, if the file system of `destination` has less than is to be written."""
    parent = next(path for path in destination.resolve().parents if path.exists())
    needed, free = num_bytes + _SPARE_BYTES, shutil.disk_usage(parent).free
    if needed > free:
        raise CheckpointError(destination, f"needs {in_words(needed)}, {parent} has {in_words(free)} free")


def publish(partial: Path, destination: Path) -> None:
    """Gives a whole checkpoint its name; an earlier one there is removed afterwards."""
    make_durable(partial)
    old = destination.with_name(f"{destination.name}.old-{os.getpid()}")
    is_replacing = destination.exists()
    if is_replacing:
        os.rename(destination, old)
    os.rename(partial, destination)
    make_durable(destination.parent)
    if is_replacing:
        shutil.rmtree(old)


@contextmanager
def staged(destination: Path, num_bytes: int, *, overwrite: bool) -> Iterator[Path]:
    """An empty directory that becomes `destination` when the block ends, and vanishes when it raises.

    Raises CheckpointError as `check_destination` and `check_free_space` do, before anything is written.
    """
    check_destination(destination, overwrite=overwrite)
    check_free_space(destination, num_bytes)
    partial = partial_path(destination)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / JOURNAL).touch()
    try:
        yield partial
        (partial / JOURNAL).unlink()
        publish(partial, destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _is_removable(directory: Path) -> bool:
    names = (CONFIG, NATIVE_CONFIG, JOURNAL)
    return directory.is_dir() and (not any(directory.iterdir()) or any((directory / name).is_file() for name in names))
