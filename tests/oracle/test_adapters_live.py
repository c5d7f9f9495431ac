"""Adapters that PEFT makes, served here, next to PEFT itself, live: `make test-oracle`."""

from pathlib import Path

import numpy as np
import pytest

from tests.oracle.adapter_cases import FAMILIES, PYTHON, TOLERANCE, Kind, kinds_of, library, read_tensors
from tests.oracle.adapter_parity import alone, difference, merged_logprobs, open_llm, together

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.optimized,
    pytest.mark.skipif(not PYTHON.is_file(), reason=f"no peft in {PYTHON}: make test-oracle"),
]
CASES = {f"{name}-{kind.name}": (name, kind) for name in FAMILIES for kind in kinds_of(FAMILIES[name]).values()}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """made(family): a folder with its base and adapters, and the library's log-probabilities."""
    folders: dict[str, Path] = {}

    def make(name: str) -> tuple[Path, dict[str, np.ndarray]]:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            print(library(name, folders[name]))
        return folders[name], read_tensors(folders[name] / "expected.safetensors")[1]

    return make


@pytest.mark.parametrize("case", CASES)
def test_rows_of_one_batch_and_rows_alone_have_the_library_s_log_probabilities(made, case):
    name, kind = CASES[case]
    folder, expected = made(name)
    with open_llm(folder / "base", folders_of(folder, kind)) as llm:
        batch, single = together(llm, kind), alone(llm, kind)
        base = together(llm, kind, adapter=None)
    wanted = {way: expected[f"{kind.name}.{way}"] for way in ("single", "mixed") if way == "single" or kind.is_mixed}
    found = {way: difference(batch, values) for way, values in wanted.items()}
    found["alone"] = difference(single, wanted["single"])
    print(f"{case}: max |difference| " + ", ".join(f"{way} {value:.1e}" for way, value in found.items()))
    assert max(found.values()) <= TOLERANCE
    for adapter in kind.adapters:  # each changes something
        rows = [row for row, other in enumerate(kind.rows) if other == adapter]
        assert np.abs(batch - base)[rows].max() > 0.05


def can_merge(name: str, kind: Kind) -> bool:
    """Biases of pairs need biases of the base; what changes some tokens only is no merged model."""
    return kind.name != "alora" and (kind.name != "lora_bias" or FAMILIES[name].has_biases)


@pytest.mark.parametrize("case", [case for case, own in CASES.items() if can_merge(*own)])
def test_a_merged_base_has_the_library_s_log_probabilities(made, case):
    name, kind = CASES[case]
    folder, expected = made(name)
    worst = 0.0
    for adapter, path in folders_of(folder, kind).items():
        rows = [row for row, other in enumerate(kind.rows) if other == adapter]
        found = merged_logprobs(folder / "base", path, kind.tokens[rows])
        worst = max(worst, difference(found, expected[f"{kind.name}.single"][rows]))
    print(f"{case} merged: max |difference| {worst:.1e}")
    assert worst <= 2 * TOLERANCE  # sums are rounded once more


def folders_of(folder: Path, kind: Kind) -> dict[str, Path]:
    return {adapter: folder / kind.name / adapter for adapter in kind.adapters}
