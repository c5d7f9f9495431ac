"""The three kinds of run: one batch at a time, all requests at once, and clients that arrive over time."""

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jaxinfer import compilation_cache
from jaxinfer.api.async_engine import AsyncEngine
from jaxinfer.api.llm import LLM
from jaxinfer.engine.request import RequestOptions
from jaxinfer.measure.bench.metrics import Trace, figures
from jaxinfer.measure.bench.model import Bench
from jaxinfer.measure.bench.probe import DispatchProbe, MemorySampler, host_gap
from jaxinfer.measure.bench.workload import WorkloadRequest
from jaxinfer.sampling import SamplingParams
from jaxinfer.speculative import SpeculationStats

Sent = TypeVar("Sent")
_SALTS = itertools.count()  # one for each run, so that no run reuses the prefixes of another


@dataclass(frozen=True)
class RunOptions:
    """Options of sending requests and evaluating their times. Answers have exactly the requested lengths.

    Attributes:
      temperature, seed: of the sampler. limits: seconds by name, for goodput. price_per_hour: of the machine.
      progress: called when a request has ended.
    """

    temperature: float = 0.0
    seed: int = 0
    limits: dict[str, float] = field(default_factory=dict)
    price_per_hour: float | None = None
    progress: Callable[[], object] = lambda: None

    def params(self, num_tokens: int) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, seed=self.seed, max_tokens=num_tokens, ignore_eos=True)


def serve_all(llm: LLM, requests: Sequence[WorkloadRequest], options: RunOptions) -> tuple[list[Trace], float]:
    """Sends all requests at once and steps the engine until they are done; returns their traces and the total seconds.

    Raises RuntimeError if one failed.
    """
    request_options = RequestOptions(cache_salt=f"bench {next(_SALTS)}")
    prepared = [
        llm.prepare(request.prompt, options.params(request.num_tokens), request_options, what=f"request {number}")
        for number, request in enumerate(requests)
    ]
    start = time.perf_counter()
    running = {}
    traces = []
    for request in prepared:
        traces.append(Trace(time.perf_counter(), request.num_prompt))
        running |= dict.fromkeys(llm.submit(request), traces[-1])
    try:
        while running:
            llm.step()
            for answer in llm.client.take_progress(running):
                delta, trace = llm.advance(answer), running[answer]
                if delta.token_ids:
                    trace.deliver(time.perf_counter(), len(delta.token_ids))
                if answer.is_finished:
                    del running[answer]
                    _check(answer.finish_reason, answer.error)
                    options.progress()
    finally:
        llm.client.abort(list(running))
    return traces, time.perf_counter() - start


async def serve_arriving(
    engine: AsyncEngine,
    requests: Sequence[WorkloadRequest],
    times: Sequence[float],
    options: RunOptions,
    max_concurrency: int | None = None,
) -> tuple[list[Trace], float]:
    """Streams requests to clients, as `arriving`. Returns and raises as `serve_all`."""
    salt = f"bench {next(_SALTS)}"

    async def send(request: WorkloadRequest) -> Trace:
        trace = Trace(time.perf_counter(), 0)
        async for delta in engine.generate(request.prompt, options.params(request.num_tokens), cache_salt=salt):
            if delta.token_ids:
                trace.deliver(time.perf_counter(), len(delta.token_ids))
            if delta.output is not None:
                trace.num_prompt = len(delta.output.prompt_token_ids)
                (answer,) = delta.output.outputs
                _check(answer.finish_reason, answer.error)
        return trace

    return await arriving(send, requests, times, options, max_concurrency)


async def arriving(
    send: Callable[[WorkloadRequest], Coroutine[Any, Any, Sent]],
    requests: Sequence[WorkloadRequest],
    times: Sequence[float],
    options: RunOptions,
    max_concurrency: int | None,
) -> tuple[list[Sent], float]:
    """Results of `send` for each request, and the total seconds: request i arrives `times[i]` seconds after the start,
    and is sent when fewer than `max_concurrency` others run."""
    gate = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    start = time.perf_counter()

    async def client(request: WorkloadRequest, when: float) -> Sent:
        await asyncio.sleep(max(when - (time.perf_counter() - start), 0))
        async with gate:
            sent = await send(request)
        options.progress()
        return sent

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client(request, when)) for request, when in zip(requests, times, strict=True)]
    return [task.result() for task in tasks], time.perf_counter() - start


def _check(reason: str | None, error: str | None) -> None:
    if reason != "length":
        raise RuntimeError(f"a request ended with {reason!r}" + (f": {error}" if error else ""))


