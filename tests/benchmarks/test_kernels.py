"""The report of compiled kernels: its lines, its exit code, and the README example of the kernels' page."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import kernels as report
from pallas_kernels import ahead_of_time
from tests.pallas_kernels.quick import quick

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("dtypes", quick([(report.CACHE_DTYPES,), (("int8",),)], (("int8",),)))
def test_report_of_one_kernel(dtypes, tmp_path, monkeypatch, capsys):
    if (reason := ahead_of_time.missing_compiler("v6e")) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(report, "CACHE_DTYPES", dtypes)
    output = tmp_path / "report.json"
    assert report.main(["--chip", "v6e", "--only", "decode", "--quick", "--json", str(output)]) == 0
    lines = json.loads(output.read_text())["lines"]
    assert [line["cache"] for line in lines] == list(dtypes)
    for line in lines:
        assert line["implementation"] == "pallas_tpu"
        assert line["on_chip_bytes"] > 0
        assert line["ideal_bytes"] <= line["bytes_moved"] <= 1.1 * line["ideal_bytes"]
    assert capsys.readouterr().out.count("\n") == 2 + len(lines)


def test_a_kernel_that_does_not_compile_fails_the_report(monkeypatch, capsys):
    if (reason := ahead_of_time.missing_compiler("v6e")) is not None:
        pytest.skip(reason)

    def refuse(*args, **options):
        raise RuntimeError("out of VMEM\nand more")

    monkeypatch.setattr(ahead_of_time, "compile_for", refuse)
    assert report.main(["--chip", "v6e", "--only", "decode", "--quick"]) == 1
    assert "DOES NOT COMPILE: out of VMEM" in capsys.readouterr().out


def test_a_missing_compiler_is_said(monkeypatch, capsys):
    monkeypatch.setattr(ahead_of_time, "missing_compiler", lambda chip: "no compiler here")
    assert report.main(["--chip", "v6e", "--only", "decode", "--quick"]) == 0
    assert capsys.readouterr().out.count("no compiler here") == len(report.CACHE_DTYPES)


@pytest.mark.slow
def test_the_example_of_the_page_runs():
    text = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    scope: dict = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], scope)  # noqa: S102 - our own page
    assert scope["out"].shape == (21, 8, 64)
