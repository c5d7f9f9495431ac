"""One line of the input as a row."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.batch.errors import RowError
from jaxinfer.batch.requests import FORMS_BY_URL, BatchRequest, read_chat, read_completions, read_plain

_OPENAI_KEYS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class BatchRow:
    """A row that can be tried. `line` counts from 1; `number`, from 0, is what its seed is derived from."""

    line: int
    custom_id: str
    request: BatchRequest

    @property
    def number(self) -> int:
        return self.line - 1


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be served, under its custom_id where that can be read, else under its default one."""

    line: int
    custom_id: str
    error: RowError


def default_custom_id(line: int) -> str:
    return f"row-{line}"


def parse_row(data: bytes, line: int) -> BatchRow | BadRow:
    """Reads one line, in OpenAI's batch form (it has a "body") or the plain one."""
    custom_id = default_custom_id(line)
    try:
        record = _read_json(data)
        has_body = "body" in record or "url" in record
        if has_body and "custom_id" not in record:
            raise RowError("custom_id is missing", "custom_id")
        custom_id = _custom_id(record, custom_id)
        return BatchRow(line, custom_id, _read_openai(record) if has_body else _read_plain(record))
    except RowError as error:
        return BadRow(line, custom_id, error)


def _read_json(data: bytes) -> dict[str, Any]:
    try:
        record = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}") from None
    except json.JSONDecodeError as error:
        raise RowError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise RowError("not JSON that can be read: nested too deeply") from None
    except RowError:
        raise
    except ValueError as error:  # an integer with thousands of digits
        raise RowError(f"not JSON that can be read: {error}") from None
    if not isinstance(record, dict):
        raise RowError(f"a row must be a JSON object, got {type(record).__name__}")
    return record


def _refuse_constant(name: str) -> None:
    raise RowError(f"not JSON: it has no {name}")


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
        raise RowError(f"custom_id must be a text that is not empty, got {custom_id!r:.60}", "custom_id")
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
    return read_chat(body) if form == "chat" else read_completions(body)


def _read_plain(record: Mapping[str, Any]) -> BatchRequest:
    if "prompt" not in record and "messages" not in record:
        raise RowError('a row has "prompt" or "messages", or "url" and "body"')
    return read_plain({name: value for name, value in record.items() if name != "custom_id"})
