"""The ollama package against a server at sys.argv[1]: chat, generate, streams, formats, tools, models, errors."""

import asyncio
import json
import sys

from ollama import AsyncClient, Client, ResponseError

MODEL = "tiny"
ASK = [{"role": "user", "content": "read a file"}]
OPTIONS = {"seed": 5, "temperature": 0.8, "num_predict": 12}
client = Client(host=sys.argv[1])


def status_of(call):
    try:
        call()
    except ResponseError as error:
        return error.status_code
    return 200


def answers():
    whole = client.chat(MODEL, ASK, options=OPTIONS)
    assert (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 12)
    assert whole.total_duration > whole.eval_duration > 0
    parts = list(client.chat(MODEL, ASK, options=OPTIONS, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    generated = client.generate(MODEL, "read a file", options=OPTIONS)
    assert generated.response == whole.message.content  # through the same template
    parts = list(client.generate(MODEL, "def", raw=True, options=OPTIONS, stream=True, keep_alive="10m"))
    assert "".join(part.response for part in parts)
    loaded = client.generate(MODEL, "")
    assert (loaded.done_reason, loaded.response) == ("load", "")


def formats():
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
    for wanted in ("json", schema):
        answer = client.chat(MODEL, ASK, format=wanted, options={**OPTIONS, "num_predict": 100})
        assert answer.message.content.lstrip().startswith("{")
        if answer.done_reason == "stop":
            json.loads(answer.message.content)


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
      a: one number. b: the other number.
    """
    return a + b


def tools():
    """The tiny model writes noise; its calls are tested in test_ollama.py."""
    first = client.chat(MODEL, ASK, tools=[add], options=OPTIONS)
    assert first.message.role == "assistant"
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    said = client.chat(MODEL, ASK, options=OPTIONS).message.model_dump()
    assert client.chat(MODEL, [*ASK, said, *ASK], options=OPTIONS).message.content is not None
    turns = [*ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_name": "add", "content": "3"})
    # The demo's template may know no role tool.
    assert status_of(lambda: client.chat(MODEL, turns, tools=[add], options=OPTIONS)) in (200, 400)


def models():
    (entry,) = client.list().models
    assert entry.model == MODEL
    assert entry.modified_at is not None
    (running,) = client.ps().models
    assert (running.model, running.context_length) == (MODEL, 256)
    shown = client.show(MODEL)
    assert shown.modelinfo["general.architecture"] == "LlamaForCausalLM"
    assert "completion" in shown.capabilities
    for change in (lambda: client.pull(MODEL), lambda: client.delete(MODEL), lambda: client.copy(MODEL, "b")):
        assert status_of(change) == 403  # this server was started with its model


def errors():
    for call, status in (
        (lambda: client.chat("other", ASK), 404),
        (lambda: list(client.chat("other", ASK, stream=True)), 404),
        (lambda: client.chat(MODEL, ASK, options={"mirostat": 2}), 400),
        (lambda: client.chat(MODEL, [{**ASK[0], "images": [b"GIF89a"]}]), 400),
        (lambda: client.show("other"), 404),
    ):
        assert status_of(call) == status


async def many():
    one = AsyncClient(host=sys.argv[1])
    wanted = client.chat(MODEL, ASK, options=OPTIONS).message.content
    found = await asyncio.gather(*(one.chat(MODEL, ASK, options=OPTIONS) for _ in range(8)))
    assert {answer.message.content for answer in found} == {wanted}
    parts = [part async for part in await one.chat(MODEL, ASK, options=OPTIONS, stream=True)]
    assert "".join(part.message.content for part in parts) == wanted


answers()
formats()
tools()
models()
errors()
asyncio.run(many())
