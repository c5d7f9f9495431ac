"""OpenTelemetry traces, with the extra `tracing`: a span for each request that generates, with the attributes of the
conventions for generative AI (gen_ai.*). A span is made from the request's record when the request has ended."""

import threading
import time
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from jaxinfer import __version__
from jaxinfer.server.record import Record

# Values of gen_ai.operation.name; requests of other routes get no span.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}
_TRACES_PATH = "/v1/traces"
_CLOSING_SECONDS = 2.0  # the exporter tries a collector that is away for 10 s
_PARENT = TraceContextTextMapPropagator()

Attributes = dict[str, str | bool | int | float | list[str]]


class RequestTracer:
    """Makes a span of each finished request.

    Args:
      processor: what takes the spans. model: the name in `gen_ai.request.model` and in the names of spans, where a
        request was answered by none.
    """

    def __init__(self, processor: SpanProcessor, model: str):
        # What the environment says, such as OTEL_SERVICE_NAME, comes before our names.
        own = Resource({SERVICE_NAME: "jaxinfer", SERVICE_VERSION: __version__})
        resource = Resource.create().merge(own).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("jaxinfer.server", __version__)
        self._model = model

    def trace(self, record: Record) -> None:
        """Makes the span of a request that ended just now."""
        operation = _OPERATIONS.get(record.route)
        if operation is None:
            return
        end, model = time.time_ns(), record.model or self._model
        start = end - round(record.total_seconds * 1e9)
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=_PARENT.extract(record.trace_context),
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                **_attributes(record),
            },
            start_time=start,
        )
        if span.is_recording():
            _add_events(span, record, start, end)
            if record.status >= 500 or _has_failed(record):
                span.set_status(Status(StatusCode.ERROR))
        span.end(end)

    def close(self) -> None:
        """Sends what was not sent yet, for a few seconds at most."""
        closing = threading.Thread(target=self._provider.shutdown, name="jaxinfer-traces", daemon=True)
        closing.start()
        closing.join(_CLOSING_SECONDS)


def open_tracer(endpoint: str | None, model: str) -> RequestTracer:
    """Spans are sent to an OTLP collector over HTTP, in batches and by a thread of their own.

    Args:
      endpoint: its URL; `/v1/traces` is added to one without a path. None: the one that OpenTelemetry's environment
        variables name.
    """
    url = endpoint
    if url is not None and urlsplit(url).path in ("", "/"):
        url = url.rstrip("/") + _TRACES_PATH
    return RequestTracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)), model)


def _attributes(record: Record) -> Attributes:
    params = record.params
    known: dict[str, str | bool | int | float | list[str] | None] = {
        "gen_ai.provider.name": "jaxinfer",
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "jaxinfer.request_id": record.request_id,
        "jaxinfer.api_key_name": record.key or None,
        "gen_ai.request.stream": record.is_stream or None,
        "jaxinfer.client_left": record.has_left or None,
        "jaxinfer.prompt": record.prompt,
        "gen_ai.request.seed": None if record.seed is None else _int64(record.seed),
        "gen_ai.usage.input_tokens": record.num_prompt or None,
        "gen_ai.usage.output_tokens": record.num_output or None,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached or None,
        "gen_ai.response.finish_reasons": list(record.finish_reasons) or None,
    }
    if record.status >= 400:
        known["error.type"] = str(record.status)
    elif _has_failed(record):
        known["error.type"] = "error_event"
    if record.status < 400 and record.finish_reasons:
        known["gen_ai.response.time_to_first_chunk"] = record.first_token_seconds
    if params is not None:
        known |= {
            "gen_ai.request.choice.count": params.n if params.n != 1 else None,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
            "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
            "gen_ai.request.presence_penalty": params.presence_penalty or None,
            "gen_ai.request.stop_sequences": list(params.stop) or None,
        }
    return {name: value for name, value in known.items() if value is not None}


def _add_events(span: Span, record: Record, start: int, end: int) -> None:
    """When the request was queued, when its turn came, and when its first token and its end did."""
    if record.queued_seconds is not None:
        queued = start + round(record.received_seconds * 1e9)
        span.add_event("queued", timestamp=queued)
        span.add_event("scheduled", timestamp=queued + round(record.queued_seconds * 1e9))
        if record.first_token_seconds is not None:
            span.add_event("first_token", timestamp=queued + round(record.first_token_seconds * 1e9))
    span.add_event("end", timestamp=end)


def _has_failed(record: Record) -> bool:
    """True if a stream ended with an error event: its status had been sent."""
    return record.status == 200 and record.is_stream and not record.finish_reasons and not record.has_left


def _int64(number: int) -> int:
    """A seed as OTLP can hold it: seeds have 64 bits without a sign."""
    return number if number < 2**63 else number - 2**64
