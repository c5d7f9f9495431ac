"""Bodies in, streams out: JSON that is read typed, events that are sent while the client is there to read them."""

import asyncio
import contextlib
import heapq
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxinfer.openai import fields
from jaxinfer.openai.errors import RequestError
from jaxinfer.server.api_error import APIError, unavailable
from jaxinfer.server.auth import OF_BROWSERS
from jaxinfer.server.connected import until_left, while_connected
from jaxinfer.server.errors import as_api_error
from jaxinfer.server.models import Lease, ServedModel
from jaxinfer.server.record import RECORD, Record
from jaxinfer.server.sent_tokens import SENT_TOKENS, split_sent_tokens
from jaxinfer.server.service import Service
from jaxinfer.server.sizes import check_fields, count_values, is_large, max_values, off_loop

_FREE_BYTES = 1 << 18  # of each body; what is more is limited for all bodies together
_BODIES_AT_ONCE = 8  # of the largest size
_MAX_UNKNOWN = 20  # names of unknown fields that are logged
_KEEP_ALIVE = b": keep-alive\n\n"
_KEEP_ALIVE_SECONDS = 15.0
_BODY_SECONDS = 60.0
_FORM = "application/x-www-form-urlencoded"

Body = TypeVar("Body", bound=msgspec.Struct)
Result = TypeVar("Result")


def record_of(scope: Scope) -> Record:
    return scope[RECORD]


async def read_body(request: Request, kind: type[Body], service: Service, *, uses_model: bool = True) -> Body:
    """The typed body. Raises APIError for another media type, a body that is too large or late, or is not as it should
    be, and where it `uses_model` while no new requests are taken.

    JSON under the media type of forms, which `curl -d` sends unless told otherwise, is taken from any client but a
    browser: a page of another site may send it without asking the server first.
    """
    if uses_model:
        service.check_accepts()
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_form = media_type == _FORM and not any(name in OF_BROWSERS for name, _ in request.scope["headers"])
    if media_type != "application/json" and not is_form:
        raise _wrong_type(media_type)
    limit = service.options.max_body_bytes
    try:
        if int(request.headers.get("content-length", 0)) > limit:
            raise _too_large(limit)
    except ValueError:
        raise APIError(400, "content-length is no number") from None
    data, num_values = await _receive(
        request, service, max_values(kind, service.largest_model_len(), service.options.max_n)
    )
    record = record_of(request.scope)
    if (counts := request.headers.get(SENT_TOKENS)) is not None:
        if not service.options.accept_sent_tokens:
            told = "this server takes no tokens of answers that were begun elsewhere; see --accept-sent-tokens"
            raise APIError(403, told, param=SENT_TOKENS, code="sent_tokens_refused")
        data, record.sent_tokens = split_sent_tokens(data, counts)
    record.num_bytes = len(data)
    record.is_large = is_large(len(data), num_values)
    is_lenient = service.options.ignore_unknown_fields
    body, unknown = await work_for(record, lambda: _decode(data, kind, is_lenient, is_form))
    if unknown:
        service.log_unknown(unknown, record.route)
    return body


async def _receive(request: Request, service: Service, value_limit: int) -> tuple[bytes, int]:
    """The bytes of a body, and how many values it has at most."""
    limit = service.options.max_body_bytes
    data, num_values, num_held = bytearray(), 0, 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                data += part
                if len(data) > limit:
                    raise _too_large(limit)
                num_values += count_values(part)
                if num_values > value_limit:
                    message = (
                        f"the body has more than {value_limit:,} commas and brackets: no such prompt fits the model"
                    )
                    raise APIError(413, message)
                if len(data) > num_held + _FREE_BYTES:
                    service.num_body_bytes += len(data) - num_held
                    num_held = len(data)
                    if service.num_body_bytes > _BODIES_AT_ONCE * limit:
                        raise unavailable("the server is reading too many large requests", 5)
    except TimeoutError:
        raise APIError(408, f"the body did not come within {_BODY_SECONDS:.0f} s") from None
    finally:
        service.num_body_bytes -= num_held
    return bytes(data), num_values


async def work_for(record: Record, work: Callable[[], Result]) -> Result:
    """Runs what takes as long as the body is large: in the event loop, or in a thread."""
    return await off_loop(work) if record.is_large else work()


