"""Routers that people have, in an environment of their own: Dynamo's index and vLLM's router, by our events of cached
blocks."""

import contextlib
import json
import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxinfer.engine.scheduler import Scheduler, SchedulerOptions
from jaxinfer.engine.tiers.host_tier import HostPoolSize
from jaxinfer.server.kv_events import KVEventPublisher, PrefixNames
from jaxinfer.server.options import ServerOptions
from tests.engine.sequences import make_sequence

HERE = Path(__file__).parent
ROUTERS = HERE.parents[2] / ".venv-routers" / "bin"
BLOCK = 16  # tokens of a page of the demo's
# These packages must not look for the modules of this repository.
VARIABLES = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

pytestmark = [
    *(pytest.mark.slow, pytest.mark.clients, pytest.mark.timeout(900)),
    pytest.mark.skipif(
        not (ROUTERS / "python").exists(), reason="clients: there is no .venv-routers; make test-clients makes it"
    ),
]


class Dynamo:
    """Dynamo's index in a process."""

    def __init__(self, *workers: dict):
        command = [ROUTERS / "python", HERE / "use_dynamo.py", json.dumps(workers)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, text=True, env=VARIABLES, bufsize=1, **pipes)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=lambda: [self._lines.put(line) for line in self._process.stdout], daemon=True).start()
        self._until("listening")

    def _until(self, *texts: str) -> str:
        while not (line := self._lines.get(timeout=120)).startswith(texts):  # others are its log
            pass
        return line

    def should_have(self, *asked: dict) -> None:
        self._process.stdin.write(json.dumps(asked) + "\n")
        assert self._until("equal", "{") == "equal\n"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()


@pytest.mark.parametrize("form", ["maps", "positional"])
def test_dynamo_indexes_blocks_on_the_device_and_in_host_memory(form):
    """In both forms; those before it listens by the replay socket; salts that Dynamo knows; a cache that is cleared."""
    names = PrefixNames()
    endpoints = {"kv_events": "tcp://127.0.0.1:0", "kv_events_replay": "tcp://127.0.0.1:0"}
    publisher = KVEventPublisher(ServerOptions(**endpoints, kv_events_format=form), 0, names)
    host = (HostPoolSize(64, 8),)
    scheduler = Scheduler(
        SchedulerOptions(num_pages=14, page_size=BLOCK, max_seqs=4, prefill_chunk=32, host_pools=host)
    )
    publisher.follow(SimpleNamespace(scheduler=scheduler))

    def run(start: int, namespace: str = "") -> dict:
        """Computes a prompt of four blocks and a token."""
        salt = f"dynamo-cache-salt:{namespace}" if namespace else ""
        sequence = make_sequence(list(range(start, start + 65)), 4, salt=salt)
        names.add([sequence.request], (salt,) if salt else (), None)
        scheduler.add(sequence)
        for num_tokens in (32, 64, 65):
            scheduler.schedule()
            scheduler.confirm(sequence, num_tokens)
        scheduler.finish(sequence, "stop")
        return {"token_ids": list(sequence.tokens[:65]), "cache_salt": namespace}

    first = run(100)
    worker = {"events": publisher.endpoint, "more": {"block_size": BLOCK, "replay_endpoint": publisher.replay_endpoint}}
    with Dynamo({**worker, "more": {**worker["more"], "endpoint": "http://127.0.0.1:1"}}) as dynamo:
        salted = run(200, "tenant")
        dynamo.should_have(
            {**first, "workers": {"0": [4, 4]}},
            {**salted, "workers": {"0": [4, 4]}},
            {**salted, "cache_salt": "other", "workers": {"0": [0, 0]}},
            {**salted, "cache_salt": "", "workers": {"0": [0, 0]}},
        )
        latest = [run(start) for start in (300, 400, 500)][-1]  # the device has room for three
        dynamo.should_have(
            {**first, "workers": {"0": [0, 4]}},
            {**salted, "workers": {"0": [0, 4]}},
            {**latest, "workers": {"0": [4, 4]}},
        )
        run(100)  # comes back
        dynamo.should_have({**first, "workers": {"0": [4, 4]}})
        scheduler.drop_prefixes()
        dynamo.should_have(*({**asked, "workers": {"0": [0, 0]}} for asked in (first, salted, latest)))
    publisher.close()


class Server:
    """`jaxinfer serve demo` with events."""

    def __init__(self):
        command = [sys.executable, "-m", "jaxinfer.cli", "serve", "demo", "--lazy", "--port", "0"]
        command += ["--kv-events", "tcp://127.0.0.1:0", "--kv-events-replay", "tcp://127.0.0.1:0"]
        variables = {**os.environ, "PYTHONPATH": str(HERE.parents[2])}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables)
        text = ""
        while not text.count("ready: demo"):
            text += self.process.stderr.readline()
            assert self.process.poll() is None, text
        self.url = re.search(r"listening at (\S+?);", text)[1]
        self.events, self.replay = re.search(r"KV events at (\S+); replays at (\S+);", text).groups()
        threading.Thread(target=self.process.stderr.read, daemon=True).start()


