"""Bodies as clients really send them: what changes nothing is accepted, and one bad row ends no job."""

import asyncio
import json

import pytest

from jaxinfer.server.app import make_app
from jaxinfer.tool_calls import AnswerFormat
from tests.server.asgi import Client
from tests.server.templates import use_template
from tests.server.test_tools import ANTHROPIC, ASK, FLAT, TOOLS

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SAID = {"role": "assistant", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}", "parsed_arguments": None}}
VLLM = {
    "length_penalty": 1.0,
    "use_beam_search": False,
    "spaces_between_special_tokens": True,
    "detokenize": True,
    "include_reasoning": True,
    "echo": False,
    "add_special_tokens": False,
    "request_id": "a",
    "documents": None,
    "structured_outputs": {"regex": "[ab]", "json_object": None, "disable_fallback": False},
}
WHOLE = {"id": "msg_1", "type": "message", "model": "tiny", "stop_reason": "end_turn", "usage": {"input_tokens": 1}}
ACCEPTED = {
    "litellm's second turn": (
        CHAT,
        {"messages": [*ASK, {**SAID, "provider_specific_fields": {"refusal": None}}, *ASK]},
    ),
    "parse() of openai": (CHAT, {"messages": [*ASK, {**SAID, "parsed": None, "tool_calls": [CALL]}, *ASK]}),
    "langchain's parts": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "index": 0, "id": "lc_1"}]}]},
    ),
    "tools of transformers": (
        CHAT,
        {"messages": ASK, "tools": [{"type": "function", "function": {**TOOLS[1]["function"], "return": {}}}]},
    ),
    "vLLM's neutral values": (CHAT, {"messages": ASK, **VLLM}),
    "Codex": (RESPONSES, {"input": "a", "client_metadata": {"x": "y"}, "prompt_cache_key": "k", "store": False}),
    "an object as a result": (
        RESPONSES,
        {
            "input": [
                *ASK,
                {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": {"temp": 3}},
            ]
        },
    ),
    "null options of tools": (
        RESPONSES,
        {"input": "a", "tools": [{**FLAT[1], "allowed_callers": None, "async": None}]},
    ),
    "Claude Code": (
        MESSAGES,
        {
            "messages": ASK,
            "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
            "output_config": {"effort": "high"},
            "tools": [{**ANTHROPIC[1], "input_schema": {"type": "object"}, "defer_loading": False}],
        },
    ),
    "a whole message": (MESSAGES, {"messages": [*ASK, {**WHOLE, "role": "assistant", "content": "a"}, *ASK]}),
    "a schema": (MESSAGES, {"messages": ASK, "output_config": {"format": {"type": "json_schema", "schema": {}}}}),
    "Go's show": ("/api/show", {"model": "tiny", "system": "", "template": "", "options": None, "name": ""}),
}
LIMITS = {CHAT: {"max_tokens": 2}, MESSAGES: {"max_tokens": 2}, RESPONSES: {"max_output_tokens": 2}}
DEEP = "[" * 900 + "]" * 900
REFUSED = [
    (CHAT, {"messages": ASK, "max_completion_tokens": 20_000}, "max_completion_tokens=20000"),
    (CHAT, {"messages": ASK, "max_completion_tokens": 2, "min_tokens": 5}, "larger than max_completion_tokens=2"),
    (RESPONSES, {"input": "a", "max_output_tokens": 20_000}, "max_output_tokens=20000"),
    (RESPONSES, {"input": [{"type": "web_search_call", "action": {}}]}, "of type 'web_search_call' is not supported"),
    (
        MESSAGES,
        {"messages": ASK, "max_tokens": 1, "tools": [{"name": "a", "input_schema": 5}]},
        "tools[0].input_schema",
    ),
    (
        MESSAGES,
        {"messages": ASK, "max_tokens": 1, "tools": [{"type": "web_search_20250305", "name": "a", "max_uses": 8}]},
        "tools of type 'web_search_20250305'",
    ),
    (CHAT, {"messages": ASK, "stream": True, "stream_options": {"continuous_usage_stats": True}}, "is not supported"),
    (CHAT, {"messages": ASK, "x" * 300_000: 1}, "unknown field"),
    ("/api/chat", {"model": "tiny", "messages": [{**ASK[0], "audio": {}}]}, "messages[0].audio"),
]


@pytest.fixture
def make_client(make_service, engine):
    def make(**options):
        service = make_service(**options)
        service.default.answers = AnswerFormat(engine.llm.tokenizer, "hermes", None)
        return Client(make_app(service))

    return make


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", ACCEPTED)
def test_what_clients_send_is_accepted(make_client, name):
    path, body = ACCEPTED[name]
    answer = asyncio.run(make_client().post(path, {**LIMITS.get(path, {}), **body}))
    assert answer.status == 200, answer.body


@pytest.mark.parametrize(("path", "body", "sentence"), REFUSED, ids=[one[2][:40] for one in REFUSED])
def test_errors_are_about_what_was_sent(make_client, path, body, sentence):
    answer = asyncio.run(make_client().post(path, body))
    assert answer.status == 400, answer.body
    assert sentence in answer.body.decode()
    assert len(answer.body) < 2000
    assert b" max_tokens=" not in answer.body


def test_ignored_names_are_ignored_at_every_depth(make_client, caplog):
    choice = {"type": "function", "function": {"name": "stop"}, "q": 1}
    body = {"messages": ASK, "max_tokens": 2, "tool_choice": choice, "tools": [{**one, "q": 1} for one in TOOLS]}
    client = make_client(ignore_unknown_fields=True)
    assert asyncio.run(client.post(CHAT, body)).status == 200
    formatted = {"messages": ASK, "max_tokens": 2, "response_format": {"type": "text", "q": 1}}
    assert asyncio.run(client.post(CHAT, formatted)).status == 200
    assert any("tools[].q" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("url", "body", "field"),
    [
        (CHAT, '{"messages": [{"role": "user", "content": "a"}], "timeout": 0}', "timeout"),
        (CHAT, '{"messages": [{"role": "user", "content": "a"}], "timeout": 100000}', "timeout"),
        (CHAT, '{"messages": [{"role": "user", "content": "a"}], "tool_choice": ' + DEEP + "}", None),
        (CHAT, '{"messages": [{"role": "user", "content": "a"}], "audio": ' + DEEP + "}", None),
        (RESPONSES, '{"input": "a", "max_output_tokens": 2, "metadata": {"a": 1e999}}', None),
    ],
)
def test_one_bad_row_ends_no_job(engine, tmp_path, url, body, field):
    good = json.dumps({"custom_id": "good", "url": CHAT, "body": {"messages": ASK, "max_tokens": 2}})
    bad = f'{{"custom_id": "bad", "url": "{url}", "body": {body}}}'
    (tmp_path / "in.jsonl").write_text(f"{bad}\n{good}\n")
    summary = engine.llm.generate_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl", use_tqdm=False)
    assert (summary.ok, summary.failed) == (1, 1)
    (record,) = (json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines())
    if field is not None:
        assert record["response"]["body"]["error"]["param"] == field


def test_any_template_may_read_a_name(engine, monkeypatch):
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    use_template(monkeypatch, engine.llm, plain, tool_use=plain.replace("m.content", "m.content ~ m.mood ~ tools"))
    assert engine.llm.chat_prompt([{**ASK[0], "mood": "glad"}], tools=TOOLS)
    with pytest.raises(ValueError, match=r"unknown field 'messages\[0\].moods'.* leave it out of the messages"):
        engine.llm.chat_prompt([{**ASK[0], "moods": "glad"}])
