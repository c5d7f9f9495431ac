"""`jaxinfer serve` refuses what cannot be served before it loads anything."""

import contextlib
import http.server
import json
import threading

import pytest
from typer.testing import CliRunner

from jaxinfer.cli.main import app
from tests.cli.conftest import write_checkpoint


def run(*arguments):
    return CliRunner().invoke(app, ["serve", *arguments])


def test_a_public_address_needs_keys():
    found = run("demo", "--host", "0.0.0.0")
    assert found.exit_code == 1
    assert "--api-keys" in found.output


def test_a_file_of_keys_is_read_first(tmp_path):
    found = run("demo", "--api-keys", str(tmp_path / "none"))
    assert found.exit_code == 1
    assert "No such file" in found.output
    (tmp_path / "keys").write_text("short\n")
    found = run("demo", "--api-keys", str(tmp_path / "keys"))
    assert "line 1" in found.output


def test_values_are_checked():
    assert "reasoning" in run("demo", "--reasoning", "loud").output
    assert run("demo", "--port", "70000").exit_code == 2


def test_options_of_several_models_are_checked():
    assert "'much'" in run("--model-memory", "much").output
    assert "'soon'" in run("--keep-alive", "soon").output
    found = run("--model", "no/such-model")
    assert (found.exit_code, "no/such-model is not on this machine" in found.output) == (2, True)
    assert "--served-model-name is for one model" in run("--model", "demo", "--served-model-name", "x").output
    found = run("--model", "demo", "--keep-alive", "other=5m")
    assert (found.exit_code, "--keep-alive other: requests cannot name it; add --model other" in found.output) == (
        2,
        True,
    )
    for flag, value in {"--pin": "demo", "--model-memory": "1GiB", "--keep-alive": "5m"}.items():
        found = run("demo", flag, value)
        assert (found.exit_code, f"{flag} is for several models: add --model" in found.output) == (2, True)


def test_a_pinned_model_is_one_that_can_be_named(tmp_path):
    folder = write_checkpoint(tmp_path / "own")
    found = run("--pin", str(folder))
    assert (found.exit_code, "requests cannot name it; add --model" in found.output) == (2, True)


def test_two_models_have_two_names(tmp_path):
    folders = [str(write_checkpoint(tmp_path / one / "own")) for one in "ab"]
    found = run("--model", folders[0], "--model", folders[1])
    assert (found.exit_code, "would both be served as 'own'" in found.output) == (1, True)
    found = run(folders[0], "--model", f"own={folders[1]}")
    assert (found.exit_code, f"--model OTHER={folders[1]}" in found.output) == (1, True)
    assert "is no NAME=MODEL" in run("=demo").output


def test_a_model_is_served_by_its_name_and_not_by_its_path(tmp_path, monkeypatch):
    """One model or several: the names that requests take, the first of which answers have."""
    folder, served = str(write_checkpoint(tmp_path / "own")), []
    monkeypatch.setattr("jaxinfer.server.run.run_service", lambda service, first, **how: served.append(service) or 0)
    for arguments, wanted in {
        (folder,): ["own"],
        (f"mine={folder}",): ["mine"],
        (folder, "--served-model-name", "mine"): ["mine", "own"],
        ("user/model",): ["user/model"],
        (folder, "--model", f"mine={folder}", "--pin", "mine"): ["own", "mine"],
        (folder, "--pin", folder, "--allow-any"): ["own"],
    }.items():
        assert run(*arguments).exit_code == 0
        service = served[-1]
        sources = [service.models._catalogue.find(name) for name in wanted]
        assert all(source is not None and str(tmp_path) not in source.root for source in sources)
        assert service.models.default_name == wanted[0]
        assert service.models._catalogue.names()[0] == wanted[0]
    assert service.options.pin == ["own"]


STATUS = {
    "value": "ready",
    "is_pinned": False,
    "bytes": 2**20,
    "requests": 1,
    "waiting": 2,
    "idle_seconds": None,
    "keep_alive_seconds": 299.6,
    "load_seconds": 1.0,
    "error": None,
}


@contextlib.contextmanager
def server(*, has_adapter=False):
    """Answers as a server of one loaded and one unloaded model does; the requests that came, with their keys."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self):
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            requests.append((self.command, self.path, json.loads(body or b"null"), self.headers["authorization"]))
            models = [{"id": "a", "status": STATUS}, {"id": "b", "status": {**STATUS, "value": "unloaded"}}]
            adapter = {"id": "sql", "root": "sql-v2", "parent": "a"}
            status, found = 200, {"data": [*models, *([adapter] if has_adapter else [])]}
            if self.path == "/models/unload":
                found = models[1]
                if requests[-1][2]["model"] != "b":
                    status, found = 404, {"error": {"message": "the model 'c' is not served here"}}
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        do_GET = do_POST = answer

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.server_port}", requests
        finally:
            listener.shutdown()
            thread.join()


def test_ps_shows_adapters(monkeypatch):
    monkeypatch.delenv("JAXINFER_API_KEY", raising=False)
    with server(has_adapter=True) as (url, _):
        lines = [line.split() for line in CliRunner().invoke(app, ["ps", "--url", url]).output.splitlines()]
        assert lines[1][0] == "a"
        assert lines[2:] == [[], ["adapter", "of", "folder"], ["sql", "a", "sql-v2"]]
        found = json.loads(CliRunner().invoke(app, ["ps", "--url", url, "--json"]).output)
        assert [model["id"] for model in found["models"]] == ["a"]
        assert found["adapters"] == [{"id": "sql", "root": "sql-v2", "parent": "a"}]


@pytest.mark.slow
def test_ps_and_stop_ask_the_server(monkeypatch):
    monkeypatch.setenv("JAXINFER_API_KEY", "secret-key")
    with server() as (url, requests):
        shown = CliRunner().invoke(app, ["ps", "--url", url])
        assert shown.exit_code == 0
        assert shown.output.splitlines()[1].split() == ["a", "ready", "1.0", "MiB", "1", "2", "300", "s"]
        found = json.loads(CliRunner().invoke(app, ["ps", "--url", url, "--json"]).output)
        assert [one["id"] for one in found["models"]] == ["a"]
        assert CliRunner().invoke(app, ["stop", "b", "--url", url]).output == "b is unloaded\n"
        failed = CliRunner().invoke(app, ["stop", "c", "--url", url])
        assert (failed.exit_code, "'c' is not served here" in failed.output) == (1, True)
    assert requests[-2] == ("POST", "/models/unload", {"model": "b"}, "Bearer secret-key")
    gone = CliRunner().invoke(app, ["ps", "--url", url])
    assert (gone.exit_code, "no server answers at" in gone.output) == (1, True)
