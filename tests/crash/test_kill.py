"""Commands that write checkpoints, killed at any moment: the same command ends as if nothing had happened."""

import os
import random
import re
import signal

import pytest

from tests.crash.scenes import COMMANDS, SCENES, Reference, digests
from tests.crash.server import Moment
from tests.pallas_kernels.quick import quick

NUM_MOMENTS = int(os.environ.get("JAXINFER_CRASH_MOMENTS", "50"))
SECONDS_TO_END = 5.0


def check_kill(reference: Reference, moment: Moment, what: str) -> str:
    """Kills a run, checks what it left and how it ended, and repeats it. Returns how it ended."""
    place = reference.place()
    moment = Moment(moment.signal, moment.seconds, moment.operation, str(place))
    killed = reference.run(place, moment)
    is_complete = reference.is_complete(place)
    reference.check_inputs(place)
    assert "Traceback" not in killed.stderr, f"{what}: {killed.stderr}"
    if moment.signal == signal.SIGTERM and killed.code == 143:
        *progress, last = killed.stderr.splitlines()
        assert last.startswith("terminated"), f"{what}: {killed.stderr}"
        # On a busy machine a run may take more than the 30 s after which it says how far it is.
        assert all(re.match(r"[\w ]+: .*\d\d:\d\d", line) for line in progress), f"{what}: {killed.stderr}"
        assert len(progress) <= killed.seconds // 30, f"{what}: {killed.stderr}"
        assert moment.seconds is None or killed.to_end < SECONDS_TO_END, f"{what}: {killed.to_end} s"
    elif moment.signal == signal.SIGTERM:  # it came before the command began, or when it had ended and Python had not
        has_begun = digests(place) != reference.before
        assert not has_begun or is_complete, f"{what}: {killed.code}: {killed.stderr}"
        assert killed.code in (0, -signal.SIGTERM), f"{what}: {killed.code}: {killed.stderr}"
    else:
        assert killed.code in (0, -signal.SIGKILL), f"{what}: {killed.code}: {killed.stderr}"
    reference.check_repeated(place, what)
    return "done before" if killed.code == 0 else "complete" if is_complete else "killed"


def moments(number: signal.Signals, reference: Reference, seed: int, count: int) -> list[Moment]:
    """Half of them by the clock, half before file operations."""
    chosen, found = random.Random(seed), []
    seconds, operations = reference.measure(), reference.undisturbed.operations
    for index in range(count):
        if index % 2:
            found.append(Moment(number, operation=chosen.randint(1, operations)))
        else:
            found.append(Moment(number, seconds=round(chosen.uniform(0, seconds), 3)))
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


@pytest.mark.parametrize("name", quick(["convert", "convert-overwrite"], "convert"))
def test_killed_before_each_kind_of_step(converting, tmp_path, name):
    """Of a conversion: at its start, in its middle, and before its last steps, of which renaming is one."""
    reference = Reference(converting, SCENES[name], tmp_path)
    last = reference.undisturbed.operations
    chosen = (
        ((last // 2, signal.SIGKILL), (last, signal.SIGTERM)) if name == "convert" else ((last - 2, signal.SIGKILL),)
    )
    for operation, number in chosen:
        check_kill(reference, Moment(number, operation=operation), f"{name}, {number.name}: operation {operation}")
