"""Processor time of the server for each chunk of a stream, apart from the model: an engine that makes tokens of nothing
behind the real client, server and sockets, read by another process.

    python -m benchmarks.serving_cost [--streams 32] [--tokens 300] [--profile]

Times are of each thread's own processor time, so they hold on a busy machine too.
"""

import argparse
import cProfile
import inspect
import json
import os
import pstats
import selectors
import socket
import subprocess
import sys
import time
from importlib import resources
from types import SimpleNamespace

import numpy as np

from jaxinfer import AsyncEngine, SamplingParams
from jaxinfer.api import async_engine
from jaxinfer.engine.client import Client
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.run import run_server
from jaxinfer.text import Tokenizer
from jaxinfer.tool_calls import AnswerFormat

VOCAB, LENGTH = 4096, 4096
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class TokensOfNothing:
    """An engine without a model: a step gives each answer one token."""

    def __init__(self, num_streams):
        options = SimpleNamespace(max_waiting=None, deterministic=False)
        self.spec = SimpleNamespace(
            options=options,
            max_model_len=LENGTH,
            max_seqs=num_streams,
            dtype=np.dtype("float32"),
            determinism=SimpleNamespace(rows=None),
            is_deterministic=True,
        )
        self.scheduler = SimpleNamespace(options=SimpleNamespace(page_size=16, num_pages=2))
        self.running, self.num_chunks, self.seconds = {}, 0, 0.0
        self._started, self.engines = None, [self]

    has_work = property(lambda self: bool(self.running))

    def check_fits(self, num_prompt, max_tokens):
        pass

    def close(self):
        self.running.clear()

    def add(self, answer):
        answer.arrived = time.monotonic()
        self.running[answer] = None

    def finish(self, answer, reason, stop_reason=None):
        if self.running.pop(answer, answer) is None:
            answer.finish_reason, answer.stop_reason, answer.finished = reason, stop_reason, time.monotonic()

    def step(self, max_steps=None):
        if self._started is not None:
            self.seconds += time.thread_time() - self._started
        while any(reader.num_pending_bytes for reader in list(self.readers.values())):
            time.sleep(0.0005)  # every token becomes a chunk
        for answer in (progressed := list(self.running)):
            answer.tokens.append(200 + (answer.num_output * 7 + answer.num_prompt) % 3000)
            if answer.num_output >= answer.request.max_tokens:
                self.finish(answer, "length")
        self.num_chunks += len(progressed)
        self._started = time.thread_time()
        return progressed


class Model:
    """What the server uses of an `LLM`."""

    name, acceptance, max_model_len, default_params = "nothing", "exact", LENGTH, SamplingParams()

    def __init__(self, num_streams):
        config = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=LENGTH)
        self.tokenizer = Tokenizer.from_dir(resources.files("jaxinfer") / "data" / "demo")
        self.answer_format, self.embedder = AnswerFormat(self.tokenizer), SimpleNamespace(default_pooling=None)
        self.engine = TokensOfNothing(num_streams)
        self.client = Client(
            self.engine, name=self.name, config=config, tokenizer=self.tokenizer, eos_token_ids=(0,), seed=0
        )
        self.submit, self.step, self.advance = self.client.submit, self.client.step, self.client.advance
        self.collect, self.prepare, self.close = self.client.collect, self.client.prepare, self.client.close

    def fingerprint(self):
        return "nothing"

    def speculation_stats(self):
        return None


def read_streams(port, num_streams, num_tokens, path):
    """A client of few words: sends the requests, reads until all have ended; prints the number of events."""
    body = {"max_tokens": num_tokens, "ignore_eos": True, "stream": True, "seed": 1}
    prompt = {"prompt": "def read(path):"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    data = json.dumps(body | prompt).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    selector, ends, num_events = selectors.DefaultSelector(), {}, 0
    for _ in range(num_streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head.encode() + b"\r\n\r\n" + data)
        selector.register(connection, selectors.EVENT_READ)
        ends[connection] = b""
    while ends:
        for key, _ in selector.select():
            received = key.fileobj.recv(1 << 16)
            num_events += received.count(b"data: {")
            ends[key.fileobj] = (ends[key.fileobj] + received)[-40:]
            if not received or b"[DONE]" in ends[key.fileobj]:
                selector.unregister(key.fileobj)
                del ends[key.fileobj]
    print(num_events)


def measure(num_streams, num_tokens, path, profile):
    """Microseconds for each chunk: of the event loop, and of the engine's thread without the engine."""
    async_engine.LLM = lambda _, **options: Model(num_streams)
    engine, started, readers, port = [], [], [], []

    def open_engine():
        engine.append(AsyncEngine("nothing"))
        engine[0].llm.engine.readers = engine[0]._readers
        return engine[0]

    def on_ready(service):
        command = [
            sys.executable,
            "-c",
            READER,
            str(port[0]),
            str(num_streams),
            str(num_tokens),
            path,
            str(os.getpid()),
        ]
        readers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        started.append(time.thread_time())
        if profile:
            profile.enable()

    listening = lambda url: port.append(int(url.rpartition(":")[2]))  # noqa: E731
    run_server(ServerOptions(port=0), "nothing", open_engine, on_listening=listening, on_ready=on_ready)
    seconds = time.thread_time() - started[0]
    if profile:
        profile.disable()
    num_events, found = int(readers[0].communicate()[0]), engine[0].llm.engine
    return num_events, seconds / num_events * 1e6, found.seconds / found.num_chunks * 1e6


READER = f"""
import json, os, selectors, signal, socket, sys
COMPLETIONS = "{COMPLETIONS}"
{inspect.getsource(read_streams)}
port, streams, tokens, path, parent = sys.argv[1:]
read_streams(int(port), int(streams), int(tokens), path)
os.kill(int(parent), signal.SIGTERM)
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--route", choices=(COMPLETIONS, CHAT), default=COMPLETIONS)
    parser.add_argument("--profile", action="store_true", help="print where the event loop's time goes; it takes more")
    arguments = parser.parse_args()
    profile = cProfile.Profile(time.thread_time) if arguments.profile else None
    num_chunks, loop, engine = measure(arguments.streams, arguments.tokens, arguments.route, profile)
    print(f"{arguments.route}: {num_chunks:,} chunks of {arguments.streams} streams")
    print(f"event loop {loop:.1f} and engine's thread {engine:.1f}, together {loop + engine:.1f} microseconds a chunk")
    if profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)


if __name__ == "__main__":
    main()
