"""The command for a machine with a chip: pieces that do not end well, interruptions, cards, comparisons and tables."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.on_chip import child, parity, peers, planted, steps, supervisor, table
from benchmarks.on_chip.__main__ import main
from benchmarks.on_chip.pieces import NO_GRAPHS, ONE_GRAPH, Piece, pieces
from benchmarks.on_chip.results import CRASHED, CUT_OFF, DONE, FAILED, FILE, TIMED_OUT, CardResults, Results, Row
from benchmarks.on_chip.settings import ALL_DONE, ANOTHER_PROCESS, NO_TIME, Settings
from benchmarks.on_chip.sizes import sizes_for
from benchmarks.on_chip.steps import KernelRun
from benchmarks.on_chip.worker import Worker
from pallas_kernels.paged_attention.shapes import decode_shape

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.on_chip", "--tiny", "--out"]
MACHINE = {"platform": "cpu", "device": "cpu", "num_devices": 1, "driver": "", "jax": "0", "jaxlib": "0", "python": "3"}
TINY = sizes_for("cpu", is_tiny=True)
PLANTED = {"planted exception": FAILED, "planted abort": CRASHED, "planted hang": TIMED_OUT}


def only_card(out: Path) -> CardResults:
    """The results of the one card in a folder."""
    (card,) = Results.read(out / FILE).cards.values()
    return card


def statuses(card: CardResults) -> dict[str, str]:
    return {name: piece["status"] for name, piece in card.pieces.items()}


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A worker of this process, on which no programs run."""
    monkeypatch.setattr("benchmarks.on_chip.worker.free", lambda: None)
    monkeypatch.setattr(planted, "_is_poisoned", False)
    results = Results()
    card = results.of(MACHINE, is_tiny=True)
    return Worker(TINY, results, card, tmp_path / FILE, time.time() + 60)


def rows_of(*cases: str, error: Exception | None = None):
    """A piece's function that gives these rows, then raises."""

    def run(sizes, results):
        yield from (Row(case, 1.0) for case in cases)
        if error is not None:
            raise error

    return run


# Processes.


def test_a_process_is_left_after_an_exception_and_its_rows_are_kept(worker):
    chosen = [Piece("first", planted.exception, 0), Piece("second", rows_of("second row"), 0)]
    assert worker.run(chosen) == ANOTHER_PROCESS
    assert statuses(worker.card) == {"first": FAILED}
    assert [row.case for row in worker.card.rows("first")] == ["before the exception"]
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in worker.card.pieces["first"]["error"]
    with pytest.raises(RuntimeError, match="poisoned"):
        planted.raise_if_poisoned()
    planted._is_poisoned = False  # as in a fresh process
    assert worker.run(chosen) == ALL_DONE
    assert statuses(worker.card) == {"first": FAILED, "second": DONE}


def test_a_device_that_no_longer_answers_fails_the_piece_that_caught_its_error(worker, monkeypatch):
    def no_answer():
        raise RuntimeError("CUDA_ERROR_LAUNCH_FAILED")

    monkeypatch.setattr("benchmarks.on_chip.worker.free", no_answer)
    assert worker.run([Piece("first", rows_of("a"), 0), Piece("second", rows_of("b"), 0)]) == ANOTHER_PROCESS
    assert statuses(worker.card) == {"first": FAILED}


def test_pieces_of_another_process_or_environment_are_left_to_it(worker):
    chosen = [
        Piece("parity", rows_of("a"), 0, process="int8"),
        Piece("more", rows_of("b"), 0, process="int8"),
        Piece("graph", rows_of("c"), 0, process="one graph", environment=ONE_GRAPH),
    ]
    assert worker.run(chosen) == ANOTHER_PROCESS
    assert statuses(worker.card) == {"parity": DONE, "more": DONE}
    assert Results.read(worker.file).environment == ONE_GRAPH
    assert worker.card.running == "graph"
    assert worker.run(chosen) == ANOTHER_PROCESS  # not in this environment
    assert replace(worker, environment=dict(ONE_GRAPH)).run(chosen) == ALL_DONE


