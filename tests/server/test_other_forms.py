"""Anthropic's messages and OpenAI's responses: the same chat in other forms."""

import asyncio

import pytest

from jaxinfer.server.app import make_app
from jaxinfer.text.reasoning import FAMILIES, Tags, hidden_tokens
from jaxinfer.tool_calls import AnswerFormat
from tests.server.asgi import Client
from tests.server.conftest import offline

CHAT = [{"role": "user", "content": "read a file"}]


def run(coroutine):
    return asyncio.run(coroutine)


def test_messages_are_those_of_the_library(engine, client):
    system = {"role": "system", "content": "be brief"}
    ids = engine.llm.chat_prompt([system, *CHAT])
    expected = offline(engine, ids, seed=3, max_tokens=8).outputs[0]

    async def ask():
        body = {"model": "tiny", "max_tokens": 8, "seed": 3, "system": [{"type": "text", "text": "be brief"}]}
        body["messages"] = [{"role": "user", "content": [{"type": "text", "text": "read a file"}]}]
        count = await client.post("/v1/messages/count_tokens", {"messages": body["messages"], "system": "be brief"})
        return await client.post("/v1/messages", body), await client.stream("/v1/messages", body), count

    whole, events, count = run(ask())
    answer = whole.json
    assert answer["content"] == [{"type": "text", "text": expected.text}]
    assert (answer["stop_reason"], answer["type"], answer["role"]) == ("max_tokens", "message", "assistant")
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(ids) == count.json["input_tokens"]
    assert usage["output_tokens"] == 8
    assert [event.name for event in events if event.name != "content_block_delta"] == [
        *("message_start", "ping", "content_block_start", "content_block_stop", "message_delta", "message_stop")
    ]
    deltas = [event.data["delta"]["text"] for event in events if event.name == "content_block_delta"]
    assert "".join(deltas) == expected.text
    assert all(event.name == event.data["type"] for event in events)
    assert events[-2].data["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


def test_a_begun_message_is_continued_and_tools_are_rendered(engine, client):
    turns = [*CHAT, {"role": "assistant", "content": "def"}]

    async def ask():
        body = {"messages": turns, "max_tokens": 4, "seed": 1}
        return (await client.post("/v1/messages", body)).json, (
            await client.post("/v1/chat/completions", {**body, "continue_final_message": True})
        ).json

    message, chat = run(ask())
    assert message["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert (
        message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]
        == (chat["usage"]["prompt_tokens"])
    )


REFUSED = [
    ("/v1/messages", {"messages": CHAT}),
    ("/v1/messages", {"messages": CHAT, "max_tokens": 0}),
    ("/v1/messages", {"messages": [], "max_tokens": 4}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 4}),
    ("/v1/messages", {"messages": [{"role": "tool", "content": "a"}], "max_tokens": 4}),
    ("/v1/messages", {"messages": CHAT, "max_tokens": 4, "tool_choice": {"type": "any"}}),
    (
        "/v1/messages",
        {
            "messages": CHAT,
            "max_tokens": 4,
            "tools": [{"name": "f"}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        },
    ),
    ("/v1/messages", {"messages": CHAT, "max_tokens": 4, "thinking": {"type": "enabled", "budget_tokens": 9}}),
    ("/v1/messages", {"messages": CHAT, "max_tokens": 4, "tools": [{"type": "bash_20250124", "name": "bash"}]}),
    ("/v1/responses", {}),
    ("/v1/responses", {"input": []}),
    ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}),
    ("/v1/responses", {"input": "a", "background": True}),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "yaml"}}}),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 0}),
]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_what_is_not_supported_is_refused(client, path):
    async def ask():
        for body in (body for one, body in REFUSED if one == path):
            answer = await client.post(path, body)
            assert answer.status == 400, (body, answer.body)
            assert answer.error["type"] == "invalid_request_error"

    run(ask())


