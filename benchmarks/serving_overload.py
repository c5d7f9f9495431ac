"""More load than the server can carry: what it still answers, how soon it refuses the rest, and what a second API key
notices of the first one's flood.

    python -m benchmarks.serving_overload [--seconds 120] [--factor 4] [--json FILE] [-- demo --draft ngram]

What follows `--` are arguments of `jaxinfer serve`, the embedded model by default. The phases, in one run:

1. alone: one key sends a request now and then to an idle server;
2. capacity: another key keeps `--streams` streams running, and the first one goes on;
3. overload: the other key sends `--factor` times as many requests per second as it was answered before, as a Poisson
   process, each on a connection of its own; the first one goes on.

The last two take turns, since a machine's speed changes. The first token under overload is compared with that at
capacity: a step of a full batch takes longer than one of an idle server, with a flood or without.

All requests are streams of the same length. The exit code is 1 if a claim fails. Run it on a machine that does nothing
else: the load generator takes its share of the processor as it is.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.serving_client import ServerProcess, request_bytes

STEADY, FLOOD = "steady-key-0123456789", "flood-key-0123456789"
MIN_GOODPUT, MAX_REFUSAL_SECONDS, MAX_SLOWDOWN = 0.9, 0.05, 2.0
_NUM_ALONE = 10
_LOST_SECONDS = 300.0  # after the last request


@dataclass
class OverloadOptions:
    """Args:
    streams: of the phase in which the capacity is measured. steady_period: seconds between two requests of the key
      at a low rate. rounds: that `seconds` are cut into. ramp_seconds: until a phase is measured. prompt_tokens,
      answer_tokens: of each request.
    """

    seconds: float = 120.0
    capacity_seconds: float = 20.0
    rounds: int = 2
    ramp_seconds: float = 3.0
    factor: float = 4.0
    streams: int = 32
    steady_period: float = 1.0
    prompt_tokens: int = 128
    answer_tokens: int = 64
    vocab_size: int = 4096
    seed: int = 0


class Shot(asyncio.Protocol):
    """One streamed request on a connection of its own, at little cost: looks at the bytes no more than it must.

    Attributes:
      first: seconds until the first event. last: until the end. status: 0 where no answer came. is_whole: whether the
        stream ended as it should.
    """

    def __init__(self, data: bytes):
        self._data, self._received = data, b""
        self.start, self.first, self.last, self.status, self.retry_after = time.perf_counter(), 0.0, 0.0, 0, 0
        self.is_whole = False
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._data)

    def data_received(self, data: bytes) -> None:
        if self.status != 200:
            self._received += data
            if b"\r\n\r\n" not in self._received:
                return
            self.status = int(self._received[9:12])
            if self.status != 200:
                self._end_refused()
                return
            data = self._received
        if not self.first and b"data: " in data:
            self.first = time.perf_counter() - self.start
        self._received = (self._received + data)[-40:]
        if b"data: [DONE]" in self._received:
            self.is_whole = True
            self._end()

    def _end_refused(self) -> None:
        head, _, body = self._received.partition(b"\r\n\r\n")
        headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if len(body) < int(headers.get(b"content-length", 0)):
            self.status = 0  # until the rest has come
            return
        self.retry_after = int(headers.get(b"retry-after", 0))
        self._end()

    def _end(self) -> None:
        self.last = time.perf_counter() - self.start
        self._transport.close()
        if not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


@dataclass
class Phase:
    """The shots of a phase by key; answers are counted between `begin` and `end`, in seconds of `perf_counter`."""

    begin: float = 0.0
    end: float = 0.0
    steady: list[Shot] = field(default_factory=list)
    flood: list[Shot] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Answers per second of both keys that ended while the phase was measured."""
        ends = [shot.start + shot.last for shot in (*self.flood, *self.steady) if shot.is_whole]
        return sum(self.begin <= one <= self.end for one in ends) / (self.end - self.begin)


