"""Many requests to a fleet of the embedded model: answers of an engine alone, and caches that conversations find."""

import asyncio
import json
import os
import random

import pytest
import uvloop

from jaxinfer import LLM, SamplingParams
from tests.fleet.front.test_kills import COMPLETIONS, answered
from tests.fleet.front.test_prefix_hits import share_of_hits

pytest.importorskip("ray.serve")
from tests.fleet.ray_serve.fleets import FRONT, LLM_OPTIONS, PROXY, Fleet, tiny_fleet

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(3 * 3600)]
NUM_REQUESTS = int(os.environ.get("JAXINFER_RAY_REQUESTS", "200"))
NUM_STREAMS = int(os.environ.get("JAXINFER_RAY_STREAMS", "64"))
MODEL = os.environ.get("JAXINFER_RAY_MODEL", "demo")
OPTIONS = {"max_seqs": 16, "max_model_len": 128}
ALONE = {"placement": {"num_cpus": 0.2}, "server": {"max_queued": 1024}}
NUM_PROMPTS = 40


def request(number):
    generator = random.Random(number)
    sampled = number % 3 != 0
    return {
        "prompt": f"def function_{number % NUM_PROMPTS}(path, mode):",
        "max_tokens": generator.randint(8, 32),
        "temperature": 0.9 if sampled else 0.0,
        "seed": number,
        "top_p": 0.95 if number % 2 else 1.0,
        "frequency_penalty": 0.4 if number % 5 == 0 else 0.0,
    }


def without_prompt(body):
    return {name: value for name, value in body.items() if name != "prompt"}


def alone(bodies):
    """Texts, tokens and reasons of one engine, in batches."""
    with LLM(MODEL, **OPTIONS) as llm:
        defaults = vars(llm.default_params)  # of the checkpoint, which requests over HTTP have too
        params = [SamplingParams.from_dict({**defaults, **without_prompt(body)}) for body in bodies]
        outputs = llm.generate([body["prompt"] for body in bodies], params, use_tqdm=False)
    return [(one.text, list(one.token_ids), one.finish_reason) for one in (output.outputs[0] for output in outputs)]


def parts(text):
    """The content of a stream of completions: text, tokens and reason, and how many events had a token."""
    whole, ids, reason, num_events = "", [], None, 0
    for line in text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                whole += choice["text"]
                ids += choice.get("token_ids") or []
                num_events += bool(choice.get("token_ids"))
                reason = choice["finish_reason"] or reason
    return (whole, ids, reason), num_events


def test_answers_are_those_of_one_engine(tmp_path):
    bodies = [request(number) for number in range(NUM_REQUESTS)]
    expected = alone(bodies)
    fleet = Fleet(tmp_path, {"model": MODEL, "num_replicas": 3, "options": OPTIONS, **ALONE})
    numbers, num_events = iter(range(NUM_REQUESTS)), 0

    async def stream():
        nonlocal num_events
        for number in numbers:
            body = {**bodies[number], "stream": True, "return_token_ids": True}
            seed = body.pop("seed")
            status, text = await answered(fleet.port, COMPLETIONS, body, seed)
            assert status == 200, text
            own, count = parts(text)
            assert own == expected[number], number
            num_events += count

    async def everything():
        await fleet.until_ready()
        before = fleet.seconds()
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_STREAMS):
                group.create_task(stream())
        after = fleet.seconds()
        return {kind: 1e6 * (after[kind] - before[kind]) / num_events for kind in after}, await fleet.metrics()

    try:
        costs, metrics = uvloop.run(everything())
    finally:
        fleet.close()
    print(
        f"{NUM_REQUESTS} requests at {NUM_STREAMS} streams, all equal; {num_events} chunks, of which each cost "
        f"{costs[FRONT]:.0f} us of the front's processor time and {costs[PROXY]:.0f} of Ray's proxy; {metrics}"
    )
    assert metrics["jaxinfer_front_lost_total"] == metrics["jaxinfer_front_given_up_total"] == "0"


async def chunk_costs(fleet, port):
    """Microseconds of processor time a chunk, of the front and of Ray's proxy: 8 streams of many chunks."""
    body = {"prompt": "def read(path):", "max_tokens": 110, "ignore_eos": True, "stream": True}
    before = fleet.seconds()
    answers = await asyncio.gather(*(answered(port, COMPLETIONS, body, number) for number in range(16)))
    num_chunks, after = sum(text.count("\ndata: {") for _, text in answers), fleet.seconds()
    return {kind: 1e6 * (after[kind] - before[kind]) / num_chunks for kind in after}


def test_what_a_chunk_costs(tmp_path):
    fleet = Fleet(tmp_path, {"model": MODEL, "num_replicas": 2, "options": OPTIONS, **ALONE})

    async def everything():
        await fleet.until_ready(2)
        ports = (fleet.port, fleet.direct_port)
        return [[await chunk_costs(fleet, port) for _ in range(3)][-1] for port in ports]

    try:
        through, direct = uvloop.run(everything())
    finally:
        fleet.close()
    print(
        f"a chunk through Ray's proxy costs {through[FRONT]:.0f} us of the front's processor time and "
        f"{through[PROXY]:.0f} of the proxy; directly {direct[FRONT]:.0f} and {direct[PROXY]:.0f}"
    )


NUM_PAGES = 180


def rate(fleet, num_replicas):
    """The share of cached prompt tokens in the conversations of the front's test."""

    async def everything():
        await fleet.until_ready(num_replicas)
        return await share_of_hits(1, lambda: fleet.direct_port)

    try:
        return uvloop.run(everything())
    finally:
        fleet.close()


def test_conversations_find_their_prefixes(tmp_path):
    rates = []
    kinds = ((1, 3 * NUM_PAGES, "prefix"), (3, NUM_PAGES, "prefix"), (3, NUM_PAGES, "round_robin"))
    for num_replicas, num_pages, routing in kinds:
        folder = tmp_path / f"{num_replicas}-{routing}"
        folder.mkdir()
        options = {**LLM_OPTIONS, "num_pages": num_pages}
        rates.append(
            rate(tiny_fleet(folder, num_replicas=num_replicas, options=options, routing=routing), num_replicas)
        )
    one, prefix, in_turn = rates
    told = f"{one:.3f} of one replica with all pages, {prefix:.3f} of three by prefix ({prefix / one:.3f})"
    print(f"cached: {told}, {in_turn:.3f} in turn")
    assert prefix >= 0.95 * one
    assert in_turn < 0.8 * prefix
