"""Help texts, the version, wrong usage; and that asking for help stays fast."""

import os
import subprocess
import sys

import pytest
import typer.main

from jaxinfer import __version__
from jaxinfer.cli.main import GROUPS, app

COMMANDS = [name for commands in GROUPS.values() for name in commands]


def test_help_lists_every_command_by_group(jaxinfer):
    result = jaxinfer("--help")
    assert result.exit_code == 0
    for words in (*COMMANDS, *GROUPS, "--version", "Examples", "Exit codes"):
        assert words in result.stdout
    assert "…" not in result.stdout  # nothing is cut off at 80 columns


@pytest.mark.matrix
@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_names_all_its_options(jaxinfer, name):
    result = jaxinfer(name, "--help")
    assert result.exit_code == 0
    assert "…" not in result.stdout
    for parameter in typer.main.get_command(app).commands[name].params:
        for option in parameter.opts:
            if option.startswith("--"):
                assert option in result.stdout
    assert jaxinfer(name, "-h").stdout == result.stdout


@pytest.mark.matrix
@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"chat", "front", "generate", "score", "serve"}))
def test_reporting_commands_have_json(jaxinfer, name):
    assert "--json" in jaxinfer(name, "--help").stdout


def test_help_loads_nothing_slow():
    code = (
        "import sys; from jaxinfer.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "print([name for name in ('jax', 'numpy', 'flax', 'tokenizers', 'tqdm') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_version(jaxinfer):
    result = jaxinfer("--version")
    assert (result.exit_code, result.stdout) == (0, f"jaxinfer {__version__}\n")


def test_it_runs_as_a_module():
    result = subprocess.run([sys.executable, "-m", "jaxinfer.cli", "--version"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, f"jaxinfer {__version__}\n")


def test_without_a_command_it_shows_help(jaxinfer):
    assert "Usage: jaxinfer" in jaxinfer().output


@pytest.mark.parametrize(
    "arguments", [["nope"], ["generate", "hi"], ["generate", "hi", "-m", "x", "--nope"], ["convert"]]
)
def test_wrong_usage_exits_with_2(jaxinfer, arguments):
    result = jaxinfer(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage:" in result.stderr


@pytest.mark.slow
def test_completion_is_installed_and_completes(tmp_path):
    """For bash, as for the other shells that typer knows."""
    code = "from jaxinfer.cli.main import main; main()"
    # Typer takes the shell from the processes above, which is sh under make, unless this is set.
    environment = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    installed = subprocess.run(
        [sys.executable, "-c", code, "--install-completion", "bash"], env=environment, capture_output=True, text=True
    )
    assert installed.returncode == 0, installed.stderr
    assert "jaxinfer" in (tmp_path / ".bashrc").read_text()
    words = {"_JAXINFER_COMPLETE": "complete_bash", "COMP_WORDS": "jaxinfer ge", "COMP_CWORD": "1"}
    completed = subprocess.run(
        [sys.executable, "-c", code], env={**environment, **words}, capture_output=True, text=True
    )
    assert completed.stdout.split() == ["generate"]
