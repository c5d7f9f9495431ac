"""Many clients at once: the same tokens as alone, slow readers, readers who leave, an engine that fails."""

import asyncio
import contextlib
import time

import jax
import pytest

from jaxinfer import LLM, AsyncEngine, ModelConfig, RopeConfig, SamplingParams
from jaxinfer.api import async_engine as module
from jaxinfer.api.async_engine import EngineDeadError
from jaxinfer.engine.scheduler import QueueFullError
from jaxinfer.models import init_params
from jaxinfer.server.errors import as_api_error

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=97, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_position_embeddings=512,
)  # fmt: skip
OPTIONS = {"max_seqs": 4, "max_model_len": 256, "prefill_chunk": 28}  # steps of 32 tokens only


@pytest.fixture(scope="module")
def model():
    params = init_params(CONFIG, jax.random.key(0))
    return CONFIG, jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, params)


async def collect(engine, prompt, params, **terms):
    """All tokens of each answer, and the last delta."""
    tokens: dict[int, list[int]] = {}
    delta = None
    async for delta in engine.generate(prompt, params, **terms):
        tokens.setdefault(delta.index, []).extend(delta.token_ids)
    return tokens, delta


async def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(0.005)


def is_idle(engine):
    scheduler = engine.llm.engine.scheduler
    return not scheduler.has_work and scheduler.pool.num_owned == 0


def test_many_clients_get_the_tokens_they_would_get_alone(model):
    prompts = [[i + 1, i + 2, 7] * (1 + i % 9) for i in range(12)]
    params = [SamplingParams(max_tokens=5 + i % 11, temperature=i % 2, seed=i, n=1 + (i % 4 == 3)) for i in range(12)]

    async def run():
        async with AsyncEngine(model, **OPTIONS) as engine:
            pairs = list(zip(prompts, params, strict=True))
            alone = [await collect(engine, *pair) for pair in pairs]
            found = await asyncio.gather(*(collect(engine, *pair) for pair in pairs))
            await until(lambda: is_idle(engine))
            return alone, found

    for (expected, _), (tokens, last) in zip(*asyncio.run(run()), strict=True):
        assert tokens == expected
        assert tokens == {one.index: one.token_ids for one in last.output.outputs}


def test_a_reader_who_leaves_frees_what_it_held(model):
    async def run():
        async with AsyncEngine(model, **OPTIONS) as engine:
            stream = engine.generate([1, 2, 3], SamplingParams(max_tokens=200, temperature=0))
            async for _ in stream:
                break
            await stream.aclose()
            await until(lambda: is_idle(engine))
            task = asyncio.create_task(collect(engine, [1, 2], SamplingParams(max_tokens=200, temperature=0)))
            await until(lambda: engine.llm.engine.has_work)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await until(lambda: is_idle(engine))

    asyncio.run(run())


def test_a_slow_reader_gets_merged_deltas_and_holds_up_nobody(model):
    async def run():
        async with AsyncEngine(model, **OPTIONS) as engine:
            slow = engine.generate([5, 6], SamplingParams(max_tokens=100, seed=1))
            first = await anext(slow)
            tokens, _ = await collect(engine, [1, 2], SamplingParams(max_tokens=150, temperature=0))
            await until(lambda: is_idle(engine))
            rest = [delta async for delta in slow]
            return first, rest, tokens

    first, rest, tokens = asyncio.run(run())
    assert len(tokens[0]) == 150
    assert sum(len(delta.token_ids) for delta in [first, *rest]) == 100
    assert len(rest) <= 2


def test_a_reader_too_far_behind_is_aborted(model, monkeypatch):
    monkeypatch.setattr(module, "MAX_PENDING_BYTES", 80)

    async def run():
        async with AsyncEngine(model, **OPTIONS) as engine:
            slow = engine.generate([5, 6], SamplingParams(max_tokens=200, temperature=0))
            first = await anext(slow)  # the only one where this thread did not run for long
            await until(lambda: is_idle(engine))
            return [first, *[delta async for delta in slow]][-1]

    last = asyncio.run(run())
    assert last.finish_reason == "abort"
    assert "bytes behind, 80 are allowed" in last.output.outputs[0].error


