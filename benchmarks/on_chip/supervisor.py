"""Starts workers until all pieces have a result or the time is over, and records those that crash or hang."""

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.on_chip import table
from benchmarks.on_chip.results import CRASHED, TIMED_OUT, Results
from benchmarks.on_chip.settings import ALL_DONE, ANOTHER_PROCESS, NO_TIME, REFUSED, Settings

LOG, TABLE = "on_chip.log", "table.txt"
STARTS = 5  # processes in a row without the end of a piece, after which the run ends
# Tiny sizes are compiled without optimizations, which take most of such a run.
TINY_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)


def supervise(settings: Settings, seconds: float) -> int:
    """Runs workers; returns an exit status. Rows of a piece that is cut off are kept."""
    until = time.time() + seconds
    settings.out.mkdir(parents=True, exist_ok=True)
    _record_cut_off(settings)  # the last run may have been killed
    try:
        return _supervise(settings, until)
    except KeyboardInterrupt:
        print("on_chip: interrupted", file=sys.stderr)
        _record_cut_off(settings)
        return 1


def _supervise(settings: Settings, until: float) -> int:
    file, log = settings.file, settings.out / LOG
    num_at_start = num_ended = _num_ended(file)
    num_idle, environment = 0, {}
    while time.time() < until and num_idle < STARTS:
        num_logged = log.stat().st_size if log.exists() else 0
        status = _run_worker(settings, until, environment)
        said = log.read_bytes()[num_logged:].decode(errors="replace").strip()
        if status == REFUSED:
            print(said.rpartition("\n")[2] or f"on_chip: the process refused to run; see {log}", file=sys.stderr)
            return status
        results = Results.read(file)
        if status != ANOTHER_PROCESS and (card := results.running) is not None:
            if status is not None:
                card.end(CRASHED, f"ended with {status}: {said[-300:]}")
            elif time.time() >= until and num_ended > num_at_start:
                results.cut_off()
            else:  # hung, or longer than a whole run
                card.end(TIMED_OUT, "took too long")
            results.save(file)
        if status in (ALL_DONE, NO_TIME):
            return 0
        environment = results.environment if status == ANOTHER_PROCESS else environment
        num_idle = 0 if _num_ended(file) > num_ended else num_idle + 1
        num_ended = _num_ended(file)
        settings = replace(settings, again=False)
    if num_idle == STARTS:
        print(f"on_chip: {STARTS} processes ended without a result; see {log}", file=sys.stderr)
    return int(num_idle == STARTS)


def _record_cut_off(settings: Settings) -> None:
    results = Results.read(settings.file)
    if results.running is not None:
        results.cut_off()
        results.save(settings.file)


def _run_worker(settings: Settings, until: float, environment: dict[str, str]) -> int | None:
    """Runs one worker; its exit status, or None where a piece hung, the time is over or the run was interrupted."""
    command = [sys.executable, "-m", "benchmarks.on_chip", "--work", str(until), "--out", str(settings.out)]
    command += ["--environment", json.dumps(environment)]
    command += ["--tiny"] * settings.is_tiny + ["--again"] * settings.again
    command += [part for text in settings.only for part in ("--only", text)]
    command += ["--plant", ",".join(settings.plant)] * bool(settings.plant)
    options = {"stdin": subprocess.PIPE, "env": variables(settings, environment)}
    with (settings.out / LOG).open("ab") as output, subprocess.Popen(command, stderr=output, **options) as process:
        try:
            return _watch(process, settings, until)
        finally:
            process.kill()


def variables(settings: Settings, environment: dict[str, str]) -> dict[str, str]:
    """The environment of a worker: programs are kept between all processes of a run; XLA's flags are added."""
    found = os.environ | environment
    found.setdefault("JAXINFER_CACHE_DIR", str(settings.out / "cache"))
    flags = (os.environ.get("XLA_FLAGS"), TINY_FLAGS if settings.is_tiny else None, environment.get("XLA_FLAGS"))
    return found | {"XLA_FLAGS": " ".join(filter(None, flags))}


def _watch(process: subprocess.Popen, settings: Settings, until: float) -> int | None:
    """Waits for a worker, prints what runs, and writes the table after each piece."""
    said = None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=0.2)
        card = Results.read(settings.file).running
        running = None if card is None else card.running
        if running != said:
            said = running
            write_table(settings)
            if running is not None:
                print(f"{max(until - time.time(), 0):5.0f} s left: {running}", flush=True)
        if time.time() >= until or (card is not None and time.time() - card.begun > card.limit):
            return None


def write_table(settings: Settings) -> Results:
    """Writes the table beside the results, which are returned."""
    results = Results.read(settings.file)
    if results.cards:
        (settings.out / TABLE).write_text("".join(f"{line}\n" for line in table.lines(results)), encoding="utf-8")
    return results


def _num_ended(file: Path) -> int:
    return sum(card.num_ended for card in Results.read(file).cards.values())
