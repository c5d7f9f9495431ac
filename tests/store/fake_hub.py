"""A hub on the loopback: the routes of Hugging Face's that its client uses, with files in large file storage, which are
redirected, and faults."""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote, urlparse

TOKEN = "hf_secret"


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repository:
    """Files by commit, and commits by branch. Files of these endings, and large ones, are in large file storage."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    license: str | None = None

    def push(self, files: dict[str, bytes], branch: str = "main") -> str:
        contents = sorted((name, git_hash(data)) for name, data in files.items())
        commit = hashlib.sha1(repr((len(self.commits), contents)).encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.branches[branch] = commit
        return commit


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf", ".bin"))


@dataclass
class Faults:
    """What goes wrong.

    Attributes:
      needs_token: "missing" answers as the hub for private repositories, "gated" as for gated ones.
      cut_after: bytes of a large file after which the connection is closed. num_cuts: how often.
      wrong_bytes: large files have the right size and other bytes. status: an error for every large file.
      bytes_per_second: of each connection. ignores_range: the whole file is sent always.
    """

    needs_token: str | None = None
    cut_after: int | None = None
    num_cuts: int = 0
    wrong_bytes: bool = False
    status: int | None = None
    bytes_per_second: float | None = None
    ignores_range: bool = False


class FakeHub:
    """Attributes:
    url: of the hub. cdn: of its large files. requested: paths of all requests.
    sent: bytes of each large file that were sent, by name.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.faults = Faults()
        self.requested: list[str] = []
        self.sent: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.url = self.cdn = ""

    def push(self, repository: str, files: dict[str, bytes], branch: str = "main") -> str:
        return self.repositories.setdefault(repository, Repository()).push(files, branch)

    def reset(self) -> None:
        self.requested.clear()
        self.sent.clear()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path)
        self.hub.requested.append(f"{self.command} {path}")
        if path.startswith("/large/"):
            return self._large(*path.removeprefix("/large/").split("/", 1))
        needs = self.hub.faults.needs_token
        if needs and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            code = "GatedRepo" if needs == "gated" else "RepoNotFound"
            return self._answer(401, b"", {"X-Error-Code": code, "X-Error-Message": "no"})
        for name, repository in self.hub.repositories.items():
            for prefix, answer in (
                (f"/api/models/{name}/revision/", self._info),
                (f"/api/models/{name}/tree/", self._tree),
                (f"/{name}/resolve/", self._resolve),
            ):
                if path.startswith(prefix):
                    revision, _, rest = path.removeprefix(prefix).partition("/")
                    commit = repository.branches.get(revision, revision)
                    if commit not in repository.commits:
                        return self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
                    return answer(name, repository, commit, rest)
        return self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _info(self, name: str, repository: Repository, commit: str, rest: str) -> None:
        files = [
            {
                "rfilename": path,
                "size": len(data),
                "blobId": git_hash(data),
                **({"lfs": self._lfs(data)} if is_large(path) else {}),
            }
            for path, data in repository.commits[commit].items()
        ]
        info = {"id": name, "modelId": name, "sha": commit, "siblings": files, "private": False}
        self._json({**info, **({"cardData": {"license": repository.license}} if repository.license else {})})

    def _tree(self, name: str, repository: Repository, commit: str, rest: str) -> None:
        self._json(
            [
                {
                    "type": "file",
                    "path": path,
                    "size": len(data),
                    "oid": git_hash(data),
                    **({"lfs": {**self._lfs(data), "oid": self._lfs(data)["sha256"]}} if is_large(path) else {}),
                }
                for path, data in repository.commits[commit].items()
            ]
        )

    def _lfs(self, data: bytes) -> dict[str, Any]:
        return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}

    def _resolve(self, name: str, repository: Repository, commit: str, path: str) -> None:
        data = repository.commits[commit].get(path)
        if data is None:
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        if is_large(path):
            digest = hashlib.sha256(data).hexdigest()
            headers = {
                "Location": f"{self.hub.cdn}/large/{digest}/{quote(path)}",
                "X-Linked-Etag": f'"{digest}"',
                "X-Linked-Size": str(len(data)),
                "X-Repo-Commit": commit,
            }
            return self._answer(302, b"", headers)
        return self._ranged(data, {"ETag": f'"{git_hash(data)}"', "X-Repo-Commit": commit})

    def _large(self, digest: str, name: str) -> None:
        for repository in self.hub.repositories.values():
            for files in repository.commits.values():
                data = files.get(name)
                if data is not None and hashlib.sha256(data).hexdigest() == digest:
                    if self.hub.faults.status is not None:
                        return self._answer(self.hub.faults.status, b"", {})
                    if self.hub.faults.wrong_bytes:
                        data = bytes(len(data))
                    return self._ranged(data, {"ETag": f'"{digest}"'}, name)
        return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})

    def _ranged(self, data: bytes, headers: dict[str, str], counted: str | None = None) -> None:
        start, end = 0, len(data)
        wanted = self.headers.get("Range")
        if wanted and not self.hub.faults.ignores_range:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1 if last else end, end)
            headers = {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
        self.send_response(206 if "Content-Range" in headers else 200)
        for name, value in {**headers, "Accept-Ranges": "bytes", "Content-Length": str(end - start)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self._send(data[start:end], counted)

    def _send(self, data: bytes, counted: str | None) -> None:
        faults = self.hub.faults
        step = 2**16
        if counted is not None and faults.num_cuts > 0 and faults.cut_after is not None:
            faults.num_cuts -= 1
            data, self.close_connection = data[: faults.cut_after], True
        for first in range(0, len(data), step):
            piece = data[first : first + step]
            try:
                self.wfile.write(piece)
                self.wfile.flush()
            except OSError:
                self.close_connection = True
                return
            if counted is not None:
                with self.hub.lock:
                    self.hub.sent[counted] += len(piece)
            if faults.bytes_per_second:
                time.sleep(len(piece) / faults.bytes_per_second)

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:  # a client that was killed
        pass


@contextmanager
def serving() -> Iterator[FakeHub]:
    hub = FakeHub()
    server = _Server(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    hub.cdn = f"http://localhost:{server.server_port}"  # another host, as large files have
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