class Overload:
    """The three phases on the server at `port`."""

    def __init__(self, port: int, options: OverloadOptions):
        self._port, self._options = port, options
        self._generator = random.Random(options.seed)

    async def run(self) -> dict[str, Any]:
        options = self._options
        alone = Phase()
        for _ in range(_NUM_ALONE):
            alone.steady.append(await self._shoot(STEADY))
        capacities, overloads = [await self._capacity()], []
        for _ in range(options.rounds):
            self._pace = options.factor * capacities[-1].rate
            overloads.append(await self._phase(options.seconds / options.rounds, self._open_loop))
            capacities.append(await self._capacity())
        return report(alone, capacities, overloads, options)

    async def _capacity(self) -> Phase:
        phase = await self._phase(self._options.capacity_seconds, self._closed_loop)
        if not phase.rate:  # a slow machine: not one answer has ended in time
            phase.end = max(shot.start + shot.last for shot in phase.flood)
        return phase

    async def _phase(self, seconds: float, load: Any) -> Phase:
        phase = Phase()
        phase.begin = time.perf_counter() + self._options.ramp_seconds
        phase.end = phase.begin + seconds
        await asyncio.gather(load(phase), self._steady(phase))
        return phase

    async def _steady(self, phase: Phase) -> None:
        await asyncio.sleep(self._options.ramp_seconds)
        tasks = []
        while time.perf_counter() < phase.end:
            tasks.append(asyncio.create_task(self._shoot(STEADY)))
            await asyncio.sleep(self._options.steady_period * self._generator.uniform(0.5, 1.5))
        phase.steady += await asyncio.gather(*tasks)

    async def _closed_loop(self, phase: Phase) -> None:
        async def stream() -> None:
            while time.perf_counter() < phase.end:
                phase.flood.append(await self._shoot(FLOOD))

        await asyncio.gather(*(stream() for _ in range(self._options.streams)))

    async def _open_loop(self, phase: Phase) -> None:
        tasks, due = [], time.perf_counter()
        while due < phase.end:
            tasks.append(asyncio.create_task(self._shoot(FLOOD)))
            due += self._generator.expovariate(self._pace)
            await asyncio.sleep(max(due - time.perf_counter(), 0))
        phase.flood += await asyncio.gather(*tasks)

    async def _shoot(self, key: str) -> Shot:
        options = self._options
        body = {
            "prompt": [self._generator.randrange(5, options.vocab_size) for _ in range(options.prompt_tokens)],
            "max_tokens": options.answer_tokens,
            "ignore_eos": True,
            "stream": True,
            "seed": 1,
        }
        data = json.dumps(body).encode()
        headers = {"authorization": f"Bearer {key}", "connection": "close"}
        shot = Shot(request_bytes("POST", "/v1/completions", data, headers))
        try:
            await asyncio.get_running_loop().create_connection(lambda: shot, "127.0.0.1", self._port)
            await asyncio.wait_for(shot.done, self._options.seconds + _LOST_SECONDS)
        except (OSError, TimeoutError):
            pass  # it counts as lost
        return shot


def report(
    alone: Phase, capacities: Sequence[Phase], overloads: Sequence[Phase], options: OverloadOptions
) -> dict[str, Any]:
    """The figures, and the claims that fail as `wrong`."""
    capacity, overload = _together(capacities), _together(overloads)
    capacity_rate, rate = (statistics.mean(one.rate for one in phases) for phases in (capacities, overloads))
    seconds = sum(one.end - one.begin + options.ramp_seconds for one in overloads)
    refused = [shot for shot in overload.flood if shot.status == 429]
    accepted = [shot for shot in (*overload.flood, *overload.steady) if shot.status == 200]
    waits = [shot.first for shot in overload.flood if shot.is_whole]
    num_steady_refused = sum(shot.status == 429 for shot in overload.steady)
    found: dict[str, Any] = {
        "capacity_per_second": capacity_rate,
        "capacities_per_second": [one.rate for one in capacities],
        "offered_per_second": len(overload.flood) / seconds,
        "answered_per_second": rate,
        "goodput": rate / capacity_rate,
        "num_offered": len(overload.flood) + len(overload.steady),
        "num_refused": len(refused),
        "num_lost": sum(not shot.is_whole for shot in accepted),
        "num_other": sum(shot.status not in (200, 429) for shot in (*overload.flood, *overload.steady)),
        "num_steady_refused": num_steady_refused,
        "refused_seconds": _quantiles([shot.last for shot in refused]),
        "retry_after": _quantiles([float(shot.retry_after) for shot in refused]),
        "flood_first_token": _quantiles(waits),
        "first_token_alone": _quantiles([shot.first for shot in alone.steady]),
        "first_token_at_capacity": _quantiles([shot.first for shot in capacity.steady]),
        "first_token_under_flood": _quantiles([shot.first for shot in overload.steady if shot.is_whole]),
        "answer_tokens": options.answer_tokens,
    }
    slowdown = found["first_token_under_flood"]["p50"] / found["first_token_at_capacity"]["p50"]
    found["slowdown"] = slowdown
    claims = {
        f"goodput {found['goodput']:.2f} is below {MIN_GOODPUT}": found["goodput"] < MIN_GOODPUT,
        f"{found['num_lost']} accepted requests were lost": found["num_lost"] > 0,
        f"{found['num_other']} requests got neither an answer nor 429": found["num_other"] > 0,
        f"{num_steady_refused} requests of the steady key were refused": num_steady_refused > 0,
        f"refused after {found['refused_seconds']['p99'] * 1e3:.0f} ms at p99": found["refused_seconds"]["p99"]
        > MAX_REFUSAL_SECONDS,
        f"first token {slowdown:.1f} times as late under the flood": slowdown > MAX_SLOWDOWN,
    }
    found["wrong"] = [claim for claim, fails in claims.items() if fails]
    return found