def test_responses_are_those_of_the_library(engine, client):
    ids = engine.llm.chat_prompt([{"role": "system", "content": "be brief"}, *CHAT])
    expected = offline(engine, ids, seed=3, max_tokens=8).outputs[0]

    async def ask():
        body = {"model": "tiny", "input": "read a file", "instructions": "be brief", "max_output_tokens": 8, "seed": 3}
        body["tools"] = [{"type": "web_search"}]  # agents send what the server has not
        items = {**body, "input": [{"role": "user", "content": [{"type": "input_text", "text": "read a file"}]}]}
        return await client.post("/v1/responses", body), await client.stream("/v1/responses", items)

    whole, events = run(ask())
    answer = whole.json
    (item,) = answer["output"]
    assert item["content"] == [{"type": "output_text", "text": expected.text, "annotations": [], "logprobs": []}]
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["usage"]["input_tokens"] == len(ids)
    assert answer["usage"].keys() == {
        *("input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details", "total_tokens")
    }
    assert [event.data["sequence_number"] for event in events] == list(range(len(events)))
    assert [event.name for event in events if not event.name.endswith(".delta")] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    deltas = [event.data["delta"] for event in events if event.name == "response.output_text.delta"]
    assert "".join(deltas) == expected.text
    last = events[-1].data["response"]
    assert last["output"][0]["content"] == item["content"]


def joined(events):
    deltas = [one["delta"] for event in events for one in (event.data or {}).get("choices", ())]
    return {name: "".join(one.get(name, "") for one in deltas) for name in ("reasoning_content", "content")}


def test_reasoning_is_told_apart_on_every_route(make_service, engine):
    """The tiny model writes no tags, so a text that it does write stands for the closing one."""
    text = offline(engine, engine.llm.chat_prompt(CHAT), seed=3, max_tokens=16).outputs[0].text
    middle = text[len(text) // 2 : len(text) // 2 + 3]
    tags = type(FAMILIES["think"])("file", middle)  # the prompt ends with the opening tag
    before, after = text.split(middle, 1)
    service = make_service()
    service.default.answers = AnswerFormat(engine.llm.tokenizer, "auto", tags)
    client = Client(make_app(service))

    async def ask():
        base = {"seed": 3, "model": "tiny"}
        chat = {**base, "messages": CHAT, "max_tokens": 16}
        whole = (await client.post("/v1/chat/completions", chat)).json["choices"][0]["message"]
        events = await client.stream("/v1/chat/completions", chat)
        streamed = joined(events)
        blocks = (await client.post("/v1/messages", chat)).json["content"]
        named = await client.stream("/v1/messages", chat)
        items = (await client.post("/v1/responses", {**base, "input": CHAT, "max_output_tokens": 16})).json["output"]
        last = (await client.stream("/v1/responses", {**base, "input": CHAT, "max_output_tokens": 16}))[-1]
        resumed = await client.stream("/v1/chat/completions", chat, last_event_id=events[4].id)
        assert joined([*events[:5], *resumed]) == streamed
        counted = last.data["response"]["usage"]["output_tokens_details"]["reasoning_tokens"]
        assert counted == len(engine.llm.tokenizer.encode(before.strip(), add_special_tokens=False))
        return whole, streamed, blocks, named, items, last.data["response"]["output"]

    whole, streamed, blocks, named, items, streamed_items = run(ask())
    expected = {"reasoning_content": before.strip(), "content": after.lstrip()}
    assert {name: whole[name] for name in expected} == streamed == expected
    assert [block.get("thinking", block.get("text")) for block in blocks] == list(expected.values())
    starts = [event.data["content_block"]["type"] for event in named if event.name == "content_block_start"]
    assert starts == ["thinking", "text"]
    assert [one["content"][0]["text"] for one in items] == list(expected.values())
    assert [one["content"] for one in streamed_items] == [one["content"] for one in items]


def test_tags_that_are_special_tokens(engine, make_service):
    """The text has special tokens then, to tell the reasoning; the client sees none of them."""
    tokenizer = engine.llm.tokenizer
    one, other = (tokenizer.decode([token], skip_special_tokens=False) for token in sorted(tokenizer.special_ids)[:2])
    family = Tags(one, other)
    hidden = hidden_tokens(family, tokenizer)
    assert hidden is not None
    assert not {one, other} & set(hidden)
    assert hidden_tokens(FAMILIES["think"], tokenizer) is None
    service = make_service()
    service.default.answers = AnswerFormat(tokenizer, "auto", family)
    client = Client(make_app(service))
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 6, "seed": 1, "ignore_eos": True}
    body["logit_bias"] = {str(sorted(tokenizer.special_ids)[0]): 100}  # only opening tags

    async def ask():
        whole = await client.post("/v1/chat/completions", body)
        events = await client.stream("/v1/chat/completions", body)
        return whole.json["choices"][0]["message"], events

    message, events = asyncio.run(ask())
    assert message["content"] == ""
    assert message["reasoning_content"] == one * 5  # the first one is the tag
    deltas = [choice["delta"] for event in events for choice in (event.data or {}).get("choices", ())]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == one * 5
