"""Ollama's API: lines of JSON, what is refused, and the routes about models. Its own client: clients/use_ollama.py."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from jaxinfer.embedding_files import EmbeddingConfig
from jaxinfer.engine.request import StreamDelta
from jaxinfer.server import ollama_models
from jaxinfer.server.app import make_app
from jaxinfer.server.models import OneModel
from jaxinfer.server.ollama import _ChatLines
from jaxinfer.server.resume import StreamPosition
from jaxinfer.store import UnknownModelError
from jaxinfer.tool_calls import ToolCallDelta
from tests.server.asgi import Client
from tests.server.conftest import offline
from tests.server.services import service_of

CHAT, GENERATE = "/api/chat", "/api/generate"
ASK = [{"role": "user", "content": "read a file"}]
OPTIONS = {"seed": 5, "temperature": 0.8, "num_predict": 12}

POSITION = StreamPosition("0" * 24, "a" * 16, 1, 1)


def lines(answer):
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.body.decode().splitlines()]


def ask(client, path, **body):
    return asyncio.run(client.post(path, {"model": "tiny", **body}))


def test_chat_and_generate_give_the_offline_answer(client, engine):
    wanted = offline(engine, engine.llm.chat_prompt(ASK), seed=5, temperature=0.8, max_tokens=12).outputs[0]
    streamed = lines(ask(client, CHAT, messages=ASK, options=OPTIONS))
    assert "".join(line["message"]["content"] for line in streamed) == wanted.text
    assert [line["done"] for line in streamed] == [False] * (len(streamed) - 1) + [True]
    last = streamed[-1]
    assert (last["done_reason"], last["eval_count"]) == ("length", 12)
    assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"] > 0
    whole = ask(client, CHAT, messages=ASK, options=OPTIONS, stream=False).json
    assert whole["message"] == {"role": "assistant", "content": wanted.text}
    assert whole.keys() == last.keys()
    for body in ({"prompt": "read a file"}, {"prompt": "read a file", "stream": False}):
        answer = ask(client, GENERATE, options=OPTIONS, **body)
        found = [answer.json] if "stream" in body else lines(answer)
        assert "".join(line["response"] for line in found) == wanted.text
    raw = ask(client, GENERATE, prompt="def", raw=True, stream=False, options={**OPTIONS, "num_ctx": 9}).json
    text = offline(engine, "def", seed=5, temperature=0.8, max_tokens=12).outputs[0]
    assert raw["eval_count"] == 9 - raw["prompt_eval_count"]
    assert text.text.startswith(raw["response"].rstrip("\ufffd"))


def test_formats_and_tags_of_names(client):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    answer = ask(client, CHAT, messages=ASK, format=schema, stream=False, options={"seed": 1, "num_predict": 100})
    if answer.json["done_reason"] == "stop":
        assert isinstance(json.loads(answer.json["message"]["content"])["a"], int)
    assert answer.json["message"]["content"].lstrip().startswith("{")
    assert ask(client, CHAT, model="tiny:latest", messages=ASK, stream=False, options=OPTIONS).status == 200
    missing = ask(client, CHAT, model="other", messages=ASK)
    assert (missing.status, missing.json["error"][:27]) == (404, "the model 'other' is not se")
    assert ask(client, CHAT, messages=[]).json["done_reason"] == "load"
    for more in (
        {"cache_salt": "x" * 1025},
        {"format": "xml"},
        {"options": {"mirostat": 2}},
        {"top_logprobs": False},
        {"options": {"mirostat_eta": "x"}},
    ):
        assert ask(client, CHAT, messages=[], **more).status == 400
        assert ask(client, GENERATE, prompt="", **more).status == 400


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (CHAT, {"options": {"mirostat": 1}}, "options.mirostat"),
        (CHAT, {"options": {"vocab_only": True}}, "options.vocab_only"),
        (CHAT, {"options": {"num_ctx": 100_000}}, "options.num_ctx"),
        (CHAT, {"options": {"num_predict": 0}}, "options.num_predict"),
        (CHAT, {"options": {"temperature": -1}}, "options.temperature"),
        (CHAT, {"options": {"num_ctx": 4}}, "options.num_ctx"),
        (CHAT, {"options": {"stop": 7}}, "options.stop"),
        (CHAT, {"messages": [{**ASK[0], "images": ["aGk="]}]}, "messages[0].images"),
        (CHAT, {"format": "xml"}, "format"),
        (CHAT, {"format": {"type": "nothing"}}, "format"),
        (CHAT, {"think": "high"}, "think"),
        (CHAT, {"think": True}, "think"),
        (CHAT, {"logprobs": True}, "logprobs"),
        (CHAT, {"keep_alive": "soon"}, "keep_alive"),
        (GENERATE, {"prompt": "a", "images": ["aGk="]}, "images"),
        (GENERATE, {"prompt": "a", "template": "{{ .Prompt }}"}, "template"),
        (GENERATE, {"prompt": "a", "context": [1, 2]}, "context"),
        (GENERATE, {"prompt": "a", "suffix": "b"}, "suffix"),
        (GENERATE, {"prompt": "a", "raw": True, "system": "b"}, "system"),
    ],
)
def test_what_is_not_applied_is_refused_by_its_name(client, path, body, name):
    body = {"messages": ASK, **body} if path == CHAT else body
    answer = ask(client, path, **body)
    assert answer.status == 400
    assert name in answer.json["error"]


def test_what_changes_nothing_is_taken(client):
    options = {**OPTIONS, "mirostat": 0, "tfs_z": 1.0, "num_keep": 4, "top_k": 0, "num_ctx": 256, "repeat_last_n": -1}
    answer = ask(client, GENERATE, prompt="a", options=options, context=[], images=[], suffix="", stream=False)
    assert answer.status == 200


def test_calls_of_tools_come_whole(service):
    written = _ChatLines(None, SimpleNamespace(model=service.default, has_front=False), POSITION)
    pieces = [
        (StreamDelta(0, "so ", [1]), "", None),
        (StreamDelta(0, "", [2]), "", ToolCallDelta(0, "call_1", "add", "")),
        (StreamDelta(0, "", [3]), "", ToolCallDelta(0, None, None, '{"a": 1')),
        (StreamDelta(0, "", [4]), "", ToolCallDelta(0, None, None, "}")),
        (StreamDelta(0, "", [5], finish_reason="tool_calls"), "", ToolCallDelta(1, "call_2", "now", "")),
    ]
    found = [json.loads(line) for piece in pieces for line in written.add(*piece).splitlines()]
    assert [line["message"].get("tool_calls") for line in found] == [
        None,
        [{"function": {"name": "add", "arguments": {"a": 1}}}, {"function": {"name": "now", "arguments": {}}}],
    ]


def test_a_call_that_is_cut_off_is_left_out(service):
    written = _ChatLines(None, SimpleNamespace(model=service.default, has_front=False), POSITION)
    assert written.add(StreamDelta(0, "", [1]), "", ToolCallDelta(0, "call_1", "add", "")) == b""
    cut = StreamDelta(0, "", [2], finish_reason="length")
    assert written.add(cut, "", ToolCallDelta(0, None, None, '{"a": 1')) == b""
    assert written._reason == "length"


def test_routes_about_the_one_model(client):
    async def run():
        (entry,) = (await client.get("/api/tags")).json["models"]
        assert entry["name"] == entry["model"] == "tiny"
        (running,) = (await client.get("/api/ps")).json["models"]
        assert running["context_length"] == 256
        shown = (await client.post("/api/show", {"model": "tiny"})).json
        assert shown["model_info"]["general.architecture"] == "LlamaForCausalLM"
        assert "completion" in shown["capabilities"]
        assert (await client.get("/api/version")).json["version"]
        for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
            assert (await client.call(method, path, {"model": "tiny"})).status == 403
        assert (await client.post("/api/copy", {"source": "tiny", "destination": "b"})).status == 403

    asyncio.run(run())


def test_embeddings(client, engine, monkeypatch):
    assert "pooling" in ask(client, "/api/embed", input="a").json["error"]  # nothing says how it embeds
    monkeypatch.setattr(engine.llm.embedder, "config", EmbeddingConfig("last"))
    answer = ask(client, "/api/embed", input=["a", "bcd"], truncate=False).json
    texts = asyncio.run(client.post("/v1/embeddings", {"model": "tiny", "input": ["a", "bcd"]})).json["data"]
    assert answer["embeddings"] == [one["embedding"] for one in texts]
    assert answer["total_duration"] > 0
    assert answer["prompt_eval_count"] > 1
    assert len(ask(client, "/api/embed", input="ab").json["embeddings"]) == 1
    assert ask(client, "/api/embed", input=[]).json["embeddings"] == []
    assert len(ask(client, "/api/embed", input="ab" * 500).json["embeddings"]) == 1  # cut
    assert ask(client, "/api/embed", input="ab" * 500, truncate=False).status == 400
    assert ask(client, "/api/embed", input="a", dimensions=7000).status == 400
    assert "options.top_k" in ask(client, "/api/embed", input="a", options={"top_k": 1}).json["error"]


class FakeDownload:
    commit, num_bytes = "abc123", 100

    def __init__(self, error=None):
        self.error = error

    def fetch(self, *, on_bytes, stop):
        on_bytes(40)
        if self.error is not None:
            raise self.error


def test_the_store_is_managed_by_a_server_without_given_models(monkeypatch, engine):
    calls = []

    def prepare(name):
        if name == "user/none":
            raise UnknownModelError("user/none is not at the hub")
        return FakeDownload(ValueError("model.safetensors is damaged") if name == "user/bad" else None)

    monkeypatch.setattr(ollama_models.store, "prepare", prepare)
    monkeypatch.setattr(ollama_models.store, "copy_model", lambda *names: calls.append(names))
    monkeypatch.setattr(ollama_models.store, "remove", lambda name: calls.append(name))
    monkeypatch.setattr(OneModel, "is_store", True)
    client = Client(make_app(service_of(engine, "demo")))

    async def run():
        found = lines(await client.post("/api/pull", {"model": "hf.co/user/model"}))
        assert found[0] == {"status": "pulling manifest"}
        assert found[-1] == {"status": "success"}
        assert {"digest": "abc123", "total": 100, "completed": 100}.items() <= found[-4].items()
        assert (await client.post("/api/pull", {"model": "user/model", "stream": False})).json == {"status": "success"}
        assert (await client.post("/api/pull", {"model": "user/none"})).status == 404
        assert lines(await client.post("/api/pull", {"model": "user/bad"}))[-1] == {
            "error": "model.safetensors is damaged"
        }
        assert lines(await client.post("/api/pull", {"model": "demo"}))[-1] == {"status": "success"}  # is here
        assert (await client.post("/api/copy", {"source": "demo", "destination": "mine"})).status == 200
        assert (await client.call("DELETE", "/api/delete", {"model": "other"})).status == 404

    asyncio.run(run())
    assert calls == [("demo", "mine")]
