"""The routes together, behind the guard."""

import time
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxinfer import __version__
from jaxinfer.server import ollama, ollama_models
from jaxinfer.server.auth import Keys
from jaxinfer.server.completions import chat_completions, completions
from jaxinfer.server.embeddings import embeddings, rerank, score
from jaxinfer.server.errors import APIError
from jaxinfer.server.http import json_response, read_body, using, while_connected
from jaxinfer.server.messages import count_tokens, messages
from jaxinfer.server.middleware import OPEN_PATHS, Guard
from jaxinfer.server.models import ServedModel
from jaxinfer.server.openapi import openapi
from jaxinfer.server.page import chat_page
from jaxinfer.server.responses import responses
from jaxinfer.server.service import Service
from jaxinfer.server.tokenize import detokenize, tokenize, tokenizer_info
from jaxinfer.server.types import LoadRequest, ModelRequest

Endpoint = Callable[[Request, Service], Awaitable[Response]]


def make_app(service: Service, keys: Keys | None = None) -> ASGIApp:
    """The ASGI application of a service; without keys everybody who reaches it may use it."""
    endpoints: dict[tuple[str, str], Endpoint] = {
        ("GET", "/health"): health,
        ("GET", "/ready"): ready,
        ("GET", "/version"): version,
        ("GET", "/metrics"): metrics,
        ("GET", "/v1/models"): models,
        ("GET", "/v1/models/{id:path}"): model,
        ("POST", "/models/load"): load_model,
        ("POST", "/models/unload"): unload_model,
        ("POST", "/v1/chat/completions"): chat_completions,
        ("POST", "/v1/completions"): completions,
        ("POST", "/v1/responses"): responses,
        ("POST", "/v1/messages"): messages,
        ("POST", "/v1/messages/count_tokens"): count_tokens,
        ("POST", "/tokenize"): tokenize,
        ("POST", "/detokenize"): detokenize,
        ("GET", "/tokenizer_info"): tokenizer_info,
        ("POST", "/v1/embeddings"): embeddings,
        **{("POST", path): score for path in ("/v1/score", "/score")},
        **{("POST", path): rerank for path in ("/v1/rerank", "/v2/rerank", "/rerank")},
        ("POST", "/api/chat"): ollama.chat,
        ("POST", "/api/generate"): ollama.generate,
        ("GET", "/api/version"): ollama_models.version,
        ("GET", "/api/tags"): ollama_models.tags,
        ("GET", "/api/ps"): ollama_models.ps,
        ("POST", "/api/embed"): ollama_models.embed,
        ("POST", "/api/show"): ollama_models.show,
        ("POST", "/api/pull"): ollama_models.pull,
        ("POST", "/api/copy"): ollama_models.copy,
        ("DELETE", "/api/delete"): ollama_models.delete,
    }
    if service.options.ui:
        endpoints["GET", "/"] = page
    described = openapi(
        [(method, path, (endpoint.__doc__ or "").strip()) for (method, path), endpoint in endpoints.items()],
        OPEN_PATHS,
        keys is not None,
        is_strict=not service.options.ignore_unknown_fields,
    )

    async def schema(request: Request, service: Service) -> Response:
        """This description."""
        return json_response(described)

    endpoints["GET", "/openapi.json"] = schema
    routes = [
        Route(path, _Application(endpoint, service), methods=[method]) for (method, path), endpoint in endpoints.items()
    ]
    router = Router(routes, redirect_slashes=False, default=_not_found)
    return Guard(router, service, keys, [path for _, path in endpoints])


class _Application:
    """An endpoint as an ASGI application: around a function Starlette puts handlers of errors, which the guard is, and
    through which every chunk would pass."""

    def __init__(self, endpoint: Endpoint, service: Service):
        self._endpoint, self._service = endpoint, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._endpoint(Request(scope, receive, send), self._service)
        await response(scope, receive, send)


async def _not_found(*_: object) -> None:
    raise APIError(404, "there is no such route")


async def page(request: Request, service: Service) -> Response:
    """The chat page."""
    found = chat_page()
    return Response(found.content, 200, found.headers)


async def health(request: Request, service: Service) -> Response:
    """200 while the engine's thread runs, or the model is still being loaded; else 503."""
    status = 200 if service.is_healthy else 503
    return Response(b'{"status":"ok"}' if status == 200 else b'{"status":"dead"}', status, None, "application/json")


async def ready(request: Request, service: Service) -> Response:
    """200 while new requests are taken; else 503."""
    service.check_accepts()
    return json_response({"status": "ready"})


async def version(request: Request, service: Service) -> Response:
    """The version of jaxinfer."""
    return json_response({"version": __version__})


async def metrics(request: Request, service: Service) -> Response:
    """Metrics in Prometheus' format."""
    return Response(service.metrics.text(), 200, None, "text/plain; version=0.0.4; charset=utf-8")


def _described(model: ServedModel) -> dict[str, object]:
    return {**model.facts(), "status": model.status(time.monotonic())}


async def models(request: Request, service: Service) -> Response:
    """The models that may be named, and the state of each."""
    return json_response({"object": "list", "data": [_described(one) for one in await service.models.all()]})


async def model(request: Request, service: Service) -> Response:
    """The model by name."""
    return json_response(_described(await service.models.find(request.path_params["id"])))


async def load_model(request: Request, service: Service) -> Response:
    """Loads a model, and answers when it is loaded."""
    body = await read_body(request, LoadRequest, service)
    async with using(request, service, body) as model:
        return json_response(_described(model))


async def unload_model(request: Request, service: Service) -> Response:
    """Unloads a model as soon as its requests have ended, and answers then."""
    body = await read_body(request, ModelRequest, service, uses_model=False)
    return json_response(_described(await while_connected(request.receive, service.models.unload(body.model))))
