"""Answers are valid by OpenAI's own description of its API."""

import asyncio

import pytest

from jaxinfer.server.app import make_app
from jaxinfer.text.reasoning import Tags
from jaxinfer.tool_calls import AnswerFormat
from tests.server.asgi import Client
from tests.server.conftest import offline
from tests.server.openai_schemas.components import errors

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "read a file"}]
FUNCTION = {"name": "read", "description": "Reads a file.", "parameters": {"type": "object", "properties": {}}}
USAGE = {"stream_options": {"include_usage": True}}
WHOLE = {CHAT: "CreateChatCompletionResponse", COMPLETIONS: "CreateCompletionResponse", RESPONSES: "Response"}
EVENT = {CHAT: "CreateChatCompletionStreamResponse", COMPLETIONS: "CompletionChunk", RESPONSES: "ResponseStreamEvent"}
BODIES = [
    (CHAT, {"messages": MESSAGES, "max_tokens": 4, "n": 2, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 4, "tools": [{"type": "function", "function": FUNCTION}]}),
    (COMPLETIONS, {"prompt": ["a", [5, 6]], "max_tokens": 4, "n": 2, "logprobs": 2, "return_token_ids": True}),
    (COMPLETIONS, {"prompt": "def read(path):", "max_tokens": 4, "stop": ["e", "a", " "]}),
    (RESPONSES, {"input": MESSAGES, "max_output_tokens": 4, "metadata": {"a": "b"}, "user": "me"}),
    (RESPONSES, {"input": "read a file", "instructions": "be brief", "max_output_tokens": 4, "temperature": 0}),
    (RESPONSES, {"input": "read", "max_output_tokens": 4, "tools": [{"type": "function", "name": "read"}]}),
]


def run(coroutine):
    return asyncio.run(coroutine)


def check(path, whole, events):
    assert whole.status == 200, whole.body
    assert errors(WHOLE[path], whole.json) == []
    found = [event.data for event in events if event.data]
    assert found
    assert [one for event in found for one in errors(EVENT[path], event)] == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_answers_and_their_streams(make_service, engine, path):
    service = make_service()
    service.default.answers = AnswerFormat(engine.llm.tokenizer, "hermes")  # the demo's template shows no tools
    client = Client(make_app(service))

    async def ask():
        for body in (body for one, body in BODIES if one == path):
            usage = USAGE if path != RESPONSES else {}
            check(path, await client.post(path, body), await client.stream(path, {**body, **usage}))

    run(ask())


def test_an_echo_and_other_routes(client):
    async def ask():
        body = {"prompt": "a file is read", "echo": True, "max_tokens": 0, "logprobs": 1}
        assert errors("EchoedCompletion", (await client.post(COMPLETIONS, body)).json) == []
        assert errors("ListModelsResponse", (await client.get("/v1/models")).json) == []
        assert errors("Model", (await client.get("/v1/models/tiny")).json) == []
        wrong = [
            await client.get("/v1/models/other"),
            await client.get("/v1/nothing"),
            await client.get(CHAT),
            await client.post(CHAT, {}),
            await client.post(COMPLETIONS, {"prompt": "a", "max_tokens": -1}),
            await client.post(RESPONSES, {"input": "a", "previous_response_id": "resp_1"}),
            await client.post(RESPONSES, body=b"{"),
        ]
        assert [one.status for one in wrong] == [404, 404, 405, 400, 400, 400, 400]
        assert [errors("ErrorResponse", one.json) for one in wrong] == [[]] * len(wrong)

    run(ask())


def test_reasoning_and_an_answer_that_was_ended(make_service, engine):
    """The tiny model writes no tags, so a text that it does write stands for the closing one."""
    text = offline(engine, engine.llm.chat_prompt(MESSAGES), seed=3, max_tokens=16).outputs[0].text
    middle = text[len(text) // 2 : len(text) // 2 + 3]
    service = make_service()
    service.default.answers = AnswerFormat(
        engine.llm.tokenizer, "auto", Tags("file", middle)
    )  # the prompt ends with the opening tag
    client = Client(make_app(service))

    async def ask():
        for path, body in (
            (CHAT, {"messages": MESSAGES, "max_tokens": 16}),
            (RESPONSES, {"input": MESSAGES, "max_output_tokens": 16}),
            (RESPONSES, {"input": MESSAGES, "max_output_tokens": 3}),
        ):
            body = {**body, "seed": 3}
            check(path, await client.post(path, body), await client.stream(path, body))

    run(ask())
