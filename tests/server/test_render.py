"""Requests that are rendered, not run: their token ids are those of the answers, and so are their errors."""

import asyncio

import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TURNS = [{"role": "user", "content": "read a file"}]
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}
CHATS = [
    {"messages": TURNS, "max_tokens": 3, "n": 2, "stream": False},
    {"messages": TURNS, "tools": [TOOL], "tool_choice": "none", "seed": 7, "max_tokens": 2},
    {"messages": TURNS, "truncate_prompt_tokens": 5, "temperature": 0, "max_tokens": 2},
]
PROMPTS = [
    {"prompt": ["def read(path):", "a file"], "max_tokens": 2, "cache_salt": "mine", "priority": 3},
    {"prompt": [5, 6, 7], "max_tokens": 2},
    {"prompt": "a file", "max_tokens": 0, "echo": True, "logprobs": 1},
]
WRONG = [
    (CHAT, {"messages": TURNS, "temperature": -1}),
    (CHAT, {"messages": [], "model": "tiny"}),
    (CHAT, {"messages": TURNS, "max_tokens": 2, "no_such_field": 1}),
    (COMPLETIONS, {"prompt": [5] * 300}),
    (COMPLETIONS, {"prompt": ["a", [5] * 300], "max_tokens": 2}),
    (COMPLETIONS, {"prompt": "a", "model": "other"}),
]


def test_token_ids_are_those_of_the_answer(client, engine):
    async def ask():
        for body in CHATS:
            answer = await client.post(CHAT, {**body, "return_token_ids": True})
            rendered = await client.post(CHAT + "/render", {**body, "stream": True})
            assert rendered.status == 200, rendered.body
            assert rendered.json["token_ids"] == answer.json["prompt_token_ids"]
            params = rendered.json["sampling_params"]
            assert (params["seed"], params["max_tokens"]) == (body.get("seed"), body["max_tokens"])
            assert rendered.json["request_id"].startswith("chatcmpl-")
            assert rendered.json["stream"]
        for body in PROMPTS:
            answer = await client.post(COMPLETIONS, {**body, "return_token_ids": True})
            rendered = await client.post(COMPLETIONS + "/render", body)
            ids = [choice["prompt_token_ids"] for choice in answer.json["choices"]]
            assert [one["token_ids"] for one in rendered.json] == ids
            assert {one["cache_salt"] for one in rendered.json} == {body.get("cache_salt")}
            assert {one["priority"] for one in rendered.json} == {body.get("priority", 0)}
        before = engine.llm.engine.scheduler.counters.num_added
        await client.post(COMPLETIONS + "/render", PROMPTS[0])
        assert engine.llm.engine.scheduler.counters.num_added == before

    asyncio.run(ask())


@pytest.mark.parametrize(("path", "body"), WRONG)
def test_what_cannot_be_answered_is_not_rendered(client, path, body):
    async def ask():
        return await client.post(path, body), await client.post(path + "/render", body)

    answer, rendered = asyncio.run(ask())
    assert answer.status == rendered.status in (400, 404)
    assert answer.error == rendered.error
