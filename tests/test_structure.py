"""The house: imports point down, no room reaches up, nothing forbidden is imported."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {
    "pallas_kernels": 1,
    "jaxinfer.models": 2,
    "jaxinfer.parallel": 2,
    "jaxinfer.quantization": 2,
    "jaxinfer.cache": 2,
    "jaxinfer.compilation_cache": 2,
    "jaxinfer.data": 2,
    "jaxinfer.sampling": 3,
    "jaxinfer.text": 3,
    "jaxinfer.speculative": 3,
    "jaxinfer.engine": 4,
    "jaxinfer.training": 4,
    "jaxinfer.calibration": 4,
    "jaxinfer.planning": 4,
    "checkpoints_convert": 4,
    "jaxinfer.batch": 5,
    "jaxinfer.loading": 5,
    "jaxinfer.llm": 5,
    "jaxinfer.async_engine": 6,
    "jaxinfer.fleet": 6,
    "jaxinfer.measure.bench": 7,
    "jaxinfer.measure.profiling": 8,
    "jaxinfer.measure.advise": 8,
    "jaxinfer.cli": 9,
}
FILES = [path for top in ("jaxinfer", "pallas_kernels", "checkpoints_convert") for path in (ROOT / top).rglob("*.py")]
# Rooms of one floor that may look into a neighbour.
BESIDE = {
    ("jaxinfer.cache", "jaxinfer.models"),
    ("jaxinfer.llm", "jaxinfer.loading"),
    ("jaxinfer.llm", "jaxinfer.batch"),
    ("jaxinfer.batch", "jaxinfer.llm"),  # for types only
    ("jaxinfer.cache", "jaxinfer.parallel"),
    ("jaxinfer.fleet", "jaxinfer.async_engine"),
    ("jaxinfer.models", "jaxinfer.quantization"),
    ("jaxinfer.planning", "jaxinfer.engine"),
    ("jaxinfer.models", "jaxinfer.parallel"),
    ("jaxinfer.speculative", "jaxinfer.sampling"),
}
MAY_IMPORT_CHECKPOINTS = ("jaxinfer.loading", "jaxinfer.cli", "checkpoints_convert")


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(module: str) -> str | None:
    return next((name for name in FLOORS if module == name or module.startswith(name + ".")), None)


def violations(path: Path, names: set[str]) -> list[str]:
    module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    own = room(module)
    if own is None:  # the package's own __init__, which resolves names lazily
        return []
    found = []
    for name in names:
        other = room(name)
        if other in (None, own):
            continue
        is_up = FLOORS[other] > FLOORS[own] or (FLOORS[other] == FLOORS[own] and (own, other) not in BESIDE)
        is_private = other == "checkpoints_convert" and own not in MAY_IMPORT_CHECKPOINTS
        if is_up or is_private:
            found.append(f"{module} imports {name}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    assert violations(path, imported(path)) == []


def test_an_import_that_points_up_is_found():
    assert violations(ROOT / "jaxinfer/models/x.py", {"jaxinfer.engine.request"})
    assert violations(ROOT / "jaxinfer/engine/x.py", {"checkpoints_convert"})
    assert not violations(ROOT / "jaxinfer/cache/x.py", {"jaxinfer.models", "pallas_kernels"})


def test_nothing_imports_torch_or_pickle():
    forbidden = {"torch", "transformers", "pickle", "cloudpickle", "dill"}
    for path in FILES:
        assert not {name.split(".")[0] for name in imported(path)} & forbidden, path
