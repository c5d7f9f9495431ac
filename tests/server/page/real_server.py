"""`jaxinfer serve demo` in a process of its own, for the page in a real browser."""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

KEY = "sk-of-the-page"


class RealServer:
    """A server that can be killed and started again at the same port.

    Args:
      folder: for the file of keys and the log. flags: of `jaxinfer serve`.
    """

    def __init__(self, folder: Path, *flags: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        keys = folder / "keys"
        keys.write_text(f"{KEY} page\n", encoding="utf-8")
        self._log = folder / "server.log"
        self._flags = ("--port", str(self.port), "--api-keys", str(keys), *flags)
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "jaxinfer.cli", "serve", "demo", *self._flags]
        # As users run it: not with the tests' compiler flags.
        environment = {
            name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
        }
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                command, stderr=log, env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)}
            )

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def wait_until_ready(self, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while self.get("/ready") != 200:
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.1)

    def get(self, path: str) -> int:
        """The status, 0 while there is no server."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.suppress(OSError), contextlib.closing(connection):
            connection.request("GET", path)
            return connection.getresponse().status
        return 0

    def begin(self, **body: Any) -> http.client.HTTPResponse:
        """The response to a chat request with the key, not yet read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        return connection.getresponse()

    def answer(self, question: str, **body: Any) -> str:
        """The text of a whole answer."""
        messages = [{"role": "user", "content": question}]
        return json.loads(self.begin(messages=messages, **body).read())["choices"][0]["message"]["content"]
