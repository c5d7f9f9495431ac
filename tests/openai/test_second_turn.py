"""Whatever an answer contains, as the packages of clients hold it, is taken as the next request's history."""

import asyncio

import pytest

from jaxinfer.server.app import make_app
from jaxinfer.text.reasoning import FAMILIES
from jaxinfer.tool_calls import AnswerFormat
from tests.server.asgi import Client
from tests.server.test_ollama import CHAT as OLLAMA
from tests.server.test_tools import ANTHROPIC, ASK, BODIES, CHAT, FLAT, MESSAGES, RESPONSES, TEXT, TOOLS, Scripted

# What the packages' types have besides, or in place of, what is answered.
OPENAI_MESSAGE = {**dict.fromkeys(("refusal", "audio", "function_call")), "annotations": []}
OPENAI_ITEM = {"message": {"phase": None}, "reasoning": {"encrypted_content": None, "status": None}}
OPENAI_CALL = {"async": None, "caller": None, "namespace": None}
ANTHROPIC_BLOCK = {
    "text": {"citations": None},
    "tool_use": {"caller": None, "toolset_name": None, "cache_control": {"type": "ephemeral"}},
    "thinking": {},
}
OLLAMA_MESSAGE = {"images": None, "tool_name": None}


@pytest.fixture
def client(make_service, engine):
    service = make_service()
    service.default.answers = AnswerFormat(engine.llm.tokenizer, "hermes", FAMILIES["think"])
    service.default._engine = Scripted(engine, f"<think>why</think>{TEXT}")
    return Client(make_app(service))


def ask_again(client, path, body, turns_of, field):
    """Asks a question twice: the second time after the first answer."""

    async def ask():
        first = await client.post(path, body)
        assert first.status == 200, first.body
        again = await client.post(path, {**body, field: [*ASK, *turns_of(first.json), *ASK]})
        assert again.status == 200, again.body
        return again.json

    return asyncio.run(ask())


def test_a_chat(client):
    def turns(answer):
        message = answer["choices"][0]["message"]
        assert message.keys() >= {"content", "reasoning_content", "tool_calls", "refusal"}
        calls = [{**call, "index": number} for number, call in enumerate(message["tool_calls"])]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls]
        return [{**OPENAI_MESSAGE, **message, "tool_calls": calls}, *results]

    assert ask_again(client, CHAT, BODIES[CHAT], turns, "messages")["choices"]


def test_responses(client):
    def turns(answer):
        assert [item["type"] for item in answer["output"]] == ["reasoning", "message", *["function_call"] * 2]
        more = {**OPENAI_ITEM, "function_call": OPENAI_CALL}
        items = [{**more[item["type"]], **item} for item in answer["output"]]
        calls = [item for item in items if item["type"] == "function_call"]
        return [*items, *({"type": "function_call_output", "call_id": one["call_id"], "output": "a"} for one in calls)]

    assert ask_again(client, RESPONSES, BODIES[RESPONSES], turns, "input")["output"]


