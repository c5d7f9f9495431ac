"""Requests of rows: bodies of OpenAI's endpoints, and the plain form."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from jaxinfer.openai.bodies import Body, ChatRequest, CompletionRequest, EmbeddingsRequest, ResponsesRequest
from jaxinfer.openai.errors import RequestError
from jaxinfer.openai.fields import read_body, unknown_field
from jaxinfer.openai.reader import (
    check_template_kwargs,
    is_unset,
    options_of,
    read_chat,
    read_completion,
    read_ids,
    read_inputs,
    structured_of,
)
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
_SAMPLING = tuple(one.name for one in fields(SamplingParams))
_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
_CHAT = ("messages", *_TOOLS, "chat_template_kwargs")


@dataclass(frozen=True)
class BatchRequest:
    """The request of one row, checked as far as possible without the model, and the form of its answer.

    Attributes:
      text: what is to be generated; of embeddings it has the model's name and the scheduling only. body: in OpenAI's
        form.
    """

    form: Form
    text: TextRequest
    body: Any = None


def read_row_body(form: Form, given: Mapping[str, Any]) -> BatchRequest:
    """A body of one of OpenAI's endpoints. Raises RequestError or another ValueError, with the field."""
    kind, read = _READERS[form]
    body: Any = read_body(given, kind)[0]
    if getattr(body, "stream", None):
        raise RequestError("stream=True is not supported: a batch does not stream", "stream")
    return BatchRequest(form, read(body), body)


def _read_embeddings(body: EmbeddingsRequest) -> TextRequest:
    read_inputs(body)
    options_of(body)
    return TextRequest(priority=body.priority or 0, model=body.model or None)


_READERS: dict[Form, tuple[type[Body], Callable[[Any], TextRequest]]] = {
    "chat": (ChatRequest, read_chat),
    "completions": (CompletionRequest, read_completion),
    "responses": (ResponsesRequest, read_response),
    "embeddings": (EmbeddingsRequest, _read_embeddings),
}


def read_plain(record: Mapping[str, Any]) -> BatchRequest:
    """`{"prompt": ...}` or `{"messages": [...]}`, sampling parameters beside it. Raises RequestError."""
    given = {name: value for name, value in record.items() if not is_unset(name, value)}
    record = _our_names(given)
    is_chat = "messages" in record
    known = (*(_CHAT if is_chat else ("prompt",)), *_SAMPLING)
    for name in record:
        if name not in known:
            raise unknown_field(name, known)
    sampling = {name: record[name] for name in _SAMPLING if name in record} | structured_of(record)
    asked = TextRequest(sampling, has_openai_limits=False)
    if is_chat:
        kwargs = record.get("chat_template_kwargs")
        if not isinstance(kwargs, dict | None):
            raise RequestError("chat_template_kwargs must be an object", "chat_template_kwargs")
        tools = {name: record.get(name) for name in _TOOLS}
        messages = record["messages"]
        return BatchRequest(
            "plain", replace(asked, messages=messages, template_kwargs=check_template_kwargs(kwargs), **tools)
        )
    prompt = record.get("prompt")
    if not isinstance(prompt, str):
        if not isinstance(prompt, list) or not prompt or not {str, list}.isdisjoint(map(type, prompt)):
            raise RequestError(f"prompt must be a text or a list of token ids, got {prompt!r:.60}", "prompt")
        prompt = read_ids(prompt, "prompt")
    return BatchRequest("plain", replace(asked, prompts=(prompt,)))


def _our_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """A plain record with our names in place of those of other engines."""
    others = {name: value for name, value in record.items() if find("SamplingParams", name) is not None}
    found = {name: value for name, value in record.items() if name not in others}
    try:
        renamed = our_names(others)
    except SamplingParamsError as error:
        raise RequestError(str(error), error.parameter) from None
    for name in renamed:
        if name in found:
            raise RequestError(f"{name} is given twice, under two names", name)
    return {**found, **renamed}