def test_what_cannot_be_served_raises_and_the_others_go_on(model):
    async def run():
        async with AsyncEngine(model, **OPTIONS, max_waiting=1) as engine:
            busy = [
                asyncio.create_task(collect(engine, [i], SamplingParams(max_tokens=150, temperature=0)))
                for i in range(1, 5)
            ]
            await until(lambda: len(engine.llm.engine.scheduler.running) == 4)
            with pytest.raises(ValueError, match="max_model_len=256"):
                await collect(engine, [1] * 300, SamplingParams())
            with pytest.raises(TypeError, match="SamplingParams"):
                await collect(engine, [1], {"max_tokens": 3})
            with pytest.raises(QueueFullError, match="max_waiting=1"):
                await collect(engine, [1], SamplingParams(n=3, seed=1))
            late = await collect(engine, [1, 2], SamplingParams(max_tokens=100), timeout=1e-4)
            assert late[1].finish_reason == "abort"
            assert "deadline" in late[1].output.outputs[0].error
            return await asyncio.gather(*busy)

    assert all(len(tokens[0]) == 150 for tokens, _ in asyncio.run(run()))


@pytest.mark.parametrize("error", [TypeError("odd"), KeyError("odd"), MemoryError("odd"), ValueError("odd")])
def test_a_request_that_cannot_be_added_fails_alone_whatever_the_error(model, monkeypatch, error):
    async def run():
        async with AsyncEngine(model, **OPTIONS) as engine:
            with monkeypatch.context() as patch:
                patch.setattr(engine.llm, "submit", lambda *_: (_ for _ in ()).throw(error))
                with pytest.raises(type(error), match="odd"):
                    await asyncio.wait_for(collect(engine, [1], SamplingParams()), 20)
            assert engine.is_alive
            await collect(engine, [1], SamplingParams(max_tokens=1))

    asyncio.run(run())


def test_an_engine_that_fails_tells_every_reader_and_those_who_come_later(model, monkeypatch, caplog):
    async def run():
        async with AsyncEngine(model, **OPTIONS) as engine:
            tasks = [
                asyncio.create_task(collect(engine, [i], SamplingParams(max_tokens=200, temperature=0)))
                for i in range(1, 4)
            ]
            await until(lambda: len(engine.llm.engine.scheduler.running) == 3)

            def fail(*_):
                # A command that comes now, and fails too, keeps nobody waiting.
                engine._commands.put(lambda: {}["later"])
                raise RuntimeError("the device has gone")

            monkeypatch.setattr(engine.llm.engine, "step", fail)
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, EngineDeadError)
                assert str(result) == "the engine has failed: RuntimeError: the device has gone"
                assert as_api_error(result).status == 503
                assert "RuntimeError: the device has gone" in as_api_error(result).message
            with pytest.raises(EngineDeadError, match="the device has gone"):
                await collect(engine, [1], SamplingParams())
            assert not engine.is_alive

    asyncio.run(run())
    (death,) = [record for record in caplog.records if record.levelname == "CRITICAL"]
    assert death.message == "the engine has failed"
    assert str(death.exc_info[1]) == "the device has gone"


def test_closing_aborts_what_runs(model):
    async def run():
        engine = AsyncEngine(model, **OPTIONS)
        task = asyncio.create_task(collect(engine, [1], SamplingParams(max_tokens=250, temperature=0)))
        await until(lambda: engine.llm.engine.has_work)
        await engine.close()
        await engine.close()
        _, last = await task
        with pytest.raises(EngineDeadError, match="closed"):
            await collect(engine, [1], SamplingParams())
        return last

    assert asyncio.run(run()).finish_reason == "abort"


def test_one_request_whose_processing_fails_leaves_the_others_alone(model, monkeypatch):
    advance = LLM.advance

    def fail_for_one(self, answer):
        if answer.request.token_ids[0] == 66:
            raise ValueError("no text for this one")
        return advance(self, answer)

    monkeypatch.setattr(LLM, "advance", fail_for_one)

    async def run():
        async with AsyncEngine(model, **OPTIONS) as engine:
            params = SamplingParams(max_tokens=20, temperature=0)
            calls = [collect(engine, [first], params) for first in (1, 66, 2)]
            found = await asyncio.gather(*calls, return_exceptions=True)
            await until(lambda: is_idle(engine))
            return found

    first, failed, last = asyncio.run(run())
    assert isinstance(failed, ValueError)
    assert len(first[0][0]) == len(last[0][0]) == 20


def test_a_text_of_50_megabytes_is_refused_at_once():
    async def run():
        async with AsyncEngine("demo", max_seqs=1) as engine:
            started = time.process_time()
            with pytest.raises(ValueError, match="50000000 bytes of text are more than 1024 tokens"):
                await collect(engine, "word " * 10_000_000, SamplingParams(max_tokens=2))
            assert time.process_time() - started < 0.5
            assert engine.is_alive

    asyncio.run(run())
