"""What the benchmarks of the server share: `jaxinfer serve` in a process of its own, and a client of raw HTTP that can
also send what no client should."""

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from httptools import HttpParserError, HttpResponseParser

_READY_SECONDS = 1800.0
_READ_BYTES = 1 << 16
_JSON = {"content-type": "application/json"}


class ServerProcess:
    """`jaxinfer serve` with these arguments at a free port, ready when the block is entered; killed when it is left.

    Raises RuntimeError with the end of the log where it does not start.
    """

    def __init__(self, *arguments: str):
        self._log = tempfile.NamedTemporaryFile(prefix="serve-", suffix=".log")  # noqa: SIM115
        command = [sys.executable, "-m", "jaxinfer.cli", "serve", *arguments, "--port", str(port := _free_port())]
        self._process = subprocess.Popen(  # Ctrl-C is not for it
            command, stdout=self._log, stderr=self._log, start_new_session=True
        )
        self.url, self.pid = f"http://127.0.0.1:{port}", self._process.pid

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def __enter__(self) -> "ServerProcess":
        deadline = time.monotonic() + _READY_SECONDS
        while True:
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"{self.url}/ready", timeout=5).close()
                return self
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                raise RuntimeError(f"the server did not start:\n{self.log[-2000:]}")
            time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


_METRIC = re.compile(r"^jaxinfer_(\w+?)(?:\{[^}]*\})? ([0-9.e+-]+)$", re.MULTILINE)


def server_facts(metrics: str, pid: int | None = None) -> dict[str, float]:
    """Numbers that must not grow: of the server's metrics, and of its process if `pid` is given."""
    values = dict(_METRIC.findall(metrics))
    found = {
        "compilations": float(values["compilations_total"]),
        "running": float(values["num_requests_running"]),
        "waiting": float(values["num_requests_waiting"]),
        "pages": float(values["kv_cache_pages_owned"]),
    }
    if pid is not None:
        status = Path(f"/proc/{pid}/status").read_text()
        found |= {
            "rss_mib": int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024,
            "threads": int(re.findall(r"Threads:\s+(\d+)", status)[0]),
            "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        }
    return found


@dataclass
class Answer:
    """A whole answer."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Event:
    """One server-sent event; `data` is None for [DONE]."""

    id: str | None
    data: Any


class BrokenError(Exception):
    """The server closed the connection within an answer or before it, or sent what is not HTTP."""


class Connection:
    """One connection, for one request after another."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self.writer = reader, writer
        self._answer, self._parts = Answer(), list[bytes]()
        self._has_head = self._has_ended = False

    @classmethod
    async def open(cls, port: int, receive_buffer: int | None = None) -> "Connection":
        """Args: receive_buffer: bytes that the kernel may hold for a client that does not read. Raises OSError."""
        if receive_buffer is None:
            return cls(*await asyncio.open_connection("127.0.0.1", port))
        opened = socket.socket()
        opened.setblocking(False)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(opened, ("127.0.0.1", port))
        return cls(*await asyncio.open_connection(sock=opened, limit=receive_buffer))

    def send(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        """Starts a request; the last one's answer must have been read."""
        self.begin_answer()
        self.writer.write(request_bytes(method, path, body, headers))

    def begin_answer(self) -> None:
        """For a request whose bytes are written by the caller."""
        self._answer, self._parts = Answer(), []
        self._has_head = self._has_ended = False
        self._parser = HttpResponseParser(self)

    async def head(self) -> Answer:
        """The status and the headers, once they have come. Raises BrokenError."""
        while not self._has_head:
            await self._feed()
        return self._answer

    async def body(self) -> AsyncIterator[bytes]:
        """The parts of the body as they come. Raises BrokenError."""
        await self.head()
        while self._parts or not self._has_ended:
            parts, self._parts = self._parts, []
            for part in parts:
                yield part
            if not self._has_ended:
                await self._feed()

    async def answer(self) -> Answer:
        """The whole answer. Raises BrokenError."""
        body = b"".join([part async for part in self.body()])
        self._answer.body = body
        return self._answer

    async def events(self) -> AsyncIterator[Event]:
        """The events of a stream without its comments. Raises BrokenError."""
        rest = b""
        async for part in self.body():
            *whole, rest = (rest + part).split(b"\n\n")
            for text in whole:
                fields = dict(line.split(b": ", 1) for line in text.split(b"\n") if not line.startswith(b":"))
                if data := fields.get(b"data"):
                    event_id = fields.get(b"id", b"").decode() or None
                    yield Event(event_id, None if data == b"[DONE]" else json.loads(data))
        if rest:
            raise BrokenError(f"the stream ends within an event: {rest[:100]!r}")

    async def wait_until_answered(self) -> None:
        """Drops the answer, up to its end or to that of the connection."""
        with contextlib.suppress(BrokenError):
            async for _ in self.body():
                pass

    def close(self) -> None:
        self.writer.close()

    def abort(self) -> None:
        """Closes at once, as a process that was killed."""
        self.writer.transport.abort()

    async def _feed(self) -> None:
        try:
            data = await self._reader.read(_READ_BYTES)
            if not data:
                raise BrokenError("the server closed the connection")
            self._parser.feed_data(data)
        except OSError as error:
            raise BrokenError(f"the connection was lost: {error}") from None
        except HttpParserError as error:
            raise BrokenError(f"the answer is not HTTP: {error}") from None

    # Of the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._answer.headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()
        self._has_head = self._answer.status >= 200

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        self._has_ended = True


def request_bytes(method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
    """A request as it is sent; a header of the value "" is left out."""
    given = {"host": "localhost", "content-length": str(len(body)), **(_JSON if body else {}), **(headers or {})}
    lines: Sequence[str] = [f"{name}: {value}\r\n" for name, value in given.items() if value]
    return f"{method} {path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode() + body
