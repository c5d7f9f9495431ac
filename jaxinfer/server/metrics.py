"""Prometheus metrics, with the suffixes of vLLM's names. The only label that comes from a request is the name of a
model that is served."""

import contextlib
import time
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
    from jaxinfer.api.async_engine import AsyncEngine
    from jaxinfer.engine.adapter_slots import LoadedAdapter
    from jaxinfer.engine.model_runner import Flight
    from jaxinfer.server.admission import Admission

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
MAX_MODELS = 100


class ModelMetrics:
    """The metrics of one model: those of `Metrics` under its name."""

    def __init__(self, name: str, families: "Metrics"):
        self.name, self._families = name, families
        for field, family in families.own.items():
            setattr(self, field, family.labels(name))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def count_dispatch(self, flight: "Flight", seconds: float) -> None:
        """In the engine's thread."""
        num_prompt = sum(chunk.length for _, chunk in flight.chunks)
        self.dispatch.observe(seconds)
        self.step_tokens.observe(num_prompt + len(flight.decodes) * flight.plan.num_steps)

    def count_request(self, record: Record) -> None:
        """Counts a request that has been answered."""
        code = record.status if record.status in STATUSES else 0
        families = self._families
        families.http.labels(self.name, record.route, str(code)).inc()
        if record.num_prompt and record.finish_reasons:
            self.prompt_tokens.inc(record.num_prompt)
            self.num_prompt.observe(record.num_prompt)
            self.num_output.observe(record.num_output)
            self.latency.observe(record.total_seconds)
            for reason in record.finish_reasons:
                families.success.labels(self.name, reason).inc()
            for timings in record.timings:
                self.prefill.observe(timings.time_to_first_token - timings.queue_time)
                self.decode.observe(timings.total_time - timings.time_to_first_token)
                self.inference.observe(timings.total_time - timings.queue_time)
        elif record.queued_seconds is not None:
            families.aborted.labels(self.name, "client_left" if record.has_left else "failed").inc()
        if record.num_output:
            self.generation_tokens.inc(record.num_output)
        if record.queued_seconds is not None:
            in_engine = max((timings.queue_time for timings in record.timings), default=0.0)
            self.queue_time.observe(record.queued_seconds + in_engine)
        if record.status in (429, 503):
            families.rejected.labels(self.name, "queue_full" if record.status == 429 else "unavailable").inc()


class Metrics:
    """The metrics of one server, by model. At most `MAX_MODELS` names become labels; those beyond them are "other".

    Args:
      default: the name under which requests are counted that name no model.
    """

    def __init__(self, default: str):
        self._registry = CollectorRegistry()
        self._default = default
        self.own = {
            "prompt_tokens": self._counter("prompt_tokens", "Prompt tokens of requests that were answered."),
            "generation_tokens": self._counter("generation_tokens", "Tokens that were generated."),
            "first_token": self._histogram(
                "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN
            ),
            "inter_token": QuickHistogram(
                "jaxinfer_inter_token_latency_seconds", "Between tokens of a request.", _TOKEN
            ),
            "latency": self._histogram("e2e_request_latency_seconds", "From arrival to the end.", _LATENCY),
            "queue_time": self._histogram("request_queue_time_seconds", "Until a request's turn.", _LATENCY),
            "prefill": self._histogram("request_prefill_time_seconds", "From a slot to the first token.", _LATENCY),
            "decode": self._histogram("request_decode_time_seconds", "From the first token to the end.", _LATENCY),
            "inference": self._histogram("request_inference_time_seconds", "From a slot to the end.", _LATENCY),
            "dispatch": self._histogram("dispatch_seconds", "Of a program on the device.", _DISPATCH),
            "step_tokens": self._histogram("iteration_tokens_total", "Tokens that a dispatch computes.", _COUNTS),
            "num_prompt": self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _COUNTS),
            "num_output": self._histogram("request_generation_tokens", "Tokens generated for a request.", _COUNTS),
            "adapter_loads": self._counter("adapter_loads", "Adapters loaded, at the start and over HTTP."),
            "loads": self._counter("model_loads", "How often the model was loaded."),
            "load_seconds": self._counter("model_load_seconds", "Seconds that loading it took, all loads together."),
        }
        self._registry.register(self.own["inter_token"])
        self.success = self._counter("request_success", "Answers that ended.", "finished_reason")
        self.aborted = self._counter("aborted", "Requests that did not end.", "reason")
        self.rejected = self._counter("rejected", "Requests that were refused.", "reason")
        self.http = self._counter("http_requests", "Requests by route and status.", "route", "code")
        self._cache = Gauge(
            "jaxinfer_cache_config_info",
            "The cache.",
            ("model_name", "block_size", "num_gpu_blocks"),
            registry=self._registry,
        )
        info = Gauge("jaxinfer_build_info", "Version.", ("version",), registry=self._registry)
        info.labels(__version__).set(1)
        ProcessCollector(registry=self._registry)  # memory and processor time
        self._engines = _EngineCollector(default)
        self._registry.register(self._engines)
        self._models: dict[str, ModelMetrics] = {}
        self._others: ModelMetrics | None = None
        self.of(default)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"jaxinfer_{name}", help, ("model_name", *labels), registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"jaxinfer_{name}", help, ("model_name",), buckets=buckets, registry=self._registry)

    def of(self, name: str) -> ModelMetrics:
        """The metrics of a model; of one beyond `MAX_MODELS`, those of all such."""
        if name not in self._models:
            if len(self._models) >= MAX_MODELS:
                self._others = self._others or ModelMetrics("other", self)
                return self._others
            self._models[name] = ModelMetrics(name, self)
        return self._models[name]

    def watch(self, name: str, engine: "AsyncEngine", queue: "Admission") -> None:
        """Adds an engine's metrics under its model's name, in place of those of the engine before; `queue` is where
        requests wait in the server."""
        self.unwatch(name)
        self._engines.count_from_now()
        metrics = self.of(name)
        watched = self._engines.watched[metrics.name] = _Watched(engine, queue)
        options = watched.schedulers[0].options
        watched.sizes = str(options.page_size), str(options.num_pages)
        self._cache.labels(metrics.name, *watched.sizes).set(1)
        for engine_ in watched.engines:
            engine_.on_read = metrics.count_dispatch

    def unwatch(self, name: str) -> None:
        """Drops the metrics of a model's engine, which is about to be closed."""
        watched = self._engines.watched.pop(self.of(name).name, None)
        if watched is not None:
            self._cache.remove(self.of(name).name, *watched.sizes)

    def count_request(self, record: Record) -> None:
        """Counts a request that has been answered."""
        self.of(record.model or self._default).count_request(record)

    def text(self, is_seen: "Callable[[LoadedAdapter], bool]" = lambda adapter: True) -> bytes:
        """All metrics in Prometheus' format. `is_seen`: whether the reader may know the name of an adapter."""
        registry = CollectorRegistry()
        registry.register(_AdapterCollector(self._engines.watched, is_seen))
        return generate_latest(self._registry) + generate_latest(registry)


