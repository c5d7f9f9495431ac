"""Tables and texts as inputs: CSV, Parquet, a prompt a line. A prompt is a cell, or a template filled from cells."""

import csv
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxinfer.batch.errors import BatchError, RowError
from jaxinfer.batch.rows import ADAPTER, BadRow, BatchRow, default_custom_id, read_plain
from jaxinfer.checks import did_you_mean
from jaxinfer.extras import install_hint

SUFFIXES = (".csv", ".tsv", ".parquet", ".txt")
PROMPT = "prompt"  # the column that is taken by default, and that of a text file
_ID = "custom_id"
_SEPARATORS = (",", ";", "\t")
_MAX_CELL = 2**31 - 1  # characters; the library's own limit is 131,072, which documents exceed
_BATCH_ROWS = 256  # of a Parquet file, in memory at once
_NUM_SHOWN = 20  # names of columns in an error
_PLACE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


@dataclass(frozen=True)
class TableOptions:
    """How rows of a table become requests.

    Attributes:
      prompt_column: the column of prompts; None is "prompt". prompt: instead, a template such as "Translate: {text}".
      chat: a prompt is a user's message for the chat template; a column may have lists of messages too.
      keep: columns that are copied to the lines of the answers, as `columns`.
      adapter_column: the column that names each row's adapter; an empty cell is the model without one.
    """

    prompt_column: str | None = None
    prompt: str | None = None
    chat: bool = False
    keep: Sequence[str] = ()
    adapter_column: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", tuple(self.keep or ()))
        if self.prompt_column is not None and self.prompt is not None:
            raise BatchError("--prompt-column and --prompt (prompt_column and prompt in Python) exclude each other")

    @property
    def given(self) -> dict[str, Any]:
        """Those that differ from the defaults, as JSON values."""
        values = {**vars(self), "keep": list(self.keep)}
        return {name: value for name, value in values.items() if value not in (None, False, [])}


def is_table(path: Path) -> bool:
    """Tells whether the name is that of a table or a text."""
    return path.suffix.lower() in SUFFIXES


def check_output(path: Path) -> None:
    """Raises BatchError for a file of answers that is named as a table."""
    if is_table(path) and path.suffix.lower() != ".txt":
        raise BatchError(f"{path}: answers are written as JSON lines, so name it {path.stem}.jsonl")


class TableSource:
    """The rows of a table.

    Raises BatchError for a file that cannot be read, and for a column that it does not have.
    """

    def __init__(self, path: Path, options: TableOptions):
        self.path = path
        self.unit = "line" if path.suffix.lower() == ".txt" else "row"
        self.options = options
        names = _column_names(path)
        self._parts = _template(path, options, names)
        used = [name for _, name in self._parts if name is not None]
        for name in options.keep:
            _check_column(path, name, names, "--keep")
        more = [_ID] if _ID in names else []
        if options.adapter_column is not None:
            _check_column(path, options.adapter_column, names, "--adapter-column")
            more.append(options.adapter_column)
        self._columns = tuple(dict.fromkeys((*used, *options.keep, *more)))

    def items(self, whole: "hashlib._Hash | None" = None) -> Iterator[tuple[int, bytes]]:
        """Numbers of rows, from 1, with their cells for `row`. `whole` is updated with the content of the file."""
        if whole is not None:
            with self.path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    whole.update(chunk)
        for number, cells in _rows(self.path, self._columns):
            yield number, json.dumps(cells, ensure_ascii=False).encode("utf-8", "surrogatepass")

    def row(self, data: bytes, number: int) -> BatchRow | BadRow:
        """Reads what `items` gave."""
        cells = json.loads(data.decode("utf-8", "surrogatepass"))
        custom_id = default_custom_id(number)
        columns: dict[str, Any] = {}
        try:
            if isinstance(cells, str):
                raise RowError(cells)
            columns = {name: cells[name] for name in self.options.keep}
            custom_id = _text(cells.get(_ID)) or custom_id
            prompt = self._prompt(cells)
            record: dict[str, Any]
            if not self.options.chat:
                record = {"prompt": prompt}
            else:
                is_history = isinstance(prompt, list)
                record = {"messages": prompt if is_history else [{"role": "user", "content": prompt}]}
            if (column := self.options.adapter_column) is not None:
                record[ADAPTER] = _text(cells[column]).strip() or None
            return BatchRow(number, custom_id, read_plain(record), True, columns)
        except ValueError as error:
            return BadRow(number, custom_id, error, True, columns)

    def _prompt(self, cells: Mapping[str, Any]) -> Any:
        names = [name for _, name in self._parts if name is not None]
        if all(cells[name] in (None, []) or not _text(cells[name]).strip() for name in names):
            many = len(set(names)) > 1
            what = f"cells of {', '.join(dict.fromkeys(names))} are" if many else f"cell of {names[0]} is"
            raise RowError(f"the {what} empty", "prompt")
        first = cells[names[0]]
        if self.options.prompt is None and isinstance(first, list):
            if isinstance(first[0], dict) and not self.options.chat:
                raise RowError(f"the cell of {names[0]} is a list of messages: --chat (chat=True) takes them", "prompt")
            return first  # token ids or messages
        return "".join(literal + _text(None if name is None else cells[name]) for literal, name in self._parts)


