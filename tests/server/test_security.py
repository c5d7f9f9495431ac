"""One test for each known hole of servers like this one.

| hole | where it was | test |
| --- | --- | --- |
| key check on a URL made from the Host header | CVE-2026-48710, CVE-2026-48746 | test_request_targets |
| root_path, `//v1`, encoded paths | vllm#52794 | test_request_targets |
| routes beside the guarded prefixes | vLLM `/invocations`, `/pause` | test_keys_guard_every_route |
| timing of the key's comparison | CVE-2025-59425 | test_answers_to_wrong_keys_are_alike, test_guard.py |
| huge headers | CVE-2025-48956 | test_connections.py, test_guard.py |
| huge `n` | CVE-2026-34756 | test_numbers_out_of_range, test_large_bodies |
| lengths of stop, logit_bias, logprobs | | test_large_bodies, test_openai_routes.py |
| integers beyond 64 bits, NaN, negatives | CVE-2026-21869 llama.cpp | test_numbers_out_of_range |
| unsandboxed templates | CVE-2026-5760 SGLang | test_templates_come_from_the_checkpoint_only, tests/text |
| chat_template_kwargs that override the renderer | CVE-2025-62426 | test_template_kwargs_override_nothing |
| hostile patterns in tools, nesting | CVE-2025-48944, llama.cpp#26600 | test_tools_are_text, test_deep_nesting |
| server-side requests for media | CVE-2026-24779, CVE-2026-5497 | test_media_are_refused_and_not_fetched |
| pickle | CVE-2026-3059 | test_nothing_runs_what_was_received |
| timing of the prefix cache | CVE-2025-46570 | test_cached_prefixes_are_of_one_key |
| DNS rebinding, CORS | | test_guard.py, test_origins |
| forms of other sites, which need no preflight | | test_json_is_taken_from_curl_as_a_form_and_from_no_browser |
| request smuggling, slow clients, open connections | | test_connections.py |
"""

import ast
import asyncio
import gc
import itertools
import json
import logging
import socket
import time
import types
import typing
from pathlib import Path

import msgspec
import pytest

from jaxinfer.embedding_files import EmbeddingConfig
from jaxinfer.server import http
from jaxinfer.server.app import ROUTES, make_app
from jaxinfer.server.auth import Keys
from jaxinfer.server.middleware import OPEN_PATHS
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.page import chat_page
from jaxinfer.server.sizes import count_values, weight
from jaxinfer.text.messages import plain_json
from tests.server.asgi import Client

