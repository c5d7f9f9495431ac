"""Checks before every route, in pure ASGI: request ids, hosts, origins, keys, the size of headers, and errors."""

import time
from collections.abc import Awaitable, Sequence

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.server.api_error import APIError, invalid_key
from jaxinfer.server.auth import Keys, key_in
from jaxinfer.server.connected import ClientLeftError
from jaxinfer.server.errors import as_api_error
from jaxinfer.server.ids import request_id
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.record import RECORD, Record
from jaxinfer.server.service import Service

# For probes, which have no key, and for the page, which asks its reader for one.
OPEN_PATHS = ("/health", "/ready", "/")
_METRICS = "/metrics"
_CORS_SECONDS = b"600"
_TRACE = (b"traceparent", b"tracestate")

Headers = Sequence[tuple[bytes, bytes]]


def open_paths(options: ServerOptions) -> tuple[str, ...]:
    """Paths that need no key."""
    return (*OPEN_PATHS, _METRICS) if options.open_metrics else OPEN_PATHS


class Guard:
    """Checks a request before the routes see it, and answers with an error whatever they raise."""

    def __init__(
        self, app: ASGIApp, service: Service, keys: Keys | None, routes: Sequence[str], admin_keys: Keys | None = None
    ):
        self._app, self._service, self._keys, self._admin_keys = app, service, keys, admin_keys
        self._routes = frozenset(routes)
        options = service.options
        self._hosts, self._max_header_bytes = options.hosts, options.max_header_bytes
        self._open_paths = open_paths(options)
        self._origins = frozenset(origin.encode() for origin in options.allowed_origins or ())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the only kind that is checked below
            raise ValueError(f"connections of type {scope['type']!r} are not served")
        headers: Headers = scope["headers"]
        record = Record(request_id(headers), scope["method"])
        record.route = self._route(scope["path"])
        record.start = time.perf_counter()
        if self._service.on_finish is not None:
            record.trace_context = {name.decode(): value.decode("latin-1") for name, value in headers if name in _TRACE}
        scope[RECORD] = record
        scope["app"] = self  # or Starlette answers other methods with plain text
        more = [(b"x-request-id", record.request_id.encode()), *self._cors(headers)]
        has_started = False

        def send_with_headers(message: Message) -> Awaitable[None]:  # no coroutine of its own for every chunk
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started, record.status = True, message["status"]
                message["headers"] = [*message.get("headers", ()), *more]
            return send(message)

        try:
            if not await self._answer_preflight(scope, send_with_headers):
                record.key, record.is_admin = self._check(scope)
                await self._app(scope, receive, send_with_headers)
        except (ClientLeftError, ClientDisconnect):
            record.has_left, record.status = True, 499
        except Exception as error:
            if has_started:
                raise
            await as_api_error(error).response(scope["path"])(scope, receive, send_with_headers)
        finally:
            record.total_seconds = time.perf_counter() - record.start
            self._service.finish(record)

    def _route(self, path: str) -> str:
        return path if path in self._routes else "/v1/models/{id}" if path.startswith("/v1/models/") else "other"

    def _check(self, scope: Scope) -> tuple[str, bool]:
        """The name of the request's key, "" for none, and whether it is an admin key. Raises APIError for a request
        that is not allowed."""
        headers: Headers = scope["headers"]
        if (size := sum(len(name) + len(value) for name, value in headers)) > self._max_header_bytes:
            raise APIError(431, f"the headers have {size:,} bytes, {self._max_header_bytes:,} are allowed")
        if sum(name == b"host" for name, _ in headers) > 1:  # a proxy may have checked the other one
            raise APIError(400, "the request has several Host headers")
        if self._hosts is not None and _host(headers) not in self._hosts:
            raise APIError(403, "this server does not answer for the host that the request names; see --allowed-host")
        # The path as the routes see it, not one that is put together with the Host header.
        if scope["path"] in OPEN_PATHS:
            return "", False
        key = key_in(headers)
        if key is None and scope["path"] in self._open_paths:
            return "", False
        if self._admin_keys is not None and key is not None and (name := self._admin_keys.name_of(key)) is not None:
            return name, True
        if self._keys is None:
            return "", False
        name = None if key is None else self._keys.name_of(key)
        if name is None:
            raise invalid_key(key is None)
        return name, False

    # Web pages of other origins.

    def _cors(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        if not self._origins:
            return []
        origin = _header(headers, b"origin")
        allowed = [(b"vary", b"Origin")]
        if origin in self._origins:
            exposed = b"x-request-id, x-jaxinfer-seed, x-jaxinfer-resumable, retry-after"
            allowed += [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", exposed)]
        return allowed

    async def _answer_preflight(self, scope: Scope, send: Send) -> bool:
        headers: Headers = scope["headers"]
        if scope["method"] != "OPTIONS" or not _header(headers, b"access-control-request-method"):
            return False
        if _header(headers, b"origin") not in self._origins:
            raise APIError(403, "pages of this origin may not use the server; see --allowed-origin")
        allowed = [
            (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
            (b"access-control-allow-headers", _header(headers, b"access-control-request-headers")[:1024]),
            (b"access-control-max-age", _CORS_SECONDS),
            (b"content-length", b"0"),
        ]
        await send({"type": "http.response.start", "status": 204, "headers": allowed})
        await send({"type": "http.response.body", "body": b""})
        return True


def _header(headers: Headers, name: bytes) -> bytes:
    return next((value for other, value in headers if other == name), b"")


def _host(headers: Headers) -> str:
    """The host's name without its port."""
    host = _header(headers, b"host").decode("latin-1").strip().lower()
    if host.startswith("["):
        return host.partition("]")[0].removeprefix("[")
    return host.rpartition(":")[0] if ":" in host else host
