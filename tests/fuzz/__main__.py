"""`python -m tests.fuzz`: opens damaged files of each kind, and prints how many were refused and how many harmless.

Cases run in processes with 4 GiB of memory, forked from this one; a process that dies, or takes more than 5 seconds
for a case, ends that case only. A case is a function of its kind, the seed and its number.
"""

import argparse
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Before JAX starts, as in tests/conftest.py.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUM_CPU_DEVICES"] = "1"
os.environ.setdefault("JAXINFER_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"jaxinfer-tests-{os.getuid()}"))

import psutil

from tests.fuzz import kinds

MEMORY = 4 * 2**30
MAX_SECONDS = 5.0  # of processor time; a machine with other work takes longer by the clock
MAX_WALL_SECONDS = 300.0
CASES_OF_A_PROCESS = 100
MANY = 1000  # variants of undamaged files: all that there are


@dataclass
class Tally:
    """What came of the cases of a kind."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest: float = 0.0
    peak_mib: float = 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 if no case failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="cases of each kind")
    parser.add_argument("--kind", action="append", choices=list(kinds.KINDS), help="only this kind; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--verbose", action="store_true", help="print every case")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    options = parser.parse_args(arguments)
    found: dict[str, Tally] = {}
    import jaxinfer.api.llm
    import jaxinfer.batch  # noqa: F401  so that no process imports it again

    for name in options.kind or kinds.KINDS:
        found[name] = run(kinds.KINDS[name], options.seed, options.first, options.count, is_verbose=options.verbose)
    print(f"\n{'kind':12} {'tried':>6} {'refused':>8} {'harmless':>9} {'failed':>7} {'slowest':>9} {'memory':>9}")
    for name, tally in found.items():
        numbers = [tally.counts[what] for what in ("refused", "harmless", "failed")]
        print(f"{name:12} {sum(numbers):6} {numbers[0]:8} {numbers[1]:9} {numbers[2]:7} {tally.slowest:7.2f} s "
              f"{tally.peak_mib:5.0f} MiB")  # fmt: skip
    if options.json:
        rows = {name: {**tally.counts, "slowest": tally.slowest} for name, tally in found.items()}
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 1 if any(tally.failures for tally in found.values()) else 0


def run(kind: kinds.Kind, seed: int, first: int, count: int, *, is_verbose: bool = False) -> Tally:
    """Tries cases `first` to `first + count`; prints those that fail."""
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="jaxinfer-fuzz-") as root:
        whole, work = Path(root) / "whole", Path(root) / "work"
        _in_a_process(lambda: kind.prepare(whole, MANY))
        number = first
        while number < first + count:
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(whole, work)
            end = min(number + CASES_OF_A_PROCESS, first + count)
            for record in _cases(kind, work, seed, number, end):
                number = record["number"] + 1
                _add(tally, kind, seed, record, is_verbose)
    return tally


def _add(tally: Tally, kind: kinds.Kind, seed: int, record: dict[str, Any], is_verbose: bool) -> None:
    tally.counts[record["outcome"]] += 1
    tally.slowest = max(tally.slowest, record["seconds"])
    tally.peak_mib = max(tally.peak_mib, record["mib"])
    line = f"{kind.name} {record['number']} {record['outcome']}: {record['what']}: {record['message']}"
    if record["outcome"] == "failed":
        tally.failures.append(line)
        print(f"{line}\n  python -m tests.fuzz --kind {kind.name} --seed {seed} --first {record['number']} --count 1")
    elif is_verbose:
        print(line)
    sys.stdout.flush()


def _in_a_process(work: Any) -> None:
    """Runs it in a fork, so that JAX does not start here. Raises RuntimeError if it fails."""
    process = os.fork()
    if process == 0:
        try:
            work()
            os._exit(0)
        finally:
            _print_and_exit()
    if os.waitpid(process, 0)[1] != 0:
        raise RuntimeError("the files that are to be damaged could not be written")


def _print_and_exit() -> None:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)


def _cases(kind: kinds.Kind, folder: Path, seed: int, start: int, end: int) -> Iterator[dict[str, Any]]:
    """Records of the cases until the process ends, for the last of which it may have died."""
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as errors:
        process = os.fork()
        if process == 0:
            os.close(reader)
            os.dup2(errors.fileno(), 2)
            try:
                _try_cases(kind, folder, seed, start, end, writer)
                os._exit(0)
            finally:
                _print_and_exit()
        os.close(writer)
        current: dict[str, Any] = {"number": start, "what": "the start of the process"}
        with os.fdopen(reader, "rb") as lines:
            while (line := _line(lines, process)) is not None:
                record = json.loads(line)
                if "outcome" in record:
                    yield record
                    current = {"number": record["number"] + 1, "what": "the end of the process"}
                else:
                    current = record
        status = os.waitpid(process, 0)[1]
        if current["number"] < end:
            errors.seek(0)
            said = errors.read().decode(errors="replace")[-1500:]
            why = "took too long" if status == signal.SIGKILL else f"the process ended with status {status}"
            failed = {"outcome": "failed", "message": f"{why}: {said}", "seconds": MAX_SECONDS, "mib": 0}
            yield {**current, **failed}


def _line(lines: Any, process: int) -> bytes | None:
    """The next line of a process, None at its end. A process that takes too long for it is killed."""
    started, spent = time.monotonic(), _processor_seconds(process)
    while not select.select([lines], [], [], 0.5)[0]:
        is_over = _processor_seconds(process) - spent > MAX_SECONDS
        if is_over or time.monotonic() - started > MAX_WALL_SECONDS:
            os.kill(process, signal.SIGKILL)
    return lines.readline() or None


def _processor_seconds(process: int) -> float:
    try:
        one = psutil.Process(process)
        return sum(sum(each.cpu_times()[:2]) for each in (one, *one.children(recursive=True)))
    except psutil.Error:
        return 0.0


def _try_cases(kind: kinds.Kind, folder: Path, seed: int, start: int, end: int, writer: int) -> None:
    kinds.quiet()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in range(start, end):
        chosen, what, files = kinds.damaged(kind, folder, seed, number)
        _say(writer, {"number": number, "what": what})
        restore = kinds.apply(chosen, files)
        before, printed = resource.getrusage(resource.RUSAGE_SELF), os.lseek(2, 0, os.SEEK_CUR)
        outcome, message = kinds.outcome(kind, chosen)
        after = resource.getrusage(resource.RUSAGE_SELF)
        restore()
        os.lseek(2, printed, os.SEEK_SET)
        said = os.read(2, 10_000).decode(errors="replace")
        if "Traceback" in said:
            outcome, message = "failed", f"printed a traceback: {said[-600:]}"
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if seconds > MAX_SECONDS:
            outcome, message = "failed", f"took {seconds:.1f} s of processor time: {message}"
        record = {"outcome": outcome, "message": message[:1000], "seconds": seconds, "mib": after.ru_maxrss / 1024}
        _say(writer, {"number": number, "what": what, **record})


def _say(writer: int, record: dict[str, Any]) -> None:
    os.write(writer, json.dumps(record).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