def test_anthropic(client):
    def turns(answer):
        assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use", "tool_use"]
        blocks = [{**ANTHROPIC_BLOCK[block["type"]], **block} for block in answer["content"]]
        uses = [block for block in blocks if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": one["id"], "content": "a", "is_error": False} for one in uses]
        return [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]

    assert ask_again(client, MESSAGES, BODIES[MESSAGES], turns, "messages")["content"]


def test_ollama(client):
    def turns(answer):
        assert answer["message"].keys() >= {"content", "thinking", "tool_calls"}
        return [{**OLLAMA_MESSAGE, **answer["message"]}, {"role": "tool", "tool_name": "read", "content": "a"}]

    body = {"model": "tiny", "messages": ASK, "tools": TOOLS, "stream": False}
    assert ask_again(client, OLLAMA, body, turns, "messages")["message"]


A_CALL = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
SAID = {"role": "assistant", "content": None, "tool_calls": [A_CALL]}
LIMITED = {"messages": ASK, "max_tokens": 1}


def text_part(**more):
    return [{"role": "user", "content": [{"type": "text", "text": "a", **more}]}]


def called(**function):
    return [{**SAID, "tool_calls": [{**A_CALL, "function": {"name": "read", **function}}]}]


UNKNOWN = [
    (CHAT, {"messages": ASK, "max_token": 1}, "max_token", "max_tokens"),
    (CHAT, {"messages": [{**ASK[0], "contents": "a"}]}, "messages[0].contents", "content"),
    (CHAT, {"messages": text_part(txt=1)}, "messages[0].content[0].txt", "text"),
    (CHAT, {"messages": [{**SAID, "tool_calls": [{**A_CALL, "ids": 1}]}]}, "messages[0].tool_calls[0].ids", "id"),
    (CHAT, {"messages": called(argument="{}")}, "messages[0].tool_calls[0].function.argument", "arguments"),
    (CHAT, {"messages": ASK, "tools": [{**TOOLS[0], "types": 1}]}, "tools[0].types", "type"),
    (CHAT, {**LIMITED, "stream_options": {"include_usge": True}}, "stream_options.include_usge", "include_usage"),
    (CHAT, {**LIMITED, "response_format": {"type": "text", "schem": {}}}, "response_format.schem", "schema"),
    (RESPONSES, {"input": ASK, "reasoning": {"efort": "low"}}, "reasoning.efort", "effort"),
    (RESPONSES, {"input": [{**ASK[0], "rol": 1}]}, "input[0].rol", "role"),
    (RESPONSES, {"input": "a", "text": {"format": {"type": "text", "stric": True}}}, "text.format.stric", "strict"),
    (RESPONSES, {"input": "a", "tools": [{**FLAT[1], "paramters": {}}]}, "tools[0].paramters", "parameters"),
    (MESSAGES, {**LIMITED, "stop_sequence": ["a"]}, "stop_sequence", "stop_sequences"),
    (MESSAGES, {**LIMITED, "thinking": {"type": "disabled", "budget": 1}}, "thinking.budget", "budget_tokens"),
    (MESSAGES, {**LIMITED, "tools": [{**ANTHROPIC[0], "schema": {}}]}, "tools[0].schema", "input_schema"),
    (MESSAGES, {**LIMITED, "messages": text_part(tex=1)}, "messages[0].content[0].tex", "text"),
    (OLLAMA, {"model": "tiny", "messages": ASK, "options": {"num_predct": 1}}, "options.num_predct", "num_predict"),
    (OLLAMA, {"model": "tiny", "messages": [{**ASK[0], "thinkin": "a"}]}, "messages[0].thinkin", "thinking"),
    ("/v1/embeddings", {"input": "a", "dimension": 1}, "dimension", "dimensions"),
    ("/tokenize", {"messages": [{**ASK[0], "contents": "a"}]}, "messages[0].contents", "content"),
]
SHORT = {
    CHAT: {"max_tokens": 1},
    RESPONSES: {"max_output_tokens": 1},
    OLLAMA: {"options": {"num_predict": 1}, "stream": False},
}
FREE = {
    "metadata": {"any": "thing"},
    "chat_template_kwargs": {"any": {"thing": 1}},
    "logit_bias": {"5": 1},
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "x-own": 1}}},
}


def test_names_that_are_not_known_are_refused_where_they_stand(make_service):
    async def ask():
        strict, lenient = Client(make_app(make_service())), Client(make_app(make_service(ignore_unknown_fields=True)))
        for path, body, place, near in UNKNOWN:
            answer = await strict.post(path, body)
            assert answer.status == 400, answer.body
            error = answer.json["error"]
            message, param = (error, None) if isinstance(error, str) else (error["message"], error.get("param"))
            is_for_templates = path in (CHAT, "/tokenize") and place.startswith("messages[0].")
            hint = " (nothing reads it: to drop it, leave it out of the messages)" if is_for_templates else ""
            assert message == f"unknown field {place!r}: did you mean {near!r}?{hint}"
            if path not in (MESSAGES, OLLAMA):  # whose errors have no field
                assert param == place
            answered = await lenient.post(path, {**SHORT.get(path, {}), **body})
            assert b"unknown field" not in answered.body

    asyncio.run(ask())


def test_names_are_free_where_they_are_the_clients_own(make_service):
    async def ask():
        client = Client(make_app(make_service()))
        for name, value in FREE.items():
            answer = await client.post(CHAT, {"messages": ASK, "max_tokens": 2, name: value})
            assert answer.status == 200, (name, answer.body)

    asyncio.run(ask())
