"""Runs the archive in an empty environment, with planted failures and interruptions: `make on-chip-check`.

    python -m benchmarks.on_chip.check --python .venv-chip/bin/python

The first run must end within four minutes, with a table in which only the planted failures did not end well. A second
one, whose processes are killed ten times, must give the same results.
"""

import argparse
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.on_chip import archive
from benchmarks.on_chip.results import CRASHED, DONE, FAILED, FILE, TIMED_OUT, Results
from benchmarks.on_chip.supervisor import LOG

PLANTED = {"planted exception": FAILED, "planted abort": CRASHED, "planted hang": TIMED_OUT}
MAX_SECONDS = 240.0
NUM_KILLS = 10


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.on_chip.check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="of the machine with the chip")
    parser.add_argument("--kills", type=int, default=NUM_KILLS, help="interruptions (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the times of the interruptions")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="on-chip-") as folder:
        return check(Path(folder), options.python.absolute(), options.kills, options.seed)


def check(folder: Path, python: Path, num_kills: int, seed: int) -> int:
    """Runs both; returns an exit status."""
    with tarfile.open(fileobj=io.BytesIO(archive.make(archive.ROOT))) as unpacked:
        unpacked.extractall(folder, filter="data")
    root = folder / archive.FOLDER
    first = [str(python), "-m", "benchmarks.on_chip", "--tiny", "--minutes", "20", "--plant", "exception,abort,hang"]
    variables = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    options: dict[str, Any] = {"cwd": root, "env": variables}

    begin = time.time()
    ended = subprocess.run([*first, "--out", "once"], capture_output=True, text=True, **options)
    seconds, used = time.time() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    print(ended.stdout + ended.stderr, end="")
    expected, found = outcome(root / "once"), statuses(root / "once")
    if not found:  # the folder will be gone
        print((root / "once" / LOG).read_text(encoding="utf-8")[-4_000:])
        return 1
    bad = {name: status for name, status in found.items() if status != DONE}
    is_well = bad == PLANTED and seconds <= MAX_SECONDS
    cpu = used.ru_utime + used.ru_stime
    print(f"one run: {seconds:.0f} s of {MAX_SECONDS:.0f}, {cpu:.0f} s of CPU, {len(found)} pieces; not well: {bad}")

    rng, points = random.Random(seed), []
    for _ in range(num_kills):
        process = subprocess.Popen(
            [*first, "--out", "killed"], stdout=subprocess.DEVNULL, start_new_session=True, **options
        )
        time.sleep(rng.uniform(0.02, 1.6) * seconds / num_kills)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        points.append(len(statuses(root / "killed")))
    begin = time.time()
    subprocess.run([*first, "--out", "killed"], stdout=subprocess.DEVNULL, **options)
    is_same = outcome(root / "killed") == expected
    print(
        f"killed with {points} pieces, then {time.time() - begin:.0f} s: {'the same' if is_same else 'OTHER'} results"
    )
    return int(not (is_well and is_same))


def statuses(out: Path) -> dict[str, str]:
    """The status of each piece."""
    cards = Results.read(out / FILE).cards.values()
    return {name: piece["status"] for card in cards for name, piece in card.pieces.items()}


def outcome(out: Path) -> str:
    """All that a run says beside measured values: statuses, rows and comparisons."""
    rows: dict[str, list[Any]] = {}
    for name, row in Results.read(out / FILE).rows():
        if not row.case.startswith("  "):  # kernels differ, and their order
            rows.setdefault(name, []).append([row.case, row.unit, row.is_right])
    return json.dumps([statuses(out), rows], indent=1, sort_keys=True)


if __name__ == "__main__":
    sys.exit(main())
