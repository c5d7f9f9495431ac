"""The picture: a point for each measured cache, with axes, units and a legend."""

import pytest

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure

from jaxinfer.measure.kv_report.picture import draw
from jaxinfer.measure.kv_report.report import FULL, CacheChoice, CacheFigures


def test_kl_by_bytes(tmp_path, monkeypatch):
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *rest, **more: (figures.append(self), save(self, *rest, **more))
    )
    rows = [
        CacheFigures(FULL, "float32", kl=0.0, sequence_bytes=4096),
        CacheFigures(CacheChoice("int8", "sinks(4)+window(8)"), "int8", kl=0.25, sequence_bytes=1024),
        CacheFigures(CacheChoice("int4"), "int4", reason="refused"),
    ]
    file = tmp_path / "a.png"
    draw(rows, file, "a model")
    assert file.read_bytes().startswith(b"\x89PNG")
    [axes] = figures[0].axes
    points = [tuple(map(float, line.get_xydata()[0])) for line in axes.lines if len(line.get_xydata())]
    assert points == [(4.0, 0.0), (1.0, 0.25)]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        *("float32", "int8"),
        *("no policy", "sinks(4)+window(8)"),
    ]
    assert "nats" in axes.get_ylabel()
    assert "KiB" in axes.get_xlabel()