def latency(bench: Bench, batches: Sequence[Sequence[WorkloadRequest]], options: RunOptions) -> dict[str, Any]:
    """Measures batches of one size one after another, after a first batch that is not counted. Raises ValueError for a
    model that was opened to serve."""
    _check_idle(bench)
    serve_all(bench.llm, batches[0], options)
    all_traces: list[Trace] = []
    total = 0.0
    with watched(bench) as watch:
        for batch in batches[1:]:
            traces, seconds = serve_all(bench.llm, batch, options)
            all_traces += traces
            total += seconds
    run = summary(bench, watch, all_traces, total, options)
    lengths = [trace.num_prompt for trace in all_traces[: len(batches[1])]]
    ideal = bench.ideal.prefill_seconds(lengths)
    # All prompts of a batch are computed when its last first token arrives.
    size = len(batches[1])
    last = [max(trace.ttft for trace in all_traces[start : start + size]) for start in range(0, len(all_traces), size)]
    middle = statistics.median_high(last)
    run["prefill"] = {"seconds": middle, "roofline_seconds": ideal, "percent": 100 * ideal / middle}
    return {"batch": size, **run}


def throughput(
    bench: Bench, requests: Sequence[WorkloadRequest], warm: Sequence[WorkloadRequest], options: RunOptions
) -> dict[str, Any]:
    """Measures requests sent at once, after a few `warm` ones. Raises ValueError for a model that was opened to
    serve."""
    _check_idle(bench)
    serve_all(bench.llm, warm, options)
    with watched(bench) as watch:
        traces, seconds = serve_all(bench.llm, requests, options)
    return summary(bench, watch, traces, seconds, options)


def load(
    bench: Bench,
    requests: Sequence[WorkloadRequest],
    times: Sequence[float],
    options: RunOptions,
    max_concurrency: int | None = None,
) -> dict[str, Any]:
    """Measures requests that arrive over time and are streamed to clients. Raises ValueError for a model that was not
    opened to serve."""
    if bench.engine is None:
        raise ValueError("load needs a model that was opened to serve")
    with watched(bench) as watch:
        traces, seconds = asyncio.run(serve_arriving(bench.engine, requests, times, options, max_concurrency))
    return summary(bench, watch, traces, seconds, options)


def _check_idle(bench: Bench) -> None:
    if bench.engine is not None:
        raise ValueError("a model that was opened to serve can only be stepped by its own thread")


@dataclass(frozen=True)
class Watch:
    """Observations of a run: dispatches, memory, compilations; complete when `watched` has ended."""

    probes: list[DispatchProbe]
    memory: MemorySampler
    before: SpeculationStats | None
    counts: compilation_cache.Counts


@contextlib.contextmanager
def watched(bench: Bench) -> Iterator[Watch]:
    """Observes dispatches, memory and compilations during the block."""
    before = bench.llm.speculation_stats()
    with contextlib.ExitStack() as stack:
        counts, memory = stack.enter_context(compilation_cache.counting()), stack.enter_context(MemorySampler())
        probes = [stack.enter_context(DispatchProbe(engine)) for engine in bench.llm.engine.engines]
        yield Watch(probes, memory, before, counts)


def summary(bench: Bench, watch: Watch, traces: list[Trace], seconds: float, options: RunOptions) -> dict[str, Any]:
    """The results of a run as JSON values."""
    run = figures(traces, seconds, limits=options.limits, price_per_hour=options.price_per_hour)
    run["compiled_after_warm_up"] = watch.counts.compiled + watch.counts.hits
    run["host_gap"] = host_gap(watch.probes)
    run["decode"] = _decode(bench, watch, run)
    after = bench.llm.speculation_stats()
    if after is not None and watch.before is not None:
        stats = after - watch.before
        run["speculation"] = {
            "acceptance_rate": stats.acceptance_rate,
            "acceptance_by_position": list(stats.acceptance_by_position),
            "mean_accepted_length": stats.mean_accepted_length,
            "rounds": stats.num_rounds,
            "plain_tokens": stats.num_plain_tokens,
        }
    run["memory"] = watch.memory.to_dict()
    return run


def _decode(bench: Bench, watch: Watch, run: dict[str, Any]) -> dict[str, Any] | None:
    """The time per token, and the roofline of a plain decode step of the mean batch and context at the measured rates;
    None if nothing was decoded."""
    busy = [probe for probe in watch.probes if probe.mean_batch]
    if not busy or run["tpot"] is None:
        return None
    batch = sum(probe.mean_batch for probe in busy) / len(busy)
    context = sum(probe.mean_context for probe in busy) / len(busy)
    point = bench.ideal.decode(batch, context)
    return {
        "mean_batch": batch,
        "mean_context": context,
        "step_seconds": run["tpot"]["p50"],
        "roofline_seconds": point.seconds,
        "roofline_tokens_per_second": point.tokens_per_second,
        "bound": point.bound,
        "bytes": point.hbm_bytes,
        "flops": point.flops,
        "percent": 100 * point.seconds / run["tpot"]["p50"] if run["tpot"]["p50"] else None,
    }
