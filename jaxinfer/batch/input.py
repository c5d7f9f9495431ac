"""The input file: each line as a row. It is read twice, to check all rows before anything runs, and to serve them."""

import hashlib
import itertools
import json
import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from jaxinfer.batch.errors import BatchError, RowError
from jaxinfer.batch.requests import FORMS_BY_URL, BatchRequest, read_plain, read_row_body

_OPENAI_KEYS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class BatchRow:
    """A valid row. `line` counts from 1; `number` counts from 0, and the row's seed is derived from it."""

    line: int
    custom_id: str
    request: BatchRequest

    @property
    def number(self) -> int:
        return self.line - 1

    @property
    def is_plain(self) -> bool:
        return self.request.form == "plain"


@dataclass(frozen=True)
class BadRow:
    """An invalid row, with its custom_id if that can be read, else with the default one.

    `is_plain`: whether it has the plain form; None where that cannot be read.
    """

    line: int
    custom_id: str
    error: ValueError
    is_plain: bool | None = None


def default_custom_id(line: int) -> str:
    return f"row-{line}"


def parse_row(data: bytes, line: int) -> BatchRow | BadRow:
    """Reads one line, in OpenAI's batch form (with a "body") or the plain form."""
    custom_id = default_custom_id(line)
    is_plain = None
    try:
        record = _read_json(data)
        has_body = "body" in record or "url" in record
        is_plain = not has_body
        if has_body and "custom_id" not in record:
            raise RowError("custom_id is missing", "custom_id")
        custom_id = _custom_id(record, custom_id)
        return BatchRow(line, custom_id, _read_openai(record) if has_body else _read_plain(record))
    except ValueError as error:
        return BadRow(line, custom_id, error, is_plain)