def test_a_piece_for_which_time_is_short_is_left_out_and_shorter_ones_run(worker):
    assert worker.run([Piece("long", rows_of("a"), 500), Piece("short", rows_of("b"), 1)]) == NO_TIME
    assert statuses(worker.card) == {"short": DONE}


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_planted_failures_end_in_a_table(tmp_path):
    """An exception that leaves the context poisoned, an abort and a hang, in real processes."""
    command = [*COMMAND, str(tmp_path), "--plant", "exception,abort,hang", "--only", "planted"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert ended.returncode == 1
    assert statuses(only_card(tmp_path)) == PLANTED
    for name in ("exception", "abort", "hang"):
        assert f"  before the {name} " in ended.stdout
    assert "3 pieces, 3 that did not end well" in ended.stdout
    assert (tmp_path / "table.txt").read_text() in ended.stdout


@pytest.mark.slow
def test_an_interrupted_run_prints_what_it_has(tmp_path):
    command = [*COMMAND, str(tmp_path), "--plant", "hang", "--only", "planted"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()) as run:
        while not any(card.found for card in Results.read(tmp_path / FILE).cards.values()):
            assert run.poll() is None
            time.sleep(0.02)
        run.send_signal(signal.SIGTERM)
        output, errors = run.communicate()
    assert errors == "on_chip: interrupted\n"
    assert statuses(only_card(tmp_path)) == {"planted hang": CUT_OFF}
    assert "planted hang (" in output
    assert ": cut off: runs again next time" in output
    assert "  before the hang " in output


STAND_IN = """
import os, sys, pathlib, time
from benchmarks.on_chip.results import DONE, Results, Row
file = pathlib.Path({file!r})
results = Results.read(file)
card = results.of({machine!r}, is_tiny=True)
name = next(name for name in ("first", "second", "third") if not card.is_ended(name))
card.begin(name, 60.0)
card.found.append(vars(Row(f"{{name}} row", 1.0, note=os.environ.get("MODE", ""))))
results.save(file)
if name == "first":
    print("out of luck", file=sys.stderr, flush=True)
    os.abort()
if name == "third":
    time.sleep(60)
card.end(DONE)
results.environment = {{"MODE": "other", "XLA_FLAGS": "--b"}}
results.save(file)
sys.exit({another})
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Workers that abort in their first piece, end the second and ask for other variables, and do not end the third."""
    script = tmp_path / "worker.py"
    script.write_text(STAND_IN.format(file=str(tmp_path / FILE), machine=MACHINE, another=ANOTHER_PROCESS))
    popen, given = subprocess.Popen, []

    def start(command, env, **options):
        given.append(env)
        return popen([sys.executable, str(script)], env=env | {"PYTHONPATH": str(ROOT)}, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    return given


def test_a_piece_that_aborts_is_recorded_the_others_run_and_the_last_is_cut_off(tmp_path, stand_in, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--a")
    assert supervisor.supervise(Settings(tmp_path), 8.0) == 0
    card = only_card(tmp_path)
    assert statuses(card) == {"first": CRASHED, "second": DONE, "third": CUT_OFF}
    assert "out of luck" in card.pieces["first"]["error"]
    assert [row.case for row in card.rows("first")] == ["first row"]
    assert [row.note for row in card.rows("third")] == ["other"]
    assert [env["XLA_FLAGS"] for env in stand_in] == ["--a", "--a", "--a --b"]
    assert len({env["JAXINFER_CACHE_DIR"] for env in stand_in}) == 1
    assert not card.is_right


@pytest.mark.slow
def test_a_piece_that_takes_longer_than_a_run_is_not_begun_again(tmp_path, stand_in):
    results = Results()
    card = results.of(MACHINE, is_tiny=True)
    for name in ("first", "second"):
        card.begin(name, 1.0)
        card.end(DONE)
    results.save(tmp_path / FILE)
    assert supervisor.supervise(Settings(tmp_path), 3.0) == 0
    assert statuses(only_card(tmp_path))["third"] == TIMED_OUT


def test_a_piece_beyond_its_limit_has_hung(tmp_path, monkeypatch, stand_in):
    (tmp_path / "worker.py").write_text(
        (tmp_path / "worker.py").read_text().replace("60.0)", "0.5)").replace('"first":', '"none":')
    )
    begin = time.time()
    assert supervisor.supervise(Settings(tmp_path), 20.0) in (0, 1)  # workers find nothing left to do
    assert statuses(only_card(tmp_path)) == {"first": DONE, "second": DONE, "third": TIMED_OUT}
    assert time.time() - begin < 18


def test_a_process_that_does_not_start_is_the_fault_of_the_piece_that_it_is_for(tmp_path, monkeypatch):
    """As with a flag that the compiler does not know: without the record, each next process would end like that."""
    results = Results()
    card = results.of(MACHINE, is_tiny=True)
    ends = iter((ANOTHER_PROCESS, -6, ALL_DONE))

    def start(*_):
        status = next(ends)
        if status == ANOTHER_PROCESS:
            card.begin("one graph", 60.0)
            results.save(tmp_path / FILE)
        return status

    monkeypatch.setattr(supervisor, "_run_worker", start)
    (tmp_path / "on_chip.log").touch()
    assert supervisor.supervise(Settings(tmp_path), 60.0) == 0
    assert statuses(only_card(tmp_path)) == {"one graph": CRASHED}


@pytest.mark.slow
def test_a_child_ends_when_its_time_is_over_or_its_parent_ends():
    program = "from benchmarks.on_chip import child; import time; child.end_with_parent(); print('on', flush=True); "
    command = [sys.executable, "-c", program + "time.sleep(60)"]
    begin = time.time()
    ended = child.run(command, 4.0, {"PYTHONPATH": str(ROOT)})
    assert (ended.status, time.time() - begin < 30) == (None, True)
    assert child.run([sys.executable, "-c", "raise SystemExit('no GPU')"], 60).reason == "no GPU"
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"on\n"
        process.stdin.close()
        assert process.wait(10) == 4


# Results.


def test_rows_of_a_piece_that_was_cut_off_are_kept_and_printed(tmp_path):
    results = Results()
    card = results.of(MACHINE, is_tiny=True)
    for count in (2, 1):  # the second try is cut off earlier
        card.begin("long", 100.0)
        card.found += [vars(Row(f"row {number}", 1.0)) for number in range(count)]
        results.save(tmp_path / FILE)
        results = Results.read(tmp_path / FILE)
        results.cut_off()
        (card,) = results.cards.values()
        assert statuses(card) == {"long": CUT_OFF}
        assert [row.case for row in card.rows("long")] == ["row 0", "row 1"]
    assert not card.is_ended("long")
    assert sum(line.startswith("  row ") for line in table.lines(results)) == 2


def test_another_card_and_other_versions_add_to_the_file(tmp_path, capsys):
    results = Results()
    for machine in (MACHINE, MACHINE | {"device": "NVIDIA H200"}, MACHINE | {"jax": "0.11.2"}):
        card = results.of(machine, is_tiny=False)
        card.begin("rates", 1.0)
        card.found.append(vars(Row("copy", 3e12, "B/s")))
        card.end(DONE)
        results.save(tmp_path / FILE)
        results = Results.read(tmp_path / FILE)
    assert list(results.cards) == [
        "cpu x1, JAX 0, jaxlib 0",
        "NVIDIA H200 x1, JAX 0, jaxlib 0",
        "cpu x1, JAX 0.11.2, jaxlib 0",
    ]
    assert main(["--table", "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert all(key in output for key in results.cards)
    assert output.count("  copy ") == 3


def test_a_file_that_is_not_results(tmp_path, capsys):
    (tmp_path / FILE).write_text("[1]")
    with pytest.raises(SystemExit):
        main(["--tiny", "--out", str(tmp_path)])
    assert "is not a file of results" in capsys.readouterr().err


# Refusals.


@pytest.mark.slow
def test_a_machine_without_a_chip_is_told_so(tmp_path):
    """A worker's refusal is told where the command was given, not in the log alone."""
    command = [part for part in COMMAND if part != "--tiny"]
    (tmp_path / "on_chip.log").write_text("of an earlier run\n")
    ended = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, env=environment())
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "on_chip: no chip found: this machine has only a CPU; give --tiny to run the same pieces on tiny sizes\n"
    )
    assert not (tmp_path / FILE).exists()


@pytest.mark.slow
def test_a_piece_that_is_not_there_is_told(tmp_path):
    command = [*COMMAND, str(tmp_path), "--only", "no-such"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "--only 'no-such' is in no piece's name; they are " in ended.stderr


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


# Rows and tables.


def test_verdicts():
    assert Row("a", share=0.8, goal=0.85).verdict == "SHORT"
    assert Row("a", share=0.9, goal=0.85).verdict == "ok"
    assert Row("a", is_right=False, share=0.9, goal=0.85).verdict == "WRONG"
    assert Row("a", share=0.9).verdict == ""


def test_table_says_what_is_wrong_and_how_far_a_prediction_was_off():
    results = Results()
    card = results.of(MACHINE, is_tiny=False)
    rows = [
        Row("decode", 1.5, "us", 0.5, "copy", 0.9),
        Row("parity", 3.0, "relative", is_right=False),
        Row("decode step", 6.0, "ms", predicted=7.5, note="made up"),
    ]
    card.pieces["one"] = {"status": FAILED, "seconds": 2.0, "rows": [vars(row) for row in rows], "error": "no room"}
    card.pieces["one"]["clocks"] = "1980 MHz, 2619 MHz"
    found = list(table.lines(results))
    assert "one (2 s): failed: no room [1980 MHz, 2619 MHz]" in found
    assert any("50.0% of copy" in line and "(goal 90%)" in line and "SHORT" in line for line in found)
    assert any(line.endswith("predicted 7.5 (-20.0%); made up") for line in found)
    assert found[-1] == "1 pieces, 1 that did not end well; of the figures with a bound 0 ok, 1 SHORT, 1 WRONG"


def test_the_table_of_kernels():
    """Two steps of a product in two parts and an addition; a kernel that runs beside another one leaves no gap."""
    runs = [
        KernelRun(name, start * 1e-6, end * 1e-6, operation)
        for step in (0, 100)
        for name, start, end, operation in [
            ("gemm", step, step + 10, ("m", "dot.1")),
            ("reduce", step + 12, step + 14, ("m", "dot.1")),
            ("add", step + 20, step + 40, None),
            ("copy", step + 21, step + 25, None),
        ]
    ]
    found = {row.case.strip(): row for row in steps.rows(runs, 2, {("m", "dot.1"): 20e6})}
    assert found["kernels"].value == 4
    assert found["gaps between kernels"].value == pytest.approx((2 + 6 + 60 + 2 + 6) / 2)
    assert found["gemm"].value == pytest.approx(10)
    assert found["gemm"].note == "1.0 a step of 10.0 us, 20 MB a step, 2000 GB/s"
    assert found["reduce"].note == "1.0 a step of 2.0 us"
    assert steps._short("void cutlass::Kernel<cutlass::gemm<float>>(Params)") == "Kernel"
    assert steps._short("loop_add_fusion_12") == "loop_add_fusion"


def test_traces_are_kept_in_one_archive(tmp_path):
    for name, content in (("8b-b1", b"one"), ("8b-b64", b"two"), ("8b-b1", b"again")):
        (tmp_path / "trace.xplane.pb").write_bytes(content)
        steps.keep(tmp_path, tmp_path / "traces.zip", name)
    with zipfile.ZipFile(tmp_path / "traces.zip") as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == {"8b-b64": b"two", "8b-b1": b"again"}


# Pieces.


def test_every_dtype_and_batch_of_a_chip_has_a_piece_and_names_are_unique(tmp_path, monkeypatch):
    sizes = sizes_for("gpu", is_tiny=False)
    every = pieces(sizes, tmp_path)
    names = [piece.name for piece in every]
    assert len(set(names)) == len(names)
    assert all(piece.seconds <= 200 and piece.limit <= 480 for piece in every)
    for dtype in sizes.cache_dtypes:
        assert f"parity llama-3-8b {dtype}" in names
        assert f"decode attention b64 c1536 {dtype}" in names
    processes = {piece.process for piece in every if piece.name.startswith("parity llama")}
    assert len(processes) == len(sizes.cache_dtypes)
    assert names.index("8b b1") < names.index("8b b1 one graph") < names.index("torch") < names.index("8b b1 int8")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [ONE_GRAPH, NO_GRAPHS])
def test_this_release_of_xla_knows_the_flags(flags):
    """A flag that XLA does not know ends the process."""
    program = "import jax; jax.block_until_ready(jax.numpy.ones(2))"
    ended = subprocess.run([sys.executable, "-c", program], env=environment() | flags, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-500:]


def test_packages_that_are_not_installed_give_a_row(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    card = CardResults(MACHINE)
    notes = [row.note for run in (peers.torch, peers.vllm, peers.sanitizer) for row in run(TINY, card)]
    assert notes == [f"not run: {name} is not installed" for name in ("torch", "vllm", "compute-sanitizer")]


def test_rows_of_a_peer_have_shares_of_the_copy_and_its_failure_is_told(monkeypatch):
    line = json.dumps({"case": "gemm", "value": 10.0, "unit": "us", "num_bytes": 15e6})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(child, "run", lambda *_: child.Ended(1, f"noise\n{line}\n", "Traceback\nOutOfMemoryError: 1"))
    card = CardResults(MACHINE, {"rates": {"status": DONE, "seconds": 1.0, "rows": [vars(Row("copy", 3e12, "B/s"))]}})
    gemm, failure = peers.torch(TINY, card)
    assert gemm.share == pytest.approx(0.5)
    assert failure.note == "not run to its end: OutOfMemoryError: 1"


@pytest.mark.parametrize(
    ("output", "is_right", "note"),
    [
        ("4 calls ran\n========= ERROR SUMMARY: 0 errors\n", True, ""),
        (
            "========= Invalid __global__ read of size 16\n4 calls ran\n========= ERROR SUMMARY: 2 errors\n",
            False,
            "Invalid __global__ read of size 16",
        ),
        ("Device not supported\n", None, "not run: Device not supported"),
    ],
)
def test_what_the_sanitizer_says(monkeypatch, output, is_right, note):
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(child, "run", lambda *_: child.Ended(0, output, ""))
    (row,) = peers.sanitizer(TINY, CardResults(MACHINE))
    assert (row.is_right, row.note) == (is_right, note)


# Comparisons.


def test_errors_are_relative_to_each_row():
    rng = np.random.default_rng(0)
    expected = rng.standard_normal((4, 8, 16)).astype(np.float32)
    found = expected * (1 + np.array([0.0, 1e-3, 0.02, 0.0], np.float32))[:, None, None]
    assert parity.relative_error(found, expected) == pytest.approx(0.02, rel=1e-3)
    assert parity.relative_error(found / 50, expected / 50) == pytest.approx(0.02, rel=1e-3)
    assert parity.relative_error(np.where(found > 3, np.nan, found), expected) == float("inf")


def test_a_decode_blind_to_its_newest_key_is_refused_at_1000_keys():
    shape = decode_shape("qwen3-0.6b", 2, 1000, dtype="bfloat16", cache_dtype="bfloat16", page_size=16)
    honest, blind = parity._paged_rows("decode", shape)
    assert honest.value is not None
    assert blind.value is not None
    assert honest.is_right
    assert honest.value < parity.MAX_ERROR / 2
    assert (blind.is_right, blind.note) == (True, "blind to the newest key: refused")
    assert blind.value > 2 * parity.MAX_ERROR


# Whole runs.


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_pieces(tmp_path):
    """Every piece runs to its end, and all comparisons are right."""
    begin = time.time()
    command = [*COMMAND, str(tmp_path), "--minutes", "18"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment())
    print(f"{time.time() - begin:.0f} s")
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    card = only_card(tmp_path)
    assert set(statuses(card).values()) == {DONE}
    assert card.is_right
    assert card.running is None
    figures = [row for name in card.pieces for row in card.rows(name)]
    assert {row.of for row in figures} >= {"copy", "matrix product", "roofline"}
    assert sum(row.is_right is True for row in figures) >= 15
    assert all(row.predicted is None for row in figures)  # there are constants of chips only
    assert any(row.case == "kernels" for row in figures)
    assert "0 WRONG" in ended.stdout
