"""Random load on the server for a long time: all routes, streamed or not, clients that leave or stop reading, bad and
slow bodies, streams that are cut and resumed. Memory must stay flat, no slot, page, connection or thread may be left,
nothing may hang or be compiled, and every answer must be right.

    python -m benchmarks.serving_soak [--requests 20000] [--minutes 30] [--json FILE] [-- demo --draft ngram]

What follows `--` are arguments of `jaxinfer serve`, the embedded model by default. `--url` drives a server that runs
already. One request in twenty is sent twice, and both answers must be equal. Ctrl-C ends it early. The exit code is 1
if a claim fails.
"""

import argparse
import asyncio
import json
import random
import sys
import time
import urllib.parse
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.serving_client import Answer, BrokenError, Connection, ServerProcess, request_bytes, server_facts
from benchmarks.serving_requests import (
    COMPLETIONS,
    BadRequest,
    Choices,
    Request,
    StreamedAnswer,
    WrongAnswerError,
    bad_request,
    can_resume,
    can_stream,
    random_request,
    read_answer,
)

SEND_TIMEOUT = 3  # seconds, of the server that is started
_HUNG_SECONDS = 300
_NUM_SHOWN = 20  # of what is wrong
_MAX_IDLE = 12  # connections that are kept
_SMALL_BUFFER = 4096
_GROWTH_SHARE, _GROWTH_MIB = 0.03, 20.0  # of memory, whichever is more
_SETTLING_SHARE, _LAST_SHARE = 1 / 6, 1 / 3  # of the time: memory may grow in the first part, and is judged in the last
_WEIGHTS = {
    "whole": 25,
    "stream": 26,
    "leaves": 15,
    "stops reading": 1,
    "resumes": 5,
    "bad": 18,
    "half": 4,
    "slow body": 2,
    "small": 4,
}


@dataclass
class SoakOptions:
    """Args:
    interval: seconds between two looks at the server. settle: seconds that it has at the end to become idle.
    """

    requests: int = 20_000
    minutes: float = 30.0
    connections: int = 48
    seed: int = 0
    interval: float = 60.0
    settle: float = 90.0
    vocab_size: int = 4096


