"""/openapi.json, made from the types of the bodies and of the answers."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxinfer import __version__
from jaxinfer.checks import TYPES
from jaxinfer.openai import answers
from jaxinfer.openai.bodies import Body, ChatRequest
from jaxinfer.openai.fields import UNSET, names_of
from jaxinfer.server.message_types import AnthropicError
from jaxinfer.server.service import Service
from jaxinfer.server.types import OllamaOptions, TokenizeRequest
from jaxinfer.text.messages import MESSAGE_NAMES

Endpoint = Callable[[Request, Service], Awaitable[Response]]


@dataclass(frozen=True)
class RouteEntry:
    """A route with the types of its requests and answers.

    Attributes:
      run: answers a request; its docstring describes the route. body, answer: types of JSON; None where any is meant.
      events: the type of the data of a stream's events.
      errors: statuses besides those of all routes and of those with a body. is_admin: whether it needs an admin key.
    """

    method: str
    path: str
    run: Endpoint
    body: type[msgspec.Struct] | None = None
    answer: Any = None
    events: Any = None
    errors: tuple[int, ...] = ()
    is_admin: bool = False


# OpenAI's older two routes end their streams with [DONE], and have errors among the chunks.
_ENDS_WITH_DONE = ("/v1/chat/completions", "/v1/completions")
_LINES = ("/api/chat", "/api/generate", "/api/pull")
_TEXTS = {
    "/": "text/html",
    "/v1/hidden_states": "application/octet-stream",
    **dict.fromkeys(("/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"), "text/plain"),
}
_ERRORS = {
    400: "A field is wrong or not supported; the error names it",
    401: "The API key is missing or not known",
    403: "The request is for a host, comes from a web origin, or has a key, that is not allowed",
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
_STRING = {"schema": {"type": "string"}, "required": True}
_RETRY_AFTER = {"retry-after": {"schema": {"type": "string", "pattern": "^[0-9]+$"}, "required": True}}
_ERROR_HEADERS = {401: {"www-authenticate": _STRING}, 429: _RETRY_AFTER, 503: _RETRY_AFTER}
_GENERATED_HEADERS = {
    "x-jaxinfer-seed": {"schema": {"type": "string", "pattern": "^[0-9]+$"}, "required": True},
    "x-jaxinfer-resumable": {"schema": {"enum": ["yes", "checked", "no"]}, "required": True},
}


def openapi(
    routes: Sequence[RouteEntry], open_paths: Sequence[str], has_keys: bool, *, is_strict: bool = True
) -> dict[str, Any]:
    """The description of the routes.

    Args:
      open_paths: those that need no key. has_keys: whether the others need one. is_strict: whether names that are not
        known are refused.
    """
    kinds = dict.fromkeys(kind for route in routes for kind in (route.body, route.answer, route.events))
    types = [*(kind for kind in kinds if kind is not None), answers.Error, AnthropicError, answers.OllamaError]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(types, schemas, strict=True))
    bodies = dict.fromkeys(route.body for route in routes if route.body is not None)
    _describe_neutral(components, bodies)
    if is_strict:
        for body in bodies:
            _close(components[body.__name__], {**names_of(body), **_NESTED.get(body, {})}, components)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        about = (route.run.__doc__ or "").strip()
        operation: dict[str, Any] = {"summary": about, "responses": _responses(route, schema_of)}
        if route.is_admin or (has_keys and route.path not in open_paths):
            operation["security"] = [{"key": []}]
            operation["responses"]["401"] = _error(route.path, 401)
        if "{id" in route.path:
            operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
        if route.body is not None:
            content = {"application/json": {"schema": schema_of[route.body]}}
            operation["requestBody"] = {"required": True, "content": content}
        paths.setdefault(route.path.replace("{id:path}", "{id}"), {})[route.method.lower()] = operation
    described: dict[str, Any] = {"schemas": components}
    if has_keys or any(route.is_admin for route in routes):
        described["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    info = {"title": "jaxinfer", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": described}


# Names of messages that a body does not check itself: the chat template may read others.
_NESTED: dict[type, Mapping[str, Any]] = {body: {"messages": MESSAGE_NAMES} for body in (ChatRequest, TokenizeRequest)}


def _close(schema: dict[str, Any], names: Mapping[str, Any], components: Mapping[str, Any]) -> None:
    """Objects that a schema describes have values under these names only, and so have those within them."""
    for branch in schema.get("anyOf", ()):
        _close(branch, names, components)
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


def _describe_neutral(components: dict[str, Any], bodies: Iterable[type[msgspec.Struct]]) -> None:
    """Fields that are not supported take the values that change nothing, and those that stand for none."""
    for body in {OllamaOptions, *(kind for kind in bodies if issubclass(kind, Body))}:
        types = {struct_field.encode_name: struct_field.type for struct_field in msgspec.structs.fields(body)}
        for field, values in body.NEUTRAL.items():
            unset = [value for value in UNSET if _has_type(value, types.get(field, Any))]
            components[body.__name__]["properties"][field] = {"enum": [*unset, *values]}


def _has_type(value: Any, wanted: Any) -> bool:
    try:
        msgspec.convert(value, wanted)
    except msgspec.ValidationError:
        return False
    return True


def _responses(route: RouteEntry, schema_of: Mapping[Any, Any]) -> dict[str, Any]:
    """Every answer of a route, by its status."""
    path = route.path
    whole = {} if route.answer is None else {"schema": schema_of[route.answer]}
    content: dict[str, Any] = {_TEXTS.get(path, "application/json"): whole}
    headers = {"x-request-id": _STRING}
    if path in _LINES:
        content["application/x-ndjson"] = {}
    if route.events is not None:
        content["text/event-stream"] = {"schema": _stream(schema_of[route.events], path in _ENDS_WITH_DONE)}
        headers |= _GENERATED_HEADERS
    responses: dict[str, Any] = {"200": {"description": "The answer", "headers": headers, "content": content}}
    for status in sorted({*_ALWAYS, *(() if route.body is None else _WITH_BODY), *route.errors}):
        responses[str(status)] = _error(path, status)
    if path == "/health":
        responses["503"] = {**responses["200"], "description": "The engine has stopped"}
    return responses


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
