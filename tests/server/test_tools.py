"""Calls of tools on every route: told from the text, streamed, resumed, demanded."""

import asyncio
import dataclasses
import json

import msgspec
import pytest

from jaxinfer.engine.request import CompletionOutput, RequestOutput, StreamDelta
from jaxinfer.grammar.structured import StructuredOutputs
from jaxinfer.openai import answers as answer_types
from jaxinfer.openai import response_types
from jaxinfer.sampling.seeds import sample_seed
from jaxinfer.server import message_types
from jaxinfer.server.app import make_app
from jaxinfer.text.reasoning import FAMILIES
from jaxinfer.tool_calls import AnswerFormat
from tests.server.asgi import Client
from tests.server.openai_schemas.components import errors

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ASK = [{"role": "user", "content": "read a file"}]
SCHEMA = {
    "type": "object",
    "properties": {"path": {"enum": ["a", "b/c"]}, "lines": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["path"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "read", "description": "Reads a file.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
ANTHROPIC = [{"name": "read", "description": "Reads a file.", "input_schema": SCHEMA}, {"name": "stop"}]
BODIES = {
    CHAT: {"messages": ASK, "tools": TOOLS, "seed": 3},
    MESSAGES: {"messages": ASK, "tools": ANTHROPIC, "seed": 3, "max_tokens": 64},
    RESPONSES: {"input": ASK, "tools": FLAT, "seed": 3},
}
JSON_FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
CALLS = [("read", {"path": "b/c", "lines": 2}), ("stop", {})]
TEXT = "I look.\n" + "\n".join(
    f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in CALLS
)


class Scripted:
    """An engine whose every answer is one text, in pieces of a few characters."""

    def __init__(self, engine, text, size=3, finish_reason="stop"):
        self._engine, self._text, self._size, self._finish_reason = engine, text, size, finish_reason

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def submit(self, request):
        return _Script(request, self._text, self._size, self._finish_reason)


class _Script:
    def __init__(self, request, text, size, finish_reason):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        self.is_done, self._deltas = False, [StreamDelta(0, piece, [5]) for piece in pieces]
        ids = [5] * len(pieces)
        answer = CompletionOutput(0, text, ids, sample_seed(request.params.seed, 0), finish_reason)
        output = RequestOutput("0", None, list(request.token_ids), [answer], True)
        self._deltas.append(StreamDelta(0, "", [], finish_reason, output))

    async def read(self):
        await asyncio.sleep(0)
        delta = self._deltas.pop(0)
        self.is_done = not self._deltas
        return [delta]

    def abort(self):
        pass


@pytest.fixture
def make_client(make_service, engine):
    def make(text=None, form="hermes", tags=None, **script):
        service = make_service()
        service.default.answers = AnswerFormat(engine.llm.tokenizer, form, tags)
        if text is not None:
            service.default._engine = Scripted(engine, text, **script)
        return Client(make_app(service))

    return make


def run(coroutine):
    return asyncio.run(coroutine)


def gathered(events):
    """What a client puts together of a streamed chat: content, reasoning, calls by their index, the end."""
    content, reasoning, calls, ends = "", "", {}, []
    for event in events:
        for choice in (event.data or {}).get("choices", ()):
            delta = choice["delta"]
            content += delta.get("content", "")
            reasoning += delta.get("reasoning_content", "")
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
            for one in delta.get("tool_calls", ()):
                if "id" in one:
                    assert one["index"] == len(calls)
                    calls[one["index"]] = [one["id"], one["function"]["name"], ""]
                calls[one["index"]][2] += one["function"]["arguments"]
    return content, reasoning, list(calls.values()), ends


@pytest.mark.parametrize("tags", [None, FAMILIES["think"]], ids=["plain", "reasoning"])
def test_calls_are_told_from_the_text_on_every_route(make_client, tags):
    thought = "" if tags is None else '<think>\n<tool_call>{"name": "stop"}</tool_call>\n</think>\n\n'
    client = make_client(thought + TEXT, tags=tags)

    async def ask():
        return {path: (await client.post(path, body), await client.stream(path, body)) for path, body in BODIES.items()}

    found = run(ask())
    whole, events = found[CHAT]
    choice = whole.json["choices"][0]
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == ("I look.", "tool_calls")
    named = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in message["tool_calls"]]
    assert named == CALLS
    calls = [[one["id"], one["function"]["name"], one["function"]["arguments"]] for one in message["tool_calls"]]
    reasoning = message.get("reasoning_content", "")
    assert bool(reasoning) == (tags is not None)
    assert gathered(events) == ("I look.", reasoning, calls, ["tool_calls"])
    assert errors("CreateChatCompletionResponse", whole.json) == []
    assert [errors("CreateChatCompletionStreamResponse", event.data) for event in events if event.data] == [[]] * (
        len(events) - 1
    )

    whole, events = found[MESSAGES]
    blocks = [block for block in whole.json["content"] if block["type"] != "thinking"]
    uses = [{"type": "tool_use", "id": one[0], "name": one[1], "input": json.loads(one[2])} for one in calls]
    assert blocks == [{"type": "text", "text": "I look."}, *uses]
    assert whole.json["stop_reason"] == "tool_use"
    check_message(events, whole.json["content"])

    whole, events = found[RESPONSES]
    items = [item for item in whole.json["output"] if item["type"] != "reasoning"]
    assert [item["type"] for item in items] == ["message", "function_call", "function_call"]
    assert [[one["call_id"], one["name"], one["arguments"]] for one in items[1:]] == calls
    check_response(events, whole.json)


def check_message(events, blocks):
    """The events make the same blocks."""
    made, texts = [], []
    for event in events:
        msgspec.convert(event.data, message_types.MessageEvent)
        if event.name == "content_block_start":
            made.append(event.data["content_block"])
            texts.append("")
        elif event.name == "content_block_delta":
            delta = event.data["delta"]
            assert event.data["index"] == len(made) - 1
            texts[-1] += next(value for name, value in delta.items() if name != "type")
    for block, text in zip(made, texts, strict=True):
        if block["type"] == "tool_use":
            block["input"] = json.loads(text or "{}")
        else:
            block[block["type"]] = text
    assert made == blocks
    assert [event.data["delta"]["stop_reason"] for event in events if event.name == "message_delta"] == ["tool_use"]


def check_response(events, whole):
    """The events make the same items."""
    msgspec.convert(whole, response_types.Response)
    assert errors("Response", whole) == []
    for number, event in enumerate(events):
        msgspec.convert(event.data, response_types.ResponseEvent)
        assert errors("ResponseStreamEvent", event.data) == []
        assert event.data["sequence_number"] == number
    pieces: dict[str, str] = {}
    for event in events:
        if event.name == "response.function_call_arguments.delta":
            pieces[event.data["item_id"]] = pieces.get(event.data["item_id"], "") + event.data["delta"]
        elif event.name == "response.function_call_arguments.done":
            assert pieces[event.data["item_id"]] == event.data["arguments"]
    done = [event.data["item"] for event in events if event.name == "response.output_item.done"]
    assert done == events[-1].data["response"]["output"]

    def nameless(items):
        return [{name: value for name, value in item.items() if name != "id"} for item in items]

    assert nameless(done) == nameless(whole["output"])


def test_an_answer_without_a_call_is_all_content(make_client):
    text = 'Use <tool_call> like this: <tool_call>\n{"name": "write", "arguments": {}}\n</tool_call>'
    client = make_client(text)

    async def ask():
        whole = (await client.post(CHAT, BODIES[CHAT])).json["choices"][0]
        assert (whole["message"]["content"], whole["finish_reason"]) == (text, "stop")
        assert "tool_calls" not in whole["message"]
        assert gathered(await client.stream(CHAT, BODIES[CHAT])) == (text, "", [], ["stop"])
        # Without tools, or where none may be called, nothing is read.
        for body in ({"messages": ASK}, {**BODIES[CHAT], "tool_choice": "none"}):
            assert (await make_client(TEXT).post(CHAT, body)).json["choices"][0]["message"]["content"] == TEXT

    run(ask())


def test_a_cut_stream_goes_on_within_calls(make_client):
    client = make_client(f"<think>a b</think>{TEXT} Done.", tags=FAMILIES["think"], size=7)
    body = {**BODIES[CHAT], "return_token_ids": True}

    async def ask():
        whole = await client.stream(CHAT, body)
        assert len(gathered(whole)[2]) == 2
        for number, event in enumerate(whole):
            if event.id is not None:
                rest = await client.stream(CHAT, body, last_event_id=event.id)
                assert gathered([*whole[: number + 1], *rest]) == gathered(whole), number

    run(ask())


@pytest.mark.slow
def test_the_grammar_makes_the_model_call(make_client, engine):
    """The tiny model writes noise, so that only a grammar makes it call a tool."""
    client = make_client()
    named = {"type": "function", "function": {"name": "read"}}

    async def ask():
        for path, choice in (
            (CHAT, {"tool_choice": named}),
            (CHAT, {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.5, "seed": 5}),
            (MESSAGES, {"tool_choice": {"type": "tool", "name": "read"}}),
            (RESPONSES, {"tool_choice": {"type": "function", "name": "read"}}),
        ):
            answer = await client.post(path, {"temperature": 0, **BODIES[path], **choice})
            assert answer.status == 200, answer.body
            yield path, answer.json

    async def collect():
        return [one async for one in ask()]

    first, second, third, fourth = [answer for _, answer in run(collect())]
    for choice in (first["choices"][0], second["choices"][0]):
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        msgspec.convert(choice, answer_types.ChatChoice)
    call = first["choices"][0]["message"]["tool_calls"][0]["function"]
    assert call["name"] == "read"
    arguments = json.loads(call["arguments"])
    assert arguments["path"] in ("a", "b/c")
    assert third["content"][-1]["input"] == json.loads(fourth["output"][-1]["arguments"]) == arguments


def test_the_library_finds_the_same_calls(make_client, engine, monkeypatch):
    llm = engine.llm
    monkeypatch.setattr(llm, "answer_format", AnswerFormat(llm.tokenizer, "hermes"))
    choice = {"type": "function", "function": {"name": "read"}}
    body = {**BODIES[CHAT], "tool_choice": choice, "temperature": 0}
    expected = run(make_client().post(CHAT, body)).json["choices"][0]["message"]["tool_calls"]
    asked = {}

    def generate(prompts, params, *, use_tqdm=None, **options):
        """The engine's thread runs the model, so that the server's answer stands for the library's."""
        asked["params"] = params[0]
        request = llm.prepare(prompts[0], params[0])
        text = json.dumps({"name": "read", "arguments": json.loads(expected[0]["function"]["arguments"])})
        answer = CompletionOutput(0, f"<tool_call>\n{text}\n</tool_call>", [5], 3, "stop")
        return [RequestOutput("0", None, list(request.token_ids), [answer], True)]

    monkeypatch.setattr(llm, "generate", generate)
    params = dataclasses.replace(llm.default_params, seed=3, temperature=0)
    (output,) = llm.chat(ASK, params, tools=TOOLS, tool_choice=choice)
    (answer,) = output.outputs
    assert answer.text == ""
    assert [one.id for one in answer.tool_calls] == [one["id"] for one in expected]
    assert isinstance(asked["params"].structured, StructuredOutputs)
    with pytest.raises(ValueError, match="exclude each other"):
        llm.chat(ASK, dataclasses.replace(params, structured={"regex": "a"}), tools=TOOLS)


REFUSED = [
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {"tools": [*TOOLS, TOOLS[0]]}, "tools[2]"),
    (CHAT, {"tool_choice": "sometimes"}, "tool_choice"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "write"}}}, "write"),
    (CHAT, {"tools": [], "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"response_format": {"type": "json_object"}}, "tools"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"$ref": "http://x"}}}]}, "$ref"),
    (MESSAGES, {"tool_choice": {"type": "some"}}, "tool_choice"),
    (MESSAGES, {"tool_choice": {"type": "tool", "name": "write"}}, "write"),
    (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash"),
    (RESPONSES, {"tool_choice": {"type": "web_search"}}, "a tool of type 'web_search': only functions can be called"),
    (RESPONSES, {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "mcp"}]}}, "a tool of type 'mcp'"),
    (RESPONSES, {"tool_choice": {"type": "allowed_tools", "mode": "some"}}, "tool_choice must have a mode"),
    (RESPONSES, {"tool_choice": {"type": "function", "name": "write"}}, "tool_choice.name 'write'"),
    (RESPONSES, {"tool_choice": {"type": "function"}}, "must be {'type': 'function', 'name': ...}"),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "tools and text.format exclude each other"),
    (MESSAGES, {"output_config": {"format": JSON_FORMAT}}, "tools and output_config.format exclude each other"),
]


def test_what_cannot_be_served_is_refused(make_client):
    async def ask():
        client, formless = make_client(), make_client(form="none")
        for path, body, what in REFUSED:
            choice = {} if "tool_choice" in body or "response_format" in body else {"tool_choice": "required"}
            choice = choice if path == CHAT else {}
            answer = await client.post(path, {**BODIES[path], **choice, **body})
            assert answer.status == 400, (body, answer.body)
            assert what in answer.error["message"], (body, answer.error)
        answer = await formless.post(CHAT, {**BODIES[CHAT], "tool_choice": "required"})
        assert (answer.status, answer.error["param"]) == (400, "tool_choice")

    run(ask())
