"""Prometheus metrics, with the suffixes of vLLM's names. No label comes from a request."""

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxinfer import __version__, compilation_cache
from jaxinfer.server.record import Record
from jaxinfer.speculative.statistics import SpeculationStats

if TYPE_CHECKING:
    from jaxinfer.async_engine import AsyncEngine
    from jaxinfer.engine.flight import Flight

_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
    *(640, 2560),
)
_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20),
    *(40, 80),
)
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_DISPATCH = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
_COUNTS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
STATUSES = (200, 400, 401, 403, 404, 405, 408, 409, 413, 415, 429, 431, 499, 500, 501, 503)


class Metrics:
    """The metrics of one server; `watch` adds those of its engine."""

    def __init__(self, model: str):
        self._registry = CollectorRegistry()
        self._values = {"model_name": model}
        self._own = {"labelnames": tuple(self._values), "registry": self._registry}
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that were answered.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens that were generated.")
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN
        )
        self.inter_token = QuickHistogram(
            "jaxinfer_inter_token_latency_seconds", "Between tokens of a request.", _TOKEN, self._values
        )
        self._registry.register(self.inter_token)
        self._latency = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", _LATENCY)
        self._queue_time = self._histogram("request_queue_time_seconds", "Until a request's turn.", _LATENCY)
        self._prefill = self._histogram("request_prefill_time_seconds", "From a slot to the first token.", _LATENCY)
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the end.", _LATENCY)
        self._inference = self._histogram("request_inference_time_seconds", "From a slot to the end.", _LATENCY)
        self._dispatch = self._histogram("dispatch_seconds", "Of a program on the device.", _DISPATCH)
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens that a dispatch computes.", _COUNTS)
        self._num_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _COUNTS)
        self._num_output = self._histogram("request_generation_tokens", "Tokens generated for a request.", _COUNTS)
        self._success = self._labelled("request_success", "Answers that ended.", "finished_reason")
        self._aborted = self._labelled("aborted", "Requests that did not end.", "reason")
        self._rejected = self._labelled("rejected", "Requests that were refused.", "reason")
        self._http = self._labelled("http_requests", "Requests by route and status.", "route", "code")
        info = Gauge("jaxinfer_build_info", "Version.", ("version",), registry=self._registry)
        info.labels(__version__).set(1)
        ProcessCollector(registry=self._registry)  # memory and processor time

    def _counter(self, name: str, help: str) -> Any:
        return Counter(f"jaxinfer_{name}", help, **self._own).labels(**self._values)

    def _labelled(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"jaxinfer_{name}", help, (*self._values, *labels), registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Any:
        return Histogram(f"jaxinfer_{name}", help, buckets=buckets, **self._own).labels(**self._values)

    def watch(self, engine: "AsyncEngine", num_queued: Callable[[], int]) -> None:
        """Adds the engine's metrics; `num_queued` answers wait in the server."""
        collector = _EngineCollector(engine, self._values, num_queued)
        self._registry.register(collector)
        options = collector.engines[0].scheduler.options
        sizes = {"block_size": str(options.page_size), "num_gpu_blocks": str(options.num_pages)}
        info = Gauge("jaxinfer_cache_config_info", "The cache.", (*self._values, *sizes), registry=self._registry)
        info.labels(**self._values, **sizes).set(1)
        for one in collector.engines:
            one.on_read = self._count_dispatch

    def _count_dispatch(self, flight: "Flight", seconds: float) -> None:
        """In the engine's thread."""
        num_prompt = sum(chunk.length for _, chunk in flight.chunks)
        self._dispatch.observe(seconds)
        self._step_tokens.observe(num_prompt + len(flight.decodes) * flight.plan.num_steps)

    def count_request(self, record: Record) -> None:
        """Counts a request that has been answered."""
        code = record.status if record.status in STATUSES else 0
        self._http.labels(**self._values, route=record.route, code=str(code)).inc()
        if record.num_prompt and record.finish_reasons:
            self.prompt_tokens.inc(record.num_prompt)
            self._num_prompt.observe(record.num_prompt)
            self._num_output.observe(record.num_output)
            self._latency.observe(record.total_seconds)
            for reason in record.finish_reasons:
                self._success.labels(**self._values, finished_reason=reason).inc()
            for one in record.timings:
                self._prefill.observe(one.time_to_first_token - one.queue_time)
                self._decode.observe(one.total_time - one.time_to_first_token)
                self._inference.observe(one.total_time - one.queue_time)
        elif record.queued_seconds is not None:
            reason = "client_left" if record.has_left else "failed"
            self._aborted.labels(**self._values, reason=reason).inc()
        if record.num_output:
            self.generation_tokens.inc(record.num_output)
        if record.queued_seconds is not None:
            in_engine = max((one.queue_time for one in record.timings), default=0.0)
            self._queue_time.observe(record.queued_seconds + in_engine)
        if record.status in (429, 503):
            self._rejected.labels(**self._values, reason="queue_full" if record.status == 429 else "unavailable").inc()

    def text(self) -> bytes:
        """All metrics in Prometheus' format."""
        return generate_latest(self._registry)


class QuickHistogram(Collector):
    """A histogram for what happens with every token: prometheus_client's takes locks and looks at each bucket. It is
    observed by one thread."""

    def __init__(self, name: str, help: str, buckets: Sequence[float], values: dict[str, str]):
        self._family = name, help
        self._buckets, self._values = tuple(map(float, buckets)), values
        self._counts, self._sum = [0] * (len(buckets) + 1), 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._buckets, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(*self._family, labels=tuple(self._values))
        names = (*map(str, self._buckets), "+Inf")
        pairs = list(zip(names, accumulate(self._counts), strict=True))
        family.add_metric(tuple(self._values.values()), pairs, self._sum)
        yield family


class _EngineCollector(Collector):
    """Reads an engine's numbers while it runs, each of them by itself."""

    def __init__(self, engine: "AsyncEngine", values: dict[str, str], num_queued: Callable[[], int]):
        self._llm, self._values, self._num_queued = engine.llm, values, num_queued
        self.engines: list[Any] = getattr(engine.llm.engine, "engines", [engine.llm.engine])
        self._schedulers = [one.scheduler for one in self.engines]
        self._num_compiled, self._listening = 0, contextlib.ExitStack()
        self._counts = self._listening.enter_context(compilation_cache.counting())

    def collect(self) -> Iterator[Metric]:
        one = self._schedulers
        yield self._gauge("num_requests_running", "Answers that hold a slot.", sum(len(s.running) for s in one))
        num_waiting = self._num_queued() + sum(len(s.waiting) for s in one)
        yield self._gauge("num_requests_waiting", "Answers that wait, in the server and the engine.", num_waiting)
        shares = [1 - s.pool.num_available / (s.options.num_pages - 1) for s in one]
        yield self._gauge("kv_cache_usage_perc", "Share of the cache in use, 0 to 1.", sum(shares) / len(shares))
        yield self._gauge("kv_cache_pages_owned", "Pages that answers own.", sum(s.pool.num_owned for s in one))
        counters = [s.counters for s in one]
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens of all answers.", sum(c.prompt_tokens for c in counters)
        )
        yield self._counter(
            "prefix_cache_hits", "Prompt tokens found in the cache.", sum(c.reused_tokens for c in counters)
        )
        yield self._counter("num_preemptions", "Preemptions.", sum(c.num_preemptions for c in counters))
        yield self._counter("compilations", "Programs compiled since the model was loaded.", self._compilations())
        stats = self._llm.speculation_stats() or SpeculationStats()
        yield self._counter("spec_decode_num_drafts", "Rounds of drafting, of each answer.", stats.num_rounds)
        yield self._counter("spec_decode_num_draft_tokens", "Drafted tokens.", stats.proposed)
        yield self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", stats.accepted)

    def _compilations(self) -> int:
        self._listening.close()
        self._num_compiled += self._counts.compiled
        self._counts = self._listening.enter_context(compilation_cache.counting())
        return self._num_compiled

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        return self._filled(GaugeMetricFamily(f"jaxinfer_{name}", help, labels=tuple(self._values)), value)

    def _counter(self, name: str, help: str, value: float) -> Metric:
        return self._filled(CounterMetricFamily(f"jaxinfer_{name}", help, labels=tuple(self._values)), value)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric(tuple(self._values.values()), value)
        return family
