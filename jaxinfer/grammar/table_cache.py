"""Tables on disk, by language and tokenizer."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxinfer.grammar.nodes import Node
from jaxinfer.grammar.pattern import pattern_of
from jaxinfer.grammar.spelling import Spelling
from jaxinfer.grammar.table import TokenTable
from jaxinfer.grammar.table_builder import TableLimits

_LOG = logging.getLogger(__name__)
FORMAT_VERSION = 2
"""Changes when the same language and tokenizer give another table, or its arrays another meaning."""
MAX_BYTES = 512 * 2**20
_PART = ".part"  # ends the names of files that are being written
_OLD_SECONDS = 24 * 3600  # after which such a file was left by a killed process


class TableCache:
    """Tables in a folder, which processes may share. Files are complete or absent, and the least recently used ones are
    removed when all are larger than a limit. Threads may use it at the same time."""

    def __init__(self, folder: Path | None, max_bytes: int = MAX_BYTES):
        """Args:
        folder: exists (`jaxinfer.files.cache_folder`); None: nothing is kept.
        max_bytes: of all files.
        """
        self._folder, self._max_bytes = folder, max_bytes
        self._is_told = False
        if folder is not None:
            _remove_parts(folder)

    def get_or_build(
        self, node: Node, spelling: Spelling, limits: TableLimits, build: Callable[[], TokenTable]
    ) -> TokenTable:
        """The table of a language over a tokenizer's vocabulary, from its file or else from `build`, then kept.

        A file that cannot be read or is no such table is removed, and logged. A table is returned even if it cannot be
        written. Raises what `build` raises.
        """
        if self._folder is None:
            return build()
        path = self._folder / f"{_key(node, spelling, limits)}.npz"
        if (table := _read(path, len(spelling.vocabulary))) is not None:
            return table
        table = build()
        self._write(path, table)
        return table

    def _write(self, path: Path, table: TokenTable) -> None:
        data = io.BytesIO()
        np.savez(data, **vars(table))
        if data.tell() > self._max_bytes:
            return
        try:
            self._make_room(path.parent, data.tell())
            descriptor, part = tempfile.mkstemp(prefix=".", suffix=_PART, dir=path.parent)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data.getbuffer())
                os.replace(part, path)
            except BaseException:
                os.unlink(part)
                raise
        except OSError as error:
            if not self._is_told:
                self._is_told = True
                _LOG.warning("tables of grammars cannot be kept in %s: %s", path.parent, error.strerror)

    def _make_room(self, folder: Path, num_bytes: int) -> None:
        found = []
        for path in folder.glob("*.npz"):
            with contextlib.suppress(OSError):  # another process may have removed it
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        excess = sum(size for _, size, _ in found) + num_bytes - self._max_bytes
        for _, size, path in sorted(found):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= size


def _key(node: Node, spelling: Spelling, limits: TableLimits) -> str:
    digest = hashlib.blake2b(digest_size=20)
    for part in (str(FORMAT_VERSION), repr(limits), spelling.vocabulary.digest, spelling.name, pattern_of(node)):
        digest.update(hashlib.blake2b(part.encode()).digest())
    return digest.hexdigest()


def _read(path: Path, vocab_size: int) -> TokenTable | None:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            table = TokenTable(**{name: arrays[name] for name in TokenTable.__dataclass_fields__})
        _check(table, vocab_size)
        os.utime(path)  # used last
        return table
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        _LOG.warning("%s could not be read (%s) and is built again", path, error)
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def _check(table: TokenTable, vocab_size: int) -> None:
    """Raises ValueError unless the arrays fit one another: an index out of range would read another row's mask."""
    num_states, num_classes = table.successors.shape
    shapes = {
        "classes": (np.int16, (vocab_size,), 0, num_classes),
        "successors": (np.int32, (num_states, num_classes), -1, num_states),
        "masks": (np.uint32, (len(table.masks), -(-vocab_size // 32)), 0, 2**32),
        "mask_of": (np.int32, (num_states,), 0, len(table.masks)),
        "drafts": (np.int32, (num_states,), -1, vocab_size),
    }
    for name, (dtype, shape, low, high) in shapes.items():
        array = getattr(table, name)
        if array.dtype != dtype or array.shape != shape or not array.size:
            raise ValueError(f"{name} has type {array.dtype} and shape {array.shape}")
        if array.min() < low or array.max() >= high:
            raise ValueError(f"{name} has numbers outside of {low} to {high - 1}")


def _remove_parts(folder: Path) -> None:
    for path in folder.glob(f".*{_PART}"):
        with contextlib.suppress(OSError):  # another process may have removed it
            if time.time() - path.stat().st_mtime > _OLD_SECONDS:
                path.unlink()
