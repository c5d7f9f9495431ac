"""Killed at every operation on the files, and at every kind of place inside a write."""

import json
import os
import random

import pytest

from jaxinfer import files
from jaxinfer.batch import BatchError, results
from jaxinfer.batch.results import ResultsFile


class Killed(BaseException):
    """The process is gone: nothing catches it, and no operation works after it."""


class DyingOS:
    """`os`, until operation number `last` of those that change the disk, which happens only in part."""

    CHANGES = ("write", "fsync", "ftruncate", "replace", "unlink")

    def __init__(self, last: int, how_much: float):
        self.last, self.how_much = last, how_much
        self.num_done = 0
        self.is_dead = False

    def __getattr__(self, name):
        real = getattr(os, name)
        if name not in self.CHANGES:
            return real

        def change(*arguments):
            if self.is_dead or self.num_done == self.last:
                if not self.is_dead and name == "write" and self.how_much < 1:
                    fd, data = arguments
                    real(fd, data[: int(len(data) * self.how_much)])
                elif not self.is_dead and self.how_much:
                    real(*arguments)
                self.is_dead = True
                raise Killed
            self.num_done += 1
            return real(*arguments)

        return change


@pytest.fixture
def run_until(monkeypatch, run, fake_llm):
    """Runs a job that dies at operation `last`; says whether it died."""

    def run_until(path_in, last, how_much=1.0, order=0, adapters=None, **options):
        dying = DyingOS(last, how_much)
        with monkeypatch.context() as patch:
            patch.setattr(results, "os", dying)
            patch.setattr(files, "os", dying)
            patch.setattr(results, "SYNC_SECONDS", 0)
            patch.setattr(results, "_SYNC_SHARE", 0)
            try:
                run(path_in, llm=fake_llm(order=order, adapters=adapters), **options)
            except Killed:
                return True
        return False

    return run_until


@pytest.fixture
def expected(tmp_path, write_rows, run, mixed, outcome, fake_llm):
    """An input of so many rows, and what an undisturbed run makes of it; with `adapters`, rows name these."""

    def expected(count, adapters=None):
        path_in = write_rows(mixed(count, list(adapters or ())))
        summary = run(path_in, tmp_path / "whole.jsonl", llm=fake_llm(adapters=adapters))
        assert (summary.rows, summary.failed) == (count, count // 8)
        found = outcome(tmp_path, "whole")
        assert len(found) == count
        return path_in, found

    return expected


@pytest.fixture
def left(tmp_path, outcome):
    """What a job left, and its files removed."""

    def left():
        found = outcome(tmp_path)
        for path in tmp_path.glob("out.*"):
            path.unlink()
        return found

    return left


@pytest.mark.matrix
@pytest.mark.parametrize("how_much", [0.0, 0.01, 0.5, 0.999, 1.0])
def test_a_kill_at_any_operation_changes_nothing(expected, run_until, run, left, fake_llm, how_much):
    path_in, whole = expected(17)
    last = 0
    while run_until(path_in, last, how_much):
        run(path_in, llm=fake_llm(order=last + 1))
        assert left() == whole, f"killed at operation {last}"
        last += 1
    assert last > 2 * 17  # a write and a sync for each row


@pytest.mark.slow
def test_fifty_kills_of_one_batch(expected, run_until, left):
    path_in, whole = expected(200)
    chance = random.Random(5)
    num_kills = 0
    while run_until(path_in, chance.randrange(14), chance.random(), order=num_kills):
        num_kills += 1
    assert num_kills >= 50
    assert left() == whole


def test_kills_of_a_batch_with_adapters(expected, run_until, run, left, fake_llm):
    """It continues with the same adapters, and with no others, which change nothing that is there."""
    adapters, others = {"a": "1" * 64, "b": "2" * 64}, {"a": "1" * 64, "b": "3" * 64}
    path_in, whole = expected(60, adapters)
    assert {record["adapter"]["name"] for record in whole.values() if "adapter" in record} == {"a", "b"}
    chance, num_kills, num_refused = random.Random(6), 0, 0
    while run_until(path_in, chance.randrange(14), chance.random(), order=num_kills, adapters=adapters):
        num_kills += 1
        if num_kills % 3 == 0 and (path_in.parent / "out.jsonl").stat().st_size:
            with pytest.raises(BatchError, match=r"adapter 'b' \(was 2{16}, is 3{16}\)"):
                run(path_in, llm=fake_llm(adapters=others))
            num_refused += 1
    assert min(num_kills, 3 * num_refused) >= 15
    assert left() == whole


def test_kills_while_errors_are_retried(expected, run_until, run, left, write_rows, mixed):
    path_in, whole = expected(40)
    for last in range(14):
        run(path_in)
        assert run_until(path_in, last, 0.5, retry_errors=True) or last > 10
        run(path_in)
        assert left() == whole


def test_kills_while_results_are_overwritten(expected, run_until, run, left, fake_llm):
    path_in, whole = expected(9)
    for last in range(8):
        run(path_in, llm=fake_llm(weights="others"))
        assert run_until(path_in, last, 0.5, overwrite=True)
        run(path_in, overwrite=True)
        assert left() == whole


def test_kills_while_results_are_sorted(expected, run_until, run, left, records, tmp_path):
    path_in, whole = expected(9)
    wanted = [row for row in whole_order(path_in) if not row.startswith("bad")]
    last = 0
    while True:
        run(path_in)
        has_died = run_until(path_in, last, 0.5, sort=True)
        run(path_in, sort=True)
        assert [one["custom_id"] for one in records(tmp_path / "out.jsonl")] == wanted
        assert left() == whole
        if not has_died:
            break
        last += 1
    assert last >= 2  # the copy is synced, and replaces the file


def whole_order(path_in):
    rows = map(json.loads, path_in.read_text().splitlines())
    return [row.get("custom_id", f"row-{number}") for number, row in enumerate(rows, 1)]


@pytest.mark.parametrize("fault", ["trim", "read"])
def test_a_fault_in_recovery_is_found(expected, run_until, run, left, monkeypatch, fault):
    path_in, whole = expected(17)
    assert run_until(path_in, 12, 0.5)
    if fault == "trim":
        monkeypatch.setattr(ResultsFile, "trim", lambda file: 0)
    else:
        monkeypatch.setattr(ResultsFile, "read", lambda file: iter(()))
    with pytest.raises((AssertionError, ValueError)):
        check(run, path_in, left, whole)


def check(run, path_in, left, whole):
    run(path_in)
    assert left() == whole