# Templates.


def _template(path: Path, options: TableOptions, names: Sequence[str]) -> list[tuple[str, str | None]]:
    """Parts of a prompt: a text, and the column that comes after it. Raises BatchError."""
    if options.prompt is None:
        name = PROMPT if options.prompt_column is None else options.prompt_column
        _check_column(path, name, names, "--prompt-column")
        return [("", name)]
    parts: list[tuple[str, str | None]] = []
    literal, end = "", 0
    for match in _PLACE.finditer(options.prompt):
        literal += options.prompt[end : match.start()]
        end = match.end()
        if match[0] in ("{{", "}}"):
            literal += match[0][0]
        elif match[1] is None:
            where = f"character {match.start() + 1}"
            raise BatchError(f"--prompt has a single {match[0]!r} at {where}: a brace of the text is {match[0] * 2!r}")
        else:
            _check_column(path, match[1], names, "--prompt")
            parts.append((literal, match[1]))
            literal = ""
    if not parts:
        raise BatchError(
            f"--prompt {options.prompt!r:.80} is the same for every row: {{NAME}} is the place of a column; "
            f"{_columns_of(path, names)}"
        )
    return [*parts, (literal + options.prompt[end:], None)]


def _check_column(path: Path, name: str, names: Sequence[str], flag: str) -> None:
    """Raises BatchError for a column that is not there, with those that are, and for one that is there twice."""
    if names.count(name) == 1:
        return
    if name in names:
        raise BatchError(f"{path} has {names.count(name)} columns {name!r}: give each a name of its own")
    columns = _columns_of(path, names)
    if flag == "--prompt-column" and name == PROMPT:
        raise BatchError(
            f"{path} has no column 'prompt': {columns}. --prompt-column NAME (prompt_column= in Python) takes another "
            "one, and --prompt 'Translate: {NAME}' (prompt=) makes prompts of columns"
        )
    hint = did_you_mean(name, names)
    listed = f"{hint} I{columns[1:]}" if hint else f": {columns}"
    raise BatchError(f"{flag}: {path} has no column {name!r}{listed}")


def _columns_of(path: Path, names: Sequence[str]) -> str:
    shown = ", ".join(repr(name)[:60] for name in names[:_NUM_SHOWN])
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    first = " (its first line is taken as their names)" if path.suffix.lower() in (".csv", ".tsv") else ""
    return f"its columns are {shown}{more}{first}"


# Cells.


def _text(value: Any) -> str:
    """A cell as a part of a prompt; an empty one is ""."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """A cell of a Parquet file as a JSON value. Raises UnicodeDecodeError for bytes that are no text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, bytes):  # older writers leave texts unmarked
        return value.decode()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value)  # dates, times, decimals


# Files.

Cells = dict[str, Any]


def _column_names(path: Path) -> list[str]:
    match path.suffix.lower():
        case ".parquet":
            with _explained(path), _parquet(path) as file:
                return list(file.schema_arrow.names)
        case ".txt":
            _check_no_json(path)
            return [PROMPT]
        case _:
            _check_no_json(path)
            names = next(_csv_records(path), [])
            if not names:
                raise BatchError(f"{path} has no rows")
            return [name.strip() for name in names]


