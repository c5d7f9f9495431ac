"""HTTP/1.1 to a replica: what comes is handed on as it comes, and a connection that ends too early is told apart.

A client library would take longer for each chunk than the whole front may.
"""

import asyncio
from collections.abc import Sequence
from typing import cast

import httptools

_MOST_UNREAD = 1 << 18  # bytes after which nothing more is read from the replica, until the client has read some
_CONNECT_SECONDS = 2.0
_MAX_IDLE = 64  # connections that are kept open for later requests
_IDLE_SECONDS = 30.0  # fewer than the replica keeps them

Headers = list[tuple[bytes, bytes]]


class ReplicaLostError(Exception):
    """A replica's connection ended before its answer did. `has_begun`: whether anything of the answer had come."""

    def __init__(self, why: str, has_begun: bool = False):
        super().__init__(why)
        self.has_begun = has_begun


class NotReachedError(ReplicaLostError):
    """No connection could be made: the replica never had the request."""


class ReplicaConnection(asyncio.Protocol):
    """One connection, with one answer at a time: `request`, then `head`, then `read` until it is done."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._lost: str | None = None
        self._is_paused = False
        self._heard_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.num_answers = 0
        self.idle_since = 0.0
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._num_unread = 0
        self._has_head = self.is_done = self._has_begun = False
        self.status, self.headers = 0, Headers()

    @property
    def is_usable(self) -> bool:
        """True if it can take another request."""
        is_whole = self.is_done or not self.num_answers
        return self._lost is None and is_whole and self._transport is not None and not self._transport.is_closing()

    def request(self, method: str, target: str, headers: Sequence[tuple[bytes, bytes]], body: Sequence[bytes]) -> None:
        """Sends a request. `headers` have all but content-length."""
        if self._transport is None or self._lost is not None:
            raise ReplicaLostError(self._lost or "it is not connected")
        self._reset()
        self.num_answers += 1
        lines = [f"{method} {target} HTTP/1.1".encode(), *(name + b": " + value for name, value in headers)]
        lines.append(b"content-length: %d" % sum(map(len, body)))
        self._transport.write(b"\r\n".join((*lines, b"", b"".join(body))))

    async def head(self) -> None:
        """Waits for status and headers. Raises ReplicaLostError."""
        while not self._has_head:
            await self._more()

    async def read(self) -> bytes:
        """New bytes of the body, b"" at its end. Raises ReplicaLostError."""
        while not self._body:
            if self.is_done:
                return b""
            await self._more()
        data = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        self._num_unread = 0
        if self._is_paused and self._transport is not None:
            self._is_paused, self._heard_at = False, self._loop.time()
            self._transport.resume_reading()
        return data

    def close(self) -> None:
        """Ends the connection, and with it the answer."""
        if self._transport is not None:
            self._transport.abort()

    def give_up(self, why: str) -> None:
        """Ends the connection; who reads it gets ReplicaLostError."""
        self._end(why)
        self.close()

    def expect_bytes(self, seconds: float) -> None:
        """Gives the connection up where no byte of its answer comes for so long, unless it is the client that does not
        read."""
        self._heard_at = self._loop.time()
        self._timer = self._loop.call_later(seconds, self._check_heard, seconds)

    def _check_heard(self, seconds: float) -> None:
        left = seconds if self._is_paused else self._heard_at + seconds - self._loop.time()
        if left <= 0:
            self.give_up(f"it has sent nothing for {seconds:g} s")
        elif not self.is_done and self._lost is None:
            self._timer = self._loop.call_later(left, self._check_heard, seconds)

    async def _more(self) -> None:
        if self._lost is not None:
            raise ReplicaLostError(self._lost, self._has_begun)
        self._waiter = self._loop.create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _end(self, why: str) -> None:
        if self._lost is None:
            self._lost = why
        self._stop_expecting()
        self._wake()

    def _stop_expecting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._has_begun, self._heard_at = True, self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.give_up(f"it sent no HTTP: {error}")
            return
        if self._num_unread > _MOST_UNREAD and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("its connection was closed" if exc is None else f"its connection broke: {exc}")

    # Of the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status, self._has_head = self._parser.get_status_code(), True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        self._num_unread += len(body)

    def on_message_complete(self) -> None:
        self.is_done = True
        self._stop_expecting()
        if not self._parser.should_keep_alive():
            self._lost = self._lost or "it was closed after its answer"


class ConnectionPool:
    """Connections to one replica.

    Args:
      host, port: where it listens.
    """

    def __init__(self, host: str, port: int):
        self._host, self._port = host, port
        self._idle: list[ReplicaConnection] = []
        self._in_use: set[ReplicaConnection] = set()

    async def take(self, *, fresh: bool = False) -> ReplicaConnection:
        """A connection; a `fresh` one was never used. Raises NotReachedError."""
        loop = asyncio.get_running_loop()
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.is_usable and loop.time() - connection.idle_since < _IDLE_SECONDS:
                self._in_use.add(connection)
                return connection
            connection.close()
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, connection = await loop.create_connection(ReplicaConnection, self._host, self._port)
        except (OSError, TimeoutError) as error:
            raise NotReachedError(f"it cannot be reached: {error or 'it does not answer'}") from None
        self._in_use.add(connection)
        return connection

    def give_back(self, connection: ReplicaConnection) -> None:
        """Keeps a connection whose answer was read to its end; closes any other."""
        self._in_use.discard(connection)
        if connection.is_usable and len(self._idle) < _MAX_IDLE:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.close()

    def close_idle(self) -> None:
        """Ends the connections that are not in use."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def give_up(self, why: str) -> None:
        """Ends all connections."""
        for connection in (*self._idle, *self._in_use):
            connection.give_up(why)
        self._idle.clear()
