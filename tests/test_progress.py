"""Progress: a bar on a terminal and in a notebook, lines in the log of a command, and otherwise nothing."""

import contextlib
import fcntl
import io
import os
import struct
import sys
import termios
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tqdm
import typer
from jax import monitoring
from jax._src import compiler
from typer.testing import CliRunner

from jaxinfer import progress
from jaxinfer.cli.command import command, say
from jaxinfer.progress import Stage

TICK = 0.04
tqdm.tqdm(file=io.StringIO()).close()  # the first one takes as long as several ticks


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.delenv("JAXINFER_PROGRESS", raising=False)
    monkeypatch.setattr(progress, "REFRESH_SECONDS", TICK)
    monkeypatch.setattr(progress, "LOG_SECONDS", 3 * TICK)


class Screen(io.TextIOWrapper):
    """Standard error on a terminal."""

    def __init__(self, columns: int = 100):
        self.reading, writing = os.openpty()
        fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        super().__init__(io.FileIO(writing, "w"), write_through=True)  # type: ignore[arg-type]

    def lines(self) -> list[str]:
        """What was written since the last call, in the pieces that each overwrite the one before."""
        found, data = b"", b"more"
        os.set_blocking(self.reading, False)
        while data:
            try:
                data = os.read(self.reading, 65536)
            except BlockingIOError:
                break
            found += data
        return [line.strip() for line in found.decode().replace("\n", "\r").split("\r") if line.strip()]


@pytest.fixture(params=[100, 0], ids=["wide", "unknown width"])
def screen(request):
    made = Screen(request.param)
    yield made
    made.close()
    os.close(made.reading)


def test_a_terminal_shows_the_innermost_stage(monkeypatch, screen):
    monkeypatch.setattr(sys, "stderr", screen)
    with Stage("loading model") as outer, Stage("loading model"):
        time.sleep(4 * TICK)
        with Stage("loading", 2_000_000, "B") as inner:
            inner.update(500_000)
            inner.describe("layers.0.attention")
            time.sleep(4 * TICK)
        outer.describe("almost done")
        time.sleep(4 * TICK)
    shown = screen.lines()
    kinds = [one.partition(":")[0] for one in shown]
    order = [one for number, one in enumerate(kinds) if not number or kinds[number - 1] != one]
    assert order == ["loading model", "loading", "loading model"]
    (bar, *_) = [one for one in shown if "layers.0.attention" in one]
    assert " 25%|" in bar
    assert "500k/2.00M" in bar
    assert "almost done" in shown[-1]
    assert len(shown) > 6  # it was drawn again and again, although nothing was counted


def test_a_short_stage_shows_nothing_and_a_counted_one_stays(monkeypatch, screen):
    monkeypatch.setattr(sys, "stderr", screen)
    with Stage("short"):
        pass
    assert screen.lines() == []
    with Stage("rows", 4, "row", initial=2) as stage:
        for _ in range(2):
            time.sleep(2 * TICK)
            stage.update()
    assert "4/4" in screen.lines()[-1]


def test_a_message_is_written_above_the_bar(monkeypatch, screen):
    monkeypatch.setattr(sys, "stderr", screen)
    with Stage("rows", 4, "row"):
        time.sleep(3 * TICK)
        say("a message")
        time.sleep(3 * TICK)
    shown = screen.lines()
    where = shown.index("a message")
    assert 0 < where < len(shown) - 1


