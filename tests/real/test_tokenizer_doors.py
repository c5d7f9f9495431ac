"""Published tokenizers and templates over tiny random weights: histories and demanded calls, through Python and HTTP.

Transformers' renderings are the golden ones; a history comes in OpenAI's own form, whatever the template reads.
"""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from benchmarks.real.tokenizers import TOKENIZERS
from jaxinfer import AsyncEngine
from jaxinfer.models import init_params
from jaxinfer.server.app import make_app
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.service import Service
from tests.real.chats import CHATS, TAKES_TEXT, chats_of, undated
from tests.real.test_tokenizers import GOLDEN, opened
from tests.server.asgi import Client
from tests.server.test_doors import Doors
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
    yield SimpleNamespace(name=request.param, engine=engine, llm=engine.llm, client=Client(make_app(service(engine))))
    asyncio.run(engine.close())


def service(engine):
    found = Service(ServerOptions(), "tiny")
    found.attach(engine)
    return found


def chats(name):
    return {chat: (CHATS[chat], text) for chat, text in GOLDEN[name]["renderings"].items() if chat in chats_of(name)}


def test_histories_are_rendered_as_transformers_renders_them(served, monkeypatch, tmp_path):
    doors = Doors(served.engine, lambda: service(served.engine), monkeypatch, tmp_path, served.llm.tokenizer)
    for chat, ((messages, tools, arguments), text) in chats(served.name).items():
        tools = None if served.name in TAKES_TEXT else tools
        if arguments:  # which not every door takes
            ids = served.llm.chat_prompt(messages, tools=tools, **arguments)
            found = {"LLM.chat_prompt": served.llm.tokenizer.decode(ids, skip_special_tokens=False)}
        else:
            found = doors.ask(messages, **({"tools": tools} if tools else {}))
            assert len(found) == 7
        assert {door: undated(one) for door, one in found.items()} == dict.fromkeys(found, text), chat


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "pack"}}],
    ids=["required", "named"],
)
def test_a_demanded_call_is_made_and_validates(served, choice):
    if served.name in (*TAKES_TEXT, "gemma-3"):
        pytest.skip("its template shows no tools")
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Pack it."}],
        "tools": [PACK],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "chat_template_kwargs": {"enable_thinking": False},  # random weights would not stop thinking
        "seed": 1,
    }
    answer = asyncio.run(served.client.post("/v1/chat/completions", body))
    assert answer.status == 200, answer.body
    (call,) = answer.json["choices"][0]["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert call["function"]["name"] == "pack"
    assert arguments["size"] in ("small", "größer")
    assert isinstance(arguments["fragile"], bool)
    assert arguments.keys() == {"size", "fragile"}