BODIES = {route.path: route.body for route in ROUTES if route.body is not None}
CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
KEYS = {"first-secret-key": "alice", "second-secret-key": "bob"}
ASK = [{"role": "user", "content": "read a file"}]
VALID = {
    "/api/chat": {"model": "tiny", "messages": ASK, "options": {"num_predict": 2}},
    "/api/generate": {"model": "tiny", "prompt": "a", "options": {"num_predict": 2}},
    "/api/show": {"model": "tiny"},
    "/api/embed": {"model": "tiny", "input": "a"},
    "/api/pull": {"model": "tiny"},
    "/api/copy": {"source": "tiny", "destination": "other"},
    "/models/load": {"model": "tiny"},
    "/models/unload": {"model": "tiny"},
    CHAT: {"messages": ASK, "max_tokens": 2},
    COMPLETIONS: {"prompt": "a", "max_tokens": 2},
    MESSAGES: {"messages": ASK, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": ASK},
    RESPONSES: {"input": "a", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "a"},
    **{key: {"text_1": "a", "text_2": "b"} for key in ("/v1/score", "/score")},
    **{key: {"query": "a", "documents": ["b"]} for key in ("/v1/rerank", "/v2/rerank", "/rerank")},
    CHAT + "/render": {"messages": ASK, "max_tokens": 2},
    COMPLETIONS + "/render": {"prompt": "a", "max_tokens": 2},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


def run(coroutine):
    return asyncio.run(coroutine)


@pytest.fixture
def guarded(make_service):
    return make_app(make_service(api_keys="keys"), Keys(KEYS))


# Keys.


def test_keys_guard_every_route(guarded):
    paths = {route.path.replace("{id:path}", "tiny") for route in guarded._app.routes}
    assert paths >= {*BODIES, *OPEN_PATHS, "/metrics", "/openapi.json", "/v1/models/tiny"}

    async def ask():
        for path in (*(paths - set(OPEN_PATHS)), "/invocations", "/pause", "/docs", "/v1", "*", ""):
            for method in METHODS:
                assert (await Client(guarded).call(method, path)).status == 401, (method, path)
        for path in OPEN_PATHS:
            assert (await Client(guarded).get(path)).status == 200
            assert (await Client(guarded).post(path, {})).status == 405

    run(ask())


@pytest.mark.parametrize("path", ["//v1/models", "/./v1/models", "/health/../v1/models", "/health//", "/HEALTH", "/%"])
def test_request_targets(guarded, path):
    async def ask():
        assert (await Client(guarded).get(path)).status == 401
        assert (await Client(guarded, authorization="Bearer first-secret-key").get(path)).status == 404

    run(ask())


async def status_of(app, path, headers=((b"host", b"localhost"),), root_path=""):
    """The status of an answer to a GET with this ASGI scope."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "root_path": root_path, "query_string": b""}
    await app({**scope, "scheme": "http", "headers": list(headers), "client": None, "server": None}, receive, send)
    return sent[0]["status"]


def test_a_root_path_opens_nothing(guarded):
    """A server behind a prefix: Starlette's router takes the prefix off, the guard does not."""
    for root, path in (("/health", "/health/v1/models"), ("/health", "/v1/models"), ("/v1", "/v1/models")):
        assert run(status_of(guarded, path, root_path=root)) == 401


def test_connections_that_are_no_requests_are_refused(guarded):
    with pytest.raises(ValueError, match="websocket"):
        run(guarded({"type": "websocket", "path": "/v1/models", "headers": []}, None, None))


def test_answers_to_wrong_keys_are_alike(guarded):
    async def ask():
        return [
            await Client(guarded, authorization=f"Bearer {key}").get("/v1/models")
            for key in ("first-secret-kez", "x", "x" * 5000, "first-secret-key2")
        ]

    answers = run(ask())
    assert {answer.body for answer in answers} == {answers[0].body}
    assert {tuple(answer.headers) for answer in answers} == {tuple(answers[0].headers)}


def test_files_of_keys_as_editors_write_them(tmp_path, caplog):
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbffirst-secret-key\talice b\r\n\r\n  # ours\r\nsecond#secret-key # bob's\r\n")
    path.chmod(0o644)
    keys = Keys.read(path)
    assert keys.name_of(b"first-secret-key") == "alice b"
    assert keys.name_of(b"second#secret-key") == "key-2"
    assert keys.name_of(b"second") is None
    assert "can be read by other users" in caplog.text
    caplog.clear()
    path.chmod(0o600)
    Keys.read(path)
    assert not caplog.text
    for data, told in (
        (b"", "no keys"),
        (b"\xff\xfe1", "not UTF-8"),
        (b"a-key-with-\x1b", "line 1"),
        (b"# x", "no keys"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=told):
            Keys.read(path)
    with pytest.raises(OSError, match="nothing"):
        Keys.read(tmp_path / "nothing")


def test_cached_prefixes_are_of_one_key(guarded):
    body = {"prompt": [*range(500, 600)], "max_tokens": 1, "seed": 1}

    async def cached(key, **more):
        answer = await Client(guarded, authorization=f"Bearer {key}").post(COMPLETIONS, {**body, **more})
        return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def ask():
        alice, bob = KEYS
        assert await cached(alice) == 0
        assert await cached(alice) > 0
        assert await cached(bob) == 0
        assert await cached(alice, cache_salt="bob") == 0

    run(ask())


# Hosts and origins.


def test_a_second_host_header_is_refused(client):
    host, other = (b"host", b"localhost"), (b"host", b"evil.example")
    assert run(status_of(client.app, "/health", [host])) == 200
    for headers in ([host, other], [other, host], [host, host]):
        assert run(status_of(client.app, "/health", headers)) == 400


def test_origins(make_service):
    for origin in ("*", "null", "http://a.example/", "HTTP://a.example", "http://a.example, http://b.example", ""):
        with pytest.raises(ValueError, match="allowed_origins"):
            ServerOptions(allowed_origins=[origin])

    async def ask():
        client = Client(make_app(make_service(allowed_origins=["http://a.example"])))
        for method, path in (("GET", "/v1/models"), ("OPTIONS", CHAT), ("GET", "/"), ("POST", "/nothing")):
            preflight = {"access_control_request_method": "POST", "access_control_request_headers": "x"}
            answer = await client.call(method, path, origin="http://a.example", **preflight)
            assert "access-control-allow-credentials" not in answer.headers
            assert answer.headers["access-control-allow-origin"] == "http://a.example"
            assert answer.headers["vary"] == "Origin"
            for other in ("http://b.example", "null", "http://a.example.evil", "http://a.example:80"):
                answer = await client.call(method, path, origin=other, **preflight)
                assert "access-control-allow-origin" not in answer.headers

    run(ask())


def test_the_page_loads_and_runs_nothing_else():
    policy = chat_page().headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert not any(word in policy for word in ("unsafe", "*", "http:", "https:"))
    assert "frame-ancestors 'none'" in policy


# Values.


def plain_types(kind):
    """The members of a union, without the limits that they are described with."""
    if typing.get_origin(kind) is typing.Annotated:
        yield from plain_types(kind.__origin__)
    elif typing.get_origin(kind) in (typing.Union, types.UnionType):
        for one in typing.get_args(kind):
            yield from plain_types(one)
    else:
        yield kind


def numeric_fields():
    """Fields of all bodies that take numbers, with how a value is put into them."""
    for path, kind in BODIES.items():
        for field in msgspec.structs.fields(kind):
            kinds = set(plain_types(field.type))
            texts = {str(one) for one in kinds}
            if kinds & {int, float}:
                yield path, field.name, "{}"
            if (
                any(text.startswith(("list[typing.Annotated[int", "list[int")) for text in texts)
                or field.name == "prompt"
            ):
                yield path, field.name, "[{}]"
            if any(text.startswith("dict[") and "float" in text for text in texts):
                yield path, field.name, '{{"5": {}}}'


# The server runs no tools, so it counts no calls of them.
NUMERIC = [one for one in numeric_fields() if one[0] != "/tokenize" and one[1] != "max_tool_calls"]
OUT_OF_RANGE = [str(2**64), str(-(2**63) - 1), "9" * 400, "-1e30", "NaN", "-Infinity", "Infinity", "1e999"]


def test_numbers_out_of_range(client, engine, monkeypatch):
    """Each is refused by the name of its field."""
    monkeypatch.setattr(engine.llm.embedder, "config", EmbeddingConfig("last"))
    assert {name for _, name, _ in NUMERIC} >= {
        "n",
        "seed",
        "logit_bias",
        "allowed_token_ids",
        "top_logprobs",
        "prompt",
    }

    async def ask():
        for path, name, form in NUMERIC:
            rest = {key: value for key, value in VALID[path].items() if key != name}
            head = msgspec.json.encode(rest).decode()[:-1] + ("," if rest else "")
            for number in OUT_OF_RANGE:
                answer = await client.post(path, body=f'{head}"{name}":{form.format(number)}}}'.encode())
                assert answer.status == 400, (path, name, number, answer.body)
                told = answer.json["error"]
                message = told["message"] if isinstance(told, dict) else told  # Ollama's errors are texts
                assert "not JSON" in message or name in message, (name, told)

    run(ask())


TEXTS = {
    "a body that is no UTF-8": (b'{"prompt": "\xff"}', 400),
    "an overlong encoding": (b'{"prompt": "\xc0\xaf"}', 400),
    "half a surrogate pair": (b'{"prompt": "\\ud800"}', 400),
    "half a surrogate pair as a name": (b'{"prompt": "a", "\\udc00": 1}', 400),
    "a surrogate as bytes": (b'{"prompt": "\xed\xa0\x80"}', 400),
    "a byte order mark": (b'\xef\xbb\xbf{"prompt": "a"}', 400),
    "NUL": (b'{"prompt": "a\\u0000b", "max_tokens": 1}', 200),
    "two bodies": (b'{"prompt": "a"}{"prompt": "b"}', 400),
    "no object": (b'["prompt"]', 400),
    "nothing": (b"", 415),
    "a name of a type of its own": (b'{"prompt": "a", "__class__": "x", "max_tokens": 1}', 400),
}


def test_texts_that_are_none(client):
    async def ask():
        for name, (body, status) in TEXTS.items():
            answer = await client.post(COMPLETIONS, body=body)
            assert answer.status == status, (name, answer.body)

    run(ask())


FORM = "application/x-www-form-urlencoded"


def test_json_is_taken_from_curl_as_a_form_and_from_no_browser(client):
    """`curl -d '{...}'` says that the body is a form, and so may any web page without a preflight."""
    told = "the body must be application/json, got content-type 'application/x-www-form-urlencoded'"

    async def ask():
        valid = {"prompt": "a", "max_tokens": 1}
        assert (await client.post(COMPLETIONS, valid, content_type=FORM)).status == 200
        assert (await client.post(COMPLETIONS, valid, content_type=f"{FORM}; charset=UTF-8")).status == 200
        wrong = await client.post(COMPLETIONS, {"prompt": "a", "max_tokens": "x"}, content_type=FORM)
        assert (wrong.status, wrong.error["param"]) == (400, "max_tokens")
        for body in (b"prompt=a&max_tokens=1", b"{'prompt': 'a'}", b'{"prompt": "\xff"}', b'{"prompt": "a"'):
            answer = await client.post(COMPLETIONS, body=body, content_type=FORM)
            assert (answer.status, answer.error["message"]) == (415, told), body[:20]
        for name, value in {"origin": "null", "referer": "http://x/", "sec_fetch_site": "cross-site"}.items():
            for body in (msgspec.json.encode(valid), b"prompt=a"):
                answer = await client.post(COMPLETIONS, body=body, content_type=FORM, **{name: value})
                assert (answer.status, answer.error["message"]) == (415, told), name

    run(ask())


def test_of_a_field_that_is_given_twice_the_last_one_counts_everywhere(client):
    async def ask():
        body = b'{"prompt": "a", "max_tokens": 1, "max_tokens": 2, "seed": 1, "ignore_eos": true, "n": 99, "n": 1}'
        assert (await client.post(COMPLETIONS, body=body)).json["usage"]["completion_tokens"] == 2
        assert (await client.post(COMPLETIONS, body=body[:-1] + b', "n": 99}')).status == 400

    run(ask())


def test_deep_nesting(client):
    deep = [b"[" * depth + b"]" * depth for depth in (500, 900, 5000, 30_000)]

    async def ask():
        for value in deep:
            for field in (b"metadata", b"response_format", b"tools", b"chat_template_kwargs", b"tool_choice", b"zzz"):
                body = b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1,"%b":{"a":%b}}' % (field, value)
                assert (await client.post(CHAT, body=body)).status in (200, 400), field
            call = {"type": "function", "function": {"name": "f", "arguments": '{"a":' + value.decode() + "}"}}
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
            assert (await client.post(CHAT, {"messages": [turn, *ASK], "max_tokens": 1})).status in (200, 400)

    run(ask())


WRONG_PARTS = [
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 5}]}]}),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": {"a": 1}}]}]}),
    (MESSAGES, {"messages": [{"role": "user", "content": [5]}]}),
    (RESPONSES, {"input": [{"type": "reasoning", "content": 5}]}),
    (RESPONSES, {"input": [{"type": "reasoning", "content": [{"text": 5}]}]}),
    (RESPONSES, {"input": [{"type": []}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": [], "text": 5}]}]}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [5]}]}),
    (COMPLETIONS, {"logit_bias": {"9" * 5000: 1}}),
]


def test_parts_of_other_types_are_refused(client):
    async def ask():
        for path, body in WRONG_PARTS:
            answer = await client.post(path, {**VALID[path], **body})
            assert answer.status == 400, (body, answer.body)

    run(ask())


@pytest.mark.slow
def test_no_value_of_any_field_makes_the_server_fail(client):
    numbers = ["-1", "0", "1", "1.5", "-1e308", "1e-320", str(2**31), str(2**63), *OUT_OF_RANGE]
    others = ["true", '""', '"x"', "[]", "{}", "[[]]", "[null]", '{"a":null}', '{"type":1}', "[1]", '["a"]', "[{}]"]
    others += ['"\\u0000"', '{"1":1e308}', '{"-1":1}', '{"\\u0000":1}', '[{"type":"function"}]', '{"type":"tool"}']
    messages = ['[{"role":"user"}]', '[{"role":5}]', '[{"role":"tool","content":"a"}]', '[{"role":"user","name":{}}]']

    async def ask():
        for path, kind in BODIES.items():
            head = msgspec.json.encode(VALID[path]).decode()[:-1]
            for field in msgspec.structs.fields(kind):
                for value in (*numbers, *others, *messages):
                    body = f'{head},"{field.encode_name}":{value}}}'
                    answer = await client.post(path, body=body.encode())
                    assert answer.status in (200, 400, 404), (path, body, answer.body)
                    assert answer.status == 200 or answer.json["error"]["message"]

    run(ask())


# Sizes.

N = 60_000  # values: fewer than a body may have
LARGE = {
    "a long text": (COMPLETIONS, {"prompt": "word " * 800_000}, 400),
    "ids": (COMPLETIONS, {"prompt": [5] * N}, 400),
    "prompts": (COMPLETIONS, {"prompt": ["a"] * N}, 400),
    "prompts of ids": (COMPLETIONS, {"prompt": [[5]] * (N // 2)}, 400),
    "lists that are no prompts": (COMPLETIONS, {"prompt": [[]] * (N // 2)}, 400),
    "more than can be read": (COMPLETIONS, {"prompt": [5] * 1_000_000}, 413),
    "stops": (COMPLETIONS, {"stop": ["a"] * N}, 400),
    "long stops": (COMPLETIONS, {"stop": ["a" * 100_000] * 16}, 400),
    "biases": (COMPLETIONS, {"logit_bias": dict.fromkeys(map(str, range(N)), 1)}, 400),
    "allowed ids": (COMPLETIONS, {"allowed_token_ids": [5] * N}, 400),
    "stop ids": (COMPLETIONS, {"stop_token_ids": [5] * N}, 400),
    "bad words": (COMPLETIONS, {"bad_words": ["a"] * N}, 400),
    "a user": (COMPLETIONS, {"user": "x" * 1_000_000}, 400),
    "a model": (COMPLETIONS, {"model": "x" * 1_000_000}, 400),
    "metadata": (COMPLETIONS, {"metadata": {"a": [0] * (N + 10_000)}}, 413),
    "metadata of text": (RESPONSES, {"metadata": {"a": "x" * 100_000}}, 400),
    "a format": (CHAT, {"response_format": {"json_schema": ["x" * 100] * 1000}}, 400),
    "unknown fields": (CHAT, {str(number): 0 for number in range(N)}, 200),
    "messages": (CHAT, {"messages": ASK * (N // 3)}, 400),
    "parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * (N // 3)}]}, 400),
    "tools": (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}] * (N // 5)}, 400),
    "names in tools": (CHAT, {"tools": [{"k" * 1_000_000: [0] * 30_000}]}, 400),
    "variables": (CHAT, {"chat_template_kwargs": {"a": ["x" * 100] * 1000}}, 400),
    "messages of Anthropic's": (MESSAGES, {"messages": ASK * (N // 3)}, 400),
    "messages to be counted": ("/v1/messages/count_tokens", {"messages": ASK * (N // 3)}, 400),
    "items": (RESPONSES, {"input": ASK * (N // 3)}, 400),
    "texts": ("/tokenize", {"prompt": "a " * 500_000, "return_token_strs": True}, 400),
    "tokens": ("/detokenize", {"tokens": [5] * N}, 200),
}
QUICK = ("a long text", "ids", "more than can be read", "biases", "messages", "names in tools", "a format")


@pytest.mark.alone  # the time of a processor, which neighbours share
@pytest.mark.parametrize("name", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in LARGE])
def test_large_bodies(client, name):
    """They are answered without holding up the event loop for more than 50 ms, and in seconds."""
    path, fields, status = LARGE[name]
    body = msgspec.json.encode({**VALID[path], **fields})
    start = time.process_time()
    assert stall(lambda: in_parts(client, path, body), status) < 0.05
    assert time.process_time() - start < 3


@pytest.mark.slow
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_long_answers(client, path):
    """They are put together without holding up the event loop."""
    logprobs = {"logprobs": True, "top_logprobs": 20} if path == CHAT else {"logprobs": 20, "echo": True}
    body = {**VALID[path], **logprobs, "max_tokens": 200, "n": 8, "ignore_eos": True, "seed": 1}

    async def ask():
        return (await client.post(path, body)).status

    assert stall(ask, 200) < 0.05


def stall(ask, status):
    """The longest time of the processor, in seconds, that the event loop took for one turn."""
    ticks = []

    async def tick():
        while True:
            ticks.append(time.thread_time())
            await asyncio.sleep(0)

    async def both():
        ticking = asyncio.create_task(tick())
        found = await ask()
        ticking.cancel()
        return found

    gc.freeze()  # as the server does: a pass over all that JAX holds takes longer
    try:
        assert run(both()) == status
    finally:
        gc.unfreeze()
    return max(after - before for before, after in itertools.pairwise(ticks))


async def in_parts(client, path, body):
    """The status of an answer to a body that comes in parts of 64 KiB."""
    parts = [body[at : at + 65536] for at in range(0, len(body), 65536)]
    exchange = client.send("POST", path, body=parts[0])
    message = await exchange._received.get()
    for number, part in enumerate(parts):
        exchange._received.put_nowait({**message, "body": part, "more_body": number + 1 < len(parts)})
    status, _ = await exchange.start()
    async for _ in exchange.parts():
        pass
    await exchange.task
    return status


def test_arguments_of_tool_calls_have_limits_too(client):
    """They are JSON within a text, whose commas may be written in another way."""
    body = b'{"messages":[{"role":"assistant","content":"","tool_calls":[{"function":{"arguments":"[0%b]"}}]}]}'
    answer = run(client.post(CHAT, body=body % (b"\\u002c0" * 70_000)))
    assert answer.status == 400
    assert "values" in answer.error["message"]


def num_values_of(value):
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(num_values_of, children))


def test_what_is_counted():
    for value in (0, [], {}, [1, 2], {"a": 1, "b": [[], {}]}, "a,b", [[[["a"]]]], [{}, {"a": []}]):
        assert count_values(json.dumps(value).encode()) + 1 >= num_values_of(value)
    assert weight(["ab", {"c": 1, "d": ["e"]}]) == 9
    assert weight(["a"] * 100, 10) > 10


def test_a_path_in_an_error_is_short():
    """Every value below a long name would be given a path of that length."""
    start = time.thread_time()
    plain_json({"k" * 1_000_000: [0] * 20_000}, "tools[0]")
    assert time.thread_time() - start < 0.5
    with pytest.raises(ValueError, match="lone surrogate") as error:
        plain_json({"k" * 1_000_000: ["\ud800"]}, "tools[0]")
    assert len(str(error.value)) < 200


def test_large_bodies_together_are_limited(make_service, monkeypatch):
    service = make_service(max_body_bytes=1 << 20)
    client = Client(make_app(service))
    monkeypatch.setattr(http, "_BODIES_AT_ONCE", 2)

    async def begun():
        exchange = client.send("POST", COMPLETIONS, body=b"x" * 900_000)
        message = await exchange._received.get()
        exchange._received.put_nowait({**message, "more_body": True})
        await asyncio.sleep(0.01)
        return exchange

    async def ask():
        held = [await begun() for _ in range(2)]
        assert service.num_body_bytes == 1_800_000
        status, headers = await (await begun()).start()
        assert (status, headers["retry-after"]) == (503, "5")
        assert (await client.post(COMPLETIONS, VALID[COMPLETIONS])).status == 200
        for exchange in held:
            exchange.leave()
            await exchange.task
        assert service.num_body_bytes == 0

    run(ask())


# Templates, tools, media.

OVERRIDES = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "max_prompt_tokens",
    "self",
    "loop",
)
OVERRIDES += (
    "bos_token",
    "eos_token",
    "chat_template",
    "tokenize",
    "range",
    "namespace",
    "raise_exception",
    "__class__",
)


def test_template_kwargs_override_nothing(client):
    async def ask():
        for name in OVERRIDES:
            for path, body in ((CHAT, VALID[CHAT]), ("/tokenize", {"messages": ASK})):
                answer = await client.post(path, {**body, "chat_template_kwargs": {name: True}})
                assert answer.status == 400, name
                assert name in answer.error["message"]

    run(ask())


def test_templates_come_from_the_checkpoint_only(client, make_service):
    lenient = Client(make_app(make_service(ignore_unknown_fields=True)))
    hostile = "{{ ''.__class__.__mro__[1].__subclasses__() }}"

    async def ask():
        assert (await client.post(CHAT, {**VALID[CHAT], "chat_template": hostile})).status == 400
        plain = (await client.post("/tokenize", {"messages": ASK})).json
        assert (await client.post("/tokenize", {"messages": ASK, "chat_template": hostile})).status == 400
        ignored = (await lenient.post("/tokenize", {"messages": ASK, "chat_template": hostile})).json
        assert ignored == plain
        content = (await client.post("/tokenize", {"messages": [{"role": "user", "content": hostile}]})).json["tokens"]
        assert hostile in (await client.post("/detokenize", {"tokens": content})).json["prompt"]

    run(ask())


PATTERNS = ["(a+)+$", "(" * 60_000 + ")" * 60_000, "a{1000000}" * 100, "[", "\\", "(?P<a>" * 100]


def test_tools_are_text(client):
    """Their schemas are not compiled."""

    async def ask():
        start = time.process_time()
        for pattern in PATTERNS:
            schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
            for path, tool in (
                (CHAT, {"type": "function", "function": {"name": "f", "parameters": schema}}),
                (MESSAGES, {"name": "f", "input_schema": schema}),
                (RESPONSES, {"type": "function", "name": "f", "parameters": schema}),
            ):
                assert (await client.post(path, {**VALID[path], "tools": [tool]})).status in (200, 400)
        assert time.process_time() - start < 10

    run(ask())


def test_media_are_refused_and_not_fetched(client):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/a.png"
        listener.setblocking(False)

        async def ask():
            for place in (url, "file:///etc/passwd", "data:image/png;base64,AAAA"):
                parts = [{"type": "image_url", "image_url": {"url": place}}, {"type": "image_url", "image_url": place}]
                parts += [{"type": "input_audio", "input_audio": {"data": place}}, {"type": "file", "file": place}]
                for part in parts:
                    answer = await client.post(CHAT, {"messages": [{"role": "user", "content": [part]}]})
                    assert (answer.status, answer.error["param"]) == (400, "messages[0].content[0]")
                item = {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": place}]}
                assert (await client.post(RESPONSES, {"input": [item]})).status == 400
                block = {"type": "image", "source": {"type": "url", "url": place}}
                body = {"max_tokens": 1, "messages": [{"role": "user", "content": [block]}]}
                assert (await client.post(MESSAGES, body)).status == 400

        run(ask())
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_nothing_runs_what_was_received():
    forbidden = {
        "pickle",
        "marshal",
        "shelve",
        "dill",
        "cloudpickle",
        "yaml",
        "subprocess",
        "urllib.request",
        "requests",
        "httpx",
    }
    root = Path(__file__).parents[2] / "jaxinfer"
    for path in (*(root / "server").rglob("*.py"), *(root / "openai").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not forbidden & {name.partition(".")[0] for name in names} | forbidden & names, path
        called = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not called & {"eval", "exec", "compile", "__import__", "open"}, path


# What is told and logged.


def test_no_line_is_added_to_the_log(make_service, caplog):
    client = Client(make_app(make_service(ignore_unknown_fields=True)))
    caplog.set_level(logging.INFO, "jaxinfer.server")
    line = "a\n2026-01-01 CRITICAL forged\r\n\x1b[31m\u2028"

    async def ask():
        answer = await client.post(COMPLETIONS, {"prompt": "a", "model": line, line: 1})
        assert answer.status == 404
        tools = [{"type": line}]
        await client.post(RESPONSES, {"input": "a", "max_output_tokens": 1, "tools": tools})
        await client.call("GET", f"/v1/models/{line}")
        await client.get("/health", x_request_id=line.replace("\u2028", ""))

    run(ask())
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("jaxinfer.server")]
    assert len(messages) >= 5
    assert not [message for message in messages if set(message) & set("\n\r\x1b\u2028")]
    for message in messages:
        if message.startswith("{"):
            assert set(json.loads(message)) >= {"id", "route", "status"}


def test_headers_of_a_request_add_none_to_the_answer(client):
    async def ask():
        for value in ("a\r\nset-cookie: x=1", "a\nb: c", "a\x00", "a b", "\xff"):
            answer = await client.get("/health", x_request_id=value)
            assert answer.headers["x-request-id"].startswith("req-")
            assert "set-cookie" not in answer.headers

    run(ask())


def test_messages_of_errors_are_short_and_name_no_file(client):
    async def ask():
        long = "x" * 50_000
        for path, body in (
            (CHAT, {"messages": [{"role": long, "content": "a"}]}),
            (CHAT, {"messages": [{"role": "user", "content": "a", long: ["\ue000"] * 5}], "response_format": long}),
            (COMPLETIONS, {"prompt": "a", "model": long}),
            (COMPLETIONS, {"prompt": "a", "stop": [long]}),
            (MESSAGES, {"messages": ASK, "max_tokens": 1, "thinking": {"type": long}}),
            (RESPONSES, {"input": [{"type": long}]}),
            (RESPONSES, {"input": "a", "tool_choice": {long: long}}),
        ):
            answer = await client.post(path, body)
            assert answer.status in (400, 404), body
            message = answer.json["error"]["message"]
            assert len(message) <= 1000
            assert "/" not in message or "Traceback" not in message
            assert str(Path(__file__).parents[2]) not in message

    run(ask())
