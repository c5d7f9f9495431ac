"""`jaxinfer bench load --url` against a server of this process, over a socket."""

import asyncio
import contextlib
import json
import socket
import threading

import pytest
import uvicorn
from typer.testing import CliRunner

from jaxinfer.cli.main import app
from jaxinfer.measure.bench.remote import RemoteRequestError, Server
from jaxinfer.measure.bench.runs import RunOptions
from jaxinfer.measure.bench.workload import WorkloadRequest
from jaxinfer.server.app import make_app
from jaxinfer.server.auth import Keys

KEY = "first-secret-key"


@contextlib.contextmanager
def listening(application):
    """The application at a free port; yields its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(application, log_config=None, access_log=False, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", "load", "--answer-tokens", "6", "--prompt-tokens", "4:8", *arguments])


def test_load_on_a_server_is_measured(make_service, tmp_path):
    file = tmp_path / "load.json"
    with listening(make_app(make_service())) as url:
        result = bench("--url", f"{url}/v1/", "--requests", "6", "--rate", "inf", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "6 requests answered, 36 tokens" in result.stdout
    found = json.loads(file.read_text())
    assert found["model"] == "tiny"
    assert "127.0.0.1" not in file.read_text()
    for run in found["runs"]:
        assert (run["requests"], run["answer_tokens"], run["ended_early"], run["failed"]) == (6, 36, 0, {})
        assert 24 <= run["prompt_tokens"] <= 48
        assert 0 < run["ttft"]["p50"] <= run["e2el"]["p50"]


def test_refused_requests_are_counted_apart(make_service):
    service = make_service(max_queued=1)
    service.default.admission.capacity = 1
    with listening(make_app(service)) as url:
        requests = [WorkloadRequest([7, 8, number], 40) for number in range(5)]
        run = Server.open(url).load(requests, [0.0] * 5, RunOptions())
    assert run["requests"] + run["failed"]["429"] == 5
    assert run["requests"] >= 2
    assert run["failed_seconds"]["p50"] > 0


def test_keys_and_errors(make_service, monkeypatch):
    with listening(make_app(make_service(api_keys="keys"), Keys({KEY: "a"}))) as url:
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        with pytest.raises(RemoteRequestError, match="status 401"):
            Server.open(url)
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        assert Server.open(url).model == "tiny"
        server = Server.open(url, "other")
        with pytest.raises(RemoteRequestError, match="status 404"):
            server.load([WorkloadRequest("a", 2)], [0.0], RunOptions())
    with pytest.raises(OSError, match=r"."):
        Server.open(url)
    for wrong in ("127.0.0.1:8000", "ftp://a", "http://"):
        with pytest.raises(ValueError, match="--url"):
            Server(wrong)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--url", "http://localhost:1", "--max-seqs", "4"), "--max-seqs is for a model that is opened here"),
        (("demo", "--vocab-size", "10"), "--vocab-size is for a server"),
        ((), "no model"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments, told):
    result = bench(*arguments)
    assert result.exit_code == 2
    assert told in result.output
