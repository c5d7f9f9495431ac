"""Commands that write checkpoints, killed at any moment: the same command ends as if nothing had happened."""

import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.scenes import COMMANDS, SCENES, Scene, contents, digests, write_inputs
from tests.crash.server import Moment, Request, Result, Server

NUM_MOMENTS = int(os.environ.get("JAXINFER_CRASH_MOMENTS", "50"))
SECONDS_TO_END = 5.0


@pytest.fixture(scope="module")
def converting() -> Iterator[Server]:
    with Server(has_all=False) as server:
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


class Reference:
    """What a scene has before, and what an undisturbed run of it makes."""

    def __init__(self, server: Server, scene: Scene, folder: Path):
        self.scene, self.folder, self._server = scene, folder, server
        write_inputs(folder / "before", scene)
        self.before = digests(folder / "before")
        # In the same place as the others, since files name their source.
        self.undisturbed = self.run(self.place(), Moment(0, folder=str(folder)))
        (folder / "run").rename(folder / "whole")
        assert self.undisturbed.code == 0, self.undisturbed.stderr
        self.after = contents(folder / "whole")
        assert all(self.output(folder / "whole", name) for name in scene.outputs)

    def place(self) -> Path:
        """A new copy of the folder before the run."""
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        return shutil.copytree(self.folder / "before", self.folder / "run")

    def run(self, place: Path, moment: Moment | None = None, **options: object) -> Result:
        return self._server.run(Request(self.scene.arguments(place), moment, **options))  # type: ignore[arg-type]

    def output(self, place: Path, name: str) -> dict[str, str]:
        return contents(place / name) if (place / name).exists() else {}

    def is_complete(self, place: Path) -> bool:
        """Whether all outputs are there. Fails if one is there in part."""
        found = []
        for name in self.scene.outputs:
            output = self.output(place, name)
            former = digests(self.folder / "before" / name) if self.scene.is_replacing else {}
            assert output in ({}, former, self.output(self.folder / "whole", name)), f"{name}: {sorted(output)}"
            assert output or not former, f"{name}: the former one is gone"
            found.append(bool(output) and output != former)
        return all(found)

    def check_inputs(self, place: Path) -> None:
        inputs = {name for name in self.before if not name.startswith("out")}
        now = digests(place)
        assert {name: now.get(name) for name in inputs} == {name: self.before[name] for name in inputs}

    def check_repeated(self, place: Path, what: str) -> None:
        """The same command makes what an undisturbed run makes, and leaves nothing else."""
        is_complete = self.is_complete(place)
        if not is_complete or self.scene.is_replacing:
            again = self.run(place)
            assert again.code == 0, f"{what}: {again.stderr}"
            assert "Traceback" not in again.stderr, f"{what}: {again.stderr}"
        found = contents(place)
        assert found == self.after, f"{what}: {sorted(found.items() ^ self.after.items())}"
        self.check_inputs(place)


def check_kill(reference: Reference, moment: Moment, what: str) -> str:
    """Kills a run, checks what it left and how it ended, and repeats it. Returns how it ended."""
    place = reference.place()
    moment = Moment(moment.signal, moment.seconds, moment.operation, str(place))
    killed = reference.run(place, moment)
    is_complete = reference.is_complete(place)
    reference.check_inputs(place)
    assert "Traceback" not in killed.stderr, f"{what}: {killed.stderr}"
    if moment.signal == signal.SIGTERM and killed.code == 143:
        assert killed.stderr.startswith("terminated"), f"{what}: {killed.stderr}"
        assert killed.stderr.count("\n") == 1, f"{what}: {killed.stderr}"
        assert moment.seconds is None or killed.to_end < SECONDS_TO_END, f"{what}: {killed.to_end} s"
    elif moment.signal == signal.SIGTERM:  # it was done when the signal came, and Python was ending
        assert is_complete, f"{what}: {killed.code}: {killed.stderr}"
        assert killed.code in (0, -signal.SIGTERM), f"{what}: {killed.stderr}"
    else:
        assert killed.code in (0, -signal.SIGKILL), f"{what}: {killed.code}: {killed.stderr}"
    reference.check_repeated(place, what)
    return "done before" if killed.code == 0 else "complete" if is_complete else "killed"


def moments(number: signal.Signals, reference: Reference, seed: int, count: int) -> list[Moment]:
    """Half of them by the clock, half before file operations."""
    chosen = random.Random(seed)
    whole = reference.undisturbed
    found = []
    for index in range(count):
        if index % 2:
            found.append(Moment(number, operation=chosen.randint(1, whole.operations)))
        else:
            found.append(Moment(number, seconds=round(chosen.uniform(0, whole.seconds), 3)))
    return found


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("command", COMMANDS)
def test_killed_at_random_moments(server, tmp_path, command, number):
    names, ends = COMMANDS[command], []
    for turn, name in enumerate(names):
        reference = Reference(server, SCENES[name], tmp_path / name)
        share = len(range(turn, NUM_MOMENTS, len(names)))
        for index, moment in enumerate(moments(number, reference, seed=turn, count=share)):
            when = f"{moment.seconds} s" if moment.operation is None else f"operation {moment.operation}"
            ends.append(check_kill(reference, moment, f"{name}, {number.name} {index} (seed {turn}): {when}"))
            print(name, number.name, when, ends[-1], flush=True)
    assert ends.count("killed") >= len(ends) // 3


@pytest.mark.parametrize("name", ["convert", "convert-overwrite"])
def test_killed_before_each_kind_of_step(converting, tmp_path, name):
    """Of a conversion: at its start, in its middle, and before its last steps, of which renaming is one."""
    reference = Reference(converting, SCENES[name], tmp_path)
    last = reference.undisturbed.operations
    chosen = ((last // 2, signal.SIGKILL), (last, signal.SIGTERM)) if name == "convert" else ((last - 2, signal.SIGKILL),)
    for operation, number in chosen:
        check_kill(reference, Moment(number, operation=operation), f"{name}, {number.name}: operation {operation}")