def _rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Cells | str]]:
    """Numbers of rows, from 1, with the cells of these columns, or why there are none. Blank rows are left out."""
    match path.suffix.lower():
        case ".parquet":
            return _parquet_rows(path, columns)
        case ".txt":
            return _text_rows(path)
        case _:
            return _csv_rows(path, columns)


def _csv_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Cells | str]]:
    records = _csv_records(path)
    names = next(records)
    places = {name.strip(): place for place, name in enumerate(names)}
    for number, cells in enumerate(records, 1):
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(names):
            yield number, f"the row has {len(cells)} cells, and the first line names {len(names)} columns"
        else:
            yield number, {name: cells[places[name]] for name in columns}


def _csv_records(path: Path) -> Iterator[list[str]]:
    """Records from the names of the columns on. Blank lines before those are left out; others have no cells."""
    separator = _separator(path)
    csv.field_size_limit(_MAX_CELL)  # of the process
    with _text_file(path) as file:
        reader = csv.reader(file, delimiter=separator, strict=True)
        has_begun = False
        try:
            for record in reader:
                has_begun = has_begun or any(record)
                if has_begun:
                    yield record
        except csv.Error as error:
            raise BatchError(
                f"{path} line {reader.line_num} is not CSV with the separator {separator!r}: {error}; a cell with "
                "quotation marks or line breaks has quotation marks around it, and its own doubled"
            ) from None


def _separator(path: Path) -> str:
    """That of a .tsv is a tab; of a .csv the first of , ; and tab that separates the names of columns."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    with _text_file(path) as file:
        first = next((line for line in file if line.strip()), "")
    return next((mark for mark in _SEPARATORS if len(next(csv.reader([first], delimiter=mark), [])) > 1), ",")


def _text_rows(path: Path) -> Iterator[tuple[int, Cells | str]]:
    with _text_file(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, {PROMPT: line.rstrip("\r\n")}


@contextmanager
def _text_file(path: Path) -> Iterator[Iterator[str]]:
    """Lines of a file in UTF-8, with their ends. Raises BatchError for another encoding, with the line."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield file
    except UnicodeDecodeError:
        line, byte = _first_undecodable(path)
        raise BatchError(
            f"{path} line {line} is not UTF-8 text: it has the byte 0x{byte:02x}. Save the file in UTF-8 "
            "(in Excel: CSV UTF-8)"
        ) from None


def _first_undecodable(path: Path) -> tuple[int, int]:
    """The first line that is not UTF-8, from 1, and the byte in it that is not."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return number, line[error.start]
    raise BatchError(f"{path} changed while it was read")


def _check_no_json(path: Path) -> None:
    """Raises BatchError for JSON lines under the name of a table."""
    with _text_file(path) as file:
        first = next((line for line in itertools.islice(file, 8) if line.strip()), "")
    try:
        record = json.loads(first) if first.lstrip().startswith("{") else None
    except (ValueError, RecursionError):
        return
    if isinstance(record, dict) and record.keys() & {"prompt", "messages", "body"}:
        raise BatchError(f"{path} has one JSON object a line: name it {path.stem}.jsonl")


def _parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Cells | str]]:
    number = 0
    with _explained(path), _parquet(path) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=list(columns)):
            for cells in batch.to_pylist():
                number += 1
                yield number, _plain_cells(cells)


def _plain_cells(cells: Cells) -> Cells | str:
    plain = {}
    for name, value in cells.items():
        try:
            plain[name] = _plain(value)
        except UnicodeDecodeError:
            return f"the cell of {name} is bytes that are no text"
    return plain


def _parquet(path: Path) -> Any:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise BatchError(f"reading {path} needs pyarrow: {install_hint('parquet')}") from None
    return ParquetFile(path)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Errors of a file that is no Parquet file, or damaged, as BatchError."""
    try:
        yield
    except BatchError:
        raise
    except Exception as error:
        # Arrow's errors of input are Python's; texts that are not UTF-8 and dates without a calendar are ValueErrors.
        is_damage = isinstance(error, (ValueError, OverflowError)) or (
            isinstance(error, OSError) and error.errno is None
        )
        if not (is_damage or type(error).__module__.startswith("pyarrow")):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise BatchError(f"{path} cannot be read as a Parquet file: {reason}") from None
