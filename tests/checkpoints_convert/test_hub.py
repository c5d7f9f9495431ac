"""The hub, played by a server on the loopback; each case runs in a process of its own, since the hub client reads its
environment when it is imported."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from checkpoints_convert import CheckpointNotFoundError, convert, resolve
from checkpoints_convert.hub import no_safetensors

REPO, TOKEN, COMMIT = "someone/tiny", "hf_secret", "a" * 40
ROOT = Path(__file__).parents[2]


@dataclass
class FakeHub:
    """Serves `files` as the repository REPO, at the branch main and at COMMIT.

    Attributes:
      needs_token: "missing" answers as the hub does for private repositories, "gated" as for gated ones.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    needs_token: str | None = None
    requested: list[str] = field(default_factory=list)
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *args) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path)
        self.hub.requested.append(path)
        if self.hub.needs_token and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            code = "GatedRepo" if self.hub.needs_token == "gated" else "RepoNotFound"
            return self._answer(401, b"", {"X-Error-Code": code, "X-Error-Message": "no"})
        api, resolve_ = f"/api/models/{REPO}", f"/{REPO}/resolve/"
        if path.startswith(f"{api}/revision/"):
            if path.rsplit("/", 1)[1] not in ("main", COMMIT):
                return self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
            siblings = [{"rfilename": name} for name in self.hub.files]
            return self._json({"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": siblings, "private": False})
        if path.startswith(f"{api}/tree/"):
            return self._json(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in self.hub.files.items()
                ]
            )
        if path.startswith(resolve_):
            name = path.removeprefix(resolve_).split("/", 1)[1]
            if name in self.hub.files:
                data = self.hub.files[name]
                return self._answer(200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT})
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        return self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _json(self, value) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def hub(checkpoint) -> Iterator[FakeHub]:
    source = checkpoint()
    source.files = {"tokenizer.json": "{}", "README.md": "#", "modeling_evil.py": "1/0", "pytorch_model.bin": "pickle"}
    directory = source.write(num_shards=2)
    (directory / "consolidated.safetensors").write_bytes(b"x")
    hub = FakeHub({path.name: path.read_bytes() for path in directory.iterdir()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()


PROGRAM = """
import json, os, sys
from checkpoints_convert import resolve
for name, revision, environment in json.loads(sys.argv[1]):
    os.environ.update(environment)
    try:
        path = resolve(name, revision=revision)
        files = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
        print(json.dumps({"path": str(path), "files": files}))
    except (ValueError, FileNotFoundError) as error:
        print(json.dumps({"error": type(error).__name__, "text": str(error)}))
"""


@pytest.fixture
def run(hub, tmp_path):
    """run((name, revision, environment), ...): per call {"path", "files"} or {"error", "text"} of `resolve`."""

    def call(*calls: tuple[str, str | None, dict[str, str]], **environment: str) -> list[dict]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(calls or [(REPO, None, {})])],
            env=kept | settings | {"PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_TELEMETRY": "1"} | environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return call


WANTED = [
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
]


@pytest.mark.slow
def test_fetches_what_is_needed_once_and_then_works_offline(hub, run):
    (found,) = run()
    assert found["files"] == WANTED
    assert Path(found["path"]).name == COMMIT
    fetched = {path.rsplit("/", 1)[1] for path in hub.requested if "/resolve/" in path}
    assert fetched == set(WANTED)
    hub.requested.clear()
    again, other = run((REPO, None, {}), ("someone/else", None, {}), HF_HUB_OFFLINE="1")
    assert again == found
    assert other["text"] == "someone/else: is not in the local cache, and HF_HUB_OFFLINE is set"
    assert hub.requested == []


@pytest.mark.slow
def test_without_a_network_it_says_what_to_give(run):
    (found,) = run(("someone/else", None, {}), HF_ENDPOINT="http://nowhere.invalid")
    assert found["text"].startswith("someone/else: no network: ")
    assert found["text"].endswith("give a folder, or demo")


@pytest.mark.slow
def test_token_is_sent_and_what_fails_is_explained(hub, run):
    hub.needs_token = "gated"
    gated, found, unknown, revision = run(
        (REPO, None, {}),
        (REPO, None, {"HF_TOKEN": TOKEN}),
        ("someone/else", None, {}),
        (REPO, "v9", {}),
    )
    assert gated == {
        "error": "CheckpointNotFoundError",
        "text": f"{REPO}: access is gated: accept the model's terms on its page, then set HF_TOKEN to a token of yours",
    }
    assert found["files"] == WANTED
    assert "no such directory, and no such repository on the hub; if it is private" in unknown["text"]
    assert revision["text"] == f"{REPO}: the repository has no revision 'v9'"


@pytest.mark.slow
def test_unsupported_model_is_refused_before_its_weights_are_fetched(hub, run):
    config = json.loads(hub.files["config.json"])
    hub.files["config.json"] = json.dumps({**config, "architectures": ["BertLMHeadModel"]}).encode()
    (found,) = run()
    assert found["error"] == "CheckpointError"
    assert f"{REPO}/config.json: the architecture 'BertLMHeadModel' is not supported" in found["text"]
    assert not [path for path in hub.requested if path.endswith(".safetensors")]


@pytest.mark.slow
def test_pickled_weights_are_never_fetched(hub, run):
    for name in [name for name in hub.files if "safetensors" in name]:
        del hub.files[name]
    (found,) = run()
    assert "no safetensors of a whole model; pickled weights" in found["text"]
    assert not [path for path in hub.requested if path.endswith((".bin", ".py"))]
    assert "RedHatAI/Qwen3-8B-speculator.eagle3 is a head" in str(no_safetensors("AngelSlim/Qwen3-8B_eagle3"))


@pytest.mark.slow
def test_converted_checkpoint_on_the_hub(hub, run, checkpoint, tmp_path):
    convert(checkpoint().write(), tmp_path / "native", progress=None)
    hub.files.clear()
    hub.files |= {
        path.relative_to(tmp_path / "native").as_posix(): path.read_bytes()
        for path in (tmp_path / "native").rglob("*")
        if path.is_file()
    }
    assert run()[0]["files"] == sorted(hub.files)


@pytest.mark.parametrize(
    "name",
    ["./none", "../none", "/none/at/all", "~/none-at-all", "a/b/c", "a b/c", "a/..", "a\0b", "", "model.gguf", "-x/y"],
)
def test_names_that_are_neither_a_directory_nor_a_hub_id_ask_nobody(name):
    with pytest.raises(CheckpointNotFoundError, match="no such directory"):
        resolve(name)


def test_path_objects_are_never_hub_ids(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="no such directory"):
        resolve(Path("someone/tiny"))
    assert resolve(tmp_path) == resolve(str(tmp_path)) == tmp_path