def _together(phases: Sequence[Phase]) -> Phase:
    steady, flood = ([shot for one in phases for shot in getattr(one, name)] for name in ("steady", "flood"))
    return Phase(steady=steady, flood=flood)


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"p50": 0.0, "p99": 0.0, "max": 0.0}
    ordered = sorted(values)
    return {
        "p50": statistics.median(ordered),
        "p99": ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)],
        "max": ordered[-1],
    }


def table(found: dict[str, Any]) -> str:
    """The figures as text."""

    def times(name: str) -> str:
        one = found[name]
        return f"p50 {one['p50'] * 1e3:,.1f} ms, p99 {one['p99'] * 1e3:,.1f} ms, max {one['max'] * 1e3:,.1f} ms"

    retry = found["retry_after"]
    lines = [
        f"capacity {found['capacity_per_second']:.2f} answers/s of {found['answer_tokens']} tokens; offered "
        f"{found['offered_per_second']:.1f}/s, answered {found['answered_per_second']:.2f}/s: goodput "
        f"{found['goodput']:.2f} of capacity",
        f"{found['num_offered']:,} requests: {found['num_refused']:,} refused, {found['num_lost']} accepted ones lost, "
        f"{found['num_other']} without an answer",
        f"refused after: {times('refused_seconds')}",
        f"Retry-After p50 {retry['p50']:.0f} s, max {retry['max']:.0f} s; those accepted waited "
        f"{found['flood_first_token']['p50']:.1f} s (p50) for their first token",
        "first token of the key at a low rate",
        f"  alone:       {times('first_token_alone')}",
        f"  at capacity: {times('first_token_at_capacity')}",
        f"  under flood: {times('first_token_under_flood')}; {found['slowdown']:.2f} times that at capacity; "
        f"{found['num_steady_refused']} refused",
    ]
    return "\n".join([*lines, *(f"FAILED: {claim}" for claim in found["wrong"])])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="of overload")
    parser.add_argument("--capacity-seconds", type=float, default=20.0, help="of each measurement of the capacity")
    parser.add_argument("--rounds", type=int, default=2, help="that the seconds of overload are cut into")
    parser.add_argument("--factor", type=float, default=4.0, help="of the capacity that is offered")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    parser.add_argument("serve", nargs="*", help="arguments of jaxinfer serve, after --; by default: demo")
    arguments = parser.parse_args()
    options = OverloadOptions(
        seconds=arguments.seconds,
        capacity_seconds=arguments.capacity_seconds,
        rounds=arguments.rounds,
        factor=arguments.factor,
        streams=arguments.streams,
        answer_tokens=arguments.answer_tokens,
    )
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:
        keys.write(f"{STEADY} steady\n{FLOOD} flood\n")
        keys.flush()
        with ServerProcess(*(arguments.serve or ["demo"]), "--api-keys", keys.name) as server:
            port = urllib.parse.urlsplit(server.url).port or 80
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                found = runner.run(Overload(port, options).run())
    print(table(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
