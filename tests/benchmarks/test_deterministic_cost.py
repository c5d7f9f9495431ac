"""What deterministic=True costs: the arithmetic of the benchmark, and that the page has its figures."""

import json
from pathlib import Path

import pytest

from benchmarks import deterministic_cost
from benchmarks.deterministic_cost import BOUNDS, Figures, engine, ideal, read, report, seconds
from jaxinfer.chips import chips
from jaxinfer.planning.compiled import DECODE
from pallas_kernels import ahead_of_time

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _has_compilers():
    missing = (ahead_of_time.missing_compiler(chip) for chip in BOUNDS)
    if (reason := next((one for one in missing if one), None)) is not None:
        pytest.skip(reason)


def test_a_step_of_one_row_takes_what_reading_the_weights_takes():
    spec = engine("h100", "bfloat16", 1, False)
    weights = 2 * (8.03e9 - 128_256 * 4096)  # of the embedding one row is read
    time = seconds(spec, ideal(spec, DECODE), 0.0)
    assert time == pytest.approx(weights / chips()["h100"].hbm_bandwidth, rel=0.01)


def test_what_the_cache_serves_takes_no_time_and_both_are_reported():
    whole = Figures(500e6, 1100e6, 256, 64, 450e6, 1060e6)
    without = Figures(440e6, 1060e6, 1, 1, 440e6, 1060e6)
    lines = report("h100", "bfloat16", {"uniform decode": whole, "decode 1": without})
    cached, plain = lines[0]["times"][1] / lines[0]["times"][0], lines[0]["uncached"]
    assert cached == pytest.approx((32 * 450 + 1060) / (32 * 440 + 1060), rel=0.005)
    assert plain == pytest.approx((32 * 500 + 1100) / (32 * 440 + 1060), rel=0.005)
    assert [line["is_ideal"] for line in lines] == [False, True, True]


@pytest.mark.slow
def test_the_page_has_the_figures_of_the_file():
    found = json.loads((ROOT / "benchmarks/results/deterministic_cost.json").read_text(encoding="utf-8"))
    assert deterministic_cost.table(found) in (ROOT / "docs/engine.md").read_text(encoding="utf-8")
    assert all(read(line) for line in found.values())
