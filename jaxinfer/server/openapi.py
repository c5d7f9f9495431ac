"""/openapi.json, made from the types of the bodies and of the answers."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxinfer import __version__
from jaxinfer.checks import TYPES
from jaxinfer.openai import answers
from jaxinfer.openai.bodies import Body, ChatRequest
from jaxinfer.openai.fields import UNSET, names_of
from jaxinfer.openai.response_types import Response, ResponseEvent
from jaxinfer.server.message_types import AnthropicError, Message, MessageEvent, TokenCount
from jaxinfer.server.types import BODIES, OllamaOptions, TokenizeRequest
from jaxinfer.text.messages import MESSAGE_NAMES

_ANSWERS: dict[str, Any] = {
    "/health": answers.Status,
    "/ready": answers.Status,
    "/version": answers.Version,
    "/v1/models": answers.Models,
    "/v1/models/{id:path}": answers.Model,
    "/models/load": answers.Model,
    "/models/unload": answers.Model,
    "/v1/chat/completions": answers.ChatCompletion,
    "/v1/completions": answers.Completion,
    "/v1/messages": Message,
    "/v1/messages/count_tokens": TokenCount,
    "/v1/responses": Response,
    "/tokenize": answers.Tokens,
    "/detokenize": answers.DetokenizedText,
    "/tokenizer_info": answers.TokenizerInfo,
    "/v1/embeddings": answers.Embeddings,
    **dict.fromkeys(("/v1/score", "/score"), answers.Scores),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), answers.Reranked),
}
# The data of events. OpenAI's older two routes end their streams with [DONE], and have errors among the chunks.
_EVENTS: dict[str, Any] = {
    "/v1/chat/completions": answers.ChatChunk,
    "/v1/completions": answers.CompletionChunk,
    "/v1/messages": MessageEvent,
    "/v1/responses": ResponseEvent,
}
_ENDS_WITH_DONE = ("/v1/chat/completions", "/v1/completions")
_LINES = ("/api/chat", "/api/generate", "/api/pull")
_TEXTS = {"/": "text/html", "/metrics": "text/plain"}
_ERRORS = {
    400: "A field is wrong or not supported; the error names it",
    401: "The API key is missing or not known",
    403: "The request is for a host, or comes from a web origin, that is not allowed",
    404: "The model is not served here",
    408: "The body did not come in time, or the answer not within the timeout that the request set",
    409: "The stream cannot be resumed",
    413: "The body is too large",
    415: "The body is not JSON, or said to be something else",
    429: "Too many requests wait",
    431: "The headers are too large",
    500: "The server failed; its log has the reason",
    501: "The server cannot do this",
    503: "The model is being loaded, or the server is going away",
}
_ALWAYS = (403, 431, 500)
_WITH_BODY = (400, 404, 408, 413, 415, 503)
_MORE = {
    "/v1/models/{id:path}": (404,),
    "/v1/chat/completions": (409, 429),
    "/v1/completions": (409, 429),
    "/v1/messages": (429,),
    "/v1/responses": (429,),
    **dict.fromkeys(("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"), (429,)),
    "/models/load": (429,),
    "/api/chat": (429,),
    "/api/generate": (429,),
    "/api/embed": (429,),
    "/api/delete": (400, 404, 408, 413, 415, 503),
    "/ready": (503,),
    "/tokenizer_info": (400, 404, 503),
}  # besides those of all routes and of those with a body
_STRING = {"schema": {"type": "string"}, "required": True}
_RETRY_AFTER = {"retry-after": {"schema": {"type": "string", "pattern": "^[0-9]+$"}, "required": True}}
_ERROR_HEADERS = {401: {"www-authenticate": _STRING}, 429: _RETRY_AFTER, 503: _RETRY_AFTER}
_GENERATED_HEADERS = {
    "x-jaxinfer-seed": {"schema": {"type": "string", "pattern": "^[0-9]+$"}, "required": True},
    "x-jaxinfer-resumable": {"schema": {"enum": ["yes", "checked", "no"]}, "required": True},
}


def openapi(
    routes: Sequence[tuple[str, str, str]], open_paths: Sequence[str], has_keys: bool, *, is_strict: bool = True
) -> dict[str, Any]:
    """The description of the routes: of each its method, its path and what it does.

    Args:
      open_paths: those that need no key. has_keys: whether the others need one. is_strict: whether names that are not
        known are refused.
    """
    types = [
        *BODIES.values(),
        *_ANSWERS.values(),
        *_EVENTS.values(),
        answers.Error,
        AnthropicError,
        answers.OllamaError,
    ]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    _describe_neutral(components)
    if is_strict:
        for body in BODIES.values():
            _close(components[body.__name__], {**names_of(body), **_NESTED.get(body, {})}, components)
    found = iter(schemas)
    bodies, whole, events = (dict(zip(one, found, strict=False)) for one in (BODIES, _ANSWERS, _EVENTS))
    paths: dict[str, dict[str, Any]] = {}
    for method, path, about in routes:
        operation: dict[str, Any] = {"summary": about, "responses": _responses(path, whole, events)}
        if has_keys and path not in open_paths:
            operation["security"] = [{"key": []}]
            operation["responses"]["401"] = _error(path, 401)
        if "{id" in path:
            operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
        if path in bodies:
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": bodies[path]}}}
        paths.setdefault(path.replace("{id:path}", "{id}"), {})[method.lower()] = operation
    described: dict[str, Any] = {"schemas": components}
    if has_keys:
        described["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    info = {"title": "jaxinfer", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": described}


# Names of messages that a body does not check itself: the chat template may read others.
_NESTED: dict[type, Mapping[str, Any]] = {body: {"messages": MESSAGE_NAMES} for body in (ChatRequest, TokenizeRequest)}


def _close(schema: dict[str, Any], names: Mapping[str, Any], components: Mapping[str, Any]) -> None:
    """Objects that a schema describes have values under these names only, and so have those within them."""
    for one in schema.get("anyOf", ()):
        _close(one, names, components)
    if "$ref" in schema:
        _close(components[schema["$ref"].rpartition("/")[2]], names, components)
    elif schema.get("type") == "array":
        _close(schema.get("items", {}), names, components)
    elif schema.get("type") == "object":
        properties = schema.setdefault("properties", {})
        for name, below in names.items():
            if name == TYPES:
                continue
            inner = properties.setdefault(name, {})
            if below is not None:
                _close(inner, below, components)
        schema["additionalProperties"] = {"type": "null"}  # which is not given


def _describe_neutral(components: dict[str, Any]) -> None:
    """Fields that are not supported take the values that change nothing, and those that stand for none."""
    for body in {OllamaOptions, *(one for one in BODIES.values() if issubclass(one, Body))}:
        types = {one.encode_name: one.type for one in msgspec.structs.fields(body)}
        for field, values in body.NEUTRAL.items():
            unset = [value for value in UNSET if _has_type(value, types.get(field, Any))]
            components[body.__name__]["properties"][field] = {"enum": [*unset, *values]}


def _has_type(value: Any, wanted: Any) -> bool:
    try:
        msgspec.convert(value, wanted)
    except msgspec.ValidationError:
        return False
    return True


def _responses(path: str, whole: Mapping[str, Any], events: Mapping[str, Any]) -> dict[str, Any]:
    """Every answer of a route, by its status."""
    content: dict[str, Any] = {_TEXTS.get(path, "application/json"): _content(whole.get(path))}
    headers = {"x-request-id": _STRING}
    if path in _LINES:
        content["application/x-ndjson"] = {}
    if path in events:
        content["text/event-stream"] = {"schema": _stream(events[path], path in _ENDS_WITH_DONE)}
        headers |= _GENERATED_HEADERS
    found: dict[str, Any] = {"200": {"description": "The answer", "headers": headers, "content": content}}
    for status in sorted({*_ALWAYS, *(_WITH_BODY if path in BODIES else ()), *_MORE.get(path, ())}):
        found[str(status)] = _error(path, status)
    if path == "/health":
        found["503"] = {**found["200"], "description": "The engine has stopped"}
    return found


def _content(schema: Any) -> dict[str, Any]:
    return {} if schema is None else {"schema": schema}


def _error(path: str, status: int) -> dict[str, Any]:
    name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    name = "OllamaError" if path.startswith("/api/") else name
    return {
        "description": _ERRORS[status],
        "headers": {"x-request-id": _STRING, **_ERROR_HEADERS.get(status, {})},
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}},
    }


def _stream(data: Mapping[str, Any], ends_with_done: bool) -> dict[str, Any]:
    """The schema of each event of a stream."""
    if ends_with_done:
        data = {"anyOf": [data, {"$ref": "#/components/schemas/Error"}]}
    names = {"id": {"type": "string"}, "event": {"type": "string"}}
    text = {"type": "string", "contentMediaType": "application/json", "contentSchema": data}
    event = {"type": "object", "required": ["data"], "properties": {"data": text, **names}}
    if not ends_with_done:
        return event
    return {"anyOf": [{"type": "object", "required": ["data"], "properties": {"data": {"const": "[DONE]"}}}, event]}
