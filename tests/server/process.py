"""A server of a tiny model in a process of its own."""

import http.client
import json
import os
import subprocess
import sys
import time

MODEL = """
import sys
from jaxinfer import AsyncEngine, compilation_cache
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.run import run_server
from tests.server.conftest import OPTIONS, tiny_model

compilation_cache.enable()

def open_engine():
    engine = AsyncEngine(tiny_model(), tool_parser="hermes", **OPTIONS)
    if "dies" in sys.argv:
        step, steps = engine.llm.client.step, []
        def failing(*_):
            steps.append(1)
            if len(steps) > 20:
                raise RuntimeError("the device has gone")
            step()
        engine.llm.client.step = failing
    return engine

options = ServerOptions(port=0, drain_timeout=float(sys.argv[1]), max_header_bytes=4096)
sys.exit(run_server(options, "tiny", open_engine, on_listening=lambda url: print(url, flush=True)))
"""


class Process:
    def __init__(self, *arguments: str):
        environment = {**os.environ, "PYTHONPATH": os.getcwd(), "XLA_FLAGS": "--xla_backend_optimization_level=0"}
        command = [sys.executable, "-c", MODEL, *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        url = self.process.stdout.readline().strip()
        self.port = int(url.rpartition(":")[2])

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)

    def get(self, path: str) -> int:
        connection = self.connect()
        connection.request("GET", path)
        return connection.getresponse().status

    def until_ready(self) -> None:
        deadline = time.monotonic() + 200
        while self.get("/ready") != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def stream(self, max_tokens: int) -> http.client.HTTPResponse:
        """A begun stream, of which one event was read."""
        connection = self.connect()
        body = {"prompt": "def", "max_tokens": max_tokens, "ignore_eos": True, "seed": 1, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        response.readline()
        return response

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def read_events(response: http.client.HTTPResponse, num_events: int | None = None) -> list[dict]:
    """Events of a stream with their ids, or the first ones."""
    found, last = [], None
    for line in response:
        text = line.decode().rstrip("\n")
        if text.startswith("id: "):
            last = text[4:]
        elif text.startswith("data: {"):
            found.append({"event_id": last, **json.loads(text[6:])})
        if text == "data: [DONE]" or len(found) == num_events:
            break
    return found
