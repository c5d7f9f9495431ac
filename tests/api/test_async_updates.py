"""Weights that an `AsyncEngine` is given while many clients are answered."""

import asyncio

import pytest

from jaxinfer import AsyncEngine, SamplingParams, compilation_cache
from jaxinfer.api.async_engine import EngineDeadError
from jaxinfer.engine.request import WeightsSpan
from tests.engine.test_live_weights import live_bytes, numbered
from tests.engine.test_weights import RUN
from tests.tiny import TINY

GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
PROMPTS = [[number + 3, 5, number + 9] for number in range(6)]


async def answer(engine, prompt):
    output = None
    async for delta in engine.generate(prompt, GREEDY):
        output = delta.output
    return output.outputs[0]


def made_by(output):
    """The number that each token's weights say, by the spans."""
    ends = [*(span.start for span in output.weights[1:]), len(output.token_ids)][: len(output.weights)]
    return [int(span.version) for span, end in zip(output.weights, ends, strict=True) for _ in range(end - span.start)]


@pytest.mark.slow
@pytest.mark.matrix("keep")
@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
def test_answers_beside_updates(mode):
    async def main():
        async with AsyncEngine((TINY, numbered(10)), **RUN) as engine:
            await engine.update_params(numbered(10), version="10")
            tasks = []
            for number in (11, 12):
                tasks += [asyncio.ensure_future(answer(engine, prompt)) for prompt in PROMPTS]
                await asyncio.sleep(0.05)
                assert await engine.update_params(numbered(number), version=str(number), mode=mode) == str(number)
            tasks.append(asyncio.ensure_future(answer(engine, PROMPTS[0])))
            return [await task for task in tasks]

    *outputs, last = asyncio.run(main())
    assert last.weights == (WeightsSpan("12"),)
    assert last.token_ids == [12] * 20
    for output in outputs:
        assert output.token_ids == made_by(output)
        assert output.finish_reason == "length" or mode == "abort"
        assert mode == "keep" or len(output.weights) <= 1


@pytest.mark.slow
def test_200_updates_under_32_requests():
    modes = [{"mode": "wait"}, {"mode": "keep"}, {"mode": "abort"}, {"mode": "keep", "kv": "retain"}]
    trees = {number: numbered(number) for number in range(10, 18)}
    outputs, sizes, is_over = [], [], False

    async def client(engine, number):
        while not is_over:
            outputs.append(await answer(engine, PROMPTS[number % len(PROMPTS)] + [number + 1]))
            await asyncio.sleep(0)

    async def main():
        nonlocal is_over
        async with AsyncEngine((TINY, trees[10]), **{**RUN, "max_seqs": 32, "num_pages": 400}) as engine:
            engine.llm.warm_up()
            await engine.update_params(trees[10], version="10")
            with compilation_cache.counting() as counts:
                clients = [asyncio.ensure_future(client(engine, number)) for number in range(32)]
                for update in range(200):
                    await asyncio.sleep(0.02)
                    number = 10 + update % 8
                    await engine.update_params(trees[number], version=str(number), **modes[update % 4])
                    sizes.append(live_bytes())
                is_over = True
                await asyncio.gather(*clients)
            engine.llm.engine.scheduler.check()
            return counts.compiled + counts.hits

    compiled = asyncio.run(main())
    mixed = [output for output in outputs if len(output.weights) > 1]
    num_aborted = sum(output.finish_reason == "abort" for output in outputs)
    print(
        f"{len(outputs)} answers, {num_aborted} aborted, {len(mixed)} of several versions, {compiled} compiled, "
        f"{max(sizes[100:]) - max(sizes[:100])} bytes more"
    )
    assert compiled == 0
    assert max(sizes[100:]) <= max(sizes[:100])
    assert mixed
    for output in outputs:
        assert output.token_ids == made_by(output)
        assert output.finish_reason == "abort" or len(output.token_ids) == 20


@pytest.mark.slow
def test_nothing_is_computed_between_the_steps_of_an_update():
    async def main():
        async with AsyncEngine((TINY, numbered(10)), **RUN) as engine:
            first = asyncio.ensure_future(answer(engine, PROMPTS[0]))
            await asyncio.sleep(0.05)
            await engine.begin_update()
            waiting = asyncio.ensure_future(answer(engine, PROMPTS[1]))
            await engine.write_update({"lm_head": numbered(11)["lm_head"]})
            assert "under way: 1 of" in engine.why_not_ready
            engine.resume()
            await asyncio.sleep(0.1)
            assert not waiting.done()
            with pytest.raises(RuntimeError, match="would never end"):
                await engine.update_params(numbered(11), mode="wait")
            await engine.finish_update("half")
            assert engine.why_not_ready is None
            outputs = await asyncio.gather(first, waiting)
            await engine.sleep()
            asleep = asyncio.ensure_future(answer(engine, PROMPTS[2]))
            await asyncio.sleep(0.1)
            assert "asleep" in engine.why_not_ready
            assert not asleep.done()
            await engine.wake_up()
            return [*outputs, await asleep]

    outputs = asyncio.run(main())
    assert all(len(output.token_ids) == 20 for output in outputs)
    assert outputs[1].weights[-1].version == "half"
    assert set(outputs[2].token_ids) == {11}


def test_pausing_until_all_have_ended_holds_new_requests():
    async def main():
        async with AsyncEngine((TINY, numbered(10)), **RUN) as engine:
            before = [asyncio.ensure_future(answer(engine, prompt)) for prompt in PROMPTS]
            await asyncio.sleep(0.05)
            pausing = asyncio.ensure_future(engine.pause("wait"))
            after = asyncio.ensure_future(answer(engine, PROMPTS[0]))
            await pausing
            await asyncio.sleep(0.1)
            assert [task.done() for task in (*before, after)] == [True] * 6 + [False]
            assert engine.why_not_ready == "answers are paused"
            engine.resume()
            return len((await after).token_ids)

    assert asyncio.run(main()) == 20


def test_closing_while_requests_end_first_ends_them_all():
    async def main():
        engine = AsyncEngine((TINY, numbered(10)), **RUN)
        running = asyncio.ensure_future(answer(engine, PROMPTS[0]))
        await asyncio.sleep(0.05)
        updating = asyncio.ensure_future(engine.update_params(numbered(11)))
        await asyncio.sleep(0)
        held, left = (asyncio.ensure_future(answer(engine, PROMPTS[1])) for _ in range(2))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.sleep(0)
        await engine.close()
        return await asyncio.wait_for(asyncio.gather(running, updating, held, return_exceptions=True), 30)

    results = asyncio.run(main())
    for result in results:
        assert isinstance(result, (EngineDeadError, str)) or result.finish_reason in ("abort", "length")
