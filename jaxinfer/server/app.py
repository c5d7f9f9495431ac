"""The routes together, behind the guard."""

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxinfer import __version__
from jaxinfer.openai import answers, response_types
from jaxinfer.openai.answers import ChatChunk, ChatCompletion, Completion, CompletionChunk
from jaxinfer.openai.bodies import ChatRequest, CompletionRequest, EmbeddingsRequest, ResponsesRequest
from jaxinfer.openai.response_types import ResponseEvent
from jaxinfer.server import ollama, ollama_models, types
from jaxinfer.server.adapter_routes import ADAPTER_ROUTES
from jaxinfer.server.api_error import APIError, unavailable
from jaxinfer.server.auth import Keys
from jaxinfer.server.completions import chat_completions, completions
from jaxinfer.server.connected import while_connected
from jaxinfer.server.embeddings import embeddings, rerank, score
from jaxinfer.server.hidden_states import HIDDEN_STATES_ROUTES
from jaxinfer.server.http import json_response, read_body, record_of, using
from jaxinfer.server.message_types import Message, MessageEvent, TokenCount
from jaxinfer.server.messages import count_tokens, messages
from jaxinfer.server.middleware import Guard, open_paths
from jaxinfer.server.models import ServedModel
from jaxinfer.server.openapi import Endpoint, RouteEntry, openapi
from jaxinfer.server.page import chat_page
from jaxinfer.server.render import render_chat, render_completions
from jaxinfer.server.responses import responses
from jaxinfer.server.service import Service
from jaxinfer.server.tokenize import detokenize, tokenize, tokenizer_info
from jaxinfer.server.weight_routes import WEIGHT_ROUTES, other_method


def make_app(
    service: Service, keys: Keys | None = None, admin_keys: Keys | None = None, *, for_admins: bool = False
) -> ASGIApp:
    """The ASGI application of a service; without keys it is open to all clients, but for the routes of administrators.
    `for_admins`: with those that change weights, pause and sleep, for a listener of its own.

    Raises ValueError for an admin key that is an API key too.
    """
    if admin_keys is not None and keys is not None:
        admin_keys.check_apart(keys)
    service.key_names = frozenset() if keys is None else keys.names
    entries = [*ROUTES, *([RouteEntry("GET", "/", page)] if service.options.ui else [])]
    options = service.options
    entries += ADAPTER_ROUTES if options.adapter_routes else ()
    entries += HIDDEN_STATES_ROUTES if options.hidden_states else ()
    if options.weight_routes:  # nobody but on the listener of administrators pauses
        paths = {entry.path for entry in WEIGHT_ROUTES}
        entries = [entry for entry in entries if entry.path not in paths]
        entries += WEIGHT_ROUTES if for_admins else ()
    is_strict = not service.options.ignore_unknown_fields
    described = openapi(entries, open_paths(service.options), keys is not None, is_strict=is_strict)

    async def schema(request: Request, service: Service) -> Response:
        """This description."""
        return json_response(described)

    entries.append(RouteEntry("GET", "/openapi.json", schema))
    routes = [Route(entry.path, _Application(entry.run, service), methods=[entry.method]) for entry in entries]
    if options.weight_routes and for_admins:
        routes += [Route(entry.path, _Application(other_method, service)) for entry in WEIGHT_ROUTES]
    router = Router(routes, redirect_slashes=False, default=_not_found)
    return Guard(router, service, keys, [entry.path for entry in entries], admin_keys)


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
    shown = chat_page()
    return Response(shown.content, 200, shown.headers)


async def health(request: Request, service: Service) -> Response:
    """200 while the engine's thread runs, or the model is still being loaded; else 503."""
    status = 200 if service.is_healthy else 503
    return Response(b'{"status":"ok"}' if status == 200 else b'{"status":"dead"}', status, None, "application/json")


async def ready(request: Request, service: Service) -> Response:
    """200 while new requests are answered; else 503, with the reason."""
    if (why := service.why_not_ready) is not None:
        raise unavailable(why, 5)
    # For a front, which asks before it has a key: of several replicas all must give the same answers.
    headers = {"x-jaxinfer-fingerprint": service.default.fingerprint} if service.is_one else {}
    return json_response({"status": "ready"}, headers)


async def version(request: Request, service: Service) -> Response:
    """The version of jaxinfer."""
    return json_response({"version": __version__})


async def metrics(request: Request, service: Service) -> Response:
    """Metrics in Prometheus' format."""
    record, adapters = record_of(request.scope), service.adapters
    text = service.metrics.text(lambda adapter: adapters is None or adapters.is_seen(adapter, record))
    return Response(text, 200, None, "text/plain; version=0.0.4; charset=utf-8")


