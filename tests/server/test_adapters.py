"""Adapters as models of requests, loaded at the start and over HTTP; who may load and who may name them."""

import asyncio
import base64
import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import requests
import yaml
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import load_file, save_file

from jaxinfer import AsyncEngine, SamplingParams
from jaxinfer.embedding_files import EmbeddingConfig
from jaxinfer.server.app import make_app
from jaxinfer.server.auth import ADMIN_KEY, Keys, read_admin_keys
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.run import run_service
from tests.server.adapter_folders import make_adapter, write_adapter
from tests.server.asgi import Client
from tests.server.conftest import OPTIONS, tiny_model, until
from tests.server.services import service_of
from tests.server.sockets import served

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LOAD, UNLOAD, INFO = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/server_info"
ADMIN_ROUTES = (("POST", LOAD), ("POST", UNLOAD), ("GET", INFO), ("POST", "/pause?mode=keep"), ("POST", "/resume"))
KEYS = {"first-secret-key": "alice", "second-secret-key": "bob"}
ADMIN = {"the-admins-secret": "root"}
ALICE, BOB = (f"Bearer {key}" for key in KEYS)
ROOT = "Bearer the-admins-secret"
SAY = [{"role": "user", "content": "read a file"}]
ASK = {"prompt": "def read_lines(path):", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def run(coroutine):
    return asyncio.run(coroutine)


@pytest.fixture(scope="module")
def engine():
    adapters = {"first": make_adapter(1), "second": make_adapter(2)}
    engine = AsyncEngine(tiny_model(), adapters=adapters, max_adapter_rank=8, **OPTIONS)
    yield engine
    run(engine.close())


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "root"
    write_adapter(folder / "third", 3)
    write_adapter(folder / "deep" / "fourth", 4)
    return folder


@pytest.fixture
def make(engine, root):
    """An application, with the routes of administrators unless told otherwise; what was loaded is unloaded."""

    def make(keys=KEYS, admin=ADMIN, **options):
        options = {"adapter_routes": True, "adapter_roots": [str(root)], **options}
        service = service_of(engine, **options)
        return make_app(service, None if keys is None else Keys(keys), None if admin is None else Keys(admin))

    yield make
    engine.resume()
    for name in set(engine.llm.adapters) - {"first", "second"}:
        engine.llm.unload_adapter(name)


async def ask(client, model=None, **more):
    answer = await client.post(COMPLETIONS, {**ASK, "model": model, "return_token_ids": True}, **more)
    return answer.json["choices"][0]["token_ids"] if answer.status == 200 else answer


async def offline(engine, adapter):
    found = []
    async for delta in engine.generate(ASK["prompt"], GREEDY, adapter=adapter):
        found += delta.token_ids
    return found


# As models of requests.


@pytest.mark.slow
def test_an_adapters_name_is_a_model(engine, make):
    async def check():
        client = Client(make(keys=None))
        expected = {name: await offline(engine, name) for name in (None, "first", "second")}
        assert len({tuple(ids) for ids in expected.values()}) == 3
        for name, ids in expected.items():
            assert await ask(client, name) == ids
        answer = (await client.post(COMPLETIONS, {**ASK, "model": "first"})).json
        base = (await client.post(COMPLETIONS, {**ASK, "model": "tiny"})).json
        assert (answer["model"], base["model"]) == ("first", "tiny")
        assert answer["system_fingerprint"] != base["system_fingerprint"]
        assert answer["choices"][0]["text"] == engine.llm.tokenizer.decode(expected["first"])

    run(check())


BODIES = {
    CHAT: {"messages": SAY, "max_tokens": 6, "temperature": 0},
    COMPLETIONS: ASK,
    "/v1/responses": {"input": "read a file", "max_output_tokens": 6, "temperature": 0},
    "/v1/messages": {"messages": SAY, "max_tokens": 6, "temperature": 0},
    "/api/chat": {"messages": SAY, "stream": False, "options": {"num_predict": 6, "temperature": 0}},
    "/api/generate": {"prompt": "read a file", "stream": False, "options": {"num_predict": 6, "temperature": 0}},
    "/v1/embeddings": {"input": "read a file"},
    "/api/embed": {"input": "read a file"},
    "/v1/score": {"text_1": "read", "text_2": ["a file", "write"]},
    "/v1/rerank": {"query": "read", "documents": ["a file", "write"]},
}
_CHANGES = ("id", "created", "created_at", "model", "system_fingerprint", "seed")


def content(value):
    """An answer without what differs between equal ones."""
    if isinstance(value, dict):
        return {name: content(part) for name, part in value.items() if name not in _CHANGES and "duration" not in name}
    return [content(part) for part in value] if isinstance(value, list) else value


@pytest.mark.slow
def test_every_route_takes_the_name_of_an_adapter(engine, make, monkeypatch):
    monkeypatch.setattr(engine.llm.embedder, "config", EmbeddingConfig("last"))

    async def check():
        client = Client(make(keys=None))
        for path, body in BODIES.items():
            answers = [(await client.post(path, {**body, "model": name})) for name in ("tiny", "first", "second")]
            assert [answer.status for answer in answers] == [200] * 3, (path, answers[1].body)
            assert len({json.dumps(content(answer.json)) for answer in answers}) == 3, path
            assert "first" in answers[1].body.decode(), path
            unknown = await client.post(path, {**body, "model": "firs"})
            assert unknown.status == 404, path
            assert "is not served here; served are 'tiny'" in unknown.body.decode()
        for path in ("/tokenize", "/v1/messages/count_tokens"):
            body = {"messages": SAY}
            assert (await client.post(path, {**body, "model": "first"})).status == 200
        assert (await client.get("/tokenizer_info?model=first")).status == 200
        assert (await client.post("/api/chat", {**BODIES["/api/chat"], "model": "first:latest"})).status == 200

    run(check())


def test_streams_are_those_of_the_adapter_and_are_resumed(engine, make):
    async def check():
        client = Client(make(keys=None))
        body = {**ASK, "model": "first", "return_token_ids": True}
        events = [event for event in await client.stream(COMPLETIONS, body) if event.data]
        each = [event.data["choices"][0].get("token_ids", []) for event in events]
        assert [token for ids in each for token in ids] == await offline(engine, "first")
        assert {event.data["model"] for event in events} == {"first"}
        rest = await client.stream(COMPLETIONS, body, last_event_id=events[1].id)
        more = [token for event in rest if event.data for token in event.data["choices"][0].get("token_ids", ())]
        assert more == [token for ids in each[2:] for token in ids]
        # Another adapter under the same name gives another answer, so that no stream of it goes on.
        former = engine.llm.adapters["first"]
        engine.llm.load_adapter("first", make_adapter(7), replace=True)
        try:
            answer = await client.post(COMPLETIONS, {**body, "stream": True}, last_event_id=events[1].id)
            assert (answer.status, answer.error["code"]) == (409, "resume_differs")
        finally:
            engine.llm.load_adapter("first", make_adapter(1), replace=True)
        assert engine.llm.adapters["first"].fingerprint == former.fingerprint

    run(check())


def test_lists_of_models_have_adapters_after_their_base(make):
    async def check():
        client = Client(make(keys=None))
        base, *others = (await client.get("/v1/models")).json["data"]
        assert (base["id"], base["max_model_len"]) == ("tiny", 256)
        assert "parent" not in base
        assert [(one["id"], one["object"], one["parent"]) for one in others] == [
            ("first", "model", "tiny"),
            ("second", "model", "tiny"),
        ]
        assert (await client.get("/v1/models/first")).json == others[0]
        assert (await client.get("/v1/models/firs")).status == 404
        tags = (await client.get("/api/tags")).json["models"]
        assert [(one["name"], one["details"]["parent_model"]) for one in tags] == [
            ("tiny", ""),
            ("first", "tiny"),
            ("second", "tiny"),
        ]
        shown = await client.post("/api/show", {"model": "first"})
        assert shown.json["details"]["parent_model"] == "tiny"

    run(check())


def test_an_adapter_with_the_name_of_the_model_is_refused_at_the_start(engine):
    with pytest.raises(ValueError, match="'first' would have a name of the model itself"):
        service_of(engine, "first")


# Loading and unloading.


def test_an_adapter_is_loaded_named_and_unloaded(engine, make, root):
    async def check():
        client = Client(make(), authorization=ROOT)
        assert (await ask(client, "third")).status == 404
        answer = await client.post(
            LOAD, {"lora_name": "third", "lora_path": str(root / "third"), "load_inplace": False}
        )
        assert (answer.status, answer.body) == (200, b"Success: LoRA adapter 'third' added successfully.")
        assert answer.headers["content-type"].startswith("text/plain")
        ids = await ask(client, "third")
        assert ids == await offline(engine, "third")
        assert engine.llm.adapters["third"].fingerprint == make_adapter(3).fingerprint
        (entry,) = [one for one in (await client.get("/v1/models")).json["data"] if one["id"] == "third"]
        assert (entry["parent"], entry["root"]) == ("tiny", "third")

        body = {"lora_name": "third", "lora_path": "deep/fourth"}
        taken = await client.post(LOAD, body)
        assert (taken.status, taken.error["param"]) == (400, "lora_name")
        assert await ask(client, "third") == ids
        assert (await client.post(LOAD, {**body, "load_inplace": True, "is_3d_lora_weight": False})).status == 200
        assert await ask(client, "third") == await offline(engine, "third") != ids

        gone = await client.post(UNLOAD, {"lora_name": "third", "lora_int_id": None})
        assert (gone.status, gone.body) == (200, b"Success: LoRA adapter 'third' removed successfully.")
        assert (await ask(client, "third")).status == 404
        assert (await client.post(UNLOAD, {"lora_name": "third"})).status == 404
        wrong = await client.post(UNLOAD, {"lora_name": "first", "lora_int_id": 1})
        assert (wrong.status, wrong.error["param"]) == (400, "lora_int_id")

    run(check())


def test_names_that_no_adapter_may_have(make):
    async def check():
        client = Client(make(), authorization=ROOT)
        for name in ("tiny", "", "a,b", " a", "a\n", "x" * 201):
            answer = await client.post(LOAD, {"lora_name": name, "lora_path": "third"})
            assert (answer.status, answer.error["param"]) == (400, "lora_name"), name
        for body in ({"lora_name": "x"}, {"lora_path": "third"}, {"lora_name": "x", "lora_path": "third", "hub": "y"}):
            assert (await client.post(LOAD, body)).status == 400

    run(check())


def test_a_running_answer_goes_on_with_the_adapter_that_is_unloaded(engine, make):
    async def check():
        client = Client(make(), authorization=ROOT)
        await client.post(LOAD, {"lora_name": "third", "lora_path": "third"})
        body = {**ASK, "model": "third", "max_tokens": 60, "return_token_ids": True}
        expected = (await client.post(COMPLETIONS, body)).json["choices"][0]["token_ids"]
        exchange = client.send("POST", COMPLETIONS, {**body, "stream": True})
        assert (await exchange.start())[0] == 200
        events = exchange.events()
        first = await anext(events)
        assert (await client.post(UNLOAD, {"lora_name": "third"})).status == 200
        assert (await client.post(LOAD, {"lora_name": "third", "lora_path": "deep/fourth"})).status == 200
        ids = [*first.data["choices"][0]["token_ids"]]
        async for event in events:
            ids += event.data["choices"][0].get("token_ids", ()) if event.data else ()
        assert ids == expected

    run(check())


def test_a_request_has_the_adapter_that_its_key_may_name(engine, make, monkeypatch):
    """Also if another one is loaded under its name, for other keys, after the name was looked up."""
    prepare = engine.llm.prepare

    async def check():
        client = Client(make())
        body = {"lora_name": "third", "lora_path": "third", "keys": ["alice"]}
        await client.post(LOAD, body, authorization=ROOT)
        expected, loop = await ask(client, "third", authorization=ALICE), asyncio.get_running_loop()
        other = {"lora_name": "third", "lora_path": "deep/fourth", "load_inplace": True, "keys": ["bob"]}

        def late(*arguments, **options):
            monkeypatch.setattr(engine.llm, "prepare", prepare)
            replacing = client.post(LOAD, other, authorization=ROOT)
            assert asyncio.run_coroutine_threadsafe(replacing, loop).result(30).status == 200
            return prepare(*arguments, **options)

        monkeypatch.setattr(engine.llm, "prepare", late)
        assert await ask(client, "third", authorization=ALICE) == expected
        assert (await ask(client, "third", authorization=ALICE)).status == 404
        assert await ask(client, "third", authorization=BOB) != expected

    run(check())


def test_a_load_blocks_neither_the_loop_nor_the_engine_and_ends_without_its_client(engine, make, monkeypatch):
    begun, may_end = threading.Event(), threading.Event()
    load = engine.llm.load_adapter

    def slow(*arguments, **options):
        begun.set()
        assert may_end.wait(30)
        return load(*arguments, **options)

    monkeypatch.setattr(engine.llm, "load_adapter", slow)

    async def check():
        client = Client(make(), authorization=ROOT)
        exchange = client.send("POST", LOAD, {"lora_name": "third", "lora_path": "third", "keys": ["bob"]})
        await asyncio.to_thread(begun.wait, 30)
        assert len(await ask(client)) == 8
        assert (await ask(client, "third")).status == 404
        exchange.task.cancel()
        may_end.set()
        await until(lambda: "third" in engine.llm.adapters)
        await asyncio.sleep(0.05)
        assert (await ask(client, "third", authorization=ALICE)).status == 404
        assert len(await ask(client, "third", authorization=BOB)) == 8

    run(check())


def test_an_adapter_in_place_of_another_answers_when_it_is_complete(engine, make, monkeypatch):
    load, seen = engine.llm.load_adapter, []

    async def check():
        client = Client(make(), authorization=ROOT)
        await client.post(LOAD, {"lora_name": "third", "lora_path": "third"})
        before, loop = await ask(client, "third"), asyncio.get_running_loop()

        def published(*arguments, **options):
            loaded = load(*arguments, **options)
            # The registry has it, and the server does not know yet whose it is.
            seen.append(asyncio.run_coroutine_threadsafe(ask(client, "third"), loop).result(30))
            return loaded

        monkeypatch.setattr(engine.llm, "load_adapter", published)
        body = {"lora_name": "third", "lora_path": "deep/fourth", "load_inplace": True, "keys": ["alice"]}
        assert (await client.post(LOAD, body)).status == 200
        assert seen == [before]
        assert (await ask(client, "third", authorization=BOB)).status == 404

    run(check())


def test_an_adapter_that_prompts_invoke(make, root):
    write_adapter(root / "invoked", 9, invocation_tokens=(40, 41))

    async def check():
        client = Client(make(), authorization=ROOT)
        assert (await client.post(LOAD, {"lora_name": "x", "lora_path": "invoked"})).status == 200
        for prompt, is_invoked in (([5, 6, 40, 41, 7], True), ([5, 6, 40, 7], False)):
            answers = [
                (
                    await client.post(COMPLETIONS, {**ASK, "prompt": prompt, "model": name, "return_token_ids": True})
                ).json
                for name in ("tiny", "x")
            ]
            base, own = (answer["choices"][0]["token_ids"] for answer in answers)
            assert (base != own) == is_invoked

    run(check())


# Who may.


def test_without_the_flag_there_are_no_such_routes(make):
    async def check():
        for keys, headers in ((KEYS, {"authorization": ALICE}), (None, {})):
            client = Client(make(keys, None, adapter_routes=False, adapter_roots=None), **headers)
            for method, path in ADMIN_ROUTES:
                assert (await client.call(method, path, {} if method == "POST" else None)).status == 404
            assert "/server_info" not in (await client.get("/openapi.json")).json["paths"]

    run(check())


def test_the_routes_need_an_admin_key(engine, make):
    async def check():
        body = {"lora_name": "third", "lora_path": "third"}
        for keys in (KEYS, None):
            app = make(keys)
            for method, path in ADMIN_ROUTES:
                given = body if method == "POST" else None
                assert (await Client(app).call(method, path, given)).status == 401
                assert (await Client(app, authorization="Bearer wrong-key").call(method, path, given)).status == 401
                known = await Client(app, authorization=ALICE).call(method, path, given)
                assert known.status == (401 if keys is None else 403)
                # Nothing of a body is read before.
                assert (await Client(app).call(method, path, body=b"{", content_type="x/y")).status == 401
        assert "third" not in engine.llm.adapters
        assert not engine.is_paused
        for way in ({"authorization": ROOT}, {"x_api_key": "the-admins-secret"}):
            assert (await Client(make()).get(INFO, **way)).status == 200

    run(check())


def test_an_admin_key_is_taken_from_a_url_but_not_from_a_browser(make):
    basic = "Basic " + base64.b64encode(b"any:the-admins-secret").decode()
    page = {"origin": "http://evil.example"}, {"referer": "http://evil.example/"}, {"sec_fetch_site": "cross-site"}

    async def check():
        client = Client(make(), authorization=basic)
        assert (await client.get(INFO)).status == 200
        for headers in page:
            assert (await client.post("/pause?mode=keep", **headers)).status == 401
        for wrong in ("Basic", "Basic !", "Basic " + base64.b64encode(b"the-admins-secret").decode()):
            assert (await Client(make(), authorization=wrong).get(INFO)).status == 401
        both = await client.get(INFO, x_api_key="first-secret-key")
        assert both.status == 403

    run(check())


def test_an_admin_key_is_none_of_the_others(make, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="the admin key alice2 is an API key too"):
        make(admin={"first-secret-key": "alice2"})
    with pytest.raises(ValueError, match="both named alice"):
        make(admin={"another-secret-key": "alice"})
    path = tmp_path / "admins"
    path.write_text("the-admins-secret\n")
    path.chmod(0o600)
    assert read_admin_keys(path, {}).name_of(b"the-admins-secret") == "admin-1"
    assert read_admin_keys(None, {ADMIN_KEY: "the-admins-secret"}).name_of(b"the-admins-secret") == "admin-1"
    for value in ("", "short", "two words long", "späte-schlüssel"):
        with pytest.raises(ValueError, match=ADMIN_KEY):
            read_admin_keys(None, {ADMIN_KEY: value})


def test_a_server_does_not_start_with_an_admin_key_that_is_an_api_key(root, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("first-secret-key alice\n")
    keys.chmod(0o600)
    given = {"adapter_routes": True, "adapter_roots": [str(root)], "api_keys": keys, "admin_keys": keys, "port": 0}
    with pytest.raises(ValueError, match="is an API key too"):
        run_service(service_of(None, **given), on_listening=lambda url: pytest.fail("it listens"))


def test_options_that_do_not_fit(tmp_path):
    with pytest.raises(ValueError, match="adapter_routes needs adapter_roots"):
        ServerOptions(adapter_routes=True)
    for options in ({"adapter_roots": ["x"]}, {"admin_keys": "x"}):
        with pytest.raises(ValueError, match="is for adapter_routes"):
            ServerOptions(**options)
    with pytest.raises(ValueError, match="nothing is no folder"):
        service_of(None, adapter_routes=True, adapter_roots=[str(tmp_path / "nothing")])


def test_adapters_belong_to_the_keys_that_their_load_names(make):
    async def seen(client, key):
        models = (await client.get("/v1/models", authorization=key)).json["data"]
        tags = (await client.get("/api/tags", authorization=key)).json["models"]
        assert [one["name"] for one in tags] == [one["id"] for one in models]
        return "third" in [one["id"] for one in models]

    async def check():
        client = Client(make())
        body = {"lora_name": "third", "lora_path": "third", "keys": ["alice"]}
        assert (await client.post(LOAD, body, authorization=ROOT)).status == 200
        assert [await seen(client, key) for key in (ALICE, BOB, ROOT)] == [True, False, True]
        unknown = (await ask(client, "nothing", authorization=BOB)).body.replace(b"nothing", b"third")
        assert len(await ask(client, "third", authorization=ALICE)) == 8
        assert len(await ask(client, "third", authorization=ROOT)) == 8
        for path, fields in BODIES.items():
            answer = await client.post(path, {**fields, "model": "third"}, authorization=BOB)
            assert answer.status == 404, path
            if path == COMPLETIONS:
                assert answer.body == unknown
        for path in ("/v1/models/third", "/tokenizer_info?model=third"):
            assert (await client.get(path, authorization=BOB)).status == 404
        assert (await client.post("/api/show", {"model": "third"}, authorization=BOB)).status == 404
        # In place of it, one without keys is not for all of a sudden.
        again = {"lora_name": "third", "lora_path": "deep/fourth", "load_inplace": True}
        assert (await client.post(LOAD, again, authorization=ROOT)).status == 200
        assert [await seen(client, key) for key in (ALICE, BOB)] == [True, False]
        assert (await client.post(LOAD, {**again, "keys": ["alice", "bob"]}, authorization=ROOT)).status == 200
        assert [await seen(client, key) for key in (ALICE, BOB)] == [True, True]
        for keys, told in ((["alice", "carol"], "'carol'"), ([], "keys is empty"), ("alice", "array")):
            answer = await client.post(LOAD, {**again, "keys": keys}, authorization=ROOT)
            assert answer.status == 400
            assert told in answer.error["message"]

    run(check())


# Folders.


def test_folders_outside_of_the_roots_are_not_read(engine, make, root, tmp_path):
    outside = write_adapter(tmp_path / "outside", 5)
    (root / "link").symlink_to(outside)
    (root / "inner").symlink_to(root / "third")
    (root / "parts").mkdir()
    for name in os.listdir(outside):
        (root / "parts" / name).symlink_to(outside / name)
    (root / "sibling").mkdir()
    shutil.copytree(outside, tmp_path / "root-2")

    async def check():
        client = Client(make(), authorization=ROOT)
        hidden = (
            str(outside),
            "link",
            str(root / "link"),
            "../outside",
            "third/../../outside",
            str(tmp_path / "root-2"),
        )
        absent = ("nothing", str(tmp_path / "nothing"), "user/adapter", "~", "third\0", "x" * 5000, "", ".", str(root))
        for path in (*hidden, *absent, "third/../third", "third/adapter_config.json"):
            answer = await client.post(LOAD, {"lora_name": "x", "lora_path": path})
            assert (answer.status, answer.error["param"]) == (400, "lora_path"), path
            assert "is no folder below --adapter-root" in answer.error["message"]
        answer = await client.post(LOAD, {"lora_name": "x", "lora_path": "parts"})
        assert answer.status == 400
        assert "is a link out of its folder" in answer.error["message"]
        assert set(engine.llm.adapters) == {"first", "second"}
        for name, path in (("a", "inner"), ("b", str(root / "inner")), ("c", "deep/fourth"), ("d", f"{root}/third/")):
            assert (await client.post(LOAD, {"lora_name": name, "lora_path": path})).status == 200

    run(check())


def test_the_first_root_that_has_a_folder_is_taken(engine, make, tmp_path, root):
    write_adapter(tmp_path / "other" / "third", 6)
    write_adapter(tmp_path / "other" / "sixth", 6)

    async def check():
        client = Client(make(adapter_roots=[str(root), str(tmp_path / "other")]), authorization=ROOT)
        for name in ("third", "sixth"):
            assert (await client.post(LOAD, {"lora_name": name, "lora_path": name})).status == 200
        found = [engine.llm.adapters[name].fingerprint for name in ("third", "sixth")]
        assert found == [make_adapter(3).fingerprint, make_adapter(6).fingerprint]

    run(check())


def _pickled(folder):
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04.")


def _not_finite(folder):
    tensors = load_file(folder / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = np.nan
    save_file(tensors, folder / "adapter_model.safetensors")


def _huge(folder):
    with (folder / "more.bin").open("wb") as file:
        file.truncate(3 << 20)  # of no bytes on the disk


def _cut(folder):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def _pipe(folder):
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")


def _config(**changes):
    def change(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


HOSTILE = {
    "adapter_model.bin: is not opened": _pickled,
    "are NaN or infinite": _not_finite,
    "--adapter-max-mib 2 allows": _huge,
    "adapter_model.safetensors": _cut,
    "is no file": _pipe,
    "use_bdlora": _config(use_bdlora={"nblocks": 2}),
    "has no adapter_config.json": lambda folder: (folder / "adapter_config.json").unlink(),
    "is not JSON": lambda folder: (folder / "adapter_config.json").write_text("{" * 100),
}


@pytest.mark.parametrize("told", HOSTILE)
def test_hostile_folders_give_one_error_and_load_nothing(engine, make, root, told):
    HOSTILE[told](root / "third")

    async def check():
        client = Client(make(adapter_max_mib=2), authorization=ROOT)
        for path in ("third", str(root / "third")):
            answer = await client.post(LOAD, {"lora_name": "x", "lora_path": path})
            assert (answer.status, answer.error["param"]) == (400, "lora_path"), answer.body
            assert told in answer.error["message"]
            if path == "third":
                assert str(root) not in answer.error["message"]
        assert set(engine.llm.adapters) == {"first", "second"}
        assert (await ask(client, "x")).status == 404
        assert await ask(client) == await offline(engine, None)
        # One that was there goes on.
        assert (await client.post(LOAD, {"lora_name": "y", "lora_path": "deep/fourth"})).status == 200
        ids = await ask(client, "y")
        again = {"lora_name": "y", "lora_path": "third", "load_inplace": True}
        assert (await client.post(LOAD, again)).status == 400
        assert await ask(client, "y") == ids

    run(check())


def test_adapters_for_which_there_is_no_room(engine, make, root):
    write_adapter(root / "large", 8, rank=9)

    async def check():
        client = Client(make(), authorization=ROOT)
        answer = await client.post(LOAD, {"lora_name": "x", "lora_path": "large"})
        assert answer.status == 400
        assert "its rank is 9, and there is room for 8" in answer.error["message"]

    run(check())


def test_no_more_adapters_are_loaded_than_may_be(engine, make, monkeypatch):
    async def check():
        client = Client(make(), authorization=ROOT)
        monkeypatch.setattr(engine.llm.adapters, "max_loaded", 2)
        refused = await client.post(LOAD, {"lora_name": "third", "lora_path": "third"})
        told = "adapter 'third': 2 adapters are loaded, and max_loaded_adapters=2 may be; unload one first, or raise it"
        assert (refused.status, refused.json["error"]["message"]) == (400, told)
        assert (refused.json["error"]["param"], refused.json["error"]["code"]) == ("lora_name", "too_many_adapters")
        monkeypatch.setattr(engine.llm.adapters, "max_loaded", 3)
        assert (await client.post(LOAD, {"lora_name": "third", "lora_path": "third"})).status == 200

    run(check())


def test_a_template_in_a_folder_is_not_rendered(engine, make, root):
    (root / "third" / "tokenizer.json").write_text(engine.llm.tokenizer._files.tokenizer_json)
    (root / "third" / "chat_template.jinja").write_text("{{ 'rendered' * 1000 }}")
    (root / "third" / "tokenizer_config.json").write_text('{"chat_template": "{{ 1 / 0 }}"}')

    async def check():
        client = Client(make(), authorization=ROOT)
        await client.post(LOAD, {"lora_name": "third", "lora_path": "third"})
        counts = [(await client.post("/tokenize", {"messages": SAY, "model": name})).json for name in ("tiny", "third")]
        assert counts[0] == counts[1]
        assert (await client.post(CHAT, {**BODIES[CHAT], "model": "third"})).status == 200

    run(check())


# Metrics, the log, and other routes.


def label(text, name):
    (line,) = [line for line in text.decode().splitlines() if line.startswith("jaxinfer_lora_requests_info{")]
    return line.partition(f'{name}="')[2].partition('"')[0], float(line.rpartition(" ")[2])


def test_an_endpoint_picker_finds_its_metrics_without_a_key(make):
    picker = yaml.safe_load((Path(__file__).parents[2] / "deploy" / "chart" / "picker.yaml").read_text())
    (parameters,) = [one["parameters"] for one in picker["plugins"] if one["type"] == "core-metrics-extractor"]
    (specs,) = parameters["engineConfigs"]

    async def check():
        client = Client(make(open_metrics=True))
        text = (await client.get("/metrics")).body.decode()
        samples = {one.name: one.labels for family in text_string_to_metric_families(text) for one in family.samples}
        names = {name for key, name in specs.items() if key != "name"}
        assert len(names) == 5
        assert names <= samples.keys()
        assert {"block_size", "num_gpu_blocks"} <= samples[specs["cacheInfoSpec"]].keys()
        loras = {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
        assert loras <= samples[specs["loraSpec"]].keys()

    run(check())


def test_metrics_name_adapters_that_run_and_wait(engine, make):
    async def check():
        client = Client(make())
        body = {"lora_name": "third", "lora_path": "third", "keys": ["alice"]}
        await client.post(LOAD, body, authorization=ROOT)
        assert label((await client.get("/metrics", authorization=ALICE)).body, "running_lora_adapters")[0] == ""
        long = {**ASK, "max_tokens": 200, "stream": True}
        started = []
        for name in ("first", "third", "second"):
            started.append(client.send("POST", COMPLETIONS, {**long, "model": name}, authorization=ALICE))
            if name != "second":  # its slots are taken then, so that the last one waits
                await started[-1].start()
                await anext(started[-1].events())
        scheduler = engine.llm.engine.scheduler
        await until(lambda: any(getattr(one.request.adapter, "name", "") == "second" for one in scheduler.waiting))
        shown = {}
        for key in (ALICE, BOB, ROOT):
            text = (await client.get("/metrics", authorization=key)).body
            shown[key] = [
                label(text, name)[0] for name in ("running_lora_adapters", "waiting_lora_adapters", "max_lora")
            ]
            assert label(text, "max_lora")[1] > 1.7e9
        assert shown == {ALICE: ["first,third", "second", "2"], BOB: ["first", "second", "2"], ROOT: shown[ALICE]}
        for exchange in started:
            exchange.leave()
        await asyncio.gather(*(exchange.task for exchange in started), return_exceptions=True)
        text = (await client.get("/metrics", authorization=ALICE)).body.decode()
        assert 'jaxinfer_adapters_loaded{model_name="tiny"} 3.0' in text
        host_bytes = sum(adapter.host.num_bytes for adapter in engine.llm.adapters.values())
        assert f'jaxinfer_adapter_host_bytes{{model_name="tiny"}} {float(host_bytes)}' in text
        assert 'jaxinfer_adapter_loads_total{model_name="tiny"} 3.0' in text
        assert f'jaxinfer_adapter_moves_total{{model_name="tiny"}} {scheduler.adapters.num_moved}.0' in text
        assert "third" not in (await client.get("/metrics", authorization=BOB)).body.decode()

    run(check())


def test_the_log_names_the_adapter(make, caplog):
    caplog.set_level("INFO", logger="jaxinfer.server.requests")

    async def check():
        await ask(Client(make(keys=None)), "first")

    run(check())
    line = json.loads(caplog.records[-1].getMessage())
    assert (line["model"], line["adapter"]) == ("tiny", "first")


def test_the_routes_are_described(make):
    async def check():
        paths = (await Client(make(keys=None)).get("/openapi.json")).json
        assert paths["paths"][LOAD]["post"]["security"] == [{"key": []}]
        assert "text/plain" in paths["paths"][LOAD]["post"]["responses"]["200"]["content"]
        assert "security" not in paths["paths"][COMPLETIONS]["post"]
        assert "securitySchemes" in paths["components"]

    run(check())


def test_pausing_keeps_answers_as_they_are(engine, make):
    async def check():
        client = Client(make(), authorization=ROOT)
        for mode in ("", "?mode=abort", "?mode=wait"):
            answer = await client.post(f"/pause{mode}")
            assert (answer.status, answer.error["param"]) == (400, "mode")
        body = {**ASK, "max_tokens": 100, "return_token_ids": True}
        expected = (await client.post(COMPLETIONS, body)).json["choices"][0]["token_ids"]
        exchange = client.send("POST", COMPLETIONS, {**body, "stream": True})
        await exchange.start()
        events = exchange.events()
        ids = (await anext(events)).data["choices"][0]["token_ids"]
        assert (await client.post("/pause?mode=keep")).json == {"is_paused": True}
        assert (await client.get("/is_paused")).json == {"is_paused": True}
        other = asyncio.ensure_future(ask(client))
        await client.post(LOAD, {"lora_name": "third", "lora_path": "third"})
        running = engine.llm.engine.scheduler.running
        lengths = [len(one.tokens) for one in running]
        await asyncio.sleep(0.2)
        assert [len(one.tokens) for one in running] == lengths
        assert not other.done()
        assert (await client.post("/resume")).json == {"is_paused": False}
        async for event in events:
            ids += event.data["choices"][0].get("token_ids", ()) if event.data else ()
        assert ids == expected
        assert await other == expected[:8]

    run(check())


# Trainers.


def test_the_calls_of_trl(engine, root):
    """Those of `VLLMClient` and the rollout worker of TRL 1.16.0, in their order, over a socket with `requests`, which
    take the admin key in the server's URL. `tests/server/clients/use_trl.py` has the class itself."""
    options = {"adapter_routes": True, "adapter_roots": [str(root)]}
    with served(service_of(engine, **options), None, Keys(ADMIN)) as port:
        url = f"http://admin:the-admins-secret@127.0.0.1:{port}"
        assert requests.get(f"{url}/health", timeout=5).status_code == 200
        assert requests.get(f"{url}/v1/models", timeout=60).json()["data"][0]["max_model_len"] == 256
        answer = requests.get(f"{url}/server_info", params={"config_format": "json"}, timeout=60)
        info = answer.json()["vllm_config"]
        assert info["lora_config"] == {"max_loras": 2, "max_lora_rank": 8}
        assert info["parallel_config"]["data_parallel_size"] == 1
        assert info["model_config"]["dtype"] == "torch.float32"
        found = []
        for version in range(1, 5):
            name = f"policy-v{version}"
            assert requests.post(f"{url}/pause", params={"mode": "keep"}, timeout=60).status_code == 200
            write_adapter(root / name, 10 + version)
            body = {"lora_name": name, "lora_path": str(root / name), "load_inplace": False}
            assert requests.post(f"{url}/v1/load_lora_adapter", json=body, timeout=60).status_code == 200
            assert requests.post(f"{url}/v1/load_lora_adapter", json=body, timeout=60).status_code == 400
            assert requests.post(f"{url}/resume", timeout=60).status_code == 200
            if version > 2:
                stale = {"lora_name": f"policy-v{version - 2}"}
                assert requests.post(f"{url}/v1/unload_lora_adapter", json=stale, timeout=60).status_code == 200
                shutil.rmtree(root / stale["lora_name"])
            rollout = {
                "model": name,
                "prompt": [5, 6, 7],
                "max_tokens": 6,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": 0,
                "repetition_penalty": 1.0,
                "n": 1,
                "return_token_ids": True,
                "logprobs": 0,
                "seed": 2**63 - 1,
            }
            choice = requests.post(f"{url}/v1/completions", json=rollout, timeout=60).json()["choices"][0]
            assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) > 0
            found.append(tuple(choice["token_ids"]))
        assert len(set(found)) == 4
        assert set(engine.llm.adapters) == {"first", "second", "policy-v3", "policy-v4"}
        wrong = requests.get(f"http://127.0.0.1:{port}/server_info", timeout=60)
        assert wrong.status_code == 401
    for name in ("policy-v3", "policy-v4"):
        engine.llm.unload_adapter(name)


def test_a_server_without_room(tmp_path):
    """As vLLM without --enable-lora: lora_config is null, by which trainers see it."""

    async def check():
        async with AsyncEngine(tiny_model(), **OPTIONS) as engine:
            options = {"adapter_routes": True, "adapter_roots": [str(tmp_path)]}
            app = make_app(service_of(engine, **options), None, Keys(ADMIN))
            client = Client(app, authorization=ROOT)
            assert (await client.get(INFO)).json["vllm_config"]["lora_config"] is None
            write_adapter(tmp_path / "third", 3)
            answer = await client.post(LOAD, {"lora_name": "third", "lora_path": "third"})
            assert answer.status == 400
            assert "--max-adapters" in answer.error["message"]
            assert "lora_requests_info{" not in (await client.get("/metrics")).body.decode()
            assert (await client.get(f"{INFO}?config_format=text")).status == 400

    run(check())
