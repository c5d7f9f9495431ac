"""The openai package against a server at sys.argv[1]: every way to get an answer gives the same one."""

import asyncio
import json
import sys

from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

URL = f"{sys.argv[1]}/v1"
MODEL, SEED = "tiny", 11
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "read a file"}]
CHAT = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "seed": SEED, "extra_body": {"ignore_eos": True}}
PLAIN = {"model": MODEL, "prompt": "def read(path):", "max_tokens": 12, "seed": SEED}
client = OpenAI(base_url=URL, api_key="none", max_retries=0)


def models():
    assert [one.id for one in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"


def chat():
    answer = client.chat.completions.create(**CHAT)
    (choice,) = answer.choices
    assert (answer.object, choice.message.role, choice.finish_reason) == ("chat.completion", "assistant", "length")
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0

    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**CHAT, **options))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(one.choices[0].delta.content or "" for one in chunks[:-1]) == choice.message.content
    assert (chunks[-2].choices[0].finish_reason, chunks[-1].choices) == ("length", [])
    assert chunks[-1].usage.completion_tokens == 12
    assert len({(one.id, one.created, one.system_fingerprint) for one in chunks}) == 1

    stop = {"stop": choice.message.content[3:6]}  # the package refuses to parse an answer that ends by its length
    stopped = client.chat.completions.create(**CHAT, **stop).choices[0]
    with client.chat.completions.stream(**CHAT, **stop) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert (final.finish_reason, final.message.content) == ("stop", stopped.message.content)

    several = client.chat.completions.create(**CHAT, n=3, logprobs=True, top_logprobs=2, temperature=1.0)
    assert [one.index for one in several.choices] == [0, 1, 2]
    for one in several.choices:
        assert len(one.logprobs.content) == 12
        assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in one.logprobs.content)
    assert "".join(entry.token for entry in several.choices[0].logprobs.content)

    raw = client.chat.completions.with_raw_response.create(**CHAT)
    assert raw.headers["x-jaxinfer-seed"] == str(SEED)
    assert raw.parse().choices[0].message.content == choice.message.content


def completions():
    answer = client.completions.create(**PLAIN)
    assert (answer.object, answer.choices[0].finish_reason) == ("text_completion", "length")
    chunks = list(client.completions.create(**PLAIN, stream=True))
    assert "".join(one.choices[0].text for one in chunks) == answer.choices[0].text
    several = client.completions.create(**{**PLAIN, "prompt": ["def a", "class B"]}, n=2)
    assert [one.index for one in several.choices] == [0, 1, 2, 3]
    scored = client.completions.create(**{**PLAIN, "max_tokens": 0}, echo=True, logprobs=1).choices[0]
    assert scored.text == PLAIN["prompt"]
    assert scored.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in scored.logprobs.token_logprobs[1:])
    stopped = client.completions.create(**PLAIN, stop=[answer.choices[0].text[3:6]]).choices[0]
    assert stopped.finish_reason == "stop"
    assert answer.choices[0].text.startswith(stopped.text)


def responses():
    body = {"model": MODEL, "instructions": "Be short.", "input": "read a file", "max_output_tokens": 12}
    body["extra_body"] = {"seed": SEED}
    answer = client.responses.create(**body)
    assert answer.usage.output_tokens <= 12
    assert answer.usage.input_tokens_details.cached_tokens >= 0
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert answer.output[0].type == "message"
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = list(client.responses.create(**body, stream=True))
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == answer.output_text
    assert events[-1].response.output_text == answer.output_text
    assert [one.sequence_number for one in events] == list(range(len(events)))
    # The package's own end of a stream knows no answer that ends by its length.
    body["extra_body"] |= {"stop": answer.output_text[3:6]}
    stopped = client.responses.create(**body)
    assert stopped.status == "completed"
    with client.responses.stream(**body) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert {"response.output_text.delta", "response.output_item.done", "response.completed"} <= kinds
    assert (final.status, final.output_text) == ("completed", stopped.output_text)
    assert answer.output_text.startswith(stopped.output_text)
    items = {**body, "input": [{"role": "user", "content": [{"type": "input_text", "text": "read a file"}]}]}
    assert client.responses.create(**items).output_text == stopped.output_text
    turns = [*items["input"], *(item.model_dump() for item in answer.output), {"role": "user", "content": "more"}]
    assert client.responses.create(**{**body, "input": turns}).output
    parsed = client.responses.parse(**body)
    turns = [*items["input"], *(item.model_dump() for item in parsed.output), {"role": "user", "content": "more"}]
    assert client.responses.create(**{**body, "input": turns}).output
    said = client.chat.completions.create(**CHAT).choices[0].message.model_dump()
    assert client.chat.completions.create(**{**CHAT, "messages": [*MESSAGES, said, MESSAGES[1]]}).choices


