"""A client of an ASGI application in the same process: streams, disconnects, and stops to read."""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass
class Answer:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


@dataclass
class Event:
    """One server-sent event; `data` is None for comments and [DONE]."""

    id: str | None
    name: str | None
    data: Any
    text: str


class Exchange:
    """One request on its way. `max_unread` bounds the messages that the application can send ahead."""

    def __init__(self, app, scope: dict[str, Any], body: bytes, max_unread: int = 0):
        self._sent: asyncio.Queue = asyncio.Queue(max_unread)
        self._received: asyncio.Queue = asyncio.Queue()
        self._received.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self.task = asyncio.create_task(self._run(app, scope))

    async def _run(self, app, scope) -> None:
        try:
            await app(scope, self._receive, self._sent.put)
        finally:
            with contextlib.suppress(asyncio.QueueFull):
                self._sent.put_nowait(None)

    async def _receive(self) -> dict[str, Any]:
        message = await self._received.get()
        if message["type"] == "http.disconnect":  # it is told however often one asks
            self.leave()
        return message

    def leave(self) -> None:
        """The client closes its connection."""
        self._received.put_nowait({"type": "http.disconnect"})

    async def start(self) -> tuple[int, dict[str, str]]:
        message = await self._sent.get()
        assert message is not None, self.task.exception()
        assert message["type"] == "http.response.start"
        return message["status"], {name.decode().lower(): value.decode() for name, value in message["headers"]}

    async def parts(self):
        while (message := await self._sent.get()) is not None:
            yield message.get("body", b"")
            if not message.get("more_body"):
                return

    async def events(self):
        rest = ""
        async for part in self.parts():
            rest += part.decode()
            *whole, rest = rest.split("\n\n")
            for text in whole:
                yield _event(text)
        assert rest == ""


def _event(text: str) -> Event:
    fields = {}
    for line in text.split("\n"):
        name, _, value = line.partition(": ")
        fields[name] = value
    data = fields.get("data")
    decoded = None if data in (None, "[DONE]") else msgspec.json.decode(data)
    return Event(fields.get("id"), fields.get("event"), decoded, data or text)


class Client:
    """Args:
    app: the application. headers: of every request.
    """

    def __init__(self, app, **headers: str):
        self.app, self.headers = app, headers

    def send(self, method: str, path: str, json: Any = None, *, body: bytes | None = None, max_unread: int = 0, **more):
        """Starts a request; `more` are headers, with _ for -."""
        data = body if body is not None else b"" if json is None else msgspec.json.encode(json)
        headers = {"host": "localhost:8000", **self.headers}
        if data:
            headers["content-type"] = "application/json"
        headers |= {name.replace("_", "-"): value for name, value in more.items()}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path.partition("?")[0],
            "raw_path": path.partition("?")[0].encode(),
            "query_string": path.partition("?")[2].encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        return Exchange(self.app, scope, data, max_unread)

    async def call(self, method: str, path: str, json: Any = None, **more) -> Answer:
        exchange = self.send(method, path, json, **more)
        status, headers = await exchange.start()
        body = b"".join([part async for part in exchange.parts()])
        await exchange.task
        return Answer(status, headers, body)

    async def get(self, path: str, **more) -> Answer:
        return await self.call("GET", path, **more)

    async def post(self, path: str, json: Any = None, **more) -> Answer:
        return await self.call("POST", path, json, **more)

    async def stream(self, path: str, json: Any, **more) -> list[Event]:
        exchange = self.send("POST", path, {**json, "stream": True}, **more)
        status, headers = await exchange.start()
        assert status == 200, b"".join([part async for part in exchange.parts()])
        assert headers["content-type"].startswith("text/event-stream")
        found = [event async for event in exchange.events()]
        await exchange.task
        return found
