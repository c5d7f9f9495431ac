"""Streams of Anthropic's, the responses and Ollama's routes through a break: events are those of a whole stream."""

import asyncio
import json

import pytest

from jaxinfer.fleet.front.sent import SentLines, SentStream
from jaxinfer.server.app import make_app
from jaxinfer.text.reasoning import FAMILIES
from jaxinfer.tool_calls import AnswerFormat
from tests.server.asgi import Client
from tests.server.test_tools import ANTHROPIC, FLAT, TOOLS

SENT, TELL = "x-jaxinfer-sent-tokens", "x-jaxinfer-tell-tokens"
ASK = [{"role": "user", "content": "read a file"}]
MESSAGES, RESPONSES, CHAT, GENERATE = "/v1/messages", "/v1/responses", "/api/chat", "/api/generate"
OPTIONS = {"options": {"seed": 4, "num_predict": 40}}
CASES = {
    "messages": (MESSAGES, {"messages": ASK, "max_tokens": 40, "seed": 4}),
    "messages-tools": (
        *(MESSAGES, {"messages": ASK, "max_tokens": 80, "seed": 4, "tools": ANTHROPIC, "tool_choice": {"type": "any"}}),
    ),
    "responses": (RESPONSES, {"input": ASK, "max_output_tokens": 40, "seed": 4}),
    "responses-tools": (
        *(RESPONSES, {"input": ASK, "max_output_tokens": 80, "seed": 4, "tools": FLAT, "tool_choice": "required"}),
    ),
    # Without a seed: the server chooses one, which the ids tell.
    "ollama-chat": (CHAT, {"model": "tiny", "messages": ASK, "options": {"num_predict": 40}}),
    "ollama-tools": (CHAT, {"model": "tiny", "messages": ASK, "tools": TOOLS, **OPTIONS}),
    "ollama-generate": (GENERATE, {"model": "tiny", "prompt": "def read(", "raw": True, **OPTIONS}),
}
SLOW = pytest.mark.slow
QUICK = ("messages-tools", "responses", "ollama-chat")
TIMES = ("created_at", "total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture
def client(make_service, engine):
    """A client of a server whose model thinks until it writes a text that it does write; its calls are Hermes'."""
    service = make_service(accept_sent_tokens=True)
    plain = Client(make_app(service))
    body = {"messages": ASK, "max_tokens": 40, "seed": 4}
    text = asyncio.run(plain.post("/v1/chat/completions", body)).json["choices"][0]["message"]["content"]
    tags = type(FAMILIES["think"])("file", text[len(text) // 2 :][:6])  # the prompt ends with the opening tag
    service.default.answers = AnswerFormat(engine.llm.tokenizer, "hermes", tags)
    return plain


async def asked(client, path, body, sent, **headers):
    """All bytes of a stream, or of one that goes on after what was sent."""
    data = json.dumps({**body, "stream": True}).encode()
    if sent is not None:
        headers["last_event_id"] = sent.last_id.decode()
        if (tokens := sent.tokens()) is not None and SENT not in headers:
            headers[SENT] = ",".join(str(len(ids)) for ids in tokens)
            data += b"".join(ids.tobytes() for ids in tokens)
    exchange = client.send("POST", path, body=data, **headers)
    status, _ = await exchange.start()
    raw = b"".join([part async for part in exchange.parts()])
    assert status == 200, raw
    return raw


def read(raw):
    """Events, or lines, with pieces of one text put together, without what two answers to a request differ in."""
    assert b":tokens" not in raw
    assert b":id" not in raw
    if raw.startswith(b"{"):
        return _read_lines(raw)
    found, numbers = [], []
    for line in raw.decode().split("\n"):
        if not line.startswith("data: "):
            continue
        event = json.loads(line.removeprefix("data: "))
        numbers.append(event.pop("sequence_number", len(numbers)))
        kind, delta = event["type"], event.pop("delta", None)
        text = "".join(delta[name] for name in delta if name != "type") if kind == "content_block_delta" else delta
        if kind.endswith("delta") and isinstance(text, str):
            if found and found[-1][0] == event:
                found[-1][1] += text
            else:
                found.append([event, text])
            continue
        usage = event.get("usage") or event.get("response", {}).get("usage") or {}
        usage.pop("input_tokens_details", None)
        if "cache_read_input_tokens" in usage:
            usage["input_tokens"] += usage.pop("cache_read_input_tokens")
        found.append([event, delta])
    assert numbers == list(range(len(numbers)))
    return found


def _read_lines(raw):
    found: list = []
    for line in raw.splitlines():
        event = {name: value for name, value in json.loads(line).items() if name not in TIMES}
        told = event.pop("message", None) or {
            "response": event.pop("response", ""),
            "thinking": event.pop("thinking", ""),
        }
        texts = {name: told.pop(name, "") for name in ("content", "response", "thinking")}
        name = next((name for name, text in texts.items() if text), None)
        if told.get("tool_calls") or event["done"] or name is None:
            found.append([event, told, texts])
        elif found and found[-1][0] == event and found[-1][2][name]:
            found[-1][2][name] += texts[name]
        else:
            found.append([event, told, texts])
    return found


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=SLOW) for name in CASES])
def test_a_stream_through_a_break_is_a_whole_one(client, name):
    path, body = CASES[name]
    kind = SentLines if path.startswith("/api") else SentStream

    async def check():
        raw = await asked(client, path, body, None, **{TELL: "1"})
        whole = kind()
        expected = read(whole.feed(raw))
        assert whole.is_done
        assert whole.num_events > 5
        num_continued = 0
        for part in range(1, 10):
            sent = kind()
            passed = sent.feed(raw[: part * len(raw) // 10])
            if sent.last_id is None:
                continue
            sent.begin_again()
            rest = await asked(client, path, body, sent, **{TELL: "1"})
            passed += sent.feed(rest)
            assert sent.is_done, rest
            assert read(passed) == expected
            num_continued += 1
        assert num_continued > 5

    asyncio.run(check())


def test_a_server_that_takes_no_tokens_streams_through_a_front_too(make_service):
    path, body = CASES["ollama-chat"]
    client = Client(make_app(make_service()))

    async def check():
        raw = await asked(client, path, body, None, **{TELL: "1"})
        sent = SentLines()
        passed = sent.feed(raw[: len(raw) // 2])
        assert len(passed.splitlines()) > 5
        sent.begin_again()
        assert sent.tokens() is None
        passed += sent.feed(await asked(client, path, body, sent, **{TELL: "1"}))
        assert sent.is_done
        assert read(passed) == read(SentLines().feed(raw))

    asyncio.run(check())


def test_clients_of_these_routes_go_on_by_themselves(client):
    """With the id of the last event, and without tokens, which the server makes again."""
    path, body = CASES["messages"]

    async def check():
        raw = await asked(client, path, body, None)
        end = raw.index(b"\n\n", raw.index(b"\nid: ", len(raw) // 2)) + 2
        last = raw[:end].rpartition(b"\nid: ")[2].partition(b"\n")[0].decode()
        rest = await asked(client, path, body, None, last_event_id=last)
        assert read(raw[:end] + rest) == read(raw)
        other = await client.post(path, {**body, "max_tokens": 39, "stream": True}, last_event_id=last)
        assert other.status == 409

    asyncio.run(check())


GONE = (
    (SentStream, 'event: error\ndata: {"error":{"type":"%s"}}\n\n', "overloaded_error", "api_error"),
    (SentStream, 'event: error\ndata: {"code":"%s"}\n\n', "service_unavailable", "server_error"),
    (SentStream, 'data: {"error":{"message":"%s"}}\n\n', 'a","type":"service_unavailable', '\\"service_unavailable\\"'),
    (SentLines, '%s\n{"error":"a"}\n', ":unavailable", ""),
)


@pytest.mark.parametrize(("kind", "event", "gone", "failed"), GONE)
def test_a_server_that_goes_away_is_told_apart_from_a_request_that_fails(kind, event, gone, failed):
    for told, is_gone in ((gone, True), (failed, False)):
        sent = kind()
        assert sent.feed((event % told).encode()) == b""
        assert sent.error is not None
        assert sent.is_unavailable is is_gone
