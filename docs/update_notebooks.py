"""Runs the notebooks and writes them beside their scripts, with their pictures as the only outputs: `make notebooks`.

Each `notebooks/NAME.py` (jupytext, percent format) is what people edit; `notebooks/NAME.ipynb` is made from it.
"""

import os
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
SECONDS = 600  # that a cell may take


def run(script: Path) -> nbformat.NotebookNode:
    """The notebook of a script, executed; printed text, times and counts are left out, so that runs differ little."""
    notebook = jupytext.read(script)
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # whatever the shell has: pictures are kept
    resources = {"metadata": {"path": str(script.parent)}}
    NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=resources).execute()
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02}"
        cell["metadata"] = {}
        if cell.cell_type == "code":
            cell["execution_count"] = None
            cell["outputs"] = [picture(output) for output in cell.outputs if "image/png" in output.get("data", {})]
    if not any(cell.get("outputs") for cell in notebook.cells):
        raise SystemExit(f"{script.name} shows no picture")
    notebook["metadata"] = {
        "jupytext": {"formats": "ipynb,py:percent"},
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def picture(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """An output with nothing but its PNG."""
    return nbformat.v4.new_output("display_data", data={"image/png": output["data"]["image/png"]})


def main() -> None:
    """All notebooks, or those named on the command line."""
    for script in sorted(NOTEBOOKS.glob("*.py")):
        if not sys.argv[1:] or script.stem in sys.argv[1:]:
            print(script.stem, flush=True)
            nbformat.write(run(script), script.with_suffix(".ipynb"))


if __name__ == "__main__":
    main()