SCHEMA = {
    "type": "object",
    "properties": {"mode": {"enum": ["r", "w"]}, "lines": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["mode", "lines"],
    "additionalProperties": False,
}


def tools():
    """The tiny model writes noise, so that only a grammar makes it call a tool."""
    function = {"name": "read", "description": "Reads a file.", "parameters": SCHEMA, "strict": True}
    named = {"type": "function", "function": {"name": "read"}}
    body = {"model": MODEL, "messages": MESSAGES, "seed": SEED, "tools": [{"type": "function", "function": function}]}
    body["tool_choice"] = named
    choice = client.chat.completions.create(**body).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", None, "read")
    assert json.loads(call.function.arguments).keys() == {"mode", "lines"}
    with client.chat.completions.stream(**body) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert final.finish_reason == "tool_calls"
    (streamed,) = final.message.tool_calls
    assert (streamed.id, streamed.function.arguments) == (call.id, call.function.arguments)
    assert streamed.function.parsed_arguments == json.loads(call.function.arguments)
    results = [
        *MESSAGES,
        choice.message.model_dump(),  # with every field that the package has
        {"role": "tool", "tool_call_id": call.id, "content": "empty"},
    ]
    answer = client.chat.completions.create(**{**body, "messages": results, "tool_choice": "auto"}, max_tokens=4)
    assert answer.usage.completion_tokens <= 4

    flat = {"model": MODEL, "input": "read a file", "tools": [{"type": "function", **function}]}
    flat |= {"tool_choice": {"type": "function", "name": "read"}, "extra_body": {"seed": SEED}}
    (item,) = client.responses.create(**flat).output
    assert (item.type, item.name, item.status) == ("function_call", "read", "completed")
    with client.responses.stream(**flat) as stream:
        kinds = {event.type for event in stream}
        (last,) = stream.get_final_response().output
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds
    assert (last.call_id, last.arguments) == (item.call_id, item.arguments)


def errors():
    for wrong in ({"max_tokens": -1}, {"temperature": -1.0}, {"messages": []}, {"n": 10_000}):
        try:
            client.chat.completions.create(**{**CHAT, **wrong})
        except BadRequestError as error:
            assert error.body["message"]  # noqa: PT017
        else:
            raise AssertionError(wrong)
    try:
        client.chat.completions.create(**{**CHAT, "model": "other"})
    except NotFoundError as error:
        assert error.code == "model_not_found"  # noqa: PT017
    else:
        raise AssertionError("a model that is not there")


async def many():
    async with AsyncOpenAI(base_url=URL, api_key="none", max_retries=0) as others:
        bodies = [{**CHAT, "seed": seed, "temperature": 1.0} for seed in range(8)]
        found = await asyncio.gather(*(others.chat.completions.create(**body) for body in bodies))
        again = await asyncio.gather(*(others.chat.completions.create(**body) for body in reversed(bodies)))
    texts = [one.choices[0].message.content for one in found]
    assert texts == [one.choices[0].message.content for one in reversed(again)]
    assert len(set(texts)) > 1


models()
chat()
completions()
responses()
tools()
errors()
asyncio.run(many())