def _described(model: ServedModel) -> dict[str, object]:
    status = {} if model.adapter is not None else {"status": model.status(time.monotonic())}
    return {**model.facts(), **status}


async def models(request: Request, service: Service) -> Response:
    """The models that may be named, and the state of each; then their adapters."""
    known = await service.all_models(record_of(request.scope))
    return json_response({"object": "list", "data": [_described(model) for model in known]})


async def model(request: Request, service: Service) -> Response:
    """The model or adapter by name."""
    return json_response(_described(await service.find(request.path_params["id"], record_of(request.scope))))


async def load_model(request: Request, service: Service) -> Response:
    """Loads a model, and answers when it is loaded."""
    body = await read_body(request, types.LoadRequest, service)
    async with using(request, service, body) as model:
        return json_response(_described(model))


async def unload_model(request: Request, service: Service) -> Response:
    """Unloads a model as soon as its requests have ended, and answers then."""
    body = await read_body(request, types.ModelRequest, service, uses_model=False)
    return json_response(_described(await while_connected(request.receive, service.models.unload(body.model))))


ROUTES = (
    RouteEntry("GET", "/health", health, answer=answers.Status),
    RouteEntry("GET", "/ready", ready, answer=answers.Status, errors=(503,)),
    RouteEntry("GET", "/version", version, answer=answers.Version),
    RouteEntry("GET", "/metrics", metrics),
    RouteEntry("GET", "/v1/models", models, answer=answers.Models),
    RouteEntry("GET", "/v1/models/{id:path}", model, answer=answers.Model, errors=(404,)),
    RouteEntry("POST", "/models/load", load_model, types.LoadRequest, answers.Model, errors=(429,)),
    RouteEntry("POST", "/models/unload", unload_model, types.ModelRequest, answers.Model),
    RouteEntry("POST", "/v1/chat/completions", chat_completions, ChatRequest, ChatCompletion, ChatChunk, (409, 429)),
    RouteEntry("POST", "/v1/completions", completions, CompletionRequest, Completion, CompletionChunk, (409, 429)),
    RouteEntry("POST", "/v1/chat/completions/render", render_chat, ChatRequest, answers.Rendered),
    RouteEntry("POST", "/v1/completions/render", render_completions, CompletionRequest, list[answers.Rendered]),
    RouteEntry("POST", "/v1/responses", responses, ResponsesRequest, response_types.Response, ResponseEvent, (429,)),
    RouteEntry("POST", "/v1/messages", messages, types.MessagesRequest, Message, MessageEvent, (429,)),
    RouteEntry("POST", "/v1/messages/count_tokens", count_tokens, types.CountTokensRequest, TokenCount),
    RouteEntry("POST", "/tokenize", tokenize, types.TokenizeRequest, answers.Tokens),
    RouteEntry("POST", "/detokenize", detokenize, types.DetokenizeRequest, answers.DetokenizedText),
    RouteEntry("GET", "/tokenizer_info", tokenizer_info, answer=answers.TokenizerInfo, errors=(400, 404, 503)),
    RouteEntry("POST", "/v1/embeddings", embeddings, EmbeddingsRequest, answers.Embeddings, errors=(429,)),
    *(
        RouteEntry("POST", path, score, types.ScoreRequest, answers.Scores, errors=(429,))
        for path in ("/v1/score", "/score")
    ),
    *(
        RouteEntry("POST", path, rerank, types.RerankRequest, answers.Reranked, errors=(429,))
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    RouteEntry("POST", "/api/chat", ollama.chat, types.OllamaChatRequest, errors=(429,)),
    RouteEntry("POST", "/api/generate", ollama.generate, types.OllamaGenerateRequest, errors=(429,)),
    RouteEntry("GET", "/api/version", ollama_models.version),
    RouteEntry("GET", "/api/tags", ollama_models.tags),
    RouteEntry("GET", "/api/ps", ollama_models.ps),
    RouteEntry("POST", "/api/embed", ollama_models.embed, types.OllamaEmbedRequest, errors=(429,)),
    RouteEntry("POST", "/api/show", ollama_models.show, types.OllamaModelRequest),
    RouteEntry("POST", "/api/pull", ollama_models.pull, types.OllamaModelRequest),
    RouteEntry("POST", "/api/copy", ollama_models.copy, types.OllamaCopyRequest),
    RouteEntry("DELETE", "/api/delete", ollama_models.delete, errors=(400, 404, 408, 413, 415, 503)),
)
