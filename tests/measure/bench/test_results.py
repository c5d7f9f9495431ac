"""The schema: what is written is read, what is another's is refused with the difference."""

import json

import pytest

from jaxinfer.measure.bench import results
from jaxinfer.measure.bench.results import ResultError

MACHINE = {"jax": "1", "num_cores": 2}


def made(command="load", runs=(), **options):
    own = {"command": command, "model": "demo", "options": options, "machine": MACHINE, "runs": list(runs)}
    return {"schema": results.SCHEMA, "version": results.VERSION, **own, "start": None, "roofline": None}


def test_what_is_written_is_read(tmp_path):
    file = tmp_path / "a.json"
    results.write_result(file, made(runs=[{"rate": "inf"}], seed=1))
    assert results.read_result(file) == made(runs=[{"rate": "inf"}], seed=1)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": "other"}', '{"schema": "jaxinfer.bench", "version": 2}'])
def test_other_files_are_refused_by_name(tmp_path, content):
    file = tmp_path / "a.json"
    file.write_text(content)
    with pytest.raises(ResultError, match=r"a\.json"):
        results.read_result(file)


def test_resuming_keeps_the_runs_of_the_same_benchmark(tmp_path):
    file = tmp_path / "a.json"
    assert results.earlier_runs(file, made()) == []
    results.write_result(file, made(runs=[{"rate": 2.0}], seed=1))
    assert results.earlier_runs(file, made(seed=1)) == [{"rate": 2.0}]


def test_resuming_another_benchmark_names_what_differs(tmp_path):
    file = tmp_path / "a.json"
    results.write_result(file, made(runs=[{"rate": 2.0}], seed=1))
    with pytest.raises(ResultError, match="seed=1, not 2"):
        results.earlier_runs(file, made(seed=2))
    with pytest.raises(ResultError, match="command 'load', not 'latency'"):
        results.earlier_runs(file, made("latency", seed=1))
    with pytest.raises(ResultError, match="jax='1', not '2'"):
        results.earlier_runs(file, {**made(seed=1), "machine": {**MACHINE, "jax": "2"}})


def test_a_kill_while_writing_leaves_the_earlier_file(tmp_path):
    file = tmp_path / "a.json"
    results.write_result(file, made(seed=1))
    with pytest.raises(ValueError):
        results.write_result(file, made(seed=float("nan")))
    assert json.loads(file.read_text())["options"] == {"seed": 1}
