"""A process that runs a piece of a test, and may be killed."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def run_python(code: str, num_devices: int | None = None) -> subprocess.CompletedProcess:
    """Runs the code where `tests` can be imported, its programs compiled as those of the tests beside it, on as many
    devices as these have or on `num_devices`."""
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    if num_devices is not None:
        environment["JAX_NUM_CPU_DEVICES"] = str(num_devices)
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=environment, check=False, timeout=200)
