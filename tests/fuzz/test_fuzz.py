"""Damaged files of every kind are refused with one error that names the file, or harmless: `python -m tests.fuzz`."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import kinds
from tests.fuzz.kinds import KINDS, Kind

ROOT = Path(__file__).parents[2]
FEW = 4  # of each kind in `make test`


def prepared(kind: Kind, folder: Path) -> Path:
    kind.prepare(folder, 2)
    return folder


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", KINDS)
def test_a_few_damaged_files(tmp_path, name):
    kind, folder = KINDS[name], prepared(KINDS[name], tmp_path / "whole")
    for variant in kinds.variants(folder):
        assert kinds.outcome(kind, variant) == ("harmless", ""), "the undamaged files are not"
    found = []
    for number in range(FEW):
        chosen, what, files = kinds.damaged(kind, folder, 1, number)
        restore = kinds.apply(chosen, files)
        outcome, message = kinds.outcome(kind, chosen)
        restore()
        assert outcome != "failed", f"case {number}, {what}: {message}"
        found.append(outcome)
    assert "refused" in found


def test_what_counts_as_a_failure(tmp_path):
    def check(error: Exception) -> tuple[str, str]:
        def fail(folder: Path) -> None:
            raise error

        return kinds.outcome(Kind("planted", lambda *_: None, lambda *_: ("", {}), fail), tmp_path)

    assert check(ValueError(f"{tmp_path}/config.json: is not JSON"))[0] == "refused"
    for error in (
        ValueError("is not JSON"),
        ValueError(f"{tmp_path}: {'x' * 10_000}"),
        KeyError("weight_map"),
        AssertionError("other values"),
        MemoryError(),
        RuntimeWarning("overflow"),
    ):
        assert check(error)[0] == "failed", error


def test_a_case_is_a_function_of_its_number(tmp_path):
    kind, folder = KINDS["generation"], prepared(KINDS["generation"], tmp_path)
    one, again = ([kinds.damaged(kind, folder, 0, number)[1:] for number in range(5)] for _ in range(2))
    assert one == again
    assert one != [kinds.damaged(kind, folder, 1, number)[1:] for number in range(5)]


PLANTED = """
import ctypes, os, sys, time
from tests.fuzz import __main__ as runner, kinds

def check(folder):
    number = int((folder / "file").read_bytes())
    if number == 1:
        ctypes.string_at(0)
    if number == 2:
        while True:
            pass
    if number == 3:
        bytearray(5 * 2**30)
    if number == 4:
        os.write(2, b"Traceback (most recent call last)")
    if number == 5:
        raise ValueError(f"{folder}: refused")

def prepare(folder, most):
    (folder / "0").mkdir(parents=True)
    (folder / "0" / "file").write_bytes(b"")

kind = kinds.Kind("planted", prepare, lambda folder, random: ("damage", {"file": b"%d" % number_of[id(random)]}), check)
number_of = {}
original = kinds.random_of
def random_of(name, seed, number):
    random = original(name, seed, number)
    number_of[id(random)] = number
    return random
kinds.random_of = random_of
tally = runner.run(kind, 0, 0, 7)
print(dict(tally.counts))
"""


@pytest.mark.slow
def test_the_runner_survives_what_it_looks_for():
    """A crash, an endless loop, an allocation beyond the limit, a traceback on standard error."""
    run = subprocess.run([sys.executable, "-c", PLANTED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.stdout.splitlines()[-1] == "{'harmless': 2, 'failed': 4, 'refused': 1}", run.stdout + run.stderr
    for number, why in ((1, "status 11"), (2, "took too long"), (3, "MemoryError"), (4, "printed a traceback")):
        assert any(f"planted {number} failed" in line and why in line for line in run.stdout.splitlines()), run.stdout


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("name", KINDS)
def test_two_thousand_damaged_files(name):
    run = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--count", "2000", "--kind", name],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(run.stdout[-3000:])
    assert run.returncode == 0, run.stdout + run.stderr
