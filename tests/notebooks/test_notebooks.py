"""Every notebook runs from top to bottom (with --slow), and its two forms say the same."""

import ast
import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jaxinfer.extras import install_hint

NOTEBOOKS = sorted((Path(__file__).parent.parent.parent / "notebooks").glob("*.py"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_it_imports_exists_and_takes_the_keywords_it_gives(path):
    pytest.importorskip("matplotlib", reason=f"notebooks plot: {install_hint('notebooks')}")
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            imported |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    assert any(getattr(one, "__module__", "").startswith("jaxinfer") for one in imported.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in imported:
            parameters = inspect.signature(imported[node.func.id]).parameters.values()
            if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
                unknown = {word.arg for word in node.keywords if word.arg} - {one.name for one in parameters}
                assert not unknown, f"line {node.lineno}: {node.func.id} takes no {unknown}"


def run(path, folder, seconds):
    """Runs a script in a process of its own, and returns what it printed."""
    root = str(NOTEBOOKS[0].parent.parent)  # where the package is not installed, too
    environment = {**os.environ, "MPLBACKEND": "Agg", "JAX_NUM_CPU_DEVICES": "1", "TMPDIR": str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, str(path)]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_from_top_to_bottom(path, tmp_path):
    pytest.importorskip("matplotlib", reason=f"notebooks plot: {install_hint('notebooks')}")
    run(path, tmp_path, 280)


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_reward_grows_from_other_seeds(seed, tmp_path):
    """The notebook has an assertion: at least 0.25 more on held-out prompts."""
    pytest.importorskip("matplotlib", reason=f"notebooks plot: {install_hint('notebooks')}")
    text = (NOTEBOOKS[0].parent / "grpo.py").read_text(encoding="utf-8")
    assert text.count("SEED = 0\n") == 1
    script = tmp_path / "grpo.py"
    script.write_text(text.replace("SEED = 0\n", f"SEED = {seed}\n"), encoding="utf-8")
    print(run(script, tmp_path, 600))


@pytest.mark.matrix
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_two_forms_agree(path):
    jupytext = pytest.importorskip("jupytext", reason=f"pairs are read by jupytext: {install_hint('notebooks')}")
    script, notebook = jupytext.read(path), jupytext.read(path.with_suffix(".ipynb"))
    assert [(cell.cell_type, cell.source) for cell in script.cells] == [
        (cell.cell_type, cell.source) for cell in notebook.cells
    ]


@pytest.mark.parametrize("place", ["mkdocs.yml", "docs/guides/notebooks.md"])
def test_all_are_listed(place):
    text = (NOTEBOOKS[0].parent.parent / place).read_text(encoding="utf-8")
    assert not [path.stem for path in NOTEBOOKS if f"notebooks/{path.stem}." not in text]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_output_but_plots_is_kept(path):
    notebook = json.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            assert "image/png" in output.get("data", {}), cell["source"]
