"""Load on an OpenAI-compatible server: streamed completions over HTTP, each on a connection of its own."""

import asyncio
import contextlib
import json
import os
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from jaxinfer.extras import install_hint
from jaxinfer.measure.bench.metrics import Trace, distribution, figures
from jaxinfer.measure.bench.runs import RunOptions, arriving
from jaxinfer.measure.bench.workload import WorkloadRequest

KEY_VARIABLE = "OPENAI_API_KEY"
_PORTS = {"http": 80, "https": 443}
_READ_BYTES = 2**16


class RemoteRequestError(RuntimeError):
    """An answer of the server that is an error; `status` is 0 for an error within a stream."""

    def __init__(self, status: int, message: str):
        super().__init__(f"status {status}: {message}" if status else message)
        self.status = status


class Server:
    """A server by its URL, with or without `/v1` at the end, and the model that requests name. The API key, if there is
    one, is in the environment variable OPENAI_API_KEY.

    Raises ValueError for a URL that is not one; ImportError without httptools.
    """

    def __init__(self, url: str, model: str = ""):
        try:
            from httptools import HttpResponseParser
        except ImportError:
            raise ImportError(f"--url needs httptools: {install_hint('serve')}") from None
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise ValueError(f"--url: {url!r} is not a URL such as http://127.0.0.1:8000")
        self.model, self._parser = model, HttpResponseParser
        self._host, self._port = parts.hostname, parts.port or _PORTS[parts.scheme]
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        headers = {"host": parts.netloc.rpartition("@")[2], "connection": "close", "content-type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["authorization"] = f"Bearer {key}"
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())

    @classmethod
    def open(cls, url: str, model: str = "") -> "Server":
        """With the first model that the server lists, if none is given. Raises RemoteRequestError, OSError for a server
        that does not answer."""
        server = cls(url, model)
        names = asyncio.run(server.models())
        if not model and not names:
            raise RemoteRequestError(200, "the server lists no models")
        server.model = model or names[0]
        return server

    def load(
        self,
        requests: Sequence[WorkloadRequest],
        times: Sequence[float],
        options: RunOptions,
        max_concurrency: int | None = None,
    ) -> dict[str, Any]:
        """Measures requests that arrive over time, request i `times[i]` seconds after the start. Requests that the
        server refuses or does not finish are counted by their status, 0 for a lost connection; the metrics leave them
        out. Raises the last one's error if none was answered."""
        salt = os.urandom(8).hex()  # no run reuses the prefixes of another
        failures: Counter[int] = Counter()
        errors: list[Exception] = []
        waits: list[float] = []

        async def send(request: WorkloadRequest) -> Trace | None:
            trace = Trace(time.perf_counter(), 0)
            body = {
                "model": self.model,
                "prompt": request.prompt,
                "max_tokens": request.num_tokens,
                "temperature": options.temperature,
                "seed": options.seed,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                "cache_salt": salt,
            }
            try:
                await self.complete(body, trace)
            except (RemoteRequestError, OSError) as error:
                failures[getattr(error, "status", 0)] += 1
                errors.append(error)
                waits.append(time.perf_counter() - trace.sent)
                return None
            return trace

        sent, seconds = asyncio.run(arriving(send, requests, times, options, max_concurrency))
        traces = [trace for trace in sent if trace is not None]
        if errors and not traces:
            raise errors[-1]
        run = figures(traces, seconds, limits=options.limits, price_per_hour=options.price_per_hour)
        pairs = zip(sent, requests, strict=True)
        run["ended_early"] = sum(
            trace is not None and trace.num_tokens < request.num_tokens for trace, request in pairs
        )
        run["failed"] = {str(status): count for status, count in sorted(failures.items())}
        run["failed_seconds"] = distribution(waits)
        return run

    async def models(self) -> list[str]:
        """Names of the models that the server lists. Raises RemoteRequestError, OSError."""
        body = b"".join([part async for part in self._exchange("GET", "/v1/models", b"")])
        return [model["id"] for model in json.loads(body)["data"]]

    async def complete(self, body: dict[str, Any], trace: Trace) -> None:
        """Streams a completion; `trace` gets the times of its parts, and the numbers of tokens that the server reports.

        Raises RemoteRequestError, OSError.
        """
        rest, usage = b"", None
        trace.sent = time.perf_counter()
        async for part in self._exchange("POST", "/v1/completions", json.dumps(body).encode()):
            now = time.perf_counter()
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RemoteRequestError(0, str(event["error"]))
                usage = event.get("usage") or usage
                if any(choice.get("text") or choice.get("token_ids") for choice in event.get("choices", ())):
                    trace.deliver(now, 1)
        if usage is not None:
            trace.num_prompt, trace.num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        if not trace.times:
            raise RemoteRequestError(0, "the stream ended without text")

    async def _exchange(self, method: str, path: str, body: bytes) -> AsyncIterator[bytes]:
        """The parts of the answer's body. Raises RemoteRequestError for a status other than 200, OSError."""
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._ssl)
        try:
            head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}content-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            parts = _Parts()
            parser = self._parser(parts)
            collected = b""
            while not parts.is_complete and (data := await reader.read(_READ_BYTES)):
                parser.feed_data(data)
                content, parts.received = b"".join(parts.received), []
                if not content:
                    continue
                if parser.get_status_code() == 200:
                    yield content
                else:
                    collected += content
            if not parts.is_complete and not parts.is_headed:
                raise ConnectionError("the server closed the connection without an answer")
            if (status := parser.get_status_code()) != 200:
                raise RemoteRequestError(status, collected.decode(errors="replace").strip()[:300])
            if not parts.is_complete:
                raise ConnectionError("the server closed the connection within an answer")
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


class _Parts:
    """Parts of an answer that the parser has read."""

    def __init__(self):
        self.received: list[bytes] = []
        self.is_headed = self.is_complete = False

    def on_headers_complete(self) -> None:
        self.is_headed = True

    def on_body(self, data: bytes) -> None:
        self.received.append(data)

    def on_message_complete(self) -> None:
        self.is_complete = True