class QuickHistogram(Collector):
    """A histogram by model for what happens with every token: prometheus_client's takes locks and looks at each bucket.
    It is observed by one thread."""

    def __init__(self, name: str, help: str, buckets: Sequence[float]):
        self._family = name, help
        self._buckets = tuple(map(float, buckets))
        self._models: dict[str, _QuickCounts] = {}

    def labels(self, model: str) -> "_QuickCounts":
        """The counts of one model's values."""
        return self._models.setdefault(model, _QuickCounts(self._buckets))

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(*self._family, labels=("model_name",))
        names = (*map(str, self._buckets), "+Inf")
        for model, counts in list(self._models.items()):
            pairs = list(zip(names, accumulate(counts.counts), strict=True))
            family.add_metric((model,), pairs, counts.sum)
        yield family


class _QuickCounts:
    def __init__(self, buckets: tuple[float, ...]):
        self._buckets = buckets
        self.counts, self.sum = [0] * (len(buckets) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._buckets, value)] += 1
        self.sum += value


class _Watched:
    """A loaded model's engines; `sizes` are those of its cache, as labels."""

    def __init__(self, engine: "AsyncEngine", queue: "Admission"):
        self.llm, self.queue = engine.llm, queue
        self.engines = engine.llm.engine.engines
        self.schedulers = [replica.scheduler for replica in self.engines]
        self.sizes: tuple[str, str] = ("", "")

    def gauges(self) -> Iterator[tuple[str, str, float]]:
        """Name, meaning and value of each."""
        schedulers = self.schedulers
        yield "num_requests_running", "Answers that hold a slot.", sum(len(s.running) for s in schedulers)
        num_waiting = self.queue.num_waiting + sum(len(s.waiting) for s in schedulers)
        yield "num_requests_waiting", "Answers that wait, in the server and the engine.", num_waiting
        shares = [max(1 - pool.num_available / (pool.num_pages - 1) for pool in s.pools.all) for s in schedulers]
        yield "kv_cache_usage_perc", "Share of the fullest pool in use, 0 to 1.", sum(shares) / len(shares)
        yield "kv_cache_pages_owned", "Pages that answers own.", sum(s.pools.num_owned for s in schedulers)
        pools = [pair for s in schedulers for pair in zip(s.pools.all, s.pools.groups, strict=True)]
        num_owned = sum(pool.num_owned for pool, group in pools if group.window)
        yield "kv_cache_window_pages_owned", "Of these, pages of layers with a window.", num_owned

        loaded = list(self.llm.adapters.values())
        yield "adapters_loaded", "Adapters that requests can name.", len(loaded)
        host_bytes = sum(adapter.host.num_bytes for adapter in loaded)
        yield "adapter_host_bytes", "Host memory of these adapters.", host_bytes
        yield "host_cache_bytes", "Host memory for cached pages.", sum(s.tier.num_bytes for s in schedulers)
        yield "host_cache_used_bytes", "Of these, bytes in use.", sum(s.tier.used_bytes for s in schedulers)

    def running_adapters(self) -> "set[LoadedAdapter]":
        return {adapter for scheduler in self.schedulers for adapter in scheduler.adapters.running}

    def waiting_adapters(self) -> "set[LoadedAdapter]":
        """Adapters of requests that wait in the server and the engine."""
        waiting = {sequence.request.adapter for scheduler in self.schedulers for sequence in list(scheduler.waiting)}
        return self.queue.waiting_adapters | {adapter for adapter in waiting if not isinstance(adapter, int)}

    def counters(self) -> Iterator[tuple[str, str, float]]:
        """Name, meaning and value of each."""
        moves = sum(scheduler.adapters.num_moved for scheduler in self.schedulers)
        yield "adapter_moves", "Adapters written into a slot of the device.", moves
        counts = [s.counters for s in self.schedulers]
        yield "prefix_cache_queries", "Prompt tokens of all answers.", sum(c.prompt_tokens for c in counts)
        yield "prefix_cache_hits", "Prompt tokens found in the cache.", sum(c.reused_tokens for c in counts)
        yield "prefix_cache_host_hits", "Of these, tokens from host memory.", sum(c.host_hit_tokens for c in counts)
        total = sum(c.disk_read_tokens for c in counts)
        yield "prefix_store_read_tokens", "Tokens whose pages were read from the disk.", total
        for name, way in (("out", "to"), ("in", "from")):
            total = sum(getattr(c, f"host_bytes_{name}") for c in counts)
            yield f"host_cache_bytes_{name}", f"Bytes of pages moved {way} host memory.", total
        yield "num_preemptions", "Preemptions.", sum(c.num_preemptions for c in counts)
        stats = self.llm.speculation_stats() or SpeculationStats()
        yield "spec_decode_num_drafts", "Rounds of drafting, of each answer.", stats.num_rounds
        yield "spec_decode_num_draft_tokens", "Drafted tokens.", stats.proposed
        yield "spec_decode_num_accepted_tokens", "Draft tokens accepted.", stats.accepted


