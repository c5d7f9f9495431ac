"""The input, read twice: once to know all its rows by name before anything runs, once to serve them."""

import hashlib
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxinfer.batch.errors import BatchError
from jaxinfer.batch.rows import BadRow, BatchRow, parse_row

_NUM_SHOWN = 5
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Scan:
    """What is kept of an input: about 200 bytes a row, never the rows.

    Attributes:
      sha256: of the whole content. model: the name that the first row which names one gives.
      num_bad: rows that cannot be served whatever the model; bad_rows: the first few of them.
    """

    path: Path
    sha256: str
    num_rows: int
    num_bad: int
    bad_rows: tuple[BadRow, ...]
    model: str | None
    _line_of: dict[bytes, int]
    _digests: "array[int]"

    @property
    def num_lines(self) -> int:
        return len(self._digests)

    def line_of(self, custom_id: str) -> int | None:
        """The line with this custom_id, from 1."""
        return self._line_of.get(_id_digest(custom_id))

    def rows(self, done: Collection[int] = ()) -> Iterator[BatchRow | BadRow]:
        """The rows again, but for the lines in `done`. Raises BatchError where a line is not what it was."""
        for line, data in _lines(self.path):
            if line in done:
                continue
            if line > self.num_lines or self._digests[line - 1] != _line_digest(data):
                raise BatchError(f"{self.path} was changed while the job ran, at line {line}; rows before it are done")
            yield parse_row(data, line)


def scan(path: Path) -> Scan:
    """Reads the input once.

    Raises:
      BatchError: a custom_id that two rows share, with both lines; an input without rows, or that is no file.
    """
    if path.exists() and not path.is_file():
        raise BatchError(f"{path} must be a file: a batch reads its input more than once")
    whole = hashlib.sha256()
    line_of: dict[bytes, int] = {}
    digests = array("Q")
    bad_rows: list[BadRow] = []
    num_bad = 0
    model = None
    for line, data in _lines(path, whole):
        row = parse_row(data, line)
        first = line_of.setdefault(_id_digest(row.custom_id), line)
        if first != line:
            raise BatchError(f"{path}: lines {first} and {line} have the same custom_id {row.custom_id!r:.80}")
        digests.extend([0] * (line - 1 - len(digests)))  # blank lines
        digests.append(_line_digest(data))
        if isinstance(row, BadRow):
            num_bad += 1
            bad_rows += [row] * (num_bad <= _NUM_SHOWN)
        elif model is None:
            model = row.request.model
    if not line_of:
        raise BatchError(f"{path} has no rows")
    return Scan(path, whole.hexdigest(), len(line_of), num_bad, tuple(bad_rows), model, line_of, digests)


def _lines(path: Path, whole: "hashlib._Hash | None" = None) -> Iterator[tuple[int, bytes]]:
    """Line numbers, from 1, with their bytes; blank lines are left out."""
    with path.open("rb") as file:
        for line, data in enumerate(file, 1):
            if whole is not None:
                whole.update(data)
            if line == 1:
                data = data.removeprefix(_BOM)
            data = data.strip(b" \t\r\n")
            if data:
                yield line, data


def _id_digest(custom_id: str) -> bytes:
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _line_digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