async def in_thread(record: Record, work: Callable[[], Result]) -> Result:
    """Runs work outside of the event loop: that for a large body in the thread for those."""
    return await (off_loop(work) if record.is_large else asyncio.to_thread(work))


def _decode(data: bytes, kind: type[Body], ignore_unknown: bool, is_form: bool) -> tuple[Body, list[str]]:
    """The body, and the first names of fields that it has and the type has not, where those are ignored."""
    try:
        given = msgspec.json.decode(data)
        if not isinstance(given, dict):
            raise APIError(400, f"the body must be a JSON object, got {type(given).__name__}")
        body, unknown = fields.read_body(given, kind, ignore_unknown=ignore_unknown)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, RequestError) as error:
        is_json = isinstance(error, (msgspec.ValidationError, RequestError))
        raise (_wrong_type(_FORM) if is_form and not is_json else as_api_error(error)) from None
    check_fields(body)
    return body, heapq.nsmallest(_MAX_UNKNOWN, unknown)


def _wrong_type(media_type: str) -> APIError:
    return APIError(415, f"the body must be application/json, got content-type {media_type!r:.60}")


def _too_large(limit: int) -> APIError:
    return APIError(413, f"the body is larger than {limit:,} bytes")


async def lease_for(request: Request, service: Service, body: Any) -> Lease:
    """As `Service.lease`; a client that leaves waits for its model no more."""
    leases: list[Lease] = []

    async def lease() -> None:
        leases.append(await service.lease(request, body))

    try:
        await while_connected(request.receive, lease())
    except BaseException:  # the client may leave in the moment in which the model is there
        for held in leases:
            held.release()
        raise
    return leases[0]


@contextlib.asynccontextmanager
async def using(request: Request, service: Service, body: Any) -> AsyncIterator[ServedModel]:
    """The model that a body names, for the block. Raises as `lease_for`."""
    with await lease_for(request, service, body) as model:
        yield model


def json_response(value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), 200, headers, "application/json")


class EventStream(Response):
    """Server-sent events, or lines of JSON. The stream ends when the client leaves, or has not read for `send_timeout`
    seconds.

    Args:
      events: bytes of whole events. close: called at the end, however it comes. error_event: makes the last event of
        an error in mid-stream.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        error_event: Callable[[APIError], bytes],
        send_timeout: float,
        headers: dict[str, str] | None = None,
        *,
        media_type: str = "text/event-stream",
    ):
        super().__init__(None, 200, {**(headers or {}), "cache-control": "no-cache", "x-accel-buffering": "no"})
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        self.raw_headers.append((b"content-type", f"{media_type}; charset=utf-8".encode()))
        self._keep_alive = _KEEP_ALIVE if media_type == "text/event-stream" else b""  # lines of JSON have no comments
        self._events, self._close, self._error_event = events, close, error_event
        self._send_timeout = send_timeout
        self._sent_at = time.monotonic()
        self._is_sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.ensure_future(self._send_all(send))
        try:
            await self._watch(task, receive, send)
            if not task.done():
                record_of(scope).has_left = True
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        finally:
            task.cancel()
            self._close()
        if not task.cancelled() and task.exception() is not None:
            raise task.exception()  # type: ignore[misc]

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for event in self._events:
                self._sent_at, self._is_sending = time.monotonic(), True
                await send({"type": "http.response.body", "body": event, "more_body": True})
                self._is_sending = False
        except Exception as error:  # the status has been sent
            await send(
                {"type": "http.response.body", "body": self._error_event(as_api_error(error)), "more_body": True}
            )
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch(self, task: "asyncio.Future[None]", receive: Receive, send: Send) -> None:
        """Returns when the events have been sent, or the client does not read them."""
        leaving = asyncio.ensure_future(until_left(receive))
        try:
            while True:
                period = min(_KEEP_ALIVE_SECONDS, self._send_timeout)
                await asyncio.wait((task, leaving), timeout=period, return_when=asyncio.FIRST_COMPLETED)
                if task.done() or leaving.done():
                    return
                idle = time.monotonic() - self._sent_at
                if self._is_sending and idle > self._send_timeout:
                    return
                if not self._is_sending and idle >= period:
                    try:
                        async with asyncio.timeout(self._send_timeout):
                            await send({"type": "http.response.body", "body": self._keep_alive, "more_body": True})
                    except TimeoutError:
                        return
        finally:
            leaving.cancel()
