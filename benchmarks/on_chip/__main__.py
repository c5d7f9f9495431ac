"""Parity, rates, rooflines, whole models and block sizes on the chip of this machine, in pieces.

    python -m benchmarks.on_chip --minutes 9 --resume on_chip/results.json

Pieces run in the order of their worth, each result is written at once, and the same command goes on where the last one
ended. A piece that crashes the process or hangs is recorded, and the next one runs. Needs no network.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent
PACKAGES = FOLDER / "packages"
MAX_BYTES = 50 * 2**20
STARTS = 20  # processes without a result in a row, after which the run ends


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.on_chip", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="time for this run (default: %(default)s)")
    parser.add_argument(
        "--resume",
        type=Path,
        default=Path("benchmarks/results/on_chip.json"),
        metavar="FILE",
        help="file of results; what it has is not run again (default: %(default)s)",
    )
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="pieces whose names contain it; may be repeated"
    )
    parser.add_argument("--again", action="store_true", help="run pieces again that crashed, hung or failed")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, which a CPU can run: tests the command")
    parser.add_argument("--table", action="store_true", help="print the table of FILE and run nothing")
    parser.add_argument("--packages", action="store_true", help="print the bytes of what travels with the tree")
    parser.add_argument("--work", metavar="UNTIL", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.packages:
        return _print_packages()
    if PACKAGES.exists():
        sys.path.append(str(PACKAGES))  # after the machine's own
    settings = {"tiny": options.tiny, "only": options.only or []}
    if options.work is not None:
        from benchmarks.on_chip import worker

        try:
            return worker.main(options.resume, settings, options.work)
        except ValueError as error:
            print(f"on_chip: {error}", file=sys.stderr)
            return 2
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes} is not more than 0")
    try:
        code = 0 if options.table else supervise(options.resume, settings, 60 * options.minutes, again=options.again)
        return code or _print_table(options.resume)
    except ValueError as error:
        parser.error(str(error))


def supervise(file: Path, settings: dict, seconds: float, *, again: bool = False) -> int:
    """Runs workers until all pieces are done or the time is over; returns an exit status."""
    from benchmarks.on_chip.results import CRASHED, DONE, TIMED_OUT, Results

    until = time.time() + seconds
    if file.exists():
        before = Results.read(file)
        before.running, before.found = None, []
        if again:
            before.pieces = {name: one for name, one in before.pieces.items() if one["status"] == DONE}
        before.save(file)
    log = file.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    num_idle = 0
    while time.time() < until:
        command = [sys.executable, "-m", "benchmarks.on_chip", "--work", str(until), "--resume", str(file)]
        command += ["--tiny"] * settings["tiny"]
        command += [part for text in settings["only"] for part in ("--only", text)]
        begin, num_before = time.time(), _num_done(file)
        num_logged = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output, subprocess.Popen(command, stdin=subprocess.PIPE, stderr=output) as process:
            try:
                ended = _watch(process, file, until)
            finally:
                process.kill()
        if ended == 2:
            said = log.read_bytes()[num_logged:].decode(errors="replace").strip()
            print(said.rpartition("\n")[2] or f"on_chip: the process refused to run; see {log}", file=sys.stderr)
            return 2
        if ended in (0, 3):
            return 0
        if not file.exists():
            print(f"on_chip: the process ended with {ended} before its first result; see {log}", file=sys.stderr)
            return 1
        if time.time() >= until:
            break  # the piece that was cut off runs whole next time
        results = Results.read(file)
        if results.running is not None:
            status = TIMED_OUT if ended is None else CRASHED
            said = f"ended with {ended}: {_tail(log)}" if ended is not None else "took too long"
            results.end(file, status, time.time() - begin, said)
        num_idle = 0 if _num_done(file) > num_before else num_idle + 1
        if num_idle == STARTS:
            print(f"on_chip: {STARTS} processes ended without a result; see {log}", file=sys.stderr)
            return 1
    return 0


def _watch(process: subprocess.Popen, file: Path, until: float) -> int | None:
    """Waits for a worker, says what runs; its exit status, or None where a piece hung or the time is over."""
    said, since = None, time.time()
    while True:
        try:
            return process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            pass
        running = _running(file)
        if running != said:
            said, since = running, time.time()
            if running is not None:
                print(f"{max(until - since, 0):5.0f} s left: {running}", flush=True)
        if time.time() >= until or (running is not None and time.time() - since > _limit(running)):
            return None


def _limit(name: str) -> float:
    """Seconds after which a piece counts as hung. Compilation is most of what a slow one takes."""
    return 300.0 if name.startswith(("parity", "tuning", "rates")) else 480.0


def _running(file: Path) -> str | None:
    return json.loads(file.read_text(encoding="utf-8"))["running"] if file.exists() else None


def _num_done(file: Path) -> int:
    return len(json.loads(file.read_text(encoding="utf-8"))["pieces"]) if file.exists() else 0


def _tail(log: Path, size: int = 300) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-size:].strip()


def _print_table(file: Path) -> int:
    from benchmarks.on_chip import table
    from benchmarks.on_chip.results import Results

    if not file.exists():
        print(f"on_chip: there is no {file}", file=sys.stderr)
        return 2
    results = Results.read(file)
    print(*table.lines(results), sep="\n")
    return 0 if results.is_right else 1


def _print_packages() -> int:
    """Says what has to travel; 1 if it is more than is allowed."""
    files = [path for path in PACKAGES.rglob("*") if path.is_file()] if PACKAGES.exists() else []
    size = sum(path.stat().st_size for path in files)
    name = PACKAGES.relative_to(FOLDER.parent.parent)
    print(f"{name}: {len(files)} files, {size / 2**20:.1f} MiB of at most {MAX_BYTES / 2**20:.0f}")
    return int(size > MAX_BYTES)


if __name__ == "__main__":
    sys.exit(main())
