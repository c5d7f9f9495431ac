"""What a start needs: nothing of Flax or Numba, and nothing traced, once its programs are kept; the same tokens."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from jaxinfer.files import cache_folder

pytest.importorskip("numba", reason="kernels for CPUs need Numba")

RUN = """
import sys
from jaxinfer.cli.main import main
from jaxinfer.engine import kept_programs
kept_programs.is_on = sys.argv.pop(1) == "kept"
try:
    main()
finally:
    slow = {"flax", "numba", "orbax", "optax", "torch", "transformers"}
    print(*sorted(slow & {name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""


@pytest.mark.slow
def test_a_second_start_imports_neither_flax_nor_numba(model, tmp_path):
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    found = []
    for kind in ("traced", "kept", "kept"):
        command = ["run", model, "one two", "--max-tokens", "3", "--temperature", "1", "--seed", "4", "--json"]
        run = [sys.executable, "-c", RUN, kind, *command]
        done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
        found.append((done.stdout, done.stderr.splitlines()[-1]))
        if kind == "traced":  # in the suite's own folder: to compile kernels takes half a minute
            shutil.copytree(cache_folder("kernels"), tmp_path / "kernels", ignore=shutil.ignore_patterns("*.part"))
            environment["JAXINFER_CACHE_DIR"] = str(tmp_path)
    (traced, _), (made, imported), (read, imported_later) = found
    assert "flax" in imported
    assert imported_later == ""
    assert [tokens_of(text) for text in (made, read)] == [tokens_of(traced)] * 2
    assert list((tmp_path / "programs").iterdir())


def tokens_of(printed):
    return [json.loads(line)["token_ids"] for line in printed.splitlines()]