@dataclass
class SoakReport:
    """What happened. `wrong`: answers that were not as they should be, and claims that fail."""

    counts: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    num_compared: int = 0
    num_hung: int = 0
    seconds: float = 0.0
    samples: list[dict[str, float]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Soak:
    """One run on the server at `port`; `pid` is its process, None where it is not ours."""

    def __init__(
        self, port: int, pid: int | None, options: SoakOptions, show: Callable[[str], None] = lambda line: None
    ):
        self._port, self._pid, self._options, self._show = port, pid, options, show
        self._generator = random.Random(options.seed)
        self._idle: list[Connection] = []
        self._started_at: dict[asyncio.Task[None], int] = {}  # of requests on their way, in seconds of `_num_ticks`
        self._num_ticks = 0
        self._max_model_len = 0
        self.report = SoakReport()

    async def run(self) -> SoakReport:
        """Sends everything, waits until the server is idle, and judges."""
        answer = await self._ask(request_bytes("POST", "/tokenize", b'{"prompt": "a"}'))
        self._max_model_len = answer.json["max_model_len"]
        start = time.monotonic()
        watcher = asyncio.create_task(self._watch(start))
        before = await self._sample(start)
        try:
            await self._send_all(start)
        except asyncio.CancelledError:  # Ctrl-C: judge what was sent
            asyncio.current_task().uncancel()  # type: ignore[union-attr]
        while self._started_at:
            await asyncio.sleep(0.05)
        for connection in self._idle:
            connection.close()
        await self._settle(start)
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        self.report.seconds = time.monotonic() - start
        judge(self.report, before)
        return self.report

    async def _send_all(self, start: float) -> None:
        gate = asyncio.Semaphore(self._options.connections)
        pace = self._options.requests / (self._options.minutes * 60)
        due = 0.0
        for number in range(self._options.requests):
            due += self._generator.expovariate(pace)
            await asyncio.sleep(max(due - (time.monotonic() - start), 0))
            await gate.acquire()
            self._start(number, gate)

    def _start(self, number: int, gate: asyncio.Semaphore) -> None:
        kinds: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            "whole": self._whole,
            "stream": self._stream,
            "leaves": self._leave,
            "stops reading": self._stop_reading,
            "resumes": self._resume,
            "bad": self._bad,
            "half": self._half,
            "slow body": self._slow_body,
            "small": self._small,
        }
        kind = self._generator.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        generator = random.Random(self._generator.getrandbits(64))
        task = asyncio.create_task(self._one(f"{number} ({kind})", kinds[kind](generator)))
        self.report.counts[kind] += 1
        self._started_at[task] = self._num_ticks

        def end(task: asyncio.Task[None]) -> None:
            gate.release()
            del self._started_at[task]

        task.add_done_callback(end)

    async def _one(self, name: str, work: Awaitable[None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            self.report.num_hung += 1
            self._complain(f"{name}: hung")
        except Exception as error:
            self._complain(f"{name}: {type(error).__name__}: {error}")

    def _complain(self, text: str) -> None:
        self.report.wrong.append(text)
        if len(self.report.wrong) <= _NUM_SHOWN:
            self._show(f"wrong: {text:.600}")

    # Looking at the server.

    async def _watch(self, start: float) -> None:
        """Counts seconds, not by the clock: this process may be paused together with the server."""
        while True:
            await asyncio.sleep(1)
            self._num_ticks += 1
            for task, started in list(self._started_at.items()):
                if self._num_ticks - started > _HUNG_SECONDS:
                    task.cancel()
            if self._num_ticks % self._options.interval == 0:
                await self._sample(start)

    async def _sample(self, start: float) -> dict[str, float]:
        text = (await self._ask(request_bytes("GET", "/metrics"))).body.decode()
        found = {"seconds": time.monotonic() - start, "requests": float(self.report.counts.total())}
        found |= server_facts(text, self._pid)
        self.report.samples.append(found)
        if len(self.report.samples) == 1:
            self._show("  ".join(f"{name:>12}" for name in found))
        self._show("  ".join(f"{value:12,.0f}" for value in found.values()))
        return found

    async def _settle(self, start: float) -> None:
        """Waits until nothing runs."""
        for _ in range(round(self._options.settle * 5)):
            facts = server_facts((await self._ask(request_bytes("GET", "/metrics"))).body.decode())
            if facts["running"] == facts["waiting"] == facts["pages"] == 0:
                break
            await asyncio.sleep(0.2)
        await asyncio.sleep(0.5)
        await self._sample(start)

    # What is sent.

    async def _send(
        self, generator: random.Random, request: Request, stream: bool, headers: dict[str, str] | None = None
    ) -> Connection:
        """A connection on which the request was sent and the head of its answer has come. Raises BrokenError."""
        data = request.encoded(stream)
        if self._idle and generator.random() < 0.8:
            connection = self._idle.pop(0)
            try:
                connection.send("POST", request.path, data, headers)
                await connection.head()
                return connection
            except BrokenError:  # the server has closed it meanwhile
                connection.close()
        connection = await Connection.open(self._port)
        connection.send("POST", request.path, data, headers)
        await connection.head()
        return connection

    def _keep(self, connection: Connection) -> None:
        if len(self._idle) < _MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.close()

    async def _ask(self, data: bytes) -> Answer:
        """Sends bytes on a connection of their own. Raises BrokenError."""
        connection = await Connection.open(self._port)
        try:
            connection.begin_answer()
            connection.writer.write(data)
            return await connection.answer()
        finally:
            connection.close()

    def _random_request(self, generator: random.Random) -> Request:
        return random_request(generator, self._max_model_len, self._options.vocab_size)

    def _is_taken(self, answer: Answer) -> bool:
        """Whether a valid request was not refused for the server being busy."""
        self.report.statuses[answer.status] += 1
        if answer.status == 429 and 1 <= int(answer.headers["retry-after"]) <= 120:
            return False
        if answer.status != 200:
            raise WrongAnswerError(f"status {answer.status}: {answer.body[:300]!r}")
        return True

    async def _get(self, generator: random.Random, request: Request) -> Choices | None:
        connection = await self._send(generator, request, False)
        answer = await connection.answer()
        self._keep(connection)
        try:
            return read_answer(request, answer) if self._is_taken(answer) else None
        except WrongAnswerError as error:
            raise WrongAnswerError(f"{error}; {request}") from None

    async def _get_stream(
        self, generator: random.Random, request: Request, found: StreamedAnswer, num_events: int | None = None
    ) -> Choices | None:
        """Reads a stream to its end, or breaks it off after some events."""
        headers = {} if found.last_id is None else {"last-event-id": found.last_id}
        connection = await self._send(generator, request, True, headers)
        try:
            if (await connection.head()).status != 200:
                taken = self._is_taken(await connection.answer())
                assert not taken
                self._keep(connection)
                return None
            async for event in connection.events():
                found.add(event)
                num_events = None if num_events is None else num_events - 1
                if num_events == 0 and not found.has_ended:
                    connection.abort()
                    return None
            self.report.statuses[200] += 1
            self._keep(connection)
            return found.choices()
        except WrongAnswerError as error:
            raise WrongAnswerError(f"{error}; {request}") from None

    async def _whole(self, generator: random.Random) -> None:
        request = self._random_request(generator)
        await self._compare(generator, request, await self._get(generator, request))

    async def _stream(self, generator: random.Random) -> None:
        request = self._random_request(generator)
        if can_stream(request):
            found = await self._get_stream(generator, request, StreamedAnswer(request))
            await self._compare(generator, request, found)
        else:
            await self._get(generator, request)

    async def _compare(
        self, generator: random.Random, request: Request, found: Choices | None, share: float = 0.05
    ) -> None:
        """Sends the request again, streamed or not."""
        if found is None or generator.random() >= share:
            return
        if generator.random() < 0.5 and can_stream(request):
            again = await self._get_stream(generator, request, StreamedAnswer(request))
        else:
            again = await self._get(generator, request)
        if again is not None:
            self.report.num_compared += 1
            if again != found:
                raise WrongAnswerError(f"two answers to one request differ: {request} {found} {again}")

    async def _resume(self, generator: random.Random) -> None:
        request = self._random_request(generator)
        while not can_resume(request):
            request = self._random_request(generator)
        found, choices = StreamedAnswer(request), None
        for _ in range(generator.randint(1, 2)):
            choices = await self._get_stream(generator, request, found, generator.randint(1, 12))
            if choices is not None:
                break
        if choices is None:
            choices = await self._get_stream(generator, request, found)
        await self._compare(generator, request, choices, 1.0)

    async def _leave(self, generator: random.Random) -> None:
        """Leaves after some events, or at some moment: while the request waits, is prefilled, or is answered."""
        request = self._random_request(generator)
        is_stream = generator.random() < 0.6 and can_stream(request)
        if is_stream and generator.random() < 0.5:
            await self._get_stream(generator, request, StreamedAnswer(request), generator.randint(1, 20))
            return
        connection = await Connection.open(self._port)
        connection.send("POST", request.path, request.encoded(is_stream))
        await asyncio.sleep(generator.choice((0, generator.expovariate(50), generator.expovariate(2))))
        connection.abort() if generator.random() < 0.5 else connection.close()

    async def _stop_reading(self, generator: random.Random) -> None:
        """A stream that nobody reads: it ends, or the server closes the connection."""
        request = self._random_request(generator)
        length = self._max_model_len // 3
        more = {"max_tokens": length, "ignore_eos": True, "logprobs": 20, "return_token_ids": True}
        request = Request(COMPLETIONS, {"prompt": [7, 8, 9], "seed": request.body["seed"], **more})
        connection = await Connection.open(self._port, _SMALL_BUFFER)
        connection.send("POST", request.path, request.encoded(True))
        if generator.random() < 0.5:
            await connection.head()
        for _ in range(generator.randint(0, 4 * SEND_TIMEOUT)):
            await asyncio.sleep(1)
        if generator.random() < 0.5:
            await connection.wait_until_answered()
        connection.close()

    async def _bad(self, generator: random.Random) -> None:
        bad: BadRequest = bad_request(generator)
        try:
            answer = await self._ask(bad.data)
        except (BrokenError, OSError):
            answer = Answer()
        self.report.statuses[answer.status] += 1
        if answer.status not in (*bad.statuses, 429):
            raise WrongAnswerError(f"{bad.kind}: status {answer.status}, not {bad.statuses}: {answer.body[:300]!r}")
        if answer.headers.get("content-type") == "application/json":
            message = answer.json["error"]["message"]
            if not isinstance(message, str) or not message:
                raise WrongAnswerError(f"{bad.kind}: an error without a message: {answer.body[:300]!r}")

    async def _half(self, generator: random.Random) -> None:
        """A part of a request, of its head or its body; then the client leaves."""
        request = self._random_request(generator)
        data = request_bytes("POST", request.path, request.encoded(True))
        connection = await Connection.open(self._port)
        connection.writer.write(data[: generator.randrange(len(data))])
        await asyncio.sleep(generator.choice((0, generator.expovariate(1))))
        connection.abort() if generator.random() < 0.5 else connection.close()

    async def _slow_body(self, generator: random.Random) -> None:
        """A body that comes in pieces, with pauses."""
        request = self._random_request(generator)
        data = request_bytes("POST", request.path, request.encoded(False))
        connection = await Connection.open(self._port)
        connection.begin_answer()
        cuts = sorted(generator.randrange(len(data)) for _ in range(4))
        for start, end in zip((0, *cuts), (*cuts, len(data)), strict=True):
            connection.writer.write(data[start:end])
            await asyncio.sleep(generator.expovariate(2))
        answer = await connection.answer()
        connection.close()
        if self._is_taken(answer):
            read_answer(request, answer)

    async def _small(self, generator: random.Random) -> None:
        """What generates nothing."""
        text = json.dumps({"prompt": "def read(path):" * generator.randint(1, 40)}).encode()
        chat = json.dumps({"messages": [{"role": "user", "content": "read"}]}).encode()
        data = generator.choice(
            (
                *(
                    request_bytes("GET", path)
                    for path in ("/health", "/ready", "/v1/models", "/version", "/", "/metrics")
                ),
                request_bytes("GET", "/openapi.json"),
                request_bytes("POST", "/tokenize", text),
                request_bytes("POST", "/tokenize", chat),
                request_bytes("POST", "/detokenize", b'{"tokens": [5, 6, 700]}'),
                request_bytes("POST", "/v1/messages/count_tokens", chat),
            )
        )
        answer = await self._ask(data)
        if not self._is_taken(answer) or not answer.body:
            raise WrongAnswerError(f"{data[:80]!r}: status {answer.status}")


def judge(report: SoakReport, before: dict[str, float]) -> None:
    """Adds to `wrong` the claims that fail."""
    samples, last = report.samples, report.samples[-1]
    for name in ("running", "waiting", "pages"):
        if last[name]:
            report.wrong.append(f"{name}: {last[name]:.0f} are left at the end")
    if last["compilations"] > before["compilations"]:
        report.wrong.append(f"{last['compilations'] - before['compilations']:.0f} programs were compiled")
    if "rss_mib" not in last:
        return
    if last["descriptors"] > before["descriptors"] + 2:
        report.wrong.append(f"descriptors: {before['descriptors']:.0f} before, {last['descriptors']:.0f} at the end")
    total = last["seconds"]
    settled = [one for one in samples if one["seconds"] <= _SETTLING_SHARE * total][-1]["rss_mib"]
    highest = max(one["rss_mib"] for one in samples if one["seconds"] >= (1 - _LAST_SHARE) * total)
    if highest > settled + max(_GROWTH_SHARE * settled, _GROWTH_MIB):
        report.wrong.append(f"memory grows: {settled:,.0f} MiB at first, {highest:,.0f} in the last third")


def table(report: SoakReport) -> str:
    """The result as text."""
    counts = ", ".join(f"{count:,} {kind}" for kind, count in report.counts.most_common())
    statuses = ", ".join(f"{count:,} of {status or 'none'}" for status, count in report.statuses.most_common())
    lines = [
        f"{report.counts.total():,} requests in {report.seconds:,.0f} s: {counts}",
        f"statuses: {statuses}",
        f"{report.num_compared:,} requests were sent twice; {report.num_hung} hung; {len(report.wrong)} claims failed",
        *(f"  {one:.2000}" for one in report.wrong[-_NUM_SHOWN:]),
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=30.0, help="over which the requests are sent")
    parser.add_argument("--connections", type=int, default=48, help="requests on their way at once, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--interval", type=int, default=60, help="seconds between two lines")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--url", help="of a server that runs already; its memory is not watched")
    parser.add_argument("serve", nargs="*", help="arguments of jaxinfer serve, after --; by default: demo")
    arguments = parser.parse_args()
    options = SoakOptions(
        arguments.requests, arguments.minutes, arguments.connections, arguments.seed, arguments.interval
    )
    print_line = lambda line: print(line, flush=True)  # noqa: E731

    def soak(url: str, pid: int | None) -> SoakReport:
        return asyncio.run(Soak(urllib.parse.urlsplit(url).port or 80, pid, options, print_line).run())

    if arguments.url:
        report = soak(arguments.url, None)
    else:
        with ServerProcess(*(arguments.serve or ["demo"]), "--send-timeout", str(SEND_TIMEOUT)) as server:
            report = soak(server.url, server.pid)
            for line in server.log.splitlines():
                if "Traceback" in line or "a request failed" in line:
                    report.wrong.append(f"the server's log: {line}")
    print(table(report))
    if arguments.json:
        arguments.json.write_text(json.dumps(vars(report), indent=1))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
