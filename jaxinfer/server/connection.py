"""Limits of one connection, which uvicorn lacks: a client that sends without end, or slowly, or does not read.

Everything here happens before the application sees a request, so it protects also from clients without a key.
"""

import asyncio
import contextlib
import resource
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from jaxinfer.server.api_error import unavailable
from jaxinfer.server.options import ServerOptions

HEAD_SECONDS = 30.0  # from the first byte of a request, or from connecting, to the end of its headers
MESSAGE_SECONDS = 90.0  # of a body, whatever reads it
_LINGER_SECONDS = 1.0  # until a refused connection is closed
_SPARE_FILES = 128  # of the process, beside connections
_MAX_FILES = 1 << 16


def max_connections(wanted: int) -> int:
    """Connections that can be open at once: as wanted, or what the limit on open files leaves. Raises that limit as far
    as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(min(wanted, soft - _SPARE_FILES), 1)


def limited_protocol(options: ServerOptions) -> type[HttpToolsProtocol]:
    """The protocol of a server with these options, for uvicorn, which makes an instance for each connection."""
    limits = {"options": options, "num_allowed": max_connections(options.max_connections)}
    return type("LimitedProtocol", (LimitedProtocol,), limits)


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits:

    - on connections: one more is answered with 503 and closed;
    - on what is not a body, that is headers, trailers and the sizes of chunks; uvicorn would collect any number of
      bytes before the application sees them;
    - on the seconds for the headers and for a message, and on a body that the application does not read;
    - on the seconds in which a client reads nothing of what waits for it.
    """

    options: ServerOptions
    num_allowed: int  # connections
    _timer: asyncio.TimerHandle | None = None  # of the message that is received
    _write_timer: asyncio.TimerHandle | None = None
    _is_in_message = False
    _is_in_head = True
    _num_extra = _num_body = _num_unread = 0  # bytes

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.num_allowed:
            self._reject()
        else:
            self._expect(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_expecting()
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._timer is None and not self._is_in_message:  # of a further request, perhaps empty lines before it
            self._expect(HEAD_SECONDS)
        self._num_extra += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        allowed = self.options.max_header_bytes + (0 if self._is_in_head else 2 * self._num_body)
        if self._num_extra > allowed:
            what = "headers" if self._is_in_head else "trailers and sizes of chunks"
            self.send_400_response(f"the {what} have more than {allowed} bytes")
        elif self._num_unread > self.options.max_body_bytes:
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect(HEAD_SECONDS)
        self._is_in_message = self._is_in_head = True
        self._num_body = self._num_unread = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # a trailer must not stand for a header that a proxy has checked
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head, self._num_extra = False, 0
        self._expect(MESSAGE_SECONDS)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_extra -= len(body)
        self._num_body += len(body)
        if self.cycle.response_complete:
            self._num_unread += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._stop_expecting()
        self._is_in_message, self._is_in_head, self._num_extra = False, True, 0

    # A message that does not end.

    def _expect(self, seconds: float) -> None:
        self._stop_expecting()
        self._timer = self.loop.call_later(seconds, self.transport.close)

    def _stop_expecting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # A client that does not read.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()

    def _watch(self, num_left: int) -> None:
        self._write_timer = self.loop.call_later(self.options.send_timeout, self._check_read, num_left)

    def _stop_watching(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _check_read(self, num_before: int) -> None:
        num_left = self.transport.get_write_buffer_size()
        if num_left >= num_before:
            self.transport.abort()
        elif num_left:
            self._watch(num_left)

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # closing would wait for the client to read it
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    # One connection too many.

    def _reject(self) -> None:
        error = unavailable(f"the server has {self.num_allowed} connections, as many as it takes", 5)
        body = msgspec.json.encode(error.openai())
        head = b"content-type: application/json\r\nretry-after: 5\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(STATUS_LINE[503] + head % len(body) + body)
        self.data_received = lambda data: None  # type: ignore[method-assign]
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(_LINGER_SECONDS, self.transport.abort)
