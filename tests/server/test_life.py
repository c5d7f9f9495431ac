"""A server's life in a process of its own: loading, ready, draining, death."""

import json
import random
import signal
import socket
import threading
import time

import pytest

from tests.server.process import Process, read_events


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
        assert "the engine has failed: " in text
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
        from jaxinfer.server.listening import listen

        with pytest.raises(OSError, match="cannot listen"):
            listen("127.0.0.1", server.port, 1.0)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


NUM_KILLS = 30
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SAMPLED = {"max_tokens": 60, "temperature": 0.9, "ignore_eos": True, "return_token_ids": True}
MESSAGES = [{"role": "user", "content": "read a file"}]
STREAMS = [
    (COMPLETIONS, {**SAMPLED, "prompt": "def read(path):"}),
    (COMPLETIONS, {**SAMPLED, "prompt": [9, 8, 7], "n": 2, "top_p": 0.9, "frequency_penalty": 0.4}),
    (CHAT, {**SAMPLED, "messages": MESSAGES, "logprobs": True, "top_logprobs": 1}),
    (CHAT, {**SAMPLED, "messages": MESSAGES, "temperature": 0}),
]


class CutStream:
    """A stream that a client goes on with until it has all of it."""

    def __init__(self, path, body):
        self.path, self.body, self.events, self.seed = path, {**body, "stream": True}, [], None

    def send(self, server):
        connection = server.connect()
        headers = {"content-type": "application/json"}
        if self.events:
            headers["last-event-id"] = self.events[-1]["event_id"]
        connection.request("POST", self.path, json.dumps(self.body), headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        assert self.seed in (None, response.headers["x-jaxinfer-seed"])
        self.seed = response.headers["x-jaxinfer-seed"]
        return response

    @property
    def answers(self):
        """Text, ids and finish of each choice."""
        found = {}
        for event in self.events:
            for choice in event["choices"]:
                one = found.setdefault(choice["index"], ["", [], []])
                one[0] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
                one[1] += choice.get("token_ids", [])
                one[2] += [choice["finish_reason"]] if choice["finish_reason"] else []
        return found

    @property
    def has_ended(self):
        return sum(len(answer[2]) for answer in self.answers.values()) == self.body.get("n", 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_streams_go_on_after_the_server_was_killed():
    generator, streams, ended = random.Random(5), [], []
    for _ in range(NUM_KILLS):
        ended += [stream for stream in streams if stream.has_ended]
        streams = [stream for stream in streams if not stream.has_ended] or [CutStream(*one) for one in STREAMS]
        with Process("1") as server:
            server.until_ready()
            responses = [stream.send(server) for stream in streams]
            for stream, response in zip(streams, responses, strict=True):
                stream.events += read_events(response, generator.randint(1, 12))
            server.process.kill()  # in mid-stream
    with Process("1") as server:
        server.until_ready()
        for stream in streams:
            if not stream.has_ended:
                stream.events += read_events(stream.send(server))
        for stream in (*ended, *streams):
            undisturbed = CutStream(stream.path, {**stream.body, "seed": int(stream.seed)})
            undisturbed.events = read_events(undisturbed.send(server))
            assert stream.answers == undisturbed.answers
            assert all(len(answer[1]) == stream.body["max_tokens"] for answer in stream.answers.values())
            assert len({event["system_fingerprint"] for event in (*stream.events, *undisturbed.events)}) == 1
    assert len(ended) >= len(STREAMS)
