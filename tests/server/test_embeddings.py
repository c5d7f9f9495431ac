"""/v1/embeddings, /v1/score and /v1/rerank: the forms of their answers, and what they refuse."""

import asyncio
import base64

import msgspec
import numpy as np
import pytest

from jaxinfer.embedding_files import POOLINGS, EmbeddingConfig
from jaxinfer.openai import answers
from jaxinfer.server import options
from jaxinfer.server.app import make_app
from tests.server.asgi import Client
from tests.server.conftest import is_idle

TEXTS = ["def read(path):", "import os\n" * 20, "x"]


@pytest.fixture
def embeds(engine, monkeypatch):
    """The model as one that says how it embeds."""
    config = EmbeddingConfig("last", prompts={"query": "# find: "})
    monkeypatch.setattr(engine.llm.embedder, "config", config)


def post(client, *arguments):
    return asyncio.run(client.post(*arguments))


def check(answer, kind):
    assert answer.status == 200, answer.body
    msgspec.json.decode(answer.body, type=kind)
    return answer.json


def test_embeddings(client, engine, embeds):
    wanted = post(client, "/v1/embeddings", {"model": "tiny", "input": TEXTS})
    found = check(wanted, answers.Embeddings)
    vectors = np.array([one["embedding"] for one in found["data"]], np.float32)
    assert [one["index"] for one in found["data"]] == [0, 1, 2]
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    count = sum(len(engine.llm.tokenizer.encode(text)) for text in TEXTS)
    assert found["usage"] == {"prompt_tokens": count, "total_tokens": count}
    one = check(post(client, "/v1/embeddings", {"input": TEXTS[1], "encoding_format": "base64"}), answers.Embeddings)
    decoded = np.frombuffer(base64.b64decode(one["data"][0]["embedding"]), "<f4")
    assert np.abs(decoded - vectors[1]).max() <= 1e-5
    ids = engine.llm.tokenizer.encode(TEXTS[0])
    for given in (ids, [ids]):
        cut = post(client, "/v1/embeddings", {"input": given, "dimensions": 8}).json["data"]
        assert len(cut) == 1
        wanted = vectors[0, :8] / np.linalg.norm(vectors[0, :8])
        assert np.abs(np.array(cut[0]["embedding"]) - wanted).max() <= 1e-5
    assert is_idle(engine)


