"""Servers with virtual devices in processes of their own, behind a front, and a client that sends a trace."""

import asyncio
import json
import os
import subprocess
import sys
import time

import numpy as np

from jaxinfer.fleet.simulate.times import MILLISECOND, SECOND, StepTimes

MAX_SEQS = 8
# Long against what the host takes, on two cores that others use as well: 150 ms a step, 0.3 ms a token of a prompt, 6
# microseconds a token attended to.
TIMES = StepTimes(fixed=150 * MILLISECOND, token=3 * MILLISECOND // 10, key=6 * 10**6)
SERVER = """
import sys
from jaxinfer import AsyncEngine
from jaxinfer.fleet.simulate.virtual import run_virtually
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.run import run_server
from tests.fleet.simulate.real_fleet import MAX_SEQS, TIMES

def open_engine():
    engine = AsyncEngine("demo", max_seqs=MAX_SEQS)
    (token,) = engine.llm.tokenizer.encode("a", add_special_tokens=False)[-1:]
    run_virtually(engine.llm.engine, TIMES, token)
    return engine

options = ServerOptions(port=0, accept_sent_tokens=True)
sys.exit(run_server(options, "demo", open_engine, on_listening=lambda url: print(url, flush=True)))
"""


def start(command, *, lines_at):
    """A process and the URL in its first line."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, lines_at: subprocess.PIPE}
    process = subprocess.Popen([sys.executable, *command], text=True, env=environment, **pipes)
    stream = getattr(process, lines_at)
    for line in stream:
        if "http://127.0.0.1:" in line:
            return process, line[line.index("http://") :].split(";")[0].strip()
    raise RuntimeError("it did not begin to listen")


class RealFleet:
    """A front before `num_replicas` servers, until the block ends."""

    def __init__(self, num_replicas):
        self.num_replicas, self.processes = num_replicas, []

    def __enter__(self):
        urls = []
        for _ in range(self.num_replicas):
            process, url = start(["-c", SERVER], lines_at="stdout")
            self.processes.append(process)
            urls.append(url)
        flags = [flag for url in urls for flag in ("--replica", url)]
        process, url = start(["-m", "jaxinfer.cli", "front", *flags, "--port", "0"], lines_at="stderr")
        self.processes.append(process)
        self.port = int(url.rpartition(":")[2])
        asyncio.run(self._until_ready([int(url.rpartition(":")[2]) for url in urls]))
        return self

    async def _until_ready(self, ports):
        deadline = time.monotonic() + 300
        for port in (*ports, self.port):
            while await status_of(port) != 200:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.3)
        await asyncio.sleep(2)  # the front asks twice a second

    def __exit__(self, *exception):
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            process.wait(30)


async def status_of(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /ready HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
    line = await reader.readline()
    writer.close()
    return int(line.split()[1])


async def answer(port, prompt, max_tokens):
    """Seconds until the first event and until the last, and the number of tokens."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "return_token_ids": True}
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    first = last = None
    count = 0
    async for line in reader:
        if line.startswith(b"data: {"):
            last = time.perf_counter() - begun
            first = last if first is None else first
            count += len(json.loads(line[6:])["choices"][0].get("token_ids") or ())
    writer.close()
    return first, last, count


def send_trace(port, trace, seed=0):
    """TTFT and E2EL in picoseconds, int [requests], of a trace that is sent in real time; prompts have nothing in
    common."""
    numbers = np.random.default_rng(seed)

    async def one(number, begun):
        await asyncio.sleep(max(trace.times[number] / SECOND - (time.perf_counter() - begun), 0))
        prompt = numbers.integers(10, 250, trace.prompts[number]).tolist()
        first, last, count = await answer(port, prompt, trace.answers[number])
        assert count == trace.answers[number], (number, count)
        return first, last

    async def all_of_them():
        begun = time.perf_counter()
        return await asyncio.gather(*(one(number, begun) for number in range(len(trace))))

    times = np.array(asyncio.run(all_of_them()))
    return (times * SECOND).astype(np.int64).T
