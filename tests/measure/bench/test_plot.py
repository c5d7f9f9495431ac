"""Pictures: every panel that the results allow, with axes, units and a legend."""

import pytest
from matplotlib.figure import Figure

from jaxinfer.measure.bench.plot import draw

MACHINE = {"num_devices": 1, "device": "cpu", "num_cores": 2, "jax": "1"}
TIMES = {"mean": 0.1, "p50": 0.1, "p90": 0.2, "p99": 0.3}
MEMORY = {"seconds": [0.0, 1.0], "rss_bytes": [2**30, 2**30], "device_bytes": [2**28, 2**29]}


def result(command, runs, **options):
    return {"command": command, "model": "demo", "options": options, "machine": MACHINE, "runs": runs}


def run(**more):
    decode = {"step_seconds": 0.1, "roofline_tokens_per_second": 50.0, "percent": 20.0}
    base = {"requests": 4, "ttft": TIMES, "tpot": TIMES, "tokens_per_second": {"out": 9.0}, "decode": decode}
    return {**base, "memory": MEMORY, **more}


LOAD = result("load", [run(rate=2.0), run(rate=1.0), run(rate="inf")])
DRAFTS = {"acceptance_by_position": [0.9, 0.5], "mean_accepted_length": 2.4}
LATENCY = result("latency", [run(batch=1, speculation=DRAFTS), run(batch=4)], draft="demo-draft")


@pytest.fixture
def drawn(monkeypatch):
    figures = []
    save = Figure.savefig

    def spied(self, *rest, **more):
        figures.append(self)
        save(self, *rest, **more)

    monkeypatch.setattr(Figure, "savefig", spied)
    return figures


@pytest.mark.slow
def test_all_panels_have_titles_units_and_legends(tmp_path, drawn):
    file = tmp_path / "a.png"
    titles = draw([LOAD, LATENCY], file)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert len(titles) == 6
    (figure,) = drawn
    for axes, title in zip(figure.axes, titles, strict=True):
        assert axes.get_title() == title
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        assert axes.get_legend().get_texts()
    ttft = figure.axes[0]
    assert [line.get_label() for line in ttft.lines] == ["P50", "P90", "P99"]
    assert ttft.lines[0].get_xdata().tolist() == [1.0, 2.0]  # an infinite rate has no place on the axis
    assert ttft.lines[2].get_ydata().tolist() == [300.0, 300.0]  # ms
    made, ideal = figure.axes[3].lines
    assert made.get_ydata().tolist() == [10.0, 40.0]
    assert ideal.get_ydata().tolist() == [50.0, 50.0]


@pytest.mark.slow
def test_panels_and_lines_without_values_are_left_out(tmp_path, drawn):
    """An infinite rate has no place on an axis, and a run of one sample no line, but a point."""
    short = {"seconds": [0.0], "rss_bytes": [2**30], "device_bytes": None}
    no_times = run(rate=1.0, ttft=None, memory=short)
    assert draw([result("load", [run(rate="inf", memory=short)])], tmp_path / "a.png") == ["memory over time"]
    assert "time to first token (TTFT)" not in draw([result("load", [no_times])], tmp_path / "b.png")
    (line,) = drawn[0].axes[0].lines
    assert line.get_marker() == "o"


def test_results_without_runs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing to draw"):
        draw([result("load", [])], tmp_path / "a.png")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"\[plot\]"):
        draw([LOAD], tmp_path / "a.png")
