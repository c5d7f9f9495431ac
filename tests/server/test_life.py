"""A server's life in a process of its own: loading, ready, draining, death."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

MODEL = """
import sys
from jaxinfer import AsyncEngine
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.run import run_server
from tests.server.conftest import OPTIONS, tiny_model

def open_engine():
    engine = AsyncEngine(tiny_model(), **OPTIONS)
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


@pytest.mark.slow
def test_a_server_drains():
    with Process("60") as server:
        assert server.get("/health") == 200
        server.until_ready()
        stream, found = server.stream(200), []
        reader = threading.Thread(target=lambda: found.append(stream.read().decode()))
        server.process.send_signal(signal.SIGTERM)
        reader.start()
        deadline = time.monotonic() + 20
        while server.get("/ready") == 200:
            assert time.monotonic() < deadline
        reader.join()
        assert found[0].rstrip().endswith("data: [DONE]")
        assert server.process.wait(60) == 0


@pytest.mark.slow
def test_what_does_not_end_in_time_ends_with_an_error():
    with Process("0") as server:
        server.until_ready()
        stream = server.stream(240)
        server.process.send_signal(signal.SIGTERM)
        last = stream.read().decode().rstrip().rpartition("\n")[2]
        assert "aborted" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert server.process.wait(60) == 0


@pytest.mark.slow
def test_a_second_signal_ends_at_once():
    with Process("600") as server:
        server.until_ready()
        streams = [server.stream(240) for _ in range(8)]  # twice as many as run at once
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        for stream in streams:
            last = stream.read().decode().rstrip().rpartition("\n")[2]
            assert last == "data: [DONE]" or "error" in json.loads(last.removeprefix("data: "))


@pytest.mark.slow
def test_a_dead_engine_answers_everybody_and_ends_the_server():
    with Process("60", "dies") as server:
        server.until_ready()
        text = server.stream(240).read().decode()
        assert "the engine has stopped" in text
        assert server.process.wait(60) == 1


@pytest.mark.slow
def test_headers_without_an_end_are_cut_off_and_an_address_in_use_is_told():
    with Process("1") as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\nx: ")
            received = b""
            for _ in range(1000):
                try:
                    connection.sendall(b"x" * 4096)
                except (BrokenPipeError, ConnectionResetError):
                    break
            else:
                received = connection.recv(100)
                assert received.startswith(b"HTTP/1.1 400")
        from jaxinfer.server.run import _listen

        with pytest.raises(OSError, match="cannot listen"):
            _listen("127.0.0.1", server.port)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


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


@pytest.mark.slow
def test_a_stream_goes_on_after_the_server_was_killed():
    body = {"prompt": "def read(path):", "max_tokens": 60, "temperature": 0.9, "ignore_eos": True, "stream": True}
    body["return_token_ids"] = True
    found, last, cuts = [], None, iter((5, 11, 9))
    is_done = False
    while not is_done:
        with Process("1") as server:
            server.until_ready()
            connection = server.connect()
            headers = {"content-type": "application/json", **({"last-event-id": last} if last else {})}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            seed = int(response.headers["x-jaxinfer-seed"])
            events = read_events(response, next(cuts, None))
            server.process.kill()  # in mid-stream
            found += events
            last, is_done = events[-1]["event_id"], events[-1]["choices"][0]["finish_reason"] is not None
    with Process("1") as server:
        server.until_ready()
        connection = server.connect()
        connection.request(
            "POST", "/v1/completions", json.dumps({**body, "seed": seed}), {"content-type": "application/json"}
        )
        undisturbed = read_events(connection.getresponse())

    def joined(events):
        choices = [event["choices"][0] for event in events]
        return "".join(one["text"] for one in choices), [id for one in choices for id in one.get("token_ids", ())]

    assert joined(found) == joined(undisturbed)
    assert len(joined(found)[1]) == 60
    assert len({event["system_fingerprint"] for event in (*found, *undisturbed)}) == 1
