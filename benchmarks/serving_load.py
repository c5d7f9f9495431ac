"""What HTTP costs a served model: the same requests to an AsyncEngine in this process and to `jaxinfer serve` in
another, in turn, with the load generator on the same cores.

    python -m benchmarks.serving_load [MODEL] [--rounds 3] [--json FILE]

Prints the tokens per second of 32 streams, the time to the first token of 8 streams, and the server's processor time
for each chunk: of its event loop, and of the engine's thread beside it. Exits with 1 if a bound of these does not hold.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from jaxinfer import AsyncEngine, compilation_cache
from jaxinfer.measure.bench.metrics import figures
from jaxinfer.measure.bench.remote import Server
from jaxinfer.measure.bench.runs import RunOptions, serve_arriving
from jaxinfer.measure.bench.workload import BenchWorkload, Lengths

MIN_THROUGHPUT = 0.85  # of the engine in process
MAX_CHUNK_MICROSECONDS = 60.0
MAX_ADDED_MILLISECONDS = 5.0
MAX_SEQS = 32
VOCAB_SIZE = 4000
CLI = "import sys; from jaxinfer.cli.main import main; sys.exit(main())"


class Process:
    """`jaxinfer serve` until the block ends."""

    def __init__(self, model):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-c", CLI, "serve", model, "--port", str(port), "--max-seqs", str(MAX_SEQS)]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def __enter__(self):
        deadline = time.monotonic() + 600
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/ready").close()
                return self
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the server did not start") from None
                time.sleep(0.2)

    def __exit__(self, *_):
        self._process.terminate()
        self._process.wait()

    def thread_seconds(self):
        """Processor time of each thread."""
        tasks = Path(f"/proc/{self._process.pid}/task")
        return {task.name: int((task / "schedstat").read_text().split()[0]) / 1e9 for task in tasks.iterdir()}

    def is_event_loop(self, thread):
        return thread == str(self._process.pid)

    def is_engine(self, thread):
        """Python's threads have the program's name, XLA's have their own."""
        comm = Path(f"/proc/{self._process.pid}/task/{thread}/comm")
        return not self.is_event_loop(thread) and not comm.read_text().startswith("tf_")


def measure(engine, process, server, num_streams, answer_tokens, num_requests, num_rounds):
    """One list of figures in process, one over HTTP, and the processor times of the latter."""
    workload = BenchWorkload(Lengths.parse("32", ""), Lengths.parse(answer_tokens, ""))
    requests = workload.requests(num_requests, VOCAB_SIZE)
    times, options = [0.0] * num_requests, RunOptions()
    found = {"in process": [], "HTTP": [], "loop": [], "engine": []}
    for number in range(num_rounds + 1):  # the first is not counted
        traces, seconds = asyncio.run(serve_arriving(engine, requests, times, options, num_streams))
        inside = figures(traces, seconds)
        before = process.thread_seconds()
        outside = server.load(requests, times, options, num_streams)
        spent = {name: value - before.get(name, 0.0) for name, value in process.thread_seconds().items()}
        if number == 0:
            continue
        chunks = sum(one.num_tokens for one in requests)  # one a token
        found["in process"].append(inside)
        found["HTTP"].append(outside)
        found["loop"].append(sum(v for t, v in spent.items() if process.is_event_loop(t)) / chunks * 1e6)
        found["engine"].append(max(v for t, v in spent.items() if process.is_engine(t)) / chunks * 1e6)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    compilation_cache.enable()
    engine = AsyncEngine(arguments.model, max_seqs=MAX_SEQS)
    engine.llm.warm_up()
    with Process(arguments.model) as process:
        server = Server.open(process.url)
        many = measure(engine, process, server, 32, "128", 96, arguments.rounds)
        few = measure(engine, process, server, 8, "24:96", 64, arguments.rounds)
    asyncio.run(engine.close())

    def median(runs, *path):
        values = []
        for run in runs:
            for name in path:
                run = run[name]
            values.append(run)
        return statistics.median(values)

    rates = {name: median(many[name], "tokens_per_second", "out") for name in ("in process", "HTTP")}
    first = {name: 1e3 * median(few[name], "ttft", "p50") for name in ("in process", "HTTP")}
    loop, thread = median(many["loop"]), median(many["engine"])
    share, added = rates["HTTP"] / rates["in process"], first["HTTP"] - first["in process"]
    print(f"{os.cpu_count()} cores; medians of {arguments.rounds} rounds, in turn")
    print(f"32 streams: {rates['HTTP']:.0f} tokens/s over HTTP, {rates['in process']:.0f} in process: {share:.2f}")
    print(f"event loop {loop:.1f} microseconds a chunk; the engine's thread {thread:.1f}")
    print(f"8 streams: first token p50 {first['HTTP']:.1f} ms over HTTP, {first['in process']:.1f} not: {added:+.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"32": many, "8": few}, indent=1) + "\n")
    bounds = {
        f"the share of tokens/s over HTTP is {share:.2f}, at least {MIN_THROUGHPUT} is wanted": share >= MIN_THROUGHPUT,
        f"a chunk takes the event loop {loop:.1f} microseconds, at most {MAX_CHUNK_MICROSECONDS} are wanted": (
            loop <= MAX_CHUNK_MICROSECONDS
        ),
        f"HTTP adds {added:.1f} ms to the first token, at most {MAX_ADDED_MILLISECONDS} are wanted": (
            added <= MAX_ADDED_MILLISECONDS
        ),
    }
    failed = [claim for claim, is_kept in bounds.items() if not is_kept]
    for claim in failed:
        print(f"FAILED: {claim}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
