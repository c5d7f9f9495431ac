"""A fake hub, an empty cache of the hub, and an empty store, for this process and for others."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, hf_api

from tests.cli.conftest import jaxinfer, json_lines, model, model_without_template, write_checkpoint
from tests.store.fake_hub import FakeHub, serving

__all__ = ["jaxinfer", "json_lines", "model", "model_without_template"]
ROOT = Path(__file__).parents[2]
REPOSITORY = "someone/tiny"


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> dict[str, bytes]:
    """The files of a tiny model's repository, with some that are never downloaded."""
    folder = write_checkpoint(tmp_path_factory.mktemp("hub") / "tiny")
    more = {"README.md": b"# tiny", "modeling_evil.py": b"1/0", "pytorch_model.bin": b"pickle"}
    return {path.name: path.read_bytes() for path in folder.iterdir()} | more


@pytest.fixture
def hub(files, tmp_path, monkeypatch) -> Iterator[FakeHub]:
    """A hub with the tiny model, which this process uses."""
    with serving() as hub:
        hub.push(REPOSITORY, files)
        hub.repositories[REPOSITORY].license = "apache-2.0"
        for name, value in environment(hub, tmp_path).items():
            monkeypatch.setenv(name, value)
        # huggingface_hub reads its environment when it is imported.
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(hf_api.api, "endpoint", hub.url)
        yield hub


def environment(hub: FakeHub, folder: Path) -> dict[str, str]:
    """For processes that use the hub, with cache and store below a folder."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "JAXINFER_HOME": str(folder / "home"),
    }


@pytest.fixture
def command(hub, tmp_path) -> Callable[..., tuple[list[str], dict[str, str]]]:
    """command("pull", NAME): arguments and environment of a process of the command line."""

    def make(*arguments: str) -> tuple[list[str], dict[str, str]]:
        start = "from jaxinfer.cli.main import main; main()"
        variables = {**os.environ, **environment(hub, tmp_path), "PYTHONPATH": str(ROOT)}
        return [sys.executable, "-c", start, *arguments], variables

    return make


PARENT = """
import json, os, sys
import checkpoints_convert
import huggingface_hub.hf_api, huggingface_hub._snapshot_download
from jaxinfer import store
from jaxinfer.store import names, pull, remove
from huggingface_hub.utils import WeakFileLock, build_hf_headers, get_session

def read(name):
    path = store.find_model(name, fetch=False).path
    return None if path is None else sorted(file.name for file in path.iterdir())

CALLS = {"pull": store.pull, "remove": store.remove, "list": store.list_models, "read": read}
for line in sys.stdin:
    call, *arguments = json.loads(line)
    if call == "wait":
        _, status = os.waitpid(arguments[0], 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        try:
            CALLS[call](*arguments)
            code = 0
        except (ValueError, OSError):
            code = 1
        except BaseException:
            import traceback
            traceback.print_exc()
            code = 2
        os._exit(code)
    print(pid, flush=True)
"""


class Worker:
    """A process that has imported everything and forks one for each call, since starting one takes seconds."""

    def __init__(self, variables: dict[str, str]):
        self._parent = subprocess.Popen(
            [sys.executable, "-c", PARENT], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _ask(self, *request: Any) -> int:
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(json.dumps(request) + "\n")
        self._parent.stdin.flush()
        return int(self._parent.stdout.readline())

    def start(self, call: str, *arguments: str) -> int:
        """Begins a call in a new process; returns its number."""
        return self._ask(call, *arguments)

    def wait(self, process: int) -> int:
        """The exit code: 1 for a ValueError or OSError, 2 for another exception, -9 for a killed process."""
        return self._ask("wait", process)

    def kill(self, process: int) -> bool:
        """Whether the process was still running."""
        os.kill(process, signal.SIGKILL)
        return self.wait(process) == -signal.SIGKILL

    def close(self) -> None:
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        self._parent.wait()


@pytest.fixture
def worker(hub, tmp_path) -> Iterator[Worker]:
    worker = Worker({**os.environ, **environment(hub, tmp_path), "PYTHONPATH": str(ROOT)})
    yield worker
    worker.close()
