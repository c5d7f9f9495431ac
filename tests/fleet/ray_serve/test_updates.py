"""Weights and adapters of a fleet replaced while requests run: none is refused, no answer has two versions."""

import asyncio
import itertools
import json
import os

import jax
import pytest
import uvloop

from jaxinfer import LLM
from tests.fleet.front.test_kills import BODY, CHAT, COMPLETIONS, Answer, answered, read, same
from tests.server.adapter_folders import write_adapter
from tests.server.conftest import tiny_model

pytest.importorskip("ray.serve")
from tests.fleet.ray_serve.fleets import tiny_fleet

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(3600)]
NUM_UPDATES = int(os.environ.get("JAXINFER_RAY_UPDATES", "3"))
NUM_STREAMS = 12
KINDS = (
    (COMPLETIONS, {**BODY, "max_tokens": 60, "return_coordinate": True, "return_token_ids": True}),
    (COMPLETIONS, {**BODY, "max_tokens": 60, "return_coordinate": True, "n": 2}),
    (COMPLETIONS, {**BODY, "max_tokens": 60, "return_coordinate": True, "model": "first"}),
    (COMPLETIONS, {**BODY, "max_tokens": 40, "return_coordinate": True, "stream": False}),
    (CHAT, {"messages": [{"role": "user", "content": "read"}], "max_tokens": 40, "ignore_eos": True, "stream": True}),
)


def write_weights(folder, factor):
    """The tiny model with other weights."""
    config, params, tokenizer = tiny_model()
    changed = jax.tree.map(lambda leaf: leaf * factor, params)
    with LLM((config, changed, tokenizer), max_seqs=1, max_model_len=32) as llm:
        return str(llm.save(folder))


def versions_of(text):
    """Versions of the weights, and fingerprints, that an answer names."""
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    events = events or [json.loads(text)]
    spans = [span for event in events for one in event.get("coordinates") or () for span in one["weights"]]
    return {span["version"] for span in spans}, {event["system_fingerprint"] for event in events}


def without_coordinates(text):
    """An answer without what names its version."""
    if text.startswith("{"):
        return json.dumps({name: value for name, value in json.loads(text).items() if name != "coordinates"})
    return "\n\n".join(event for event in text.split("\n\n") if '"coordinates"' not in event)


def test_weights_are_replaced_under_load(tmp_path):
    fleet = tiny_fleet(tmp_path)
    paths = {"a": write_weights(tmp_path / "a", 1.1), "b": write_weights(tmp_path / "b", 0.9)}
    second = str(write_adapter(tmp_path / "second", 2))
    answers, seen = [], []

    async def ask(kind, seed=3):
        path, body = KINDS[kind]
        answer = Answer([fleet.port], path, {**body, "seed": seed})
        status, text = await answer.run()
        assert not answer.num_breaks
        return read(path, body, (status, without_coordinates(text))), *versions_of(text)

    async def everything():
        await fleet.until_ready()
        is_over = asyncio.Event()

        async def stream(number):
            for kind in itertools.count(number):
                if is_over.is_set():
                    return
                answers.append((kind % len(KINDS), *await ask(kind % len(KINDS))))

        expected = {"0": [(await ask(kind))[0] for kind in range(len(KINDS))]}
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_STREAMS):
                group.create_task(stream(number))
            await asyncio.sleep(1)
            for number in range(NUM_UPDATES):
                name = "ab"[number % 2]
                pids = fleet.pids()
                weights = {"path": paths[name], "version": f"{name}-{number}"}
                seen.append(await fleet.change(weights=weights))
                assert fleet.pids() == pids  # in place: nothing was started again
                start = len(answers) + NUM_STREAMS  # those that ran when it was over may be of the version before
                expected[weights["version"]] = [(await ask(kind))[0] for kind in range(len(KINDS))]
                while len(answers) < start + NUM_STREAMS:
                    await asyncio.sleep(0.1)
                late = {version for _, _, versions, _ in answers[start:] for version in versions}
                assert late == {weights["version"]}
            is_over.set()
        # A new adapter is at all replicas, and one that is taken away at none.
        first = fleet.values["adapters"]
        await fleet.change(adapters={"second": second})
        body = {**BODY, "stream": False, "max_tokens": 8}
        for _ in range(9):
            assert (await answered(fleet.port, COMPLETIONS, {**body, "model": "second"}, 3))[0] == 200
            assert (await answered(fleet.port, COMPLETIONS, {**body, "model": "first"}, 3))[0] == 404
        assert first != fleet.values["adapters"]
        return expected, await fleet.metrics()

    try:
        expected, metrics = uvloop.run(everything())
    finally:
        fleet.close()
    fingerprints = {}
    for kind, answer, versions, marks in answers:
        assert len(marks) == 1, (kind, marks)
        assert len(versions) == (kind != 4), (kind, versions)
        for version in versions:
            assert same(answer, expected[version][kind]), (kind, version)
            assert fingerprints.setdefault((version, kind == 2), marks) == marks
        if not versions:
            assert any(same(answer, own[kind]) for own in expected.values())
    print(f"{NUM_UPDATES} updates under {NUM_STREAMS} streams, {len(answers)} answers, each of one version; {metrics}")
    assert metrics["jaxinfer_front_given_up_total"] == "0"
    assert metrics["jaxinfer_front_lost_total"] == "0"
    assert len(expected) == NUM_UPDATES + 1
