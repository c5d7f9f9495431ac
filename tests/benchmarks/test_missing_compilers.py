"""Commands that compile for chips say in a sentence which compiler is missing."""

from importlib import import_module

import pytest

from jaxinfer.extras import install_hint
from pallas_kernels import ahead_of_time


@pytest.mark.parametrize("name", ["compiled_roofline", "deterministic_cost", "tpu_bundles"])
def test_a_missing_compiler_is_told(name, monkeypatch, capsys):
    monkeypatch.setattr(ahead_of_time, "missing_compiler", lambda chip: f"no compiler for {chip}")
    assert import_module(f"benchmarks.{name}").main(["--chip", "v6e", "--chip", "v5e"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    *reasons, hint = output.err.splitlines()
    assert (sorted(reasons), hint) == (["no compiler for v5e", "no compiler for v6e"], install_hint("aot"))
    assert not ahead_of_time.missing_compilers([])
