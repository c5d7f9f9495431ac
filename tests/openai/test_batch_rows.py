"""Rows of every endpoint of OpenAI in one file: their answers are the server's."""

import asyncio
import json

import pytest

from jaxinfer.server.app import make_app
from tests.server.asgi import Client

ASK = [{"role": "user", "content": "read a file"}]
ROWS = {
    "/v1/chat/completions": {"messages": ASK, "max_tokens": 5, "seed": 3},
    "/v1/completions": {"prompt": ["def a", [5, 6]], "max_tokens": 4, "seed": 3, "echo": True, "logprobs": 1},
    "/v1/responses": {"input": "read a file", "instructions": "Be short.", "max_output_tokens": 5, "seed": 3},
    "/v1/embeddings": {"input": ["one", "two texts", [5, 6]], "pooling": "mean", "dimensions": 8},
}
SCORED = {"prompt": "def a", "max_tokens": 0, "echo": True, "logprobs": 1, "seed": 3}
WRONG = [
    ("/v1/embeddings", {"input": []}, "input", "input is empty"),
    ("/v1/embeddings", {"input": "a", "dimensons": 3}, "dimensons", "did you mean 'dimensions'"),
    ("/v1/embeddings", {"input": "a", "pooling": "mean", "dimensions": 9999}, "input", "dimensions=9999 must be 1 to"),
    ("/v1/completions", {**SCORED, "min_tokens": -1}, "min_tokens", "got -1"),
    ("/v1/responses", {"input": [], "max_output_tokens": 3}, "input", "input is empty"),
    ("/v1/responses", {"input": "a", "tools": [{"name": "f"}]}, "tools", "tools[0].type must be a text"),
    ("/v1/responses", {"input": "a", "previous_response_id": "b"}, "previous_response_id", "nothing is stored"),
]


def timeless(body):
    """An answer without what tells it from an equal one."""
    left_out = ("id", "created", "created_at", "system_fingerprint", "model", "usage", "output")
    items = [{name: value for name, value in item.items() if name != "id"} for item in body.get("output", ())]
    return {**{name: value for name, value in body.items() if name not in left_out}, "output": items}


@pytest.fixture
def run(engine, tmp_path):
    """The records of a file of rows, by their ids."""

    def run(rows):
        lines = [json.dumps({"custom_id": name, "url": url, "body": body}) for name, (url, body) in rows.items()]
        (tmp_path / "in.jsonl").write_text("\n".join(lines))
        summary = engine.llm.generate_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl", use_tqdm=False)
        found = [tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"]
        records = [json.loads(line) for path in found if path.exists() for line in path.read_text().splitlines()]
        return summary, {record["custom_id"]: record["response"] for record in records}

    return run


@pytest.mark.slow
def test_rows_of_every_endpoint_are_answered_as_requests_are(run, make_service):
    rows = {url: (url, body) for url, body in ROWS.items()} | {"scored": ("/v1/completions", SCORED)}
    summary, answers = run(rows)
    assert (summary.ok, summary.failed) == (5, 0)
    client = Client(make_app(make_service()))

    async def ask():
        return {name: (await client.post(*row)).json for name, row in rows.items()}

    for name, expected in asyncio.run(ask()).items():
        assert answers[name]["status_code"] == 200
        assert timeless(answers[name]["body"]) == timeless(expected), name
        counts = answers[name]["body"]["usage"]
        assert {one: expected["usage"][one] for one in counts if "details" not in one} == {
            one: value for one, value in counts.items() if "details" not in one
        }
    assert answers["scored"]["body"]["choices"][0]["finish_reason"] == "length"
    assert answers["/v1/embeddings"]["body"]["data"][2]["index"] == 2


@pytest.mark.slow
def test_rows_of_every_endpoint_name_their_weights(engine, tmp_path):
    lines = [json.dumps({"custom_id": url, "url": url, "body": body}) for url, body in ROWS.items()]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    engine.llm.generate_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl", use_tqdm=False)
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    named = {"version": engine.llm.weights_version, "fingerprint": engine.llm.fingerprint()}
    assert [record["weights"] for record in records] == [named] * len(ROWS)


@pytest.mark.slow
def test_tools_that_only_openai_has_are_ignored_with_a_warning_as_by_the_server(run, make_service, caplog):
    body = ROWS["/v1/responses"] | {"tools": [{"type": "web_search"}]}
    _, answers = run({name: ("/v1/responses", one) for name, one in {"a": ROWS["/v1/responses"], "b": body}.items()})
    assert answers["a"]["body"]["output"][0]["content"] == answers["b"]["body"]["output"][0]["content"]
    asyncio.run(Client(make_app(make_service())).post("/v1/responses", body))
    found = [record.getMessage() for record in caplog.records if "web_search" in record.getMessage()]
    assert found == [
        "line 2: tools of type web_search are not supported: they are ignored here, and in later rows",
        "/v1/responses: 'tools of type web_search' is not known and ignored",
    ]


@pytest.mark.slow
def test_what_cannot_be_served_is_an_error_line_with_its_field(run):
    summary, answers = run({str(number): one[:2] for number, one in enumerate(WRONG)})
    assert summary.failed == len(WRONG)
    for number, (_, _, field, sentence) in enumerate(WRONG):
        error = answers[str(number)]["body"]["error"]
        assert (answers[str(number)]["status_code"], error["param"]) == (400, field)
        assert sentence in error["message"]
