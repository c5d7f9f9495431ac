"""A server whose model has a trained head for a draft: over HTTP and from `AsyncEngine` come the answers of plain
decoding, whole and streamed."""

import asyncio

import pytest

from jaxinfer import AsyncEngine, SamplingParams
from jaxinfer.server.app import make_app
from tests.engine.fitted_heads import Heads
from tests.server.asgi import Client
from tests.server.conftest import CONFIG, OPTIONS, offline, tiny_model
from tests.server.services import service_of
from tests.server.test_openai_routes import COMPLETIONS, texts

PROMPTS = ["def read_lines(path):", "import json\n", "class Reader:", "x"]
CASES = [
    {"temperature": 0, "max_tokens": 30},
    {"seed": 5, "max_tokens": 20, "n": 3, "top_p": 0.9, "presence_penalty": 0.5},
    {"temperature": 0, "max_tokens": 30, "logit_bias": {"40": 5.0}, "stop": ["e", "xyz"]},
    {"temperature": 0.3, "seed": 2, "max_tokens": 30, "logprobs": 2},
]


@pytest.fixture(scope="module")
def drafting(engine):
    """The engine of other tests with a draft."""
    *target, tokenizer = tiny_model()
    outputs = [offline(engine, prompt, temperature=0, max_tokens=40) for prompt in PROMPTS]
    answers = [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]
    head = Heads(engine.llm, tuple(target), answers)["dflash"]
    drafting = AsyncEngine((*target, tokenizer), draft=head, num_draft_tokens=4, **OPTIONS)
    assert drafting.llm.engine.spec.config == CONFIG
    yield drafting
    asyncio.run(drafting.close())


@pytest.mark.slow
def test_answers_are_those_of_plain_decoding(engine, drafting):
    # Both engines' programs and a head's fit: 4 s of CPU.
    client = Client(make_app(service_of(drafting)))
    expected = [[offline(engine, prompt, **fields) for prompt in PROMPTS] for fields in CASES]

    async def ask(prompt, fields):
        body = {"model": "tiny", "prompt": prompt, "return_token_ids": True, **fields}
        return await asyncio.gather(client.post(COMPLETIONS, body), client.stream(COMPLETIONS, body))

    async def ask_all():
        return await asyncio.gather(*(ask(prompt, fields) for fields in CASES for prompt in PROMPTS))

    found = asyncio.run(ask_all())
    for (whole, events), output in zip(found, [one for row in expected for one in row], strict=True):
        assert whole.status == 200, whole.body
        wanted = [(one.text, one.token_ids, one.finish_reason) for one in output.outputs]
        choices = whole.json["choices"]
        assert [(one["text"], one["token_ids"], one["finish_reason"]) for one in choices] == wanted
        assert [texts(events, False)[index] for index in range(len(wanted))] == wanted
        if output.outputs[0].logprobs is not None:
            pairs = zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
            logprobs = [entry[token].logprob for entry, token in pairs]
            assert choices[0]["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-3)
    stats = drafting.llm.speculation_stats()
    assert 50 < stats.accepted < stats.proposed - 50


@pytest.mark.slow
def test_deltas_are_those_of_plain_decoding(engine, drafting):
    params = SamplingParams(temperature=0.4, seed=3, n=2, max_tokens=25)

    async def read(engine, prompt):
        tokens = {}
        async for delta in engine.generate(prompt, params):
            tokens.setdefault(delta.index, []).extend(delta.token_ids)
        return tokens

    async def read_all(engine):
        return await asyncio.gather(*(read(engine, prompt) for prompt in PROMPTS))

    assert asyncio.run(read_all(drafting)) == asyncio.run(read_all(engine))