class _AdapterCollector(Collector):
    """The names of adapters in use, in labels of one gauge whose value is the time, as gateways read them of vLLM."""

    def __init__(self, watched: "dict[str, _Watched]", is_seen: "Callable[[LoadedAdapter], bool]"):
        self._watched, self._is_seen = watched, is_seen

    def collect(self) -> Iterator[Metric]:
        labels = ("model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters")
        family = GaugeMetricFamily(
            "jaxinfer_lora_requests_info", "Adapters of requests that run and wait; when, in seconds.", labels=labels
        )
        for model, watched in list(self._watched.items()):
            if num_slots := sum(scheduler.adapters.num_slots for scheduler in watched.schedulers):
                pair = watched.running_adapters(), watched.waiting_adapters()
                names = [",".join(sorted({each.name for each in kind if self._is_seen(each)})) for kind in pair]
                family.add_metric((model, str(num_slots), *names), time.time())
        yield family


class _EngineCollector(Collector):
    """Reads the numbers of the loaded models' engines while they run, each of them by itself. Counters begin at 0 when
    a model is loaded again, as those of a process do that starts again."""

    def __init__(self, default: str):
        self._default = default
        self.watched: dict[str, _Watched] = {}
        self._num_compiled, self._listening = 0, contextlib.ExitStack()
        self._counts = self._listening.enter_context(compilation_cache.counting())

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for model, watched in list(self.watched.items()):
            for kind, samples in ((GaugeMetricFamily, watched.gauges()), (CounterMetricFamily, watched.counters())):
                with contextlib.suppress(RuntimeError):  # the engine was closed meanwhile
                    for name, help, value in samples:
                        family = families.setdefault(name, kind(f"jaxinfer_{name}", help, labels=("model_name",)))
                        family.add_metric((model,), value)
        yield from families.values()
        compilations = CounterMetricFamily(
            "jaxinfer_compilations", "Programs compiled since a model was loaded.", labels=("model_name",)
        )
        compilations.add_metric((self._default,), self._compilations())
        yield compilations

    def count_from_now(self) -> None:
        """Leaves out of the count what was compiled while the first model was loaded."""
        if not self.watched:
            self._compilations()
            self._num_compiled = 0

    def _compilations(self) -> int:
        self._listening.close()
        self._num_compiled += self._counts.compiled
        self._counts = self._listening.enter_context(compilation_cache.counting())
        return self._num_compiled
