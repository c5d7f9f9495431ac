"""What a process shows, and when: its output on a terminal or in a log, and the longest time without any."""

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
COLUMNS = 100
TICK = 0.1  # seconds between two looks
# Before a command: each program of the model takes seconds longer to compile, and each parameter to be read.
SLOWED = """
import sys, time
import jax._src.compiler as compiler
from jax._src.lib.mlir import ir
from checkpoints_convert.huggingface.checkpoint import HuggingFaceCheckpoint
from checkpoints_convert.store import NativeCheckpoint
from jaxinfer import progress

slowed = set()

def slow_once(function, key):
    def slowly(*arguments, **options):
        if key(arguments) not in slowed:
            slowed.add(key(arguments))
            time.sleep(SECONDS)
        return function(*arguments, **options)
    return slowly

def name(arguments):
    found = ir.StringAttr(arguments[1].operation.attributes["sym_name"]).value
    return found if found in ("jit_step", "jit_decode", "jit_score") else "others"

compiler.backend_compile_and_load = slow_once(compiler.backend_compile_and_load, name)
for form in (HuggingFaceCheckpoint, NativeCheckpoint):
    form.read_param = slow_once(form.read_param, lambda arguments: "read")
progress.LOG_SECONDS = LOG_SECONDS
sys.argv[0] = "jaxinfer"
print("begun", file=sys.stderr, flush=True)
from jaxinfer.cli.main import main; main()
"""


@dataclass(frozen=True)
class Watched:
    """Attributes:
    returncode: of the process. stdout, stderr: its output; on a terminal "\\r" separates drawings of a bar.
    silence: seconds, the longest without output on either, from the first output on.
    after: what was shown before it.
    busy_silence: as `silence`, counted only as far as the process had the processor: on a machine that is shared, a
      process that waits for its turn is not silent by its own doing.
    """

    returncode: int
    stdout: str
    stderr: str
    silence: float
    after: str
    busy_silence: float = 0.0

    @property
    def drawings(self) -> list[str]:
        """What was drawn on the terminal, or the lines of the log."""
        return [one.strip() for one in self.stderr.replace("\n", "\r").split("\r") if one.strip()]


def watch(
    code: str,
    *arguments: object,
    on_terminal: bool,
    variables: Mapping[str, str] | None = None,
    timeout: float = 280,
) -> Watched:
    """Runs Python code in a process whose standard error is a terminal, or a pipe."""
    with _channel(on_terminal) as (reading, writing):
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=writing,
            env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1", **(variables or {})},
        )
        os.close(writing)
        assert process.stdout is not None
        try:
            sources = {"stderr": reading, "stdout": process.stdout.fileno()}
            outputs, silence, after, busy = _read(sources, timeout, psutil.Process(process.pid))
            returncode = process.wait(timeout)
        finally:
            process.kill()
            process.stdout.close()
    return Watched(returncode, outputs["stdout"], outputs["stderr"], silence, after, busy)


@contextlib.contextmanager
def _channel(is_terminal: bool) -> Iterator[tuple[int, int]]:
    reading, writing = os.openpty() if is_terminal else os.pipe()
    if is_terminal:
        fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    try:
        yield reading, writing
    finally:
        os.close(reading)


def _read(
    sources: Mapping[str, int], timeout: float, process: psutil.Process
) -> tuple[dict[str, str], float, str, float]:
    """The outputs, the longest silence, what was shown before it, and the longest one in processor seconds."""
    end, tick = time.monotonic() + timeout, time.monotonic()
    quiet, silence, after = None, 0.0, ""
    busy, busy_silence, used = 0.0, 0.0, 0.0
    found, left = dict.fromkeys(sources, b""), dict(sources)
    while left:
        ready, _, _ = select.select(list(left.values()), [], [], TICK)
        now = time.monotonic()
        assert now < end, f"no end after {timeout} s; at last {found}"
        if quiet is not None:
            quiet += min(now - tick, 3 * TICK)  # a machine that stood still, this process too, was not silent
        before, used = used, _used(process, used)
        busy += min(used - before, now - tick)  # of several threads as of one
        tick = now
        if quiet is not None and quiet > silence:
            silence, after = quiet, b"".join(found.values())[-80:].decode(errors="replace")
        for name, source in list(left.items()):
            if source not in ready:
                continue
            try:
                data = os.read(source, 65536)
            except OSError:  # a terminal whose last user has gone
                data = b""
            found[name] += data
            busy_silence = max(busy, busy_silence) if quiet is not None else 0.0
            quiet = busy = 0.0
            if not data:
                del left[name]
    return {name: data.decode(errors="replace") for name, data in found.items()}, silence, after, busy_silence


def _used(process: psutil.Process, otherwise: float) -> float:
    """Processor seconds of a process; of one that has gone, as before."""
    try:
        times = process.cpu_times()
        return times.user + times.system
    except psutil.Error:
        return otherwise


def slowed(seconds: float, log_seconds: float = 1.0) -> str:
    """Code that runs the command line with each of a few things slowed down by so much."""
    return f"SECONDS, LOG_SECONDS = {seconds}, {log_seconds}\n{SLOWED}"