def test_score_and_rerank(client, engine, embeds):
    body = {"query": TEXTS[0], "documents": [*TEXTS, {"text": TEXTS[0]}]}
    found = check(post(client, "/v1/rerank", body), answers.Reranked)["results"]
    scores = [one["relevance_score"] for one in found]
    assert scores == sorted(scores, reverse=True)
    assert [one["document"]["text"] for one in found] == [[*TEXTS, TEXTS[0]][one["index"]] for one in found]
    top = check(post(client, "/rerank", {**body, "top_n": 1, "return_documents": False}), answers.Reranked)
    assert top["results"] == [{"index": found[0]["index"], "relevance_score": pytest.approx(scores[0], abs=1e-5)}]
    scored = check(post(client, "/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS}), answers.Scores)
    by_index = {one["index"]: one["relevance_score"] for one in found}
    assert [one["score"] for one in scored["data"]] == pytest.approx([by_index[i] for i in range(3)], abs=1e-5)
    pair = post(client, "/score", {"text_1": [TEXTS[0]], "text_2": [TEXTS[0]]}).json["data"]
    asked = engine.llm.embedder.config.prompts["query"]
    assert pair[0]["score"] < 1 or not asked  # the query has its prompt, the document has none
    assert is_idle(engine)


def test_no_vector_is_made_of_no_token(client, engine, embeds):
    """By other doors, and of what a text adds to its prompt."""
    empty = "is empty: it has no token to make a vector of"
    answers = [
        post(client, "/v1/rerank", {"query": "x", "documents": ["y", ""]}),
        post(client, "/v1/score", {"text_1": "x", "text_2": ""}),
    ]
    for answer, name in zip(answers, ("document 1", "document 0"), strict=True):
        assert (answer.status, answer.error["message"]) == (400, f"{name} {empty}")
    answer = post(client, "/api/embed", {"model": "tiny", "input": ["x", ""]})
    assert (answer.status, answer.json["error"]) == (400, f"input 1 {empty}")
    assert post(client, "/v1/embeddings", {"input": "", "prompt_name": "query"}).status == 200  # the prompt's tokens
    assert engine.llm.embedder.embed([]).result([]).shape == (0, 32)
    with pytest.raises(ValueError, match=f"text 0 {empty}"):
        engine.llm.embed("")
    assert is_idle(engine)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("route", "body", "status", "param", "message"),
    [
        ("/v1/embeddings", {"input": "x"}, 400, "input", "does not say how it embeds texts"),
        ("/v1/embeddings", {"input": ["x", "y" * 4000], "pooling": "last"}, 400, None, "input 1"),
        ("/v1/embeddings", {"input": ["x", 3], "pooling": "last"}, 400, "input", "input[1] must be a text"),
        ("/v1/embeddings", {"input": "", "pooling": "last"}, 400, "input", "input 0 is empty"),
        ("/v1/embeddings", {"input": ["x", ""], "pooling": "mean"}, 400, "input", "input 1 is empty"),
        ("/v1/embeddings", {"input": "", "pooling": "cls"}, 400, "input", "input 0 is empty"),
        ("/v1/embeddings", {"input": [], "pooling": "last"}, 400, "input", "input is empty"),
        ("/v1/rerank", {"query": "x", "documents": []}, 400, "documents", "documents is empty"),
        ("/v1/score", {"text_1": "x", "text_2": []}, 400, "text_2", "text_2 is empty"),
        ("/v1/score", {"text_1": [], "text_2": []}, 400, "text_2", "text_2 is empty"),
        ("/v1/completions", {"prompt": ["x", ""]}, 400, "prompt", "prompt 1 is empty"),
        ("/v1/responses", {"input": []}, 400, "input", "input is empty"),
        ("/v1/embeddings", {"input": "x", "pooling": "max"}, 400, "pooling", "Invalid enum value 'max'"),
        ("/v1/embeddings", {"input": "x", "pooling": "last", "dimensions": 99}, 400, "input", "dimensions=99 must be"),
        ("/v1/embeddings", {"input": "x", "model": "other"}, 404, "model", "is not served here"),
        ("/v1/embeddings", {"input": ["x"] * 2049, "pooling": "last"}, 400, "input", "2,049 texts, at most 2,048"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 5}, 400, "truncate_prompt_tokens", "must be -1"),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}, 400, "documents", "is no reranker of Qwen3-Reranker's kind"),
        ("/v1/rerank", {"query": "x", "documents": [3]}, 400, "documents[0]", ""),
        ("/v1/rerank", {"query": "x", "documents": [{"texts": "y"}]}, 400, "documents", "documents[0] must be a text"),
        ("/v1/score", {"text_1": ["x", "y"], "text_2": ["z"]}, 400, "text_2", "do not pair up"),
    ],
)
def test_refused(client, engine, route, body, status, param, message):
    answer = post(client, route, body)
    assert answer.status == status
    assert message in answer.error["message"]
    assert answer.error["param"] == param
    assert is_idle(engine)


def test_a_server_pools_as_it_is_told_where_a_request_is_silent(make_service, engine, monkeypatch):
    """For clients that cannot say how: OpenAI's and Ollama's."""

    def vectors(client, path="/v1/embeddings", **more):
        answer = post(client, path, {"model": "tiny", "input": TEXTS[:1], **more}).json
        return np.array(
            answer["embeddings"] if "embeddings" in answer else [answer["data"][0]["embedding"]], np.float32
        )

    silent = Client(make_app(make_service()))
    wanted = {kind: vectors(silent, pooling=kind) for kind in ("mean", "cls")}
    monkeypatch.setattr(engine.llm.embedder, "config", EmbeddingConfig("last"))
    wanted["last"] = vectors(silent)
    for config in (EmbeddingConfig("last"), None):
        monkeypatch.setattr(engine.llm.embedder, "config", config)
        client = Client(make_app(make_service(pooling="mean")))
        assert np.allclose(vectors(client), wanted["mean"], atol=1e-6)
        assert np.allclose(vectors(client, "/api/embed"), wanted["mean"], atol=1e-6)
        assert np.allclose(vectors(client, pooling="cls"), wanted["cls"], atol=1e-6)
        scored = post(client, "/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[0]}).json["data"]
        assert abs(scored[0]["score"] - 1) < 1e-6
    assert not np.allclose(wanted["mean"], wanted["last"], atol=1e-3)
    monkeypatch.setattr(engine.llm.embedder, "config", EmbeddingConfig("last", labels=(1, 2)))
    refused = post(client, "/v1/embeddings", {"input": TEXTS[:1]})
    assert "scores pairs of texts and does not pool" in refused.error["message"]
    make_service()  # the shared engine as it was


def test_poolings_are_those_of_embed():
    assert options.POOLINGS == POOLINGS
    with pytest.raises(ValueError, match="pooling='max' is none of last, mean, cls"):
        options.ServerOptions(pooling="max")  # type: ignore
