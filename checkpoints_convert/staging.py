"""A new checkpoint is written beside its destination and renamed: a reader finds the old, the new, or none."""

import fnmatch
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

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
from jaxinfer.checks import format_bytes
from jaxinfer.files import sync

JOURNAL = "journal.jsonl"  # its presence marks a directory as a checkpoint being written
# All that a checkpoint consists of, and what model hubs put beside it. A directory with anything else, such as a GGUF
# file, is not removed: that may be someone's only copy.
_OWN_FILES = (
    *COMPANION_FILES,
    *QUANTIZATION_FILES,
    *(NATIVE_CONFIG, MANIFEST, JOURNAL, f"{PARAMS}/*"),
    *("*.safetensors", "*.safetensors.index.json", "README.md", ".gitattributes"),
    *("MODEL_CARD.md", "*.png"),  # the cards of models that are trained here, and what they show
    ".*.json.part",  # of a run that was killed
)
_NUM_NAMED = 3
_SPARE_BYTES = 16 * 2**20  # configuration, tokenizer and bookkeeping


def partial_path(destination: Path) -> Path:
    """Where a checkpoint is written until it is whole."""
    return destination.with_name(destination.name + ".partial")


def check_destination(
    destination: Path, *, overwrite: bool, source: Path | None = None, also_own: Iterable[str] = ()
) -> None:
    """Raises CheckpointError if `destination` is taken, is not something to overwrite, or is or holds the source.

    Nothing is ever removed but checkpoints and checkpoints being written, there or at `partial_path`; a destination
    inside the source's directory is as good as any other.

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
        raise CheckpointError(destination, "exists: choose another destination, or ask to overwrite it")
    if reason := _not_removable(destination, also_own):
        raise CheckpointError(destination, f"{reason}: not overwriting what may be no checkpoint")


def check_free_space(destination: Path, num_bytes: int) -> None:
    """Raises CheckpointError, with both numbers, if the file system of `destination` has less than is to be written."""
    parent = next(path for path in destination.resolve().parents if path.exists())
    needed, free = num_bytes + _SPARE_BYTES, shutil.disk_usage(parent).free
    if needed > free:
        raise CheckpointError(
            destination,
            f"needs {format_bytes(needed)} ({needed} bytes), {parent} has {format_bytes(free)} ({free} bytes) free",
        )


def publish(partial: Path, destination: Path) -> None:
    """Gives a whole checkpoint its name; an earlier one there is removed afterwards."""
    sync(partial)
    old = destination.with_name(f"{destination.name}.old-{os.getpid()}")
    is_replacing = destination.exists()
    if is_replacing:
        os.rename(destination, old)
    os.rename(partial, destination)
    sync(destination.parent)
    if is_replacing:
        shutil.rmtree(old)


@contextmanager
def staged(
    destination: Path, num_bytes: int, *, overwrite: bool, source: Path | None = None, also_own: Iterable[str] = ()
) -> Iterator[Path]:
    """An empty directory that becomes `destination` when the block ends, and vanishes when it raises.

    Raises CheckpointError as `check_destination` and `check_free_space` do, before anything is written.
    """
    check_destination(destination, overwrite=overwrite, source=source, also_own=also_own)
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


def _check_apart(removed: Path, source: Path) -> None:
    """Raises CheckpointError where the source would go with what is removed."""
    place, read = removed.resolve(), source.resolve()
    if place == read:
        raise CheckpointError(removed, "is the source itself: name another destination")
    if place in read.parents:
        raise CheckpointError(removed, f"holds the source {source}: name another destination")


def _not_removable(directory: Path, also_own: Iterable[str]) -> str | None:
    """Why a directory is not to be removed: what it lacks, or holds beside a checkpoint. None where it may be."""
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
    """A pattern without a folder is of files in the directory itself."""
    return fnmatch.fnmatchcase(name, pattern) and ("/" in pattern or "/" not in name)
