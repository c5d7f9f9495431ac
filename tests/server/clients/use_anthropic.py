"""The anthropic package against a server at sys.argv[1]: messages, streams, counts of tokens, errors."""

import asyncio
import json
import sys

from anthropic import Anthropic, AsyncAnthropic, BadRequestError, NotFoundError
from anthropic.types import ErrorResponse, Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import TypeAdapter

MODEL = "tiny"
BODY = {
    "model": MODEL,
    "system": "Be short.",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "read a file"}]}],
    "max_tokens": 12,
    "extra_body": {"seed": 11},
}
client = Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)


def messages():
    answer = client.messages.create(**BODY)
    assert (answer.type, answer.role, answer.content[0].type) == ("message", "assistant", "text")
    assert answer.stop_reason in ("max_tokens", "end_turn")
    assert answer.usage.output_tokens <= 12
    with client.messages.stream(**BODY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == answer.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (answer.stop_reason, answer.usage.output_tokens)
    events = [event.type for event in client.messages.create(**BODY, stream=True)]
    assert events[:2] == ["message_start", "content_block_start"]
    assert events[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    turns = [*BODY["messages"], {"role": final.role, "content": [one.model_dump() for one in final.content]}]
    assert client.messages.create(**{**BODY, "messages": [*turns, *BODY["messages"]]}).content
    stopped = client.messages.create(**BODY, stop_sequences=[text[2:5]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[2:5])


def tools():
    """The tiny model writes noise, so that only a grammar makes it call a tool."""
    schema = {
        "type": "object",
        "properties": {"mode": {"enum": ["r", "w"]}},
        "required": ["mode"],
        "additionalProperties": False,
    }
    tool = {"name": "read", "description": "Reads a file.", "input_schema": schema}
    body = {**BODY, "max_tokens": 64, "tools": [tool], "tool_choice": {"type": "tool", "name": "read"}}
    answer = client.messages.create(**body)
    (block,) = answer.content
    assert (answer.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "read")
    assert block.input["mode"] in ("r", "w")
    with client.messages.stream(**body) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert "input_json" in kinds
    assert (final.stop_reason, final.content[0].id, final.content[0].input) == ("tool_use", block.id, block.input)
    results = [
        *BODY["messages"],
        {"role": "assistant", "content": [block.model_dump()]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "empty"}]},
    ]
    assert client.messages.create(**{**BODY, "messages": results, "tools": [tool]}).usage.output_tokens <= 12


def counts():
    count = client.messages.count_tokens(model=MODEL, system=BODY["system"], messages=BODY["messages"])
    usage = client.messages.create(**BODY).usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def types():
    """The package reads answers without checking them; its types do."""
    raw = client.messages.with_raw_response
    Message.model_validate_json(raw.create(**BODY).text(), strict=True)
    count = raw.count_tokens(model=MODEL, messages=BODY["messages"])
    MessageTokensCount.model_validate_json(count.text(), strict=True)
    with client.messages.with_streaming_response.create(**BODY, stream=True) as response:
        events = [
            json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line.startswith("data: ")
        ]
    assert len(events) > 6
    for event in events:
        if event["type"] != "ping":  # which the package skips
            TypeAdapter(RawMessageStreamEvent).validate_python(event)
    try:
        client.messages.create(**{**BODY, "max_tokens": 0})
    except BadRequestError as error:
        ErrorResponse.model_validate({"request_id": None, **error.body})


def errors():
    for kind, wrong in ((BadRequestError, {"max_tokens": -1}), (NotFoundError, {"model": "other"})):
        try:
            client.messages.create(**{**BODY, **wrong})
        except kind as error:
            assert error.body["type"] == "error"  # noqa: PT017
            assert error.body["error"]["message"]  # noqa: PT017
        else:
            raise AssertionError(wrong)


async def many():
    async with AsyncAnthropic(base_url=sys.argv[1], api_key="none", max_retries=0) as others:
        found = await asyncio.gather(*(others.messages.create(**BODY) for _ in range(6)))
    assert len({one.content[0].text for one in found}) == 1
    assert len({one.id for one in found}) == 6


messages()
tools()
counts()
types()
errors()
asyncio.run(many())
