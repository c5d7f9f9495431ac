"""A process that has imported everything, and forks one that runs a command for each request: an import takes seconds.

    python -m tests.crash.server

It reads requests, one JSON object a line, and writes a line with the result of each. JAX starts in the forks only.
"""

import atexit
import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Moment:
    """When a signal is sent: after some seconds, or before a file operation below `folder`, counted from 1; with
    `event`, such as "os.rename", of those of this kind alone."""

    signal: int
    seconds: float | None = None
    operation: int | None = None
    folder: str = "/"
    event: str | None = None


@dataclass(frozen=True)
class Request:
    """Attributes:
    arguments: of the command line. moment: of a signal; None for none.
    obeys_permissions: root has no more rights than other users. max_file_bytes: of any file that is written.
    remove: a folder that is removed before file operation `moment.operation`, in place of a signal.
    """

    arguments: Sequence[str]
    moment: Moment | None = None
    obeys_permissions: bool = False
    max_file_bytes: int | None = None
    remove: str | None = None


@dataclass(frozen=True)
class Result:
    """Attributes:
    code: as of `subprocess.Popen.returncode`. seconds: by the clock. cpu_seconds: of the processor.
    to_end: seconds from the signal to the end.
    operations: file operations below the moment's folder, if the process was not killed.
    """

    code: int
    seconds: float
    cpu_seconds: float
    to_end: float
    stdout: str
    stderr: str
    operations: int = 0


@dataclass
class Server:
    """Runs requests in forks of one process. A context manager. `has_all`: not only `jaxinfer convert`."""

    has_all: bool = True

    def __enter__(self) -> Self:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.server", *["--all"] * self.has_all],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True,
        )  # fmt: skip
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.communicate()

    def run(self, request: Request) -> Result:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(asdict(request)), file=self._process.stdin, flush=True)
        return Result(**json.loads(self._process.stdout.readline()))


# What follows runs in the server.


def serve() -> None:
    import jaxinfer.cli.main

    if "--all" in sys.argv:
        import jaxinfer.api.llm
        import jaxinfer.calibration.verify
        import jaxinfer.training.card
        import jaxinfer.training.distill
        import jaxinfer.training.head_card
        from tests.crash import tiny

        tiny.install()
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"jaxinfer-crash-{os.getpid()}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    for line in sys.stdin:
        record = json.loads(line)
        moment = Moment(**record.pop("moment")) if record["moment"] else None
        request = Request(**{**record, "moment": moment})
        process = os.fork()
        if process == 0:
            _become(request, folder)
            jaxinfer.cli.main.main()
            return  # not reached: it ends the process as the command line does
        print(json.dumps(asdict(_watched(process, request, folder))), flush=True)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def _become(request: Request, folder: Path) -> None:
    """Makes a fork of the server the process of a request."""
    os.setsid()
    for name, number in (("stdout", 1), ("stderr", 2)):
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(descriptor, number)
        os.close(descriptor)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    (folder / "operations").unlink(missing_ok=True)
    sys.argv[:] = ["jaxinfer", *request.arguments]
    if request.max_file_bytes is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (request.max_file_bytes, request.max_file_bytes))
    if request.obeys_permissions:
        _drop_capabilities()
    if request.moment is not None:
        _count_operations(request, folder / "operations")


def _drop_capabilities() -> None:
    """Takes from root the right to pass over permissions (CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH)."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    head, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    for call in (libc.capget, libc.capset):
        if call(head, data) != 0:
            raise OSError(ctypes.get_errno(), "capabilities cannot be changed")
        data[0] &= ~0b110  # effective ones


# Audit events of what changes files, with the positions of their paths.
_EVENTS = {
    "os.rename": (0, 1),
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.mkdir": (0,),
    "os.truncate": (0,),
    "open": (0,),
}


def _count_operations(request: Request, report: Path) -> None:
    moment, count, has_removed = request.moment, 0, False
    assert moment is not None

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count, has_removed
        if event not in _EVENTS or has_removed or moment.event not in (None, event):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        paths = [arguments[number] for number in _EVENTS[event]]
        if not any(isinstance(path, (str, bytes, os.PathLike)) and _is_below(path, moment.folder) for path in paths):
            return
        count += 1
        if moment.operation is None:
            return
        if count == moment.operation:
            if request.remove is None:
                os.kill(os.getpid(), moment.signal)
            else:
                has_removed = True
                shutil.rmtree(request.remove, ignore_errors=True)

    def write() -> None:
        report.write_text(str(count))

    atexit.register(write)
    sys.addaudithook(hook)


def _is_below(path: Any, folder: str) -> bool:
    return os.path.abspath(os.fsdecode(path)).startswith(folder)


def _watched(process: int, request: Request, folder: Path) -> Result:
    started, sent, moment = time.monotonic(), None, request.moment
    killed_after = 300.0
    while True:
        ended, status, usage = os.wait4(process, os.WNOHANG)
        now = time.monotonic()
        if ended:
            break
        if moment is not None and moment.seconds is not None and sent is None and now - started >= moment.seconds:
            os.kill(process, moment.signal)
            sent = now
        if now - started > killed_after:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.002)
    report = folder / "operations"
    return Result(
        os.waitstatus_to_exitcode(status),
        now - started,
        usage.ru_utime + usage.ru_stime,
        now - (sent or started),
        *((folder / name).read_text(errors="replace") for name in ("stdout", "stderr")),
        int(report.read_text() or 0) if report.exists() else 0,
    )


if __name__ == "__main__":
    serve()
