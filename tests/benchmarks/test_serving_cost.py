"""The benchmark of a chunk's cost runs against the server as it is."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_few_chunks(route):
    command = [sys.executable, "-m", "benchmarks.serving_cost", "--streams", "2", "--tokens", "20", "--route", route]
    found = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2], env={**os.environ}
    )
    assert found.returncode == 0, found.stderr
    assert re.search(r"\d+ chunks of 2 streams\nevent loop [\d.]+ and engine's thread [\d.]+", found.stdout)
