"""Processes that end with the one that started them."""

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def end_with_parent() -> None:
    """Ends this process when its standard input closes: a killed parent leaves no process on the chip."""

    def wait() -> None:
        while os.read(0, 1024):
            pass
        os._exit(4)

    threading.Thread(target=wait, daemon=True).start()


@dataclass(frozen=True)
class Ended:
    """The output of a child, and its exit status, None if it took too long."""

    status: int | None
    output: str
    errors: str

    @property
    def reason(self) -> str:
        """The last line of its errors."""
        return (self.errors.strip() or self.output.strip() or f"exit status {self.status}").splitlines()[-1][:200]


def run(command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> Ended:
    """Runs a command that calls `end_with_parent`, for at most `seconds`."""
    reader, writer = os.pipe()
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    status = None
    with subprocess.Popen(command, stdin=reader, env=os.environ | (environment or {}), **options) as process:
        os.close(reader)
        try:
            output, errors = process.communicate(timeout=seconds)
            status = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            os.close(writer)  # ends what it has started itself
            writer = None
            output, errors = process.communicate()
        finally:
            if writer is not None:
                os.close(writer)
    return Ended(status, output, errors)


def python(module: str, *arguments: str) -> list[str]:
    """The command of a module in this Python."""
    return [sys.executable, "-m", module, *arguments]
