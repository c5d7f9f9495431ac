"""Tables of block sizes, and the tuner that fills them."""

import itertools
import json
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from pallas_kernels import measure, tune, tuning
from pallas_kernels.paged_attention import make_spec
from pallas_kernels.paged_attention.shapes import decode_shape
from tests.pallas_kernels.paged_attention.shapes import SMALL, PagedShape

NAME = "paged_attention xla short"


@dataclass(frozen=True)
class ExampleSizes:
    keys: int = 128
    tile: int = 8


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """A folder of tables of this test's own."""
    monkeypatch.setenv("PALLAS_KERNELS_TABLES", str(tmp_path))
    tuning.table.cache_clear()
    yield tmp_path
    tuning.table.cache_clear()


def write(folder, sizes):
    (folder / "cpu.json").write_text(json.dumps({"sizes": {NAME: {"facts": sizes}}}))
    tuning.table.cache_clear()


def test_the_table_of_the_chip_wins_over_the_heuristic(tables):
    assert tuning.chip() == "cpu"
    assert tuning.tuned(ExampleSizes(), NAME, "facts") == ExampleSizes()
    write(tables, {"keys": 256})
    assert tuning.tuned(ExampleSizes(), NAME, "facts") == ExampleSizes(keys=256)
    assert tuning.tuned(ExampleSizes(), NAME, "other facts") == ExampleSizes()
    with tuning.force(NAME, tile=2):
        assert tuning.tuned(ExampleSizes(), NAME, "other facts") == ExampleSizes(tile=2)
    assert tuning.tuned(ExampleSizes(), NAME, "other facts") == ExampleSizes()


@pytest.mark.parametrize("sizes", [{"keys": 0}, {"keys": "many"}, {"kyes": 128}, {"keys": True}])
def test_a_wrong_size_is_an_error(tables, sizes):
    write(tables, sizes)
    with pytest.raises(ValueError, match="not a positive int"):
        tuning.tuned(ExampleSizes(), NAME, "facts")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sizes": {"a": {"b": 3}}}'])
def test_a_file_that_is_no_table_is_an_error(tables, text):
    (tables / "cpu.json").write_text(text)
    with pytest.raises(ValueError, match=r"cpu\.json is not a table"):
        tuning.tuned(ExampleSizes(), NAME, "facts")


def test_facts_do_not_name_the_batch():
    """Two batches of one model share their sizes, so that a sum is rounded the same in both."""
    specs = []
    for batch in (1, 64):
        arguments = decode_shape("llama-3-8b", batch, 1024).abstract("separate")
        arrays = {name: arguments[name] for name in ("q", "k_new", "v_new", "pages", "page_table")}
        specs.append(make_spec(**arrays))
    assert specs[0] != specs[1]
    assert specs[0].facts == specs[1].facts


def test_tune_writes_what_is_faster_and_goes_on_where_it_stopped(tables, monkeypatch, capsys):
    """With made-up times: keys of 256 are the fastest, one size does not compile, a second run measures nothing."""
    timed = []

    def seconds_per_step(loop, arguments, steps, repeats):
        sizes = tuning._forced[NAME]
        timed.append(sizes)
        if sizes["keys"] == 64:
            raise NotImplementedError("does not fit")
        return 1.0 / sizes["keys"] + (0.001 if sizes["tile"] != 8 else 0)

    monkeypatch.setattr(measure, "seconds_per_step", seconds_per_step)
    monkeypatch.setattr(measure, "paged_loop", lambda *args: (None, None))
    call = tune.paged_call("tiny", SMALL["decode_around_a_page"], "xla")
    monkeypatch.setattr(tune, "calls", lambda *args: [call])
    output = tables / "cpu.json"
    assert tune.main(["--output", str(output)]) == 0
    assert "does not fit" in capsys.readouterr().out
    found = json.loads(output.read_text())
    assert list(found["sizes"][NAME].values()) == [{"tile": 8, "queries": 16, "keys": 256}]
    before = len(timed)
    tune.main(["--output", str(output)])
    assert len(timed) == before
    tuning.table.cache_clear()
    assert tuning.table("cpu") == found["sizes"]


@pytest.mark.slow
def test_the_measured_loop_runs_every_kind_of_step():
    for shape in (
        decode_shape("qwen3-0.6b", 2, 40, dtype="float32", cache_dtype="int8", page_size=16),
        PagedShape(((20, 30),)),
    ):
        loop, arguments = measure.paged_loop(shape, "xla", 2)
        assert np.isfinite(loop(arguments, 2)).all()


def test_a_loop_that_makes_nan_is_not_timed():
    with pytest.raises(ArithmeticError, match="NaN"):
        measure.seconds_per_step(lambda arguments, n: np.array(np.nan), None, 1)


def test_a_loop_whose_time_does_not_grow_is_too_noisy_to_tell(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with pytest.raises(ArithmeticError, match="too noisy"):
        measure.seconds_per_step(lambda arguments, n: np.array(0.0), None, 1)


@pytest.mark.parametrize(("platform", "implementation"), [("cpu", "xla"), ("tpu", "pallas_tpu"), ("gpu", "pallas_gpu")])
def test_every_call_of_the_tuner_has_a_program_and_candidates(platform, implementation):
    names = []
    for call in tune.calls(implementation, platform, ["llama-3-8b"], True):
        (name,) = call.module.candidates(call.spec)
        assert name in call.module.tunable(call.spec)
        assert name.split()[1] == implementation
        names.append(call.name)
    assert len(set(names)) == len(names) > 3
