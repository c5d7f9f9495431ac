"""OpenTelemetry traces: a span for each request, made at its end."""

import asyncio
import re
import sys
import time

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from jaxinfer.extras import install_hint
from jaxinfer.server import run
from jaxinfer.server.app import make_app
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.tracing import RequestTracer, open_tracer
from tests.server.asgi import Client

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CHAT_BODY = {"messages": [{"role": "user", "content": "read a file"}], "max_tokens": 4, "ignore_eos": True}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def traced(make_service, exporter):
    """A client whose requests are traced."""

    def make(**options):
        service = make_service(**options)
        service.on_finish = RequestTracer(SimpleSpanProcessor(exporter), "tiny").trace
        return Client(make_app(service))

    return make


def test_a_span_says_what_was_asked_for_and_what_came(traced, exporter):
    body = {**CHAT_BODY, "seed": 2**64 - 1, "temperature": 0.5, "top_k": 7, "stop": ["zzz"], "stream": True}
    before = time.time_ns()
    asyncio.run(traced().stream(CHAT, body))
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.kind, span.status.status_code) == ("chat tiny", SpanKind.SERVER, StatusCode.UNSET)
    assert before <= span.start_time < span.end_time <= time.time_ns()
    found = dict(span.attributes)
    assert found.pop("jaxinfer.request_id").startswith("req-")
    assert 0 < found.pop("gen_ai.response.time_to_first_chunk") < (span.end_time - span.start_time) / 1e9
    assert found.pop("gen_ai.usage.input_tokens") > 3
    found.pop("gen_ai.usage.cache_read.input_tokens", None)
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "jaxinfer",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.model": "tiny",
        "gen_ai.request.seed": -1,
        "gen_ai.request.stop_sequences": ("zzz",),
        "gen_ai.request.stream": True,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.response.model": "tiny",
        "gen_ai.usage.output_tokens": 4,
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": CHAT,
    }
    assert [event.name for event in span.events] == ["queued", "scheduled", "first_token", "end"]
    times = [span.start_time, *(event.timestamp for event in span.events)]
    assert times == sorted(times)
    assert times[-1] == span.end_time


def test_a_span_belongs_to_the_clients_trace(traced, exporter):
    async def ask():
        client = traced()
        await client.post(CHAT, CHAT_BODY, traceparent=PARENT, tracestate="vendor=1")
        await client.post(CHAT, CHAT_BODY)
        await client.post(CHAT, CHAT_BODY, traceparent="00-no-trace-01")
        await client.post(CHAT, CHAT_BODY, traceparent=PARENT[:-1] + "0")  # the client does not sample it

    asyncio.run(ask())
    first, *others = exporter.get_finished_spans()
    assert format(first.context.trace_id, "032x") == PARENT.split("-")[1]
    assert format(first.parent.span_id, "016x") == PARENT.split("-")[2]
    assert first.context.trace_state.get("vendor") == "1"
    assert [span.parent for span in others] == [None, None]


def test_failures_are_told_and_other_routes_have_no_span(traced, exporter):
    async def ask():
        client = traced()
        for path in ("/health", "/metrics", "/v1/models", "/nowhere"):
            await client.get(path)
        await client.post("/tokenize", {"prompt": "a"})
        await client.post(COMPLETIONS, {"prompt": 5})

    asyncio.run(ask())
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.attributes["error.type"]) == ("text_completion tiny", "400")
    assert span.status.status_code == StatusCode.UNSET  # the client's fault
    assert [event.name for event in span.events] == ["end"]


def test_a_stream_that_fails_is_an_error(traced, exporter, engine, monkeypatch):
    def refuse(*_):
        raise RuntimeError("the device has gone")

    monkeypatch.setattr(engine, "submit", refuse)
    asyncio.run(traced().stream(COMPLETIONS, {"prompt": "def", "max_tokens": 3}))
    (span,) = exporter.get_finished_spans()
    assert (span.attributes["error.type"], span.status.status_code) == ("error_event", StatusCode.ERROR)


@pytest.mark.parametrize("log_prompts", [False, True])
def test_prompts_are_in_a_span_only_if_they_are_logged(traced, exporter, log_prompts):
    asyncio.run(traced(log_prompts=log_prompts).post(CHAT, CHAT_BODY))
    (span,) = exporter.get_finished_spans()
    assert ("read a file" in span.to_json()) == log_prompts


def test_the_environment_names_the_service(monkeypatch, exporter):
    def resource():
        tracer = RequestTracer(SimpleSpanProcessor(exporter), "tiny")
        return tracer._provider.resource.attributes

    assert resource()["service.name"] == "jaxinfer"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-eu")
    assert resource()["service.name"] == "chat-eu"


def test_the_collectors_address(monkeypatch):
    def url(endpoint):
        tracer = open_tracer(endpoint, "tiny")
        (processor,) = tracer._provider._active_span_processor._span_processors
        tracer.close()
        return processor.span_exporter._endpoint

    assert url("http://localhost:4318") == url("http://localhost:4318/") == "http://localhost:4318/v1/traces"
    assert url("https://example.com/otlp/traces") == "https://example.com/otlp/traces"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    assert url(None) == "http://collector:4318/v1/traces"
    for wrong in ("localhost:4318", "grpc://localhost", "http://", "http://localhost:x"):
        with pytest.raises(ValueError, match="otlp_endpoint"):
            ServerOptions(otlp_endpoint=wrong)


def test_without_the_extra_the_flag_is_an_error_and_the_environment_a_warning(monkeypatch, caplog):
    assert run._tracer(ServerOptions(), "tiny") is None
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    monkeypatch.delitem(sys.modules, "jaxinfer.server.tracing")
    with pytest.raises(ImportError, match=re.escape(install_hint("tracing"))):
        run._tracer(ServerOptions(otlp_endpoint="http://localhost:4318"), "tiny")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    assert run._tracer(ServerOptions(), "tiny") is None
    assert install_hint("tracing") in caplog.text
