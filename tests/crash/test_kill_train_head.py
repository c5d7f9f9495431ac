"""One run of `jaxinfer train-head`, killed again and again: it goes on from what is kept, and nothing is made twice."""

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from tests.crash.scenes import SCENES, Reference
from tests.crash.server import Moment
from tests.crash.tiny import GENERATED

NUM_KILLS = {"train-head": 20, "train-head-blocks": 12}  # at least
MOST_PROCESSES = 60
OPERATIONS = (4, 8)  # on files, before which a process is killed
# What a run writes, in this order; it is in the phase of which it has written a file last.
PHASES = {
    "train-head": ("held_out", "answers", "states", "checkpoints"),
    "train-head-blocks": ("prompts", "held_out", "answers", "checkpoints"),
}


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def written(work: Path, folders: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Inode and time of the files that a run keeps, by their names, in the order in which they are made."""
    paths = [path for name in folders for path in sorted((work / name).glob("[0-9]*.np?"))]
    return {path.relative_to(work).as_posix(): (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


def requests_by_file(work: Path, names: list[str], lines: list[str]) -> dict[str, list[str]]:
    """The requests of an undisturbed run, by the file that has their rows."""
    found = {}
    for name in names:
        count = len(np.load(work / name))
        found[name], lines = lines[:count], lines[count:]
    assert not lines
    return found


def place_of_kill(work: Path, folders: tuple[str, ...], now: Iterable[str]) -> str:
    if any(path.name != work.name for path in work.parent.iterdir()):
        return "export"
    parts = [path for folder in folders for path in (work / folder).glob(".*.part")]
    if parts:
        return f"{parts[-1].parent.name}, written in part"
    return next((folder for folder in reversed(folders) if any(file.startswith(folder) for file in now)), "start")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PHASES)
def test_killed_again_and_again(server, tmp_path, name):
    began, chosen = time.monotonic(), random.Random(1)
    reference = Reference(server, SCENES[name], tmp_path)
    folders, log = PHASES[name], tmp_path / GENERATED
    sampled = tuple(folder for folder in folders if folder in ("prompts", "held_out", "answers"))
    whole = tmp_path / "whole" / reference.scene.work
    requests = requests_by_file(whole, list(written(whole, sampled)), lines_of(log))
    assert max(Counter(line for lines in requests.values() for line in lines).values()) == 1
    place, ends = reference.place(), Counter[str]()
    work = place / reference.scene.work
    for number in range(MOST_PROCESSES):
        kept = written(work, folders)
        log.write_text("")
        # Each second process is killed between writing its second file and renaming it. A head is exported at once: the
        # later kills come later.
        operation, event = (2, "os.rename") if number % 2 else (chosen.randint(*OPERATIONS) + 4 * ends["export"], None)
        killed = reference.run(place, Moment(signal.SIGKILL, operation=operation, folder=str(place), event=event))
        what = f"process {number}, killed before its {event or 'operation'} {operation}"
        missing = [line for file, lines in requests.items() if file not in kept for line in lines]
        generated = lines_of(log)
        assert generated == missing[: len(generated)], f"{what}: texts were generated again, or left out"
        now = written(work, folders)
        stayed = {file: of for file, of in kept.items() if "checkpoints" not in file or file in now}
        assert stayed.items() <= now.items(), f"{what}: files were written again"
        if killed.code == 0:
            break
        assert killed.code == -signal.SIGKILL, f"{what}: {killed.stderr}"
        assert not reference.is_complete(place), what
        ends[place_of_kill(work, folders, now)] += 1
        print(what, dict(ends), flush=True)
    reference.check_repeated(place, "after all kills")
    print(f"{name}: {ends.total()} kills in {time.monotonic() - began:.0f} s:", dict(ends), flush=True)
    assert ends.total() >= NUM_KILLS[name]
    assert {end.split(",")[0] for end in ends} >= {*folders, "export"} - {"held_out"}
    assert all(ends[f"{folder}, written in part"] for folder in ("answers", "checkpoints"))


def test_requests_of_files_are_those_of_their_rows(tmp_path):
    for name, count in (("a.npy", 2), ("b.npy", 1)):
        np.save(tmp_path / name, np.zeros((count, 3)))
    lines = [json.dumps(number) for number in range(3)]
    assert requests_by_file(tmp_path, ["a.npy", "b.npy"], lines) == {"a.npy": lines[:2], "b.npy": lines[2:]}
