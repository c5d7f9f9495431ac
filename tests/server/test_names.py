"""Names of served models: given, or of the file or folder, and never where it lies."""

import asyncio
import logging

import pytest

from jaxinfer.server.app import make_app
from jaxinfer.server.catalogue import LocalModels
from jaxinfer.server.models import ModelSource
from jaxinfer.server.names import public_name, served_models, split_name
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.service import Service
from tests.cli.conftest import write_checkpoint
from tests.server.asgi import Client


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a folder, files, and one whose name has an equals sign."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXINFER_HOME", str(tmp_path / "home"))
    (tmp_path / "models" / "Qwen2.5-0.5B").mkdir(parents=True)
    for name in ("tiny.Q4_K_M.gguf", "large-00001-of-00003.gguf", "a=b.gguf"):
        (tmp_path / "models" / name).touch()
    (tmp_path / "demo").mkdir()
    (tmp_path / "link.gguf").symlink_to(tmp_path / "models" / "tiny.Q4_K_M.gguf")
    return tmp_path


def test_a_model_is_named_by_its_file_or_folder_or_as_it_is(folder):
    names = {
        "models/Qwen2.5-0.5B": "Qwen2.5-0.5B",
        "./models/Qwen2.5-0.5B/": "Qwen2.5-0.5B",
        f"{folder}/models/tiny.Q4_K_M.gguf": "tiny.Q4_K_M",
        "models/large-00001-of-00003.gguf": "large",
        "models/a=b.gguf": "a=b",
        "link.gguf": "link",
        "/srv/gone/model": "model",
        ".": folder.name,
        "gs://bucket/llama-3/": "llama-3",
        "s3://bucket": "bucket",
        "Qwen/Qwen3-8B": "Qwen/Qwen3-8B",
        "user/model:Q4_K_M@main": "user/model:Q4_K_M@main",
        "demo": "demo",  # the embedded model, not the folder
        "models": "models",
    }
    assert {model: public_name(model) for model in names} == names
    assert {model: split_name(model)[0] for model in names} == names


def test_a_name_is_given_before_an_equals_sign(folder):
    assert split_name("small=models/tiny.Q4_K_M.gguf") == ("small", "models/tiny.Q4_K_M.gguf")
    assert split_name("org/small=user/model") == ("org/small", "user/model")
    assert split_name("odd=models/a=b.gguf") == ("odd", "models/a=b.gguf")
    assert split_name("s3://bucket/a=b") == ("a=b", "s3://bucket/a=b")
    for wrong in ("=models", "small=", " a=models", "a\n=models", f"{'a' * 201}=models"):
        with pytest.raises(ValueError, match="is no NAME=MODEL"):
            split_name(wrong)


def test_one_name_stands_for_one_model(folder):
    assert served_models(["demo", "a=user/model", "demo"]) == {"demo": "demo", "a": "user/model"}
    with pytest.raises(ValueError, match=r"both be served as 'tiny': .*--model OTHER=\./b/tiny.gguf"):
        served_models(["./a/tiny.gguf", "./b/tiny.gguf"])
    with pytest.raises(ValueError, match="both be served as 'demo'"):
        served_models(["demo", "demo=user/model"])


def test_clients_are_told_the_name_in_place_of_the_path():
    source = ModelSource(("tiny",), "tiny", lambda _: None, paths=("models/x", "/srv/models/x"))  # type: ignore
    assert source.without_paths("/srv/models/x/config.json: no such file") == "tiny/config.json: no such file"
    assert source.without_paths("models/x has no head") == "tiny has no head"


BASE = {"max_seqs": 2, "max_model_len": 64, "prefill_chunk": 16, "page_size": 8}


def test_no_client_sees_a_path_of_the_server(tmp_path, caplog):
    """In lists, answers, metrics and errors, of a model that answers, one that breaks, and one that is alone."""
    given = {"tiny": str(write_checkpoint(tmp_path / "secret" / "tiny")), "mine": str(tmp_path / "secret" / "broken")}
    write_checkpoint(tmp_path / "secret" / "broken")
    (tmp_path / "secret" / "broken" / "config.json").write_text("{")
    options = ServerOptions(model_memory="1GiB", models=list(given), lazy=True)
    service = Service(options, None, LocalModels(given, BASE, options, compiled=set(given)))
    service.state = "ready"
    client = Client(make_app(service))

    async def ask():
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1, "temperature": 0}
        answers = [
            await client.post("/v1/completions", body),
            await client.post("/v1/embeddings", {"model": "tiny", "input": "a"}),
            await client.post("/v1/completions", {**body, "model": "mine"}),
            await client.post("/v1/completions", {**body, "model": given["tiny"]}),
            *[await client.post("/api/show", {"model": name}) for name in given],
            *[await client.get(path) for path in ("/v1/models", "/v1/models/mine", "/api/tags", "/api/ps", "/metrics")],
        ]
        await service.models.close()
        return answers

    with caplog.at_level(logging.INFO, "jaxinfer.server.requests"):
        answers = asyncio.run(ask())
    assert [answer.status for answer in answers] == [200, 400, 500, 404, 200, 400, *[200] * 5]
    assert answers[1].error["message"].startswith("tiny does not say how it embeds texts")
    assert "mine/config.json" in answers[2].error["message"]
    assert (
        answers[3].error["message"] == f"the model {given['tiny']!r:.80} is not served here; served are 'tiny', 'mine'"
    )
    answers.pop(3)  # which has what its client sent
    assert [answer.body for answer in answers if b"secret" in answer.body] == []
    logged = [record.message for record in caplog.records if record.name == "jaxinfer.server.requests"]
    assert logged
    assert [line for line in logged if "secret" in line] == []  # the server's own log says where a model failed
    assert {one["id"]: one["root"] for one in answers[5].json["data"]} == {"tiny": "tiny", "mine": "broken"}
