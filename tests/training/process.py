"""A process that runs a piece of a test, and may be killed."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def run_python(code: str) -> subprocess.CompletedProcess:
    """Runs the code where `tests` can be imported, its programs compiled as those of the tests beside it."""
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=environment, check=False, timeout=200)
