"""Replicas that do as a test says, and a front before them, in one event loop."""

import asyncio
import contextlib
import re
import socket

from jaxinfer.fleet.front.options import FrontOptions
from jaxinfer.fleet.front.run import serve_front

HEAD = "HTTP/1.1 200 OK\r\ncontent-type: %s; charset=utf-8\r\nx-jaxinfer-seed: 7\r\n"
ID = "{0:0>24}.aaaaaaaaaaaaaaaa.7.{1}"


class FakeReplica:
    """Answers every request with what `script(request head, body)` yields: bytes, or None to break the connection.
    Without more it ends the answer."""

    def __init__(self, script, fingerprint="fp_1"):
        self.script, self.fingerprint = script, fingerprint
        self.requests: list[tuple[str, bytes]] = []
        self.peers: list[tuple] = []  # from which the requests came
        self.is_ready = True
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task] = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(re.search(r"content-length: (\d+)", head)[1])
                body = await reader.readexactly(length)
                if head.startswith("GET /ready "):
                    status = "200 OK" if self.is_ready else "503 Unavailable"
                    writer.write(
                        f"HTTP/1.1 {status}\r\nx-jaxinfer-fingerprint: {self.fingerprint}\r\n"
                        "content-length: 0\r\n\r\n".encode()
                    )
                    continue
                self.requests.append((head, body))
                self.peers.append(writer.get_extra_info("peername"))
                async for part in self.script(head, body):
                    if part is None:
                        writer.transport.abort()
                        return
                    writer.write(part)
                    await writer.drain()


def chunk(text):
    data = text.encode() if isinstance(text, str) else text
    return b"%x\r\n%b\r\n" % (len(data), data)


def start(media_type="text/event-stream"):
    return (HEAD % media_type + "transfer-encoding: chunked\r\n\r\n").encode()


def whole(status, body):
    return (
        f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
    )


def event(number, position=None):
    """An event whose data is a number, with what tells its token."""
    told = f":tokens 0 {number - 1} {100 + number}\n\n"
    at = ID.format(1, position or f"{number:x}-{number:x}-1")
    return f"{told}id: {at}\ndata: {number}\n\n"


@contextlib.asynccontextmanager
async def front(*replicas, **options):
    """A front before replicas; gives its port. It has asked all of them whether they are ready."""
    listener = socket.create_server(("127.0.0.1", 0))
    port, stopping = listener.getsockname()[1], asyncio.Event()
    made = FrontOptions(replicas=[replica.url for replica in replicas], **{"wait_timeout": 5.0, **options})
    task = asyncio.create_task(serve_front(made, listener, stopping))
    try:
        while (await ask(port, "GET", "/ready"))[0] != 200:
            await asyncio.sleep(0.01)
        yield port
    finally:
        stopping.set()
        await task
        listener.close()


async def ask(port, method="POST", path="/v1/completions", body=b"{}", **headers):
    """Status, headers and body of an answer, as they came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [f"{method} {path} HTTP/1.1", f"host: localhost:{port}", "connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    lines += ["content-type: application/json", f"content-length: {len(body)}"]
    writer.write("\r\n".join((*lines, "", "")).encode() + body)
    data = await reader.read()
    writer.close()
    head, _, rest = data.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head:
        parts = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            parts, rest = parts + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        rest = parts
    return int(head.split()[1]), head.decode().lower(), rest
