"""Conversations over three servers: as many cached tokens as in one server with three times the pages, nearly."""

import asyncio
import itertools
import json
import random

import pytest
import uvloop

from tests.fleet.front.fakes import ask, front
from tests.fleet.front.test_kills import CHAT, tiny_server, until_all_are_ready

NUM_TALKS, NUM_TURNS, NUM_AT_ONCE, NUM_PAGES = 36, 5, 6, 180
WORDS = ("def", "read", "write", "the", "file", "path", "return", "None", "if", "else", "for", "in", "data")


async def share_of_hits(seed, choose_port):
    """The share of prompt tokens that were cached, of conversations whose turns alternate."""
    counts, slots, generator = [0, 0], asyncio.Semaphore(NUM_AT_ONCE), random.Random(seed)
    talks = [[] for _ in range(NUM_TALKS)]

    async def turn(number, messages):
        async with slots:
            body = {"messages": messages, "max_tokens": 12, "seed": number, "temperature": 0.8}
            status, _, data = await ask(choose_port(), "POST", CHAT, json.dumps(body).encode())
        assert status == 200, data
        answer = json.loads(data)
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or " "})
        counts[0] += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        counts[1] += answer["usage"]["prompt_tokens"]

    for _ in range(NUM_TURNS):
        for messages in talks:
            messages.append({"role": "user", "content": " ".join(generator.choices(WORDS, k=14))})
        order = list(enumerate(talks))
        generator.shuffle(order)
        await asyncio.gather(*(turn(number, messages) for number, messages in order))
    return counts[0] / counts[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hits_of_three_servers_are_nearly_those_of_one():
    servers = [tiny_server(num_pages=size) for size in (NUM_PAGES, NUM_PAGES, NUM_PAGES, 3 * NUM_PAGES)]

    async def everything():
        for server in servers:
            await server.until_ready()
        one = await share_of_hits(1, lambda: servers[3].port)
        in_turn = itertools.cycle(server.port for server in servers[:3])
        round_robin = await share_of_hits(2, lambda: next(in_turn))
        async with front(*servers[:3]) as port:
            await until_all_are_ready(port, 3)
            return one, await share_of_hits(1, lambda: port), round_robin

    try:
        one, routed, round_robin = uvloop.run(everything())
    finally:
        for server in servers:
            server.kill()
    told = f"{one:.3f} of one server, {routed:.3f} of three by prefix ({routed / one:.3f}), {round_robin:.3f} in turn"
    print(f"cached: {told}")
    assert routed >= 0.95 * one
    assert round_robin < 0.8 * routed
