"""Published tokenizers and templates over tiny random weights: histories and demanded calls, through Python and HTTP.

Transformers' renderings are the golden ones; a history comes in OpenAI's own form, whatever the template reads.
"""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jsonschema
import pytest

from benchmarks.real.tokenizers import TOKENIZERS
from jaxinfer import AsyncEngine, SamplingParams
from jaxinfer.models import init_params
from jaxinfer.server.app import make_app
from tests.real.chats import CHATS, TAKES_TEXT, chats_of, undated
from tests.real.test_tokenizers import GOLDEN, opened
from tests.server.asgi import Client
from tests.server.services import service_of
from tests.server.test_doors import Doors, anthropic_tool
from tests.tiny import TINY

pytestmark = pytest.mark.real
PACK = {
    "type": "function",
    "function": {
        "name": "pack",
        "description": "Packs a box.",
        "parameters": {
            "type": "object",
            "properties": {"size": {"enum": ["small", "größer"]}, "fragile": {"type": "boolean"}},
            "required": ["size", "fragile"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def served(request):
    """A tokenizer's name, its model, and a client of the server."""
    tokenizer = opened(request.param)
    config = replace(TINY, vocab_size=1 + max(tokenizer.tokens_by_id()), num_layers=1, max_position_embeddings=2048)
    model = config, init_params(config, jax.random.key(0)), tokenizer
    engine = AsyncEngine(model, max_seqs=2, max_model_len=2048, prefill_chunk=256)
    thinks = "enable_thinking" in tokenizer.chat_template
    client = Client(make_app(service_of(engine)))
    yield SimpleNamespace(name=request.param, engine=engine, llm=engine.llm, client=client, thinks=thinks)
    asyncio.run(engine.close())


def chats(name):
    return {chat: (CHATS[chat], text) for chat, text in GOLDEN[name]["renderings"].items() if chat in chats_of(name)}


def test_histories_are_rendered_as_transformers_renders_them(served, monkeypatch, tmp_path):
    doors = Doors(served.engine, lambda: service_of(served.engine), monkeypatch, tmp_path, served.llm.tokenizer)
    for chat, ((messages, tools, arguments), text) in chats(served.name).items():
        tools = None if served.name in TAKES_TEXT else tools
        if arguments:  # which not every door takes
            ids = served.llm.chat_prompt(messages, tools=tools, **arguments)
            found = {"LLM.chat_prompt": served.llm.tokenizer.decode(ids, skip_special_tokens=False)}
        else:
            found = doors.ask(messages, **({"tools": tools} if tools else {}))
            assert len(found) == 7
        assert {door: undated(one) for door, one in found.items()} == dict.fromkeys(found, text), chat


ASK = [{"role": "user", "content": "Pack it."}]
# Random weights would not stop thinking: it is switched off, or the seed does not begin it (gpt-oss).
NO_THINKING = {"enable_thinking": False}


def calls_of_chat(answer):
    calls = answer["choices"][0]["message"]["tool_calls"]
    return [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in calls]


def demanded(served, choice, folder):
    """The calls that each door makes, names and arguments; Ollama's clients cannot demand one."""
    named = None if choice == "required" else choice["function"]["name"]
    chat = {"messages": ASK, "tools": [PACK], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 200}
    chat |= {"chat_template_kwargs": NO_THINKING, "seed": 1}

    def post(path, body):
        answer = asyncio.run(served.client.post(path, body))
        assert answer.status == 200, answer.body
        return answer.json

    yield "chat", calls_of_chat(post("/v1/chat/completions", chat))
    answer = post(
        "/v1/responses",
        {
            "input": "Pack it.",
            "tools": [{"type": "function", **PACK["function"]}],
            "tool_choice": {"type": "function", "name": named} if named else choice,
            "parallel_tool_calls": False,
            "max_output_tokens": 200,
            "seed": 1,
            **({"reasoning": {"effort": "none"}} if served.thinks else {}),
        },
    )
    calls = [one for one in answer["output"] if one["type"] == "function_call"]
    yield "responses", [(one["name"], json.loads(one["arguments"])) for one in calls]
    theirs = {"type": "tool", "name": named} if named else {"type": "any"}
    answer = post(
        "/v1/messages",
        {
            "messages": ASK,
            "tools": [anthropic_tool(PACK)],
            "tool_choice": {**theirs, "disable_parallel_tool_use": True},
            "max_tokens": 200,
            "seed": 1,
            **({"thinking": {"type": "disabled"}} if served.thinks else {}),
        },
    )
    yield "messages", [(one["name"], one["input"]) for one in answer["content"] if one["type"] == "tool_use"]
    rows = folder / "in.jsonl"
    rows.write_text(json.dumps({"custom_id": "a", "url": "/v1/chat/completions", "body": chat}))
    assert served.llm.generate_file(rows, folder / "out.jsonl", use_tqdm=False).ok
    yield "batch", calls_of_chat(json.loads((folder / "out.jsonl").read_text())["response"]["body"])
    kwargs = {"tools": [PACK], "tool_choice": choice, "parallel_tool_calls": False}
    (output,) = served.llm.chat(ASK, SamplingParams(max_tokens=200, seed=1), use_tqdm=False, **kwargs, **NO_THINKING)
    yield "LLM.chat", [(one.name, json.loads(one.arguments)) for one in output.outputs[0].tool_calls]


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "pack"}}],
    ids=["required", "named"],
)
def test_a_demanded_call_is_made_and_validates_through_every_door(served, choice, tmp_path):
    if served.name in (*TAKES_TEXT, "gemma-3"):
        pytest.skip("its template shows no tools")
    doors = []
    for door, calls in demanded(served, choice, tmp_path):
        assert len(calls) == 1, door
        ((name, arguments),) = calls
        assert name == "pack", door
        jsonschema.validate(arguments, PACK["function"]["parameters"])
        doors.append(door)
    assert len(doors) == 5
