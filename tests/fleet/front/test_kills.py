"""Servers of a tiny model in processes of their own, killed under streams: none is lost, no token is another one."""

import asyncio
import json
import os
import random
import subprocess
import sys
import time

import pytest
import uvloop

from tests.fleet.front.fakes import ask, front
from tests.server.test_begun_answers import joined
from tests.server.test_resume import content
from tests.server.test_tools import TOOLS, gathered

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SERVER = """
import sys
from jaxinfer import AsyncEngine, compilation_cache
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.run import run_server
from tests.server.adapter_folders import make_adapter
from tests.server.conftest import OPTIONS, tiny_model

compilation_cache.enable()

def open_engine():
    adapters = {"first": make_adapter(1)}
    return AsyncEngine(tiny_model(), tool_parser="hermes", adapters=adapters, max_adapter_rank=8, **OPTIONS)

options = ServerOptions(port=int(sys.argv[1]), drain_timeout=0, accept_sent_tokens=True)
sys.exit(run_server(options, "tiny", open_engine, on_listening=lambda url: print(url, flush=True)))
"""
PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
ASK = {"messages": [{"role": "user", "content": "read a file"}], "stream": True}
BODY = {"prompt": "def read(path):", "max_tokens": 120, "ignore_eos": True, "stream": True, "temperature": 0.9}
USAGE = {"stream_options": {"include_usage": True}}
KINDS = (
    (COMPLETIONS, {**BODY, **USAGE, "return_token_ids": True}),
    (COMPLETIONS, {**BODY, "n": 2, "logprobs": 2, "frequency_penalty": 0.5}),
    (COMPLETIONS, {**BODY, "model": "first", "temperature": 0}),
    (CHAT, {**ASK, "max_tokens": 120, "ignore_eos": True, "logprobs": True, "return_token_ids": True}),
    (CHAT, {**ASK, "max_tokens": 80, "response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}}}),
    (CHAT, {**ASK, **USAGE, "max_tokens": 80, "tools": TOOLS, "tool_choice": "required"}),
    (COMPLETIONS, {**BODY, "stream": False}),
)


class Server:
    """A process that is started again, at its port, after it was killed."""

    def __init__(self):
        self.port = 0
        self.start()

    def start(self):
        flags = {"PYTHONPATH": os.getcwd(), "XLA_FLAGS": "--xla_backend_optimization_level=0"}
        command = [sys.executable, "-c", SERVER, str(self.port)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **flags}
        )
        self.url = self.process.stdout.readline().strip()
        self.port = int(self.url.rpartition(":")[2])

    def kill(self, *, gently=False):
        self.process.terminate() if gently else self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    async def until_ready(self):
        deadline = time.monotonic() + 200
        while (await ask(self.port, "GET", "/ready"))[0] != 200:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)


async def answered(port, path, body, seed):
    status, _, data = await ask(port, "POST", path, json.dumps({**body, "seed": seed}).encode())
    return status, data.decode()


def read(path, body, answer):
    """All that a client learns of an answer, but for what differs between two answers to one request."""
    status, text = answer
    assert status == 200, text
    if not body["stream"]:
        whole = json.loads(text)
        return whole["choices"], whole["usage"]["completion_tokens"]
    assert ":tokens" not in text
    assert text.endswith("data: [DONE]\n\n"), text[-500:]
    events = [
        type("Event", (), {"data": json.loads(line.removeprefix("data: "))})
        for line in text.splitlines()
        if line.startswith("data: {")
    ]
    assert not any("error" in event.data for event in events), text[-500:]
    assert len({event.data["id"] for event in events}) == len({event.data["created"] for event in events}) == 1
    return joined(events), content(events) if path == COMPLETIONS else gathered(events)


def same(given, expected):
    """Equal; log-probabilities nearly."""
    if isinstance(expected, dict):
        return given.keys() == expected.keys() and all(same(given[name], own) for name, own in expected.items())
    if isinstance(expected, (list, tuple)):
        return len(given) == len(expected) and all(map(same, given, expected))
    if isinstance(expected, float):
        return abs(given - expected) < 1e-3
    return given == expected


async def watched(servers, port, num_kills, num_streams, generator):
    """Streams of all kinds, `num_streams` at once, until so many servers were killed under them; each of them against
    the answer of a server that is not disturbed. Returns how many there were, and the metrics."""
    expected, num_answers, is_over, has_servers = {}, 0, asyncio.Event(), asyncio.Event()
    has_servers.set()
    pairs = [(kind, seed) for seed in (3, 4) for kind in range(len(KINDS))]
    for kind, seed in pairs:
        path, body = KINDS[kind]
        expected[kind, seed] = read(path, body, await answered(servers[0].port, path, body, seed))

    async def stream(number):
        nonlocal num_answers
        while not is_over.is_set():
            await has_servers.wait()
            kind, seed = pairs[(number + num_answers) % len(pairs)]
            path, body = KINDS[kind]
            answer = read(path, body, await answered(port, path, body, seed))
            assert same(answer, expected[kind, seed]), (kind, seed, answer, expected[kind, seed])
            num_answers += 1

    async def kill():
        for number in range(num_kills):
            await asyncio.sleep(generator.uniform(0.5, 2.0))
            server = generator.choice(servers)
            await asyncio.to_thread(server.kill, gently=number % 4 == 1)  # as a rolling update ends it
            await asyncio.sleep(1.0)
            if num_kills > 1:  # while it starts the others would only take its processors
                has_servers.clear()
                await asyncio.to_thread(server.start)
                await server.until_ready()
                await asyncio.sleep(0.7)  # the front has seen it
                has_servers.set()
        is_over.set()

    async with asyncio.TaskGroup() as group:
        for number in range(num_streams):
            group.create_task(stream(number))
        group.create_task(kill())
    metrics = (await ask(port, "GET", "/metrics"))[2].decode()
    return num_answers, dict(line.split(" ") for line in metrics.splitlines() if not line.startswith("#"))


def run(num_servers, num_kills, num_streams):
    servers = [Server() for _ in range(num_servers)]

    async def everything():
        for server in servers:
            await server.until_ready()
        async with front(*servers, wait_timeout=60.0) as port:
            while f"jaxinfer_front_ready_replicas {num_servers}\n" not in (
                (await ask(port, "GET", "/metrics"))[2].decode()
            ):
                await asyncio.sleep(0.05)
            return await watched(servers, port, num_kills, num_streams, random.Random(1))

    try:
        return uvloop.run(everything())
    finally:
        for server in servers:
            server.kill()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_streams_of_all_kinds_outlive_many_kills():
    num_kills = int(os.environ.get("JAXINFER_KILLS", "20"))
    num_answers, metrics = run(3, num_kills, 12)
    print(num_answers, metrics)
    assert num_answers > 5 * num_kills
    assert int(metrics["jaxinfer_front_continued_total"]) > num_kills
    assert metrics["jaxinfer_front_given_up_total"] == "0"
