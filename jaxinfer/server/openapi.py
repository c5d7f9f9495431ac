"""/openapi.json, made from the types of the bodies."""

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxinfer import __version__
from jaxinfer.server.types import BODIES

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_KINDS = {"/": "text/html", "/metrics": "text/plain"}
_STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


def openapi(routes: Sequence[tuple[str, str, str]], has_keys: bool) -> dict[str, Any]:
    """The description of the routes: of each its method, its path and what it does."""
    bodies, components = msgspec.json.schema_components(BODIES.values(), ref_template="#/components/schemas/{name}")
    by_path = dict(zip(BODIES, bodies, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, path, about in routes:
        name = path.replace("{id:path}", "{id}")
        paths.setdefault(name, {})[method.lower()] = _operation(path, about, by_path.get(path))
    found = {
        "openapi": "3.1.0",
        "info": {"title": "jaxinfer", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**components, "Error": _ERROR}},
    }
    if has_keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _operation(path: str, about: str, body: dict[str, Any] | None) -> dict[str, Any]:
    kinds: dict[str, Any] = {_KINDS.get(path, "application/json"): {}}
    if path in _STREAMED:
        kinds["text/event-stream"] = {}
    schema = {"$ref": "#/components/schemas/Error"}
    error = {"description": "An error", "content": {"application/json": {"schema": schema}}}
    found: dict[str, Any] = {
        "summary": about,
        "responses": {"200": {"description": "The answer", "content": kinds}, "4XX": error, "5XX": error},
    }
    if path.startswith("/v1/messages"):
        # Anthropic's form.
        found["responses"] |= {code: {"description": "An error"} for code in ("4XX", "5XX")}
    if "{id" in path:
        found["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return found
