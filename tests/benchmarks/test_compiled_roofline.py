"""The table of decode steps on chips that are not here: what is measured is kept, and a cell's error is its result."""

import json
from dataclasses import replace

import pytest

from benchmarks import compiled_roofline
from benchmarks.compiled_roofline import LLAMA_3_8B, Cell, CellFigures, measure, run
from pallas_kernels import ahead_of_time

CELLS = [Cell("v6e", "int8", 8, 1536), Cell("h100", "fp8", 1, 8192)]
NARROW = replace(
    LLAMA_3_8B, vocab_size=8192, hidden_size=2048, intermediate_size=4096, num_heads=16, num_kv_heads=4, num_layers=6
)


def test_what_the_file_has_is_not_measured_again(tmp_path, monkeypatch):
    file, asked, said = tmp_path / "roofline.json", [], []

    def fake(cell):
        asked.append(cell)
        if cell.chip == "h100":
            raise RuntimeError("out of registers\nin a long listing")
        return CellFigures(11.0, 10.0, 3, 0.5, "memory", 1.0)

    monkeypatch.setattr(compiled_roofline, "measure", fake)
    run(CELLS[:1], file, lambda cell, found: said.append(found))
    run(CELLS, file, lambda cell, found: said.append(found))
    assert asked == CELLS
    assert said[0] == said[1]
    assert said[0].ratio == pytest.approx(1.1)
    assert said[2] == "RuntimeError: out of registers"
    assert list(json.loads(file.read_text())) == [cell.name for cell in CELLS]


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    lines = {}
    for number, cell in enumerate(CELLS):
        lines[cell.name] = vars(cell) | vars(CellFigures(11.0 + number, 10.0, 3, 0.5, "memory", 1.0))
    compiled_roofline.draw(lines, tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chip", ["v6e", "tpu7x", "h100"])
def test_a_cell(chip):
    """A narrow model moves little more than it must, and no less."""
    if (reason := ahead_of_time.missing_compiler(chip)) is not None:
        pytest.skip(reason)
    found = measure(Cell(chip, "bfloat16", 8, 1536), NARROW)
    print(f"{chip}: {found.ratio:.3f}")
    assert 0.99 < found.ratio < 1.3
