"""Adapters that PEFT saved, served here, next to its results: the files that `make golden-adapters` writes."""

from functools import cache

import numpy as np
import pytest

from tests.oracle import parity
from tests.oracle.adapter_cases import FOLDER, GOLDEN_FAMILIES, TOLERANCE, kinds_of, read_tensors
from tests.oracle.adapter_parity import difference, open_llm, together

MAX_BYTES = 600_000
CASES = {
    f"{name}-{kind.name}": (name, kind) for name in GOLDEN_FAMILIES for kind in kinds_of(GOLDEN_FAMILIES[name]).values()
}
# One engine for all kinds of a family, with fewer slots than adapters.
NUM_SLOTS = 6


@cache
def golden(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    return read_tensors(FOLDER / name / "expected.safetensors")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """served(family): an engine with all adapters of a family, named as their folders."""
    engines = {}

    def make(name: str):
        if name not in engines:
            made, _ = golden(name)
            folder = tmp_path_factory.mktemp(name) / "base"
            parity.write_checkpoint(folder, made["config"], made["shapes"], 0, GOLDEN_FAMILIES[name].case)
            names = [f"{kind.name}/{adapter}" for _, kind in cases_of(name) for adapter in kind.adapters]
            engines[name] = open_llm(folder, {own: FOLDER / name / own for own in names}, max_adapters=NUM_SLOTS)
        return engines[name]

    yield make
    for llm in engines.values():
        llm.close()


def cases_of(name: str):
    return [(case, kind) for case, (family, kind) in CASES.items() if family == name]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_batch_of_rows_has_the_library_s_log_probabilities(served, case):
    name, kind = CASES[case]
    _, expected = golden(name)
    rows = [adapter and f"{kind.name}/{adapter}" for adapter in kind.rows]
    found = together(served(name), kind, adapter=rows)
    differences = {
        way: difference(found, expected[f"{kind.name}.{way}"])
        for way in (("single", "mixed") if kind.is_mixed else ("single",))
    }
    print(f"{case}: max |difference| " + ", ".join(f"{way} {value:.1e}" for way, value in differences.items()))
    assert max(differences.values()) <= TOLERANCE


def test_files_are_small():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= MAX_BYTES
