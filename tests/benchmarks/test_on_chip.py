"""The command for a machine with a chip, on tiny sizes: to its end, interrupted, and where pieces do not end well."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.on_chip import table
from benchmarks.on_chip.__main__ import main, supervise
from benchmarks.on_chip.results import CRASHED, DONE, FAILED, Results, Row

COMMAND = [sys.executable, "-m", "benchmarks.on_chip", "--tiny", "--resume"]
SETTINGS = {"tiny": True, "only": []}
MACHINE = {"platform": "cpu", "device": "cpu", "driver": "", "jax": "0", "jaxlib": "0", "python": "3"}


def names(file) -> list[str]:
    return list(json.loads(file.read_text())["pieces"])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_pieces(tmp_path):
    """Every piece runs to its end, and all comparisons are right."""
    file = tmp_path / "results.json"
    begin = time.time()
    ended = subprocess.run([*COMMAND, str(file)], capture_output=True, text=True)
    print(f"{time.time() - begin:.0f} s")
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    results = Results.read(file)
    assert {piece["status"] for piece in results.pieces.values()} == {DONE}
    assert results.is_right
    assert results.running is None
    figures = [row for name in results.pieces for row in results.rows(name)]
    assert {row.of for row in figures} >= {"copy", "matrix product", "roofline"}
    assert sum(row.is_right is True for row in figures) >= 15
    assert "0 WRONG" in ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_ten_points(tmp_path):
    """A run that is killed ten times has each piece once, as one that was not."""
    file, rng = tmp_path / "results.json", random.Random(5)
    started = []
    for _ in range(10):
        with subprocess.Popen([*COMMAND, str(file)], stdout=subprocess.DEVNULL) as process:
            try:
                process.wait(timeout=rng.uniform(4, 25))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
        started.append(len(names(file)) if file.exists() else 0)
        time.sleep(1)
    assert started == sorted(started)
    assert subprocess.run([*COMMAND, str(file), "--minutes", "20"]).returncode == 0
    results = Results.read(file)
    assert {piece["status"] for piece in results.pieces.values()} == {DONE}
    other = tmp_path / "other.json"
    assert subprocess.run([*COMMAND, str(other), "--minutes", "20"]).returncode == 0
    assert names(file) == names(other)


def test_a_piece_that_crashes_is_recorded_and_the_others_run(tmp_path, monkeypatch):
    """Workers here are a stand-in that dies in its first piece, and then ends the second."""
    file = tmp_path / "results.json"
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, sys, pathlib\n"
        "from benchmarks.on_chip.results import DONE, Results, Row\n"
        f"file = pathlib.Path({str(file)!r})\n"
        f"results = Results.open(file, {MACHINE!r}, {SETTINGS!r})\n"
        "name = 'second' if 'first' in results.pieces else 'first'\n"
        "results.begin(name, file)\n"
        "results.add(Row(f'{name} row', 1.0), file)\n"
        "if name == 'first':\n"
        "    print('out of luck', file=sys.stderr, flush=True)\n"
        "    os.abort()\n"
        "results.end(file, DONE, 1.0)\n"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **options: popen([sys.executable, str(script)], env=_env(), **options)
    )
    assert supervise(file, SETTINGS, 60) == 0
    results = Results.read(file)
    assert results.pieces["first"]["status"] == CRASHED
    assert "out of luck" in results.pieces["first"]["error"]
    assert [row.case for row in results.rows("first")] == ["first row"]
    assert results.pieces["second"]["status"] == DONE
    assert not results.is_right
    assert supervise(file, SETTINGS, 60, again=True) == 0
    assert list(Results.read(file).pieces) == ["second", "first"]  # and it crashed once more


def _env() -> dict[str, str]:
    import os
    from pathlib import Path

    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}


def test_another_machine_or_other_settings_are_refused(tmp_path):
    file = tmp_path / "results.json"
    Results(MACHINE, SETTINGS).save(file)
    with pytest.raises(ValueError, match="its machine differ: device: 'cpu' there, 'other' here"):
        Results.open(file, MACHINE | {"device": "other"}, SETTINGS)
    with pytest.raises(ValueError, match="its settings differ: tiny: True there, False here"):
        Results.open(file, MACHINE, {"tiny": False, "only": []})


def test_a_file_that_is_not_results(tmp_path, capsys):
    file = tmp_path / "results.json"
    file.write_text("[1]")
    with pytest.raises(SystemExit):
        main(["--tiny", "--resume", str(file)])
    assert "is not a file of results" in capsys.readouterr().err


def test_without_a_chip_it_says_so(tmp_path):
    command = [word for word in COMMAND if word != "--tiny"]
    ended = subprocess.run([*command, str(tmp_path / "r.json")], capture_output=True, text=True)
    assert ended.returncode == 2
    assert not (tmp_path / "r.json").exists()
    assert "no chip found" in (tmp_path / "r.log").read_text() + ended.stderr


def test_verdicts():
    assert Row("a", share=0.8, goal=0.85).verdict == "SHORT"
    assert Row("a", share=0.9, goal=0.85).verdict == "ok"
    assert Row("a", is_right=False, share=0.9, goal=0.85).verdict == "WRONG"
    assert Row("a", share=0.9).verdict == ""


def test_table_says_what_is_wrong():
    results = Results(MACHINE, SETTINGS)
    rows = [Row("decode", 1.5, "us", 0.5, "copy", 0.9), Row("parity", 3.0, "error", is_right=False)]
    results.pieces["one"] = {"status": FAILED, "seconds": 2.0, "rows": [vars(row) for row in rows], "error": "no room"}
    found = list(table.lines(results))
    assert "one (2 s): failed: no room" in found
    assert any("50.0% of copy" in line and "(goal 90%)" in line and "SHORT" in line for line in found)
    assert found[-1] == "1 pieces, 1 that did not end well; of the figures with a bound 0 ok, 1 SHORT, 1 WRONG"


def test_a_machine_without_a_chip_is_told_so(tmp_path):
    """A worker's refusal is told where the command was given, not in the log alone."""
    command = [part for part in COMMAND if part != "--tiny"]
    file = tmp_path / "results.json"
    file.with_suffix(".log").write_text("of an earlier run\n")
    ended = subprocess.run([*command, str(file)], capture_output=True, text=True, env=_env() | {"JAX_PLATFORMS": "cpu"})
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "on_chip: no chip found: this machine has only a CPU; give --tiny to run the same pieces on tiny sizes\n"
    )
    assert not file.exists()


def test_a_piece_that_is_not_there_is_told(tmp_path):
    command = [*COMMAND, str(tmp_path / "results.json"), "--only", "no-such"]
    ended = subprocess.run(command, capture_output=True, text=True, env=_env())
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "--only 'no-such' is in no piece's name; they are " in ended.stderr
