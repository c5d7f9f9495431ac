"""The front as an ASGI application: what it passes on, and the routes of its own."""

import asyncio

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jaxinfer.fleet.front.connection import Headers
from jaxinfer.fleet.front.options import FrontOptions
from jaxinfer.fleet.front.relay import FrontCounts, Relay
from jaxinfer.fleet.front.replicas import FrontReplicas, ReplicaSet
from jaxinfer.server.api_error import APIError, failed, unavailable
from jaxinfer.server.connected import ClientLeftError, while_connected
from jaxinfer.server.ids import request_id
from jaxinfer.server.sent_tokens import SENT_TOKENS

_BODY_SECONDS = 60.0
_POSTED = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/chat/completions/render", "/v1/completions/render"),
    *("/tokenize", "/detokenize", "/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"),
    *("/api/chat", "/api/generate", "/api/embed", "/api/show"),
)
_READ = ("/", "/version", "/v1/models", "/tokenizer_info", "/openapi.json", "/api/version", "/api/tags")
_OWN = ("/health", "/ready", "/metrics")
_DESCRIBED = {*_POSTED, *_READ, *_OWN, "/v1/models/{id}"}


class FrontApp:
    """Passes requests on to replicas.

    What changes a server (loading, weights, adapters, pausing) is not passed on: it would change one replica of
    several.

    Args:
      replicas: those of the options unless given.
    """

    def __init__(self, options: FrontOptions, replicas: FrontReplicas | None = None):
        self._options, self.counts = options, FrontCounts()
        self.replicas: FrontReplicas = ReplicaSet(options) if replicas is None else replicas
        self.num_running = 0
        self.is_draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"connections of type {scope['type']!r} are not served")
        path: str = scope["path"]
        try:
            self._check(scope)
            if (answer := self._own(scope["method"], path)) is not None:
                answer.headers["x-request-id"] = request_id(scope["headers"])
                await answer(scope, receive, send)
                return
            await self._pass_on(scope, receive, send)
        except (ClientLeftError, ClientDisconnect):
            return
        except Exception as error:
            answer = failed(error).response(path)
            answer.headers["x-request-id"] = request_id(scope["headers"])
            await answer(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers: Headers = scope["headers"]
        named = [value for name, value in headers if name == b"host"]
        if len(named) != 1:
            raise APIError(400, f"the request has {len(named)} Host headers")
        if (allowed := self._options.hosts) is not None and _host(named[0]) not in allowed:
            raise APIError(403, "this front does not answer for the host that the request names; see --allowed-host")
        if any(name == SENT_TOKENS.encode() for name, _ in headers):
            raise APIError(400, "tokens that were sent come from the front alone", param=SENT_TOKENS)

    def _own(self, method: str, path: str) -> Response | None:
        """The answer of a route that is the front's own."""
        if path in _OWN and method not in ("GET", "HEAD"):
            raise APIError(405, "this route does not take this method", headers={"allow": "GET, HEAD"})
        if path == "/health":
            return _json({"status": "ok"})
        if path == "/ready":
            if self.is_draining or not self.replicas.ready:
                raise unavailable("the front is going away" if self.is_draining else "no replica is ready", 5)
            return _json({"status": "ready"})
        if path == "/metrics":
            return Response(self._metrics(), 200, None, "text/plain; version=0.0.4; charset=utf-8")
        return None

    def _metrics(self) -> str:
        counts = {f"{name}_total": ("counter", value) for name, value in vars(self.counts).items()}
        gauges = {"running": ("gauge", self.num_running), "ready_replicas": ("gauge", len(self.replicas.ready))}
        lines = [
            f"# TYPE jaxinfer_front_{name} {kind}\njaxinfer_front_{name} {value}\n"
            for name, (kind, value) in {**counts, **gauges}.items()
        ]
        return "".join(lines)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        is_read = path in _READ or path.startswith("/v1/models/")
        if not (path in _POSTED or is_read):
            raise APIError(404, "there is no such route, or it is one of a single server")
        if method != ("GET" if is_read else "POST"):
            raise APIError(405, "this route does not take this method", headers={"allow": "GET" if is_read else "POST"})
        if self.is_draining:
            raise unavailable("the front is going away and takes no new requests", 5)
        target = scope["raw_path"].decode("latin-1")
        if scope["query_string"]:
            target += "?" + scope["query_string"].decode("latin-1")
        self.num_running += 1
        try:
            body = await self._body(receive)
            about = method, path, target, scope["headers"], body
            if path == "/openapi.json":
                send = _described(send)
            relay = Relay(self.replicas, self._options, self.counts, *about, send)
            await while_connected(receive, relay.run())
        finally:
            self.num_running -= 1

    async def _body(self, receive: Receive) -> bytes:
        """The whole body: another replica may need it again. Raises APIError."""
        data, limit = bytearray(), self._options.max_body_bytes
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeftError
                    data += message.get("body", b"")
                    if len(data) > limit:
                        raise APIError(413, f"the body is larger than {limit:,} bytes")
                    if not message.get("more_body", False):
                        return bytes(data)
        except TimeoutError:
            raise APIError(408, f"the body did not come within {_BODY_SECONDS:.0f} s") from None


def _described(send: Send) -> Send:
    """A `send` that leaves out of a server's description the routes that the front does not pass on."""
    started: Message = {}

    async def describe(message: Message) -> None:
        if message["type"] == "http.response.start":
            started.update(message)
            return
        body = message["body"]
        if started["status"] == 200:
            description = msgspec.json.decode(body)
            paths = description["paths"]
            description["paths"] = {path: paths[path] for path in paths if path in _DESCRIBED}
            body = msgspec.json.encode(description)
        kept = [(name, value) for name, value in started["headers"] if name != b"content-length"]
        await send({**started, "headers": [*kept, (b"content-length", b"%d" % len(body))]})
        await send({**message, "body": body})

    return describe


def _json(value: dict[str, str]) -> Response:
    return Response(msgspec.json.encode(value), 200, None, "application/json")


def _host(value: bytes) -> str:
    """The host's name without its port."""
    host = value.decode("latin-1").strip().lower()
    if host.startswith("["):
        return host.partition("]")[0].removeprefix("[")
    return host.rpartition(":")[0] if ":" in host else host
