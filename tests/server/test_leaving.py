"""A client that closes its connection frees its place, slot and pages within two steps, whatever its request does."""

import asyncio
import threading

import pytest

from jaxinfer import AsyncEngine
from jaxinfer.server.app import make_app
from tests.server.asgi import Client
from tests.server.conftest import OPTIONS, is_idle, tiny_model, until
from tests.server.services import service_of

COMPLETIONS = "/v1/completions"
LONG = {"prompt": list(range(5, 105)), "max_tokens": 100, "ignore_eos": True, "seed": 1}  # four chunks of a prompt
TEXT = {"role": "user", "content": "def read(path): " * 3}
ROUTES = {
    "/v1/chat/completions": {"messages": [TEXT], "max_tokens": 100, "ignore_eos": True},
    "/v1/messages": {"messages": [TEXT], "max_tokens": 100},
    "/v1/responses": {"input": TEXT["content"], "max_output_tokens": 100},
}
MAX_STEPS = 2


class Gate:
    """Lets an engine's thread do so many steps."""

    def __init__(self, engine):
        self.num_steps, self._is_open, self._permits = 0, False, threading.Semaphore(0)
        self._llm, self._step = engine.llm, engine.llm.step

    def __enter__(self):
        self._llm.step = self._wait
        return self

    def __exit__(self, *_):
        self._is_open = True
        self._permits.release()
        self._llm.step = self._step

    def _wait(self):
        if not self._is_open:
            self._permits.acquire()
        self._step()
        self.num_steps += 1

    def allow(self, num_steps):
        self._permits.release(num_steps)

    async def until(self, condition):
        """Steps one by one until the condition holds; it is looked at between steps."""
        while not condition():
            before = self.num_steps
            self.allow(1)
            await until(lambda: self.num_steps > before)  # noqa: B023


def has_begun(phase, scheduler, service):
    """Whether the last request is in the phase."""
    answers = [one for one in scheduler.running if one.num_prompt > 2]
    if phase == "in the server's queue":
        return service.default.admission.num_waiting == 1 and len(scheduler.waiting) == 1
    if phase == "waiting":
        return any(one.num_prompt > 2 for one in scheduler.waiting) and len(scheduler.running) == OPTIONS["max_seqs"]
    if phase == "prefill":
        return any(0 < one.num_stored < one.target for one in answers)
    return any(one.num_output >= 2 for one in answers)


async def leave(engine, service, phase, path, body):
    client, scheduler = Client(make_app(service)), engine.llm.engine.scheduler
    others = []
    with Gate(engine) as gate:
        if phase in ("waiting", "in the server's queue"):
            filling = {"prompt": [5, 6], "n": OPTIONS["max_seqs"], "max_tokens": 200, "ignore_eos": True, "seed": 2}
            others.append(client.send("POST", COMPLETIONS, filling))
            await gate.until(lambda: len(scheduler.running) == OPTIONS["max_seqs"])
        if phase == "in the server's queue":
            others.append(client.send("POST", COMPLETIONS, {"prompt": [5], "max_tokens": 9, "ignore_eos": True}))
            await until(lambda: service.default.admission.num_running == service.default.admission.capacity)
        leaving = client.send("POST", path, body)
        if phase == "waiting":
            await until(lambda: not engine._commands.empty() or has_begun(phase, scheduler, service))
        await until(lambda: scheduler.has_work)
        await gate.until(lambda: has_begun(phase, scheduler, service))
        num_pages = scheduler.pool.num_owned
        leaving.leave()
        await asyncio.wait_for(asyncio.gather(leaving.task, return_exceptions=True), 60)
        gate.allow(MAX_STEPS)
        await until(lambda: not any(one.num_prompt > 2 for one in (*scheduler.running, *scheduler.waiting)))
        if others:  # their answers may have got a page more each
            assert scheduler.pool.num_owned <= num_pages + OPTIONS["max_seqs"] + 1
        else:
            assert is_idle(engine)
        assert len(service.generations) == len(others)
        assert service.default.admission.num_waiting == 0
        for other in others:
            other.leave()
    await asyncio.gather(*(other.task for other in others))
    await until(lambda: is_idle(engine))
    assert service.default.admission.num_running == 0
    assert leaving.task.exception() is None
    return leaving


@pytest.mark.matrix
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["in the server's queue", "waiting", "prefill", "decode"])
def test_a_client_leaves(engine, service, phase, stream):
    asyncio.run(leave(engine, service, phase, COMPLETIONS, {**LONG, "stream": stream}))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_several_answers_leaves(engine, service, stream):
    asyncio.run(leave(engine, service, "decode", COMPLETIONS, {**LONG, "n": 3, "stream": stream}))
    two = {**LONG, "prompt": [LONG["prompt"], LONG["prompt"][::-1]], "stream": stream}
    asyncio.run(leave(engine, service, "prefill", COMPLETIONS, two))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_a_client_of_another_route_leaves(engine, service, path, stream):
    asyncio.run(leave(engine, service, "decode", path, {**ROUTES[path], "stream": stream}))


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode"])
def test_a_client_leaves_an_engine_with_a_draft(phase, stream):
    engine = AsyncEngine(tiny_model(), **OPTIONS, draft="ngram", num_draft_tokens=3)
    service = service_of(engine)
    try:
        asyncio.run(leave(engine, service, phase, COMPLETIONS, {**LONG, "stream": stream}))
    finally:
        asyncio.run(engine.close())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_leaves_while_its_prompt_is_tokenized(engine, service, stream, monkeypatch):
    begun, going_on, prepare = threading.Event(), threading.Event(), engine.llm.prepare

    def slowly(*arguments, **options):
        begun.set()
        going_on.wait(60)
        return prepare(*arguments, **options)

    monkeypatch.setattr(engine.llm, "prepare", slowly)

    async def ask():
        exchange = Client(make_app(service)).send("POST", COMPLETIONS, {**LONG, "stream": stream})
        await until(begun.is_set)
        exchange.leave()
        try:
            await asyncio.wait_for(exchange.task, 10)
            assert not service.generations
            assert service.default.admission.num_running == service.default.admission.num_waiting == 0
        finally:
            going_on.set()

    asyncio.run(ask())
    assert is_idle(engine)
    assert engine.llm.engine.scheduler.counters.num_added == engine.llm.engine.scheduler.counters.num_finished
