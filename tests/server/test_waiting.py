"""The log says at once what a request waits for: its model, or programs that are compiled."""

import asyncio
import functools
import logging
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from jaxinfer import progress
from jaxinfer.cli.main import app
from jaxinfer.server import run as run_module
from jaxinfer.server.app import make_app
from jaxinfer.server.catalogue import LocalModels
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.run import CompilationLog
from jaxinfer.server.service import Service
from tests.cli.conftest import write_checkpoint
from tests.server.asgi import Client
from tests.server.test_names import BASE


def lines(caplog):
    return [record.message for record in caplog.records if record.name == "jaxinfer.server"]


def test_a_request_that_waits_for_its_model_says_so_before_it_is_loaded(tmp_path, caplog):
    given = {"a": str(write_checkpoint(tmp_path / "a"))}
    options = ServerOptions(model_memory="1GiB", models=list(given), lazy=True)
    service = Service(options, None, LocalModels(given, BASE, options, compiled=set(given)))
    service.state = "ready"

    async def ask():
        client = Client(make_app(service))
        body = {"model": "a", "prompt": "x", "max_tokens": 1, "temperature": 0}
        for number in range(2):
            assert (await client.post("/v1/completions", body, x_request_id=f"one-{number}")).status == 200
        await service.models.close()

    with caplog.at_level(logging.INFO, "jaxinfer.server"):
        asyncio.run(ask())
    first, *rest = lines(caplog)
    assert first == "one-0 waits for a, which is loaded now"
    assert rest[0].startswith("loaded a in ")
    assert not [line for line in lines(caplog) if "one-1" in line]


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the log of compilations sees."""
    now = [100.0]
    monkeypatch.setattr(run_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_compilation_that_answers_wait_for_is_in_the_log(make_service, monkeypatch, caplog, clock):
    service, found = make_service(), {"": ""}
    log = CompilationLog(service)
    monkeypatch.setattr(progress, "programs", lambda threads: found[""])

    def look(programs, seconds=0.1):
        found[""] = programs
        clock[0] += seconds
        log.look()
        return lines(caplog)

    with caplog.at_level(logging.INFO, "jaxinfer.server"):
        assert look("compiling step") == look("compiling step") == []  # nobody waits
        service.generations.add(log)
        assert look("tracing step") == []
        assert look("") == look("") == []  # it took less than a look
        look("", 2)
        look("tracing step")
        said = ["answers wait for programs to be compiled: compiling step"]
        assert look("compiling step") == look("compiling decode") == look("") == said
        assert look("compiling decode") == look("", 0.5) == said
        assert look("", 2) == [*said, "compiled in 0.4 s"]


def test_only_programs_of_requests_are_waited_for():
    """Those that are compiled ahead, or for a model that is being loaded, are not."""
    progress.follow_compiler()
    inside, found = threading.Event(), {}

    def double(x):  # traced by JAX in the thread that calls it
        inside.set()
        found[threading.current_thread().name] = progress.programs(run_module._ENGINE_THREADS)
        return x * 2

    for name in ("jaxinfer engine", "jaxinfer-compile_0", "jaxinfer compile", "asyncio_0"):
        compile_it = functools.partial(jax.jit(lambda x: double(x)).lower, jnp.ones(3))
        thread = threading.Thread(target=compile_it, name=name)
        thread.start()
        thread.join()
    assert {name: bool(programs) for name, programs in found.items()} == {
        "jaxinfer engine": True,
        "jaxinfer-compile_0": True,
        "jaxinfer compile": False,
        "asyncio_0": False,
    }


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        (["--model", "x=demo", "--model", "demo-draft"], ["x"]),
        (["--model", "x=demo", "--model", "demo-draft", "--lazy"], []),
        (["--model", "x=demo", "--model", "demo-draft", "--pin", "demo-draft"], ["x", "demo-draft"]),
        (["y=demo", "--model", "x=demo-draft", "--lazy"], ["y"]),
        ([], []),
    ],
)
def test_of_several_models_the_first_is_loaded_before_the_server_is_ready(arguments, first, monkeypatch):
    started = []
    monkeypatch.setattr(run_module, "run_service", lambda service, first, **how: started.append(list(first)) or 0)
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 0, result.output
    assert started == [first]