def test_the_log_of_a_command_has_a_line_from_time_to_time(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with progress.of_command():
        for number in range(4):  # each too short for a line
            with Stage(f"part {number}", 30, "row", initial=10) as stage:
                stage.update(10)
                stage.describe(lambda: "7 tokens/s")
                time.sleep(2 * TICK)
    lines = log.getvalue().splitlines()
    assert 1 <= len(lines) <= 3
    for line in lines:
        name, _, figures = line.partition(": ")
        assert name.startswith("part ")
        done, elapsed, rate, left, detail = figures.split(", ")
        assert (done, elapsed, detail) == ("20 of 30 rows", "00:00 so far", "7 tokens/s")
        assert rate.endswith(" rows/s")
        assert 10 / (12 * TICK) < float(rate.removesuffix(" rows/s")) < 10 / TICK
        assert left == "00:00 left"


def test_time_left_is_of_what_this_run_did(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    stage = Stage("converting", 4_000_000, "B", initial=1_000_000, show=True)
    stage.update(1_000_000)
    stage.began_at -= 100
    assert stage.line() == "converting: 2.00MB of 4.00MB, 01:40 so far, 10.0kB/s, 03:20 left"


@pytest.mark.parametrize("variable", [None, "0"])
@pytest.mark.parametrize("show", [None, False, True])
def test_a_library_shows_nothing_in_a_file(monkeypatch, show, variable):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    if variable is not None:
        monkeypatch.setenv("JAXINFER_PROGRESS", variable)
    with Stage("generating", 2, "answer", show=show):
        time.sleep(6 * TICK)
    assert bool(log.getvalue()) == (show is True)


def test_every_command_can_be_silent(screen):
    from jaxinfer.cli.main import app

    def commands(group):
        for one in group.commands.values():
            yield from commands(one) if hasattr(one, "commands") else [one]

    found = list(commands(typer.main.get_command(app)))
    assert len(found) > 18
    assert [one.name for one in found if not any("--no-progress" in param.opts for param in one.params)] == []

    own = typer.Typer()

    @own.command()
    @command
    def work() -> None:
        with contextlib.redirect_stderr(screen), Stage("working"):  # the runner has replaced it
            time.sleep(4 * TICK)

    def run(*arguments: str) -> list[str]:
        assert CliRunner().invoke(own, arguments).exit_code == 0
        return screen.lines()

    assert run() != []
    assert run("--no-progress") == []
    assert run() != []  # of that call alone


def test_a_program_is_named_while_it_compiles(monkeypatch, screen):
    monkeypatch.setattr(sys, "stderr", screen)
    compile_now = compiler.backend_compile_and_load

    def slowly(*arguments, **options):
        time.sleep(6 * TICK)  # longer than programs that the cache does not keep
        return compile_now(*arguments, **options)

    monkeypatch.setattr(compiler, "backend_compile_and_load", slowly)
    shift = float(np.random.default_rng().random())  # in no cache

    def decode(x):
        time.sleep(4 * TICK)
        return x + shift

    number = jnp.float32(1)
    with Stage("waiting for the first token"):
        before = progress.num_compiled()
        jax.jit(decode)(number)
        assert progress.num_compiled() == before + 1
        assert progress.programs() == ""
        monitoring.record_event("/jax/compilation_cache/cache_hits")
        for _ in range(2):  # one that was read, and another that was not
            monitoring.record_event_duration_secs("/jax/core/compile/backend_compile_duration", 1.0)
        assert progress.num_compiled() == before + 2
        monitoring.record_event_duration_secs("/jax/core/compile/backend_compile_duration", 0.01)
        assert progress.num_compiled() == before + 2
        time.sleep(3 * TICK)
    shown = screen.lines()
    assert [one.partition(", ")[2] for one in shown if one.endswith("tracing decode")]
    assert [one.partition(", ")[2] for one in shown if one.endswith("compiling decode")]
    assert "decode" not in shown[-1]


def test_a_notebook_has_a_bar(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    drawn = []

    class Bar:
        start_t = 0.0

        def __init__(self, **options):
            self.options = options

        def set_postfix_str(self, text, refresh):
            self.text = text

        def refresh(self):
            drawn.append((self.options["total"], self.n))

        clear = close = lambda self: None

    shell = types.SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "tqdm.auto", types.SimpleNamespace(tqdm=Bar))
    with Stage("rows", 3, "row") as stage:
        stage.update()
        time.sleep(4 * TICK)
    assert drawn[-1] == (3, 1)
    assert log.getvalue() == ""


def test_a_terminal_that_has_gone_does_not_end_the_work(monkeypatch):
    made = Screen()
    monkeypatch.setattr(sys, "stderr", made)
    with Stage("working") as stage:
        time.sleep(3 * TICK)
        made.close()
        os.close(made.reading)
        time.sleep(3 * TICK)
        with Stage("inner"):
            time.sleep(2 * TICK)
    assert stage.seconds > 0
