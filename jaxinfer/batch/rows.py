"""Rows of an input: how a line of JSON is read as one, in OpenAI's batch form or the plain form."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from jaxinfer.batch.errors import RowError
from jaxinfer.checks import did_you_mean, nearest
from jaxinfer.openai import reader
from jaxinfer.openai.bodies import Body, ChatRequest, CompletionRequest, EmbeddingsRequest, ResponsesRequest
from jaxinfer.openai.errors import RequestError
from jaxinfer.openai.fields import read_body, unknown_field
from jaxinfer.openai.requests import TextRequest
from jaxinfer.openai.responses import read_response
from jaxinfer.option_names import find
from jaxinfer.sampling.params import SamplingParams, SamplingParamsError, our_names

Form = Literal["chat", "completions", "responses", "embeddings", "plain"]

FORMS_BY_URL: dict[str, Form] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/embeddings": "embeddings",
}
_SAMPLING = tuple(param.name for param in fields(SamplingParams))
_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
_CHAT = ("messages", *_TOOLS, "chat_template_kwargs")
ADAPTER, COORDINATE = "adapter", "return_coordinate"
_OPENAI_KEYS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class BatchRequest:
    """The request of one row, checked as far as possible without the model, and the form of its answer.

    Attributes:
      text: what is to be generated; of embeddings it has the model's name and the scheduling only. body: in OpenAI's
        form. adapter: the name of the adapter that a plain row asks for.
    """

    form: Form
    text: TextRequest
    body: Any = None
    adapter: str | None = None


@dataclass(frozen=True)
class BatchRow:
    """A valid row.

    `line` counts lines from 1, in a table rows; `number` counts from 0, and the row's seed is derived from it.
    `is_table`: whether it is of a table or a text. `columns`: its cells that are copied to the answer.
    """

    line: int
    custom_id: str
    request: BatchRequest
    is_table: bool = False
    columns: Mapping[str, Any] = field(default_factory=dict)

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
    columns: Mapping[str, Any] = field(default_factory=dict)


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
    except RecursionError:
        return BadRow(line, custom_id, RowError("not valid JSON: nested too deeply"), is_plain)
    except ValueError as error:
        return BadRow(line, custom_id, error, is_plain)


def _read_json(data: bytes) -> dict[str, Any]:
    try:
        text, hooks = data.decode("utf-8"), {"parse_constant": _refuse_constant, "parse_float": _finite}
        record = json.loads(text, object_pairs_hook=_unique, **hooks)
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


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise RowError(f"not JSON: the number {text:.40} is out of range")
    return number


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
            hint = did_you_mean(name, _OPENAI_KEYS, otherwise=f"; known are {', '.join(_OPENAI_KEYS)}")
            raise RowError(f"unknown field {name!r:.60} beside the body{hint}", name)
    if record.get("method", "POST") != "POST":
        raise RowError(f"method must be POST, got {record['method']!r:.60}", "method")
    url, body = record.get("url"), record.get("body")
    form = FORMS_BY_URL.get(url) if isinstance(url, str) else None
    if form is None:
        hint = did_you_mean(url, FORMS_BY_URL, cutoff=0.8)
        raise RowError(f"url must be {' or '.join(FORMS_BY_URL)}, got {url!r:.60}{hint}", "url")
    if not isinstance(body, dict):
        raise RowError(f"body must be an object, got {type(body).__name__}", "body")
    return read_row_body(form, body)


def _read_plain(record: Mapping[str, Any]) -> BatchRequest:
    if "prompt" not in record and "messages" not in record:
        for name in record:
            if near := nearest(name, ("prompt", "messages", "body", "url"), cutoff=0.75):
                raise RowError(f"unknown field {name!r:.60}: did you mean {near!r}?", name)
        raise RowError('a row has "prompt" or "messages", or "url" and "body"')
    try:
        return read_plain({name: value for name, value in record.items() if name != "custom_id"})
    except RequestError as error:
        name = error.parameter
        if name in record and nearest(name, ("custom_id",), cutoff=0.8):
            raise RowError(f"unknown field {name!r:.60}: did you mean 'custom_id'?", name) from None
        raise


def read_row_body(form: Form, given: Mapping[str, Any]) -> BatchRequest:
    """A body of one of OpenAI's endpoints. Raises RequestError or another ValueError, with the field."""
    kind, read = _READERS[form]
    body: Any = read_body(given, kind)[0]
    if getattr(body, "stream", None):
        raise RequestError("stream=True is not supported: a batch does not stream", "stream")
    return BatchRequest(form, read(body), body)


def _read_embeddings(body: EmbeddingsRequest) -> TextRequest:
    reader.read_inputs(body)
    reader.options_of(body)
    return TextRequest(priority=body.priority or 0, model=body.model or None)


_READERS: dict[Form, tuple[type[Body], Callable[[Any], TextRequest]]] = {
    "chat": (ChatRequest, reader.read_chat),
    "completions": (CompletionRequest, reader.read_completion),
    "responses": (ResponsesRequest, read_response),
    "embeddings": (EmbeddingsRequest, _read_embeddings),
}


def read_plain(record: Mapping[str, Any]) -> BatchRequest:
    """`{"prompt": ...}` or `{"messages": [...]}`, sampling parameters beside it. Raises RequestError."""
    given = {name: value for name, value in record.items() if not reader.is_unset(name, value)}
    record = _our_names(given)
    is_chat = "messages" in record
    known = (*(_CHAT if is_chat else ("prompt",)), *_SAMPLING, ADAPTER, COORDINATE)
    for name in record:
        if name not in known:
            raise unknown_field(name, known)
    sampling = {name: record[name] for name in _SAMPLING if name in record} | reader.structured_of(record)
    if not isinstance(wanted := record.get(COORDINATE, False), bool):
        raise RequestError(f"{COORDINATE} must be true or false, got {wanted!r:.60}", COORDINATE)
    asked = TextRequest(sampling, has_openai_limits=False, return_coordinate=wanted)
    adapter = record.get(ADAPTER)
    if adapter is not None and (not isinstance(adapter, str) or not adapter):
        raise RequestError(f"adapter must be the name of a loaded adapter, got {adapter!r:.60}", ADAPTER)
    if is_chat:
        kwargs = record.get("chat_template_kwargs")
        if not isinstance(kwargs, dict | None):
            raise RequestError("chat_template_kwargs must be an object", "chat_template_kwargs")
        tools = {name: record.get(name) for name in _TOOLS}
        messages = record["messages"]
        asked = replace(asked, messages=messages, template_kwargs=reader.check_template_kwargs(kwargs), **tools)
        return BatchRequest("plain", asked, adapter=adapter)
    prompt = record.get("prompt")
    if not isinstance(prompt, str):
        if not isinstance(prompt, list) or not prompt or not {str, list}.isdisjoint(map(type, prompt)):
            raise RequestError(f"prompt must be a text or a list of token ids, got {prompt!r:.60}", "prompt")
        prompt = reader.read_ids(prompt, "prompt")
    return BatchRequest("plain", replace(asked, prompts=(prompt,)), adapter=adapter)


def _our_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """A plain record with our names in place of those of other engines."""
    others = {name: value for name, value in record.items() if find("SamplingParams", name) is not None}
    own = {name: value for name, value in record.items() if name not in others}
    try:
        renamed = our_names(others)
    except SamplingParamsError as error:
        raise RequestError(str(error), error.parameter) from None
    for name in renamed:
        if name in own:
            raise RequestError(f"{name} is given twice, under two names", name)
    return {**own, **renamed}
