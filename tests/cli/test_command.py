"""What commands share: option groups, exit codes, errors as sentences."""

import contextlib
import warnings
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from jaxinfer.cli.command import UsageError, command, guarded, sentence
from jaxinfer.options import MISSING, option
from jaxinfer.sampling import SamplingParamsError


@dataclass(frozen=True)
class Colours:
    first: str = option(MISSING, "One.")
    second: int | None = option(None, "Two.", flag="--two")


def run(function, *arguments: str):
    app = typer.Typer()
    app.command()(command(function))
    return CliRunner().invoke(app, list(arguments))


def test_a_dataclass_becomes_options():
    seen = []

    def paint(colours: Colours, wall: Annotated[str, typer.Argument()], twice: bool = False) -> int:
        seen.append((colours, wall, twice))
        return 3

    result = run(paint, "north", "--first", "red", "--two", "7", "--twice")
    assert result.exit_code == 3
    assert seen == [(Colours("red", 7), "north", True)]
    assert run(paint, "north").exit_code == 2  # --first has no default


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("too long by 3 tokens"), 1, "error: too long by 3 tokens"),
        (FileNotFoundError(2, "No such file or directory", "a.txt"), 1, "error: a.txt: No such file or directory"),
        (FileNotFoundError("a: no such checkpoint"), 1, "error: a: no such checkpoint"),
        (KeyError("q"), 1, "error: KeyError: 'q' (JAXINFER_TRACEBACK=1 shows where)"),
        (UsageError("give one of them"), 2, "error: give one of them"),
        (SamplingParamsError("top_p", "top_p must be less"), 2, "error: top_p must be less"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_errors_have_a_code_and_one_sentence(capsys, error, code, message):
    def fail() -> int:
        raise error

    with contextlib.ExitStack() as stack:
        if isinstance(error, BrokenPipeError):  # pytest's own standard output must survive
            stack.enter_context(pytest.MonkeyPatch.context()).setattr("os.dup2", lambda *_: None)
        assert guarded(fail) == code
    assert capsys.readouterr().err.strip() == message


def test_traceback_on_demand(monkeypatch):
    monkeypatch.setenv("JAXINFER_TRACEBACK", "1")
    with pytest.raises(ValueError, match="too long"):
        guarded(lambda: (_ for _ in ()).throw(ValueError("too long")))


def test_warnings_are_one_line(capsys):
    def warn() -> None:
        warnings.simplefilter("always")
        warnings.warn("half of it is ignored", stacklevel=1)

    assert guarded(warn) == 0
    assert capsys.readouterr().err == "warning: half of it is ignored\n"


def test_sentence_takes_the_first_line_of_jax_errors():
    error = type("JaxRuntimeError", (RuntimeError,), {"__module__": "jaxlib._jax"})("out of memory\n  and\n  so on")
    assert sentence(error) == "out of memory"


def test_an_error_that_ctrl_c_caused_is_an_interruption(capsys):
    def fails_while_interrupted():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise RuntimeError("Array has been deleted")  # noqa: B904 - as a clean-up that fails

    assert guarded(fails_while_interrupted) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert guarded(lambda: int("x")) == 1
