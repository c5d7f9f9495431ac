"""A process that works with the store on request, and forks others that do: starting one takes seconds."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Worker:
    """The process, for a test."""

    def __init__(self, variables: dict[str, str]):
        command = [sys.executable, "-m", "tests.store.worker"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._parent = subprocess.Popen(command, cwd=ROOT, env=variables, text=True, **pipes)

    def _send(self, *request: Any) -> None:
        assert self._parent.stdin is not None
        self._parent.stdin.write(json.dumps(request) + "\n")
        self._parent.stdin.flush()

    def answer(self) -> int:
        """What the call that `begin` began returned: 0, 1 for an error that a user is told, 2 for any other."""
        assert self._parent.stdout is not None
        return int(self._parent.stdout.readline())

    def _ask(self, *request: Any) -> int:
        self._send(*request)
        return self.answer()

    def begin(self, call: str, *arguments: Any) -> None:
        """Begins a call in the process itself."""
        self._send("do", call, arguments)

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


def serve() -> None:
    """Answers requests from standard input."""
    import checkpoints_convert  # noqa: F401
    from jaxinfer import store
    from jaxinfer.store import names  # noqa: F401

    calls = {
        "pull": store.pull,
        "remove": store.remove,
        "list": store.list_models,
        "read": read,
        "copy": store.copy_model,
    }
    for line in sys.stdin:
        call, *arguments = json.loads(line)
        if call == "do":
            print(run(calls[arguments[0]], arguments[1]), flush=True)
            continue
        if call == "wait":
            _, status = os.waitpid(arguments[0], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            os._exit(run(calls[call], arguments))
        print(pid, flush=True)


def read(name: str, wanted: dict[str, dict[str, str]]) -> None:
    """Reads a model that is here, and compares it with the hashes of its commit."""
    from jaxinfer import store

    path = store.find_model(name, fetch=False).path
    for file, digest in wanted.get(path.name if path is not None else "", {}).items():
        assert hashlib.sha256((path / file).read_bytes()).hexdigest() == digest, (path, file)


def run(call: Any, arguments: list[Any]) -> int:
    """0, 1 for an error that a user is told, 2 for any other."""
    try:
        call(*arguments)
        return 0
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and not isinstance(error, (FileNotFoundError, ValueError)):
            traceback.print_exc()
            return 2
        return 1
    except BaseException:
        traceback.print_exc()
        return 2


if __name__ == "__main__":
    serve()
