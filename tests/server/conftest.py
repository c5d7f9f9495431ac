"""One small engine for the tests of the server: the demo's tokenizer and chat template over a tiny model."""

import asyncio
import dataclasses
import time
from importlib import resources

import jax
import pytest

from jaxinfer import AsyncEngine, SamplingParams
from jaxinfer.models import init_params
from jaxinfer.server.app import make_app
from jaxinfer.text import Tokenizer
from tests.server.asgi import Client
from tests.server.services import service_of
from tests.tiny import TINY

CONFIG = dataclasses.replace(TINY, vocab_size=4096, max_position_embeddings=256)
OPTIONS = {"max_seqs": 4, "max_model_len": 256, "prefill_chunk": 28, "num_pages": 100}


def tiny_model():
    params = init_params(CONFIG, jax.random.key(0))
    tokenizer = Tokenizer.from_dir(resources.files("jaxinfer") / "data" / "demo")
    return CONFIG, jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, params), tokenizer


@pytest.fixture(scope="session")
def engine():
    engine = AsyncEngine(tiny_model(), **OPTIONS)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def make_service(engine):
    def make(**options):
        return service_of(engine, **options)

    return make


@pytest.fixture
def service(make_service):
    return make_service()


@pytest.fixture
def client(service):
    return Client(make_app(service))


def offline(engine, prompt, adapter=None, **params):
    """The answer without a server. The engine must be idle."""
    base = {one.name: getattr(engine.llm.default_params, one.name) for one in dataclasses.fields(SamplingParams)}
    params = SamplingParams.from_dict({**base, **params})

    async def run():
        async for delta in engine.generate(prompt, params, adapter=adapter):
            if delta.output is not None:
                return delta.output

    return asyncio.run(run())


def is_idle(engine):
    scheduler = engine.llm.engine.scheduler
    return not scheduler.has_work and scheduler.pool.num_owned == 0


async def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(0.005)