def _read_json(data: bytes) -> dict[str, Any]:
    try:
        record = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}") from None
    except json.JSONDecodeError as error:
        raise RowError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise RowError("not valid JSON: nested too deeply") from None
    except RowError:
        raise
    except ValueError as error:  # an integer with thousands of digits
        raise RowError(f"not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise RowError(f"a row must be a JSON object, got {type(record).__name__}")
    return record


def _refuse_constant(name: str) -> None:
    raise RowError(f"not JSON: {name} is not allowed")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RowError(f"{twice!r:.60} is given twice", twice)
    return record


def _custom_id(record: Mapping[str, Any], default: str) -> str:
    custom_id = record.get("custom_id", default)
    if not isinstance(custom_id, str) or not custom_id:
        raise RowError(f"custom_id must be a non-empty string, got {custom_id!r:.60}", "custom_id")
    return custom_id


def _read_openai(record: Mapping[str, Any]) -> BatchRequest:
    for name in record:
        if name not in _OPENAI_KEYS:
            raise RowError(f"unknown field {name!r:.60} beside the body; known are {', '.join(_OPENAI_KEYS)}", name)
    if record.get("method", "POST") != "POST":
        raise RowError(f"method must be POST, got {record['method']!r:.60}", "method")
    url, body = record.get("url"), record.get("body")
    form = FORMS_BY_URL.get(url) if isinstance(url, str) else None
    if form is None:
        raise RowError(f"url must be {' or '.join(FORMS_BY_URL)}, got {url!r:.60}", "url")
    if not isinstance(body, dict):
        raise RowError(f"body must be an object, got {type(body).__name__}", "body")
    return read_row_body(form, body)


def _read_plain(record: Mapping[str, Any]) -> BatchRequest:
    if "prompt" not in record and "messages" not in record:
        raise RowError('a row has "prompt" or "messages", or "url" and "body"')
    return read_plain({name: value for name, value in record.items() if name != "custom_id"})


_NUM_SHOWN = 5
_BUFFER_BYTES = 1 << 20  # a line of 50 MB is read in half of the time that it takes with the default of 8 KiB
_BOM = b"\xef\xbb\xbf"
_KINDS = (
    (b"\xff\xfe", "text in UTF-16 or UTF-32, as a Windows shell's > writes it: save it as UTF-8"),
    (b"\xfe\xff", "text in UTF-16: save it as UTF-8"),
    (b"\x1f\x8b", "compressed by gzip: decompress it"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd: decompress it"),
    (b"\xfd7zXZ\0", "compressed by xz: decompress it"),
    (b"BZh", "compressed by bzip2: decompress it"),
    (b"PK\x03\x04", "a ZIP archive, as spreadsheets are, too"),
    (b"PAR1", "a Parquet file"),
)
_NUM_LOOKED_AT = 8  # lines that tell a table or a JSON array
_BLANK = re.compile(rb"[ \t\r\n]*")


@dataclass(frozen=True)
class Scan:
    """A summary of an input file, about 200 bytes per row, without the rows themselves.

    Attributes:
      sha256: of the whole content. models: the model names that valid rows give, with the numbers of these rows.
      num_bad: rows that are invalid for any model. bad_rows: the first few of them.
      is_plain: whether no row has OpenAI's form.
    """

    path: Path
    sha256: str
    num_rows: int
    num_bad: int
    bad_rows: tuple[BadRow, ...]
    models: Mapping[str, int]
    is_plain: bool
    _line_of: dict[bytes, int]
    _digests: "array[int]"

    @property
    def num_lines(self) -> int:
        return len(self._digests)

    def line_of(self, custom_id: str) -> int | None:
        """The line with this custom_id, from 1."""
        return self._line_of.get(_id_digest(custom_id))

    def rows(self, done: Collection[int] = ()) -> Iterator[BatchRow | BadRow]:
        """The rows, except the lines in `done`. Raises BatchError if a line has changed since the scan."""
        for line, data in _lines(self.path):
            if line in done:
                continue
            if line > self.num_lines or self._digests[line - 1] != _line_digest(data):
                raise BatchError(f"{self.path} changed while the job ran, at line {line}; the rows before it are done")
            yield parse_row(data, line)


def scan(path: Path) -> Scan:
    """Reads the whole input.

    Raises:
      BatchError: a custom_id that two rows share, with both lines; an input without rows; a path that is not a file;
        a file of another kind, such as UTF-16, gzip, CSV or a JSON array.
    """
    if path.exists() and not path.is_file():
        raise BatchError(f"{path} must be a file: a batch reads its input more than once")
    if (found := _other_kind(path)) is not None:
        raise BatchError(f"{path} {found}; a batch reads one JSON object a line, in UTF-8")
    whole = hashlib.sha256()
    line_of: dict[bytes, int] = {}
    digests = array("Q")
    bad_rows: list[BadRow] = []
    num_bad = 0
    models, is_plain = Counter[str](), True
    for line, data in _lines(path, whole):
        row = parse_row(data, line)
        first = line_of.setdefault(_id_digest(row.custom_id), line)
        if first != line:
            raise BatchError(f"{path}: lines {first} and {line} have the same custom_id {row.custom_id!r:.80}")
        digests.extend([0] * (line - 1 - len(digests)))  # blank lines
        digests.append(_line_digest(data))
        is_plain &= row.is_plain is not False
        if isinstance(row, BadRow):
            num_bad += 1
            bad_rows += [row] * (num_bad <= _NUM_SHOWN)
        elif row.request.text.model is not None:
            models[row.request.text.model] += 1
    if not line_of:
        raise BatchError(f"{path} has no rows")
    return Scan(path, whole.hexdigest(), len(line_of), num_bad, tuple(bad_rows), models, is_plain, line_of, digests)


def _other_kind(path: Path) -> str | None:
    """The kind of a file by its start, where that is no JSON lines; None where it may be."""
    with path.open("rb") as file:
        start = file.read(16)
        kind = next((kind for magic, kind in _KINDS if start.startswith(magic)), None)
        if kind is not None:
            return f"is {kind}"
        if b"\0" in start[:4]:
            return "is text in UTF-16 or UTF-32: save it as UTF-8"
        file.seek(0)
        lines = [line for line in itertools.islice(file, _NUM_LOOKED_AT) if line.removeprefix(_BOM).strip()]
    first, *rest = (line.removeprefix(_BOM).strip() for line in lines) if lines else (b"",)
    if first in (b"{", b"["):
        return f"is one JSON {'object' if first == b'{' else 'array'} over several lines: jq -c writes one a line"
    if first.startswith(b"[") and not any(line.startswith(b"{") for line in rest):
        return "is a JSON array: jq -c '.[]' writes one element a line"
    has_braces = any(line.startswith((b"{", b"[")) for line in (first, *rest))
    separator = next((one for one in (b",", b";", b"\t") if one in first), None)
    if not has_braces and separator is not None:
        return f"seems to be a table with the separator {separator.decode()!r} (CSV)"
    return None


def _lines(path: Path, whole: "hashlib._Hash | None" = None) -> Iterator[tuple[int, bytes]]:
    """Line numbers, from 1, with their bytes, without blank lines. Not stripped: a copy of a long line takes time."""
    with path.open("rb", buffering=_BUFFER_BYTES) as file:
        for line, data in enumerate(file, 1):
            if whole is not None:
                whole.update(data)
            if line == 1:
                data = data.removeprefix(_BOM)
            if not _BLANK.fullmatch(data):
                yield line, data


def _id_digest(custom_id: str) -> bytes:
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _line_digest(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)