@pytest.fixture(scope="module")
def servers():
    servers = [Server() for _ in range(2)]
    yield servers
    for server in servers:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def post(url: str, path: str, **body):
    body = json.dumps({"model": "demo", **body}).encode()
    request = urllib.request.Request(url + path, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def num_cached(url: str, prompt: str, is_chat: bool = False) -> tuple[int, int]:
    """Blocks of a prompt's tokens, and those that were cached."""
    more = {"max_tokens": 2, "temperature": 0}
    if is_chat:
        found = post(url, "/v1/chat/completions", messages=[{"role": "user", "content": prompt}], **more)["usage"]
    else:
        found = post(url, "/v1/completions", prompt=prompt, **more)["usage"]
    return (found["prompt_tokens"] - 1) // BLOCK, found["prompt_tokens_details"]["cached_tokens"] // BLOCK


def prompts(seed: int, count: int) -> list[str]:
    chance = random.Random(seed)
    line = "    y{} = x + {}\n".format
    return [
        f"def f{chance.randrange(10**6)}(x):\n" + "".join(line(*chance.choices(range(1000), k=2)) for _ in range(9))
        for _ in range(count)
    ]


def test_dynamo_knows_which_server_has_a_prompt(servers):
    """The token ids are those of the render route; as many blocks are hit as the index says."""
    workers = [
        {
            "events": server.events,
            "more": {"endpoint": server.url, "block_size": BLOCK, "replay_endpoint": server.replay},
        }
        for server in servers
    ]
    asked = []
    with Dynamo(*workers) as dynamo:
        for number, prompt in enumerate(prompts(1, 4)):
            server = servers[number % 2]
            num_blocks, _ = num_cached(server.url, prompt)
            (rendered,) = post(server.url, "/v1/completions/render", prompt=prompt)
            blocks = {str(other): [num_blocks * (other == number % 2)] * 2 for other in range(2)}
            ids = rendered["token_ids"][: num_blocks * BLOCK]
            asked.append({"token_ids": ids, "workers": blocks})
            dynamo.should_have(*asked)
            assert num_cached(server.url, prompt) == (num_blocks, num_blocks)


@contextlib.contextmanager
def vllm_router(servers, *arguments):
    with socket.socket() as free, socket.socket() as other:
        free.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, prometheus = free.getsockname()[1], other.getsockname()[1]
    command = [ROUTERS / "vllm-router", "--host", "127.0.0.1", "--port", str(port), "--worker-urls"]
    command += [*(server.url for server in servers), "--prometheus-port", str(prometheus), *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=VARIABLES) as process:
        try:
            for _ in range(300):
                with contextlib.suppress(urllib.error.URLError, ConnectionError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
                    break
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def test_vllm_router_sends_requests_where_events_say_that_their_prompt_is_cached(servers):
    """Requests that it has not seen: it asks the render routes for their token ids. Messages that were sent before it
    listens it asks for when the next one comes."""
    arguments = ["--policy", "kv_aware", "--kv-event-model", "demo", "--kv-event-block-size", str(BLOCK)]
    for server in servers:
        arguments += ["--kv-event-source", f"{server.url}={server.events}"]
        arguments += ["--kv-event-replay-source", f"{server.url}={server.replay}"]
    asked = [(prompt, number % 2, number % 4 >= 2) for number, prompt in enumerate(prompts(2, 8))]
    for prompt, number, is_chat in asked[:4]:
        num_cached(servers[number].url, prompt, is_chat)
    with vllm_router(servers, *arguments) as url:
        time.sleep(3)  # until it listens
        for prompt, number, is_chat in asked[4:]:
            num_cached(servers[number].url, prompt, is_chat)
        time.sleep(3)
        found = [num_cached(url, prompt, is_chat) for prompt, _, is_chat in asked]
    print("blocks, and those that were cached:", found)
    assert all(num_blocks == num_hit for num_blocks, num_hit in found)


def test_vllm_router_sends_a_conversation_where_it_was(servers):
    with vllm_router(servers, "--policy", "cache_aware") as url:
        first = [num_cached(url, prompt) for prompt in prompts(3, 6)]
        again = [num_cached(url, prompt) for prompt in prompts(3, 6)]
    print("blocks, and those that were cached:", first, again)
    assert [num_hit for _, num_hit in first] == [0] * 6
    assert all(num_blocks == num_hit for num_blocks, num_hit in again)
