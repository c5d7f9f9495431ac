"""Many mixed requests at once: the tokens of each are those that it gets alone, and nothing is left."""

import asyncio
import random

import pytest

from jaxinfer import AsyncEngine
from jaxinfer.server.app import make_app
from tests.server.asgi import Client
from tests.server.conftest import OPTIONS, is_idle, offline, tiny_model, until
from tests.server.services import service_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def mixed(number):
    """Parameters of a random request."""
    generator = random.Random(number)
    body = {"max_tokens": generator.randint(1, 40), "seed": number, "return_token_ids": True}
    body["prompt"] = [generator.randrange(5, 4000) for _ in range(generator.randint(1, 90))]
    choices = {
        "temperature": (0, 0.5, 1.0, 1.5),
        "top_p": (0.5, 0.95),
        "top_k": (5, 50),
        "min_p": (0.05,),
        "presence_penalty": (0.7,),
        "frequency_penalty": (-0.5, 0.5),
        "repetition_penalty": (1.3,),
        "logprobs": (0, 3),
        "min_tokens": (1,),
        "stop": ("e", ["a", "zz"]),
    }
    for name in generator.sample(sorted(choices), 3):
        body[name] = generator.choice(choices[name])
    if body.get("temperature") != 0 and generator.random() < 0.3:
        body["n"] = generator.randint(2, 4)
    if generator.random() < 0.25:  # a chat
        words = generator.choices(("def", "read", "path", "return", "file", "x"), k=generator.randint(1, 12))
        body["messages"] = [{"role": "user", "content": " ".join(words)}]
        del body["prompt"]
        if "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    return body


def offline_answer(engine, body):
    """Tokens of the answers without a server."""
    params = {name: value for name, value in body.items() if name not in ("prompt", "messages", "return_token_ids")}
    if "top_logprobs" in params:
        params["logprobs"] = params.pop("top_logprobs")
    prompt = engine.llm.chat_prompt(body["messages"]) if "messages" in body else body["prompt"]
    return [one.token_ids for one in offline(engine, prompt, **params).outputs]


def compare(engine, num_requests, num_clients):
    service = service_of(engine, max_queued=10_000)
    client = Client(make_app(service))
    bodies = [mixed(number) for number in range(num_requests)]

    async def ask():
        gate = asyncio.Semaphore(num_clients)

        async def one(number, body):
            route = CHAT if "messages" in body else COMPLETIONS
            async with gate:
                if number % 5 == 4:  # leaves
                    exchange = client.send("POST", route, {**body, "stream": True})
                    await asyncio.sleep(number % 7 / 50)
                    exchange.leave()
                    await exchange.task
                    return None
                if number % 2:
                    found: dict[int, list[int]] = {}
                    for event in await client.stream(route, body):
                        for choice in (event.data or {}).get("choices", ()):
                            found.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
                    return [found[index] for index in sorted(found)]
                answer = await client.post(route, body)
                assert answer.status == 200, answer.body
                return [choice["token_ids"] for choice in answer.json["choices"]]

        found = await asyncio.gather(*(one(number, body) for number, body in enumerate(bodies)))
        await until(lambda: is_idle(engine))
        return found

    found = asyncio.run(ask())
    assert not service.generations
    assert service.default.admission.num_running == service.default.admission.num_waiting == 0
    for number, (body, tokens) in enumerate(zip(bodies, found, strict=True)):
        if tokens is not None:
            assert tokens == offline_answer(engine, body), (number, body)


@pytest.mark.slow
def test_a_few_mixed_requests(engine):
    compare(engine, 10, 5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_mixed_requests(engine):
    compare(engine, 250, 32)  # a fifth of which leaves


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_mixed_requests_with_a_draft():
    engine = AsyncEngine(tiny_model(), **OPTIONS, draft="ngram", num_draft_tokens=3)
    try:
        compare(engine, 250, 32)
    finally:
        asyncio.run(engine.close())


@pytest.mark.parametrize("is_waiting", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_passes(engine, make_service, is_waiting, stream):
    """The request ends with an error, in the queue as while it runs, and leaves nothing behind."""
    service = make_service()
    client = Client(make_app(service))
    body = {"prompt": [5], "max_tokens": 200, "ignore_eos": True, "timeout": 0.15, "seed": 1}

    async def ask():
        filling = [client.send("POST", COMPLETIONS, {**body, "timeout": None, "n": 4}) for _ in range(2 * is_waiting)]
        await until(lambda: len(service.generations) == len(filling))
        if stream:
            error = (await client.stream(COMPLETIONS, body))[-1].data["error"]
        else:
            answer = await client.post(COMPLETIONS, body)
            assert answer.status == 408
            assert answer.headers["x-should-retry"] == "false"
            error = answer.error
        assert error["code"] == "deadline_exceeded"
        assert "0.15 s" in error["message"]
        for one in filling:
            one.leave()
        await asyncio.gather(*(one.task for one in filling))
        await until(lambda: is_idle(engine))

    asyncio.run(ask())
    assert service.default.admission.num_running == service.default.admission.num_waiting == 0
