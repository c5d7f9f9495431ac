"""The input file. It is read twice, to check all rows before anything runs, and to serve them."""

import hashlib
import importlib.util
import itertools
import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from jaxinfer.batch.errors import BatchError
from jaxinfer.batch.rows import BadRow, BatchRow, parse_row
from jaxinfer.batch.table import SUFFIXES, TableOptions, TableSource, is_table
from jaxinfer.extras import install_hint
from jaxinfer.openai.requests import TextRequest
from jaxinfer.tool_calls import check_tools

_NUM_SHOWN = 5
_BUFFER_BYTES = 1 << 20  # a line of 50 MB is read in half of the time that it takes with the default of 8 KiB
_BOM = b"\xef\xbb\xbf"
_PARQUET = b"PAR1"
_KINDS = (
    (b"\xff\xfe", "text in UTF-16 or UTF-32, as a Windows shell's > writes it: save it as UTF-8"),
    (b"\xfe\xff", "text in UTF-16: save it as UTF-8"),
    (b"\x1f\x8b", "compressed by gzip: decompress it"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd: decompress it"),
    (b"\xfd7zXZ\0", "compressed by xz: decompress it"),
    (b"BZh", "compressed by bzip2: decompress it"),
    (b"PK\x03\x04", "a ZIP archive, as spreadsheets are, too"),
    (_PARQUET, "a Parquet file: name it .parquet"),
)
_NUM_LOOKED_AT = 8  # lines that tell a table or a JSON array
_RECORD = b"\x1e"  # of RFC 7464
_BLANK = re.compile(rb"[ \t\r\n]*")


@dataclass(frozen=True)
class Scan:
    """A summary of an input file, about 200 bytes per row, without the rows themselves.

    Attributes:
      source: what reads the file.
      sha256: of the whole content. models: the model names that valid rows give, with the numbers of these rows.
      adapters: the names of adapters that valid rows give beside a prompt, or in a column.
      num_bad: rows that are invalid for any model. bad_rows: the first few of them.
      is_plain: whether no row has OpenAI's form.
    """

    source: "RowSource"
    sha256: str
    num_rows: int
    num_bad: int
    bad_rows: tuple[BadRow, ...]
    models: Mapping[str, int]
    adapters: frozenset[str]
    is_plain: bool
    _line_of: dict[bytes, int]
    _digests: "array[int]"

    @property
    def path(self) -> Path:
        return self.source.path

    @property
    def table(self) -> dict[str, Any] | None:
        """How a table's rows become requests, as JSON values; None for JSON lines."""
        return self.source.options.given if isinstance(self.source, TableSource) else None

    @property
    def num_lines(self) -> int:
        return len(self._digests)

    def line_of(self, custom_id: str) -> int | None:
        """The line with this custom_id, from 1."""
        return self._line_of.get(_id_digest(custom_id))

    def rows(self, done: Collection[int] = ()) -> Iterator[BatchRow | BadRow]:
        """The rows, except the lines in `done`. Raises BatchError if a line has changed since the scan."""
        unit = self.source.unit
        for line, data in self.source.items():
            if line in done:
                continue
            if line > self.num_lines or self._digests[line - 1] != _line_digest(data):
                raise BatchError(
                    f"{self.path} changed while the job ran, at {unit} {line}; the rows before it are done"
                )
            yield self.source.row(data, line)


class JsonLines:
    """A file of one JSON object a line. `unit` is what its numbers count."""

    unit = "line"

    def __init__(self, path: Path):
        self.path = path

    def items(self, whole: "hashlib._Hash | None" = None) -> Iterator[tuple[int, bytes]]:
        """Line numbers, from 1, with their bytes, without blank lines. `whole` is updated with the file's content.

        Lines are not stripped: a copy of a long one takes time.
        """
        with self.path.open("rb", buffering=_BUFFER_BYTES) as file:
            for line, data in enumerate(file, 1):
                if whole is not None:
                    whole.update(data)
                if line == 1:
                    data = data.removeprefix(_BOM)
                if not _BLANK.fullmatch(data):
                    yield line, data

    def row(self, data: bytes, number: int) -> BatchRow | BadRow:
        """Reads one line."""
        return parse_row(data, number)


RowSource = JsonLines | TableSource


def open_source(path: Path, options: TableOptions | None = None) -> RowSource:
    """The reader of a file, by its name: a table, or JSON lines.

    Raises BatchError for options of tables with JSON lines, for a path that is not a file, for a file of another kind
    than its name says, and as `TableSource`.
    """
    options = options or TableOptions()
    if path.exists() and not path.is_file():
        raise BatchError(f"{path} must be a file: a batch reads its input more than once")
    if is_table(path):
        if (kind := _kind_by_start(path)) is not None and not (
            kind.startswith("a Parquet") and path.suffix.lower() == ".parquet"
        ):
            raise BatchError(f"{path} is {kind}")
        return TableSource(path, options)
    if given := options.given:
        name = next(iter(given))
        raise BatchError(
            f"--{name.replace('_', '-')} ({name}= in Python) is for tables, whose names end in {', '.join(SUFFIXES)}; "
            f"in {path} each line says its own prompt"
        )
    if (kind := _other_kind(path)) is not None:
        raise BatchError(f"{path} {kind}; a batch reads one JSON object a line, in UTF-8")
    return JsonLines(path)


def scan(path: Path, options: TableOptions | None = None) -> Scan:
    """Reads the whole input.

    Raises BatchError: a custom_id that two rows share, with both lines; an input without rows; a row that needs an
    extra which is not installed; as `open_source`.
    """
    source = open_source(path, options)
    whole = hashlib.sha256()
    line_of: dict[bytes, int] = {}
    digests = array("Q")
    bad_rows: list[BadRow] = []
    num_bad = 0
    models, adapters, is_plain = Counter[str](), set[str](), True
    can_constrain = has_structured()
    for line, data in source.items(whole):
        row = source.row(data, line)
        first = line_of.setdefault(_id_digest(row.custom_id), line)
        if first != line:
            raise BatchError(f"{path}: {source.unit}s {first} and {line} have the same custom_id {row.custom_id!r:.80}")
        digests.extend([0] * (line - 1 - len(digests)))  # blank lines
        digests.append(_line_digest(data))
        is_plain &= row.is_plain is not False
        if isinstance(row, BadRow):
            num_bad += 1
            bad_rows += [row] * (num_bad <= _NUM_SHOWN)
            continue
        if row.request.text.model is not None:
            models[row.request.text.model] += 1
        if row.request.adapter is not None:
            adapters.add(row.request.adapter)
        if not can_constrain and _needs_structured(row.request.text):
            raise BatchError(f"{path} {source.unit} {line}: {NO_STRUCTURED}")
    if not line_of:
        raise BatchError(f"{path} has no rows")
    about = source, whole.hexdigest(), len(line_of), num_bad, tuple(bad_rows), models, frozenset(adapters), is_plain
    return Scan(*about, line_of, digests)


NO_STRUCTURED = f"structured output and demanded calls of tools need llguidance: {install_hint('structured')}"


def has_structured() -> bool:
    """Tells whether the extra `structured` is installed. Nothing is imported."""
    return importlib.util.find_spec("llguidance") is not None


def _needs_structured(request: TextRequest) -> bool:
    if request.sampling.get("structured") is not None:
        return True
    try:
        use = check_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
    except ValueError:  # the row fails when it is served
        return False
    return use.needs_grammar


def _kind_by_start(path: Path) -> str | None:
    """The kind of a file that is no text in UTF-8, by its first bytes."""
    with path.open("rb") as file:
        start = file.read(16)
    kind = next((kind for magic, kind in _KINDS if start.startswith(magic)), None)
    if kind is None and b"\0" in start[:4]:
        return "text in UTF-16 or UTF-32: save it as UTF-8"
    return kind


def _other_kind(path: Path) -> str | None:
    """The kind of a file by its start, where that is no JSON lines; None where it may be."""
    if (kind := _kind_by_start(path)) is not None:
        return f"is {kind}"
    with path.open("rb") as file:
        lines = [line for line in itertools.islice(file, _NUM_LOOKED_AT) if line.removeprefix(_BOM).strip()]
    if lines and lines[0].removeprefix(_BOM).startswith(_RECORD):
        return "is a JSON text sequence, whose records begin with byte 0x1E: tr -d '\\036' removes it"
    first, *rest = (line.removeprefix(_BOM).strip() for line in lines) if lines else (b"",)
    if first in (b"{", b"["):
        return f"is one JSON {'object' if first == b'{' else 'array'} over several lines: jq -c writes one a line"
    if first.startswith(b"[") and not any(line.startswith(b"{") for line in rest):
        return "is a JSON array: jq -c '.[]' writes one element a line"
    has_braces = any(line.startswith((b"{", b"[")) for line in (first, *rest))
    separator = next((mark for mark in (b",", b";", b"\t") if mark in first), None)
    if not has_braces and separator is not None:
        return f"seems to be a table with the separator {separator.decode()!r} (CSV): give it a name that ends in .csv"
    return None


def _id_digest(custom_id: str) -> bytes:
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _line_digest(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)
