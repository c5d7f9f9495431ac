"""Clients that people have, in an environment of their own (`make test-clients`), against a server in a process."""

import subprocess
from pathlib import Path

import pytest

from tests.server.process import Process

HERE = Path(__file__).parent
PYTHON = HERE.parents[2] / ".venv-clients" / "bin" / "python"

pytestmark = [pytest.mark.slow, pytest.mark.clients]


@pytest.fixture(scope="module")
def server():
    if not PYTHON.exists():
        pytest.skip("clients: there is no .venv-clients; make test-clients makes it")
    with Process("5") as process:
        process.until_ready()
        yield f"http://127.0.0.1:{process.port}"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_a_client(server, name):
    command = [PYTHON, HERE / f"use_{name}.py", server]
    found = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert found.returncode == 0, found.stderr[-4000:]
