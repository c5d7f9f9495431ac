"""Streams that go on after the tokens that were sent: as if they had never been broken, and no token is made twice."""

import array
import asyncio
import json

import pytest

from jaxinfer.server.app import make_app
from jaxinfer.server.resume import StreamPosition
from jaxinfer.tool_calls import AnswerFormat
from tests.server.asgi import Client
from tests.server.test_resume import content
from tests.server.test_tools import TOOLS, gathered

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SENT, TELL = "x-jaxinfer-sent-tokens", "x-jaxinfer-tell-tokens"
BODY = {"prompt": "def read(path):", "max_tokens": 14, "temperature": 0.9, "seed": 7, "return_token_ids": True}
ASK = {"messages": [{"role": "user", "content": "read a file"}], "max_tokens": 24, "seed": 4}
PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
USAGE = {"stream_options": {"include_usage": True}}
PENALTIES = {"frequency_penalty": 0.8, "presence_penalty": 0.3, "repetition_penalty": 1.3, "ignore_eos": True}
CASES = {
    "plain": (COMPLETIONS, BODY | USAGE | PENALTIES),
    "two answers": (COMPLETIONS, {**BODY, **USAGE, "n": 2, "logprobs": 2}),
    "two prompts": (COMPLETIONS, {**BODY, "prompt": ["def a", "class B"], "n": 2, "stop": ["e"]}),
    "greedy with an echo": (COMPLETIONS, {**BODY, "temperature": 0, "echo": True}),
    "chat": (CHAT, {**ASK, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, "ignore_eos": True}),
    "grammar": (CHAT, {**ASK, "response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}}}),
    "tools": (CHAT, {**ASK, **USAGE, "tools": TOOLS, "tool_choice": "required", "max_tokens": 60}),
    "coordinate": (COMPLETIONS, {**BODY, "return_coordinate": True}),
}
QUICK = ("two answers", "tools")
SLOW = pytest.mark.slow


@pytest.fixture
def client(make_service, engine):
    service = make_service(accept_sent_tokens=True)
    service.default.answers = AnswerFormat(engine.llm.tokenizer, "hermes", None)
    return Client(make_app(service))


def told_tokens(events):
    """The token ids of each choice that comments tell, and the events without the comments."""
    tokens, others = {}, []
    for event in events:
        if not event.text.startswith(":tokens "):
            others.append(event)
            continue
        index, first, ids = event.text.split(" ")[1:]
        own = tokens.setdefault(int(index), [])
        assert len(own) == int(first)
        own += [int(token) for token in ids.split(",")]
    return tokens, others


def continued(client, path, body, position, tokens, sent=None, **headers):
    """The request that goes on after what was sent, or that says that so many tokens of each choice were."""
    counts = sent or [part.num_tokens for part in StreamPosition.read(position).choices]
    ids = [tokens.get(index, [])[:count] for index, count in enumerate(counts)]
    data = json.dumps({**body, "stream": True}).encode() + b"".join(array.array("i", own).tobytes() for own in ids)
    headers |= {"last_event_id": position, SENT: ",".join(map(str, counts))}
    return client.send("POST", path, body=data, **headers)


async def events_of(exchange):
    status, _ = await exchange.start()
    if status != 200:
        return status, json.loads(b"".join([part async for part in exchange.parts()]))["error"]
    return status, [event async for event in exchange.events()]


def entries(logprobs):
    """Those of each token, however many were in an event."""
    if "content" in logprobs:
        return logprobs["content"]
    return [list(entry) for entry in zip(*map(logprobs.get, sorted(logprobs)), strict=True)]


def nearly(value):
    """Log-probabilities of a prompt's tokens are summed in another order than those of an answer's."""
    if isinstance(value, dict):
        return {name: nearly(own) for name, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [nearly(own) for own in value]
    return pytest.approx(value, abs=1e-3) if isinstance(value, float) else value


def joined(events):
    """All that a client learns of the answers, however it was cut into events."""
    found = {}
    for event in events:
        for choice in (event.data or {}).get("choices", ()):
            own = found.setdefault(choice["index"], {"logprobs": [], "ends": []})
            if logprobs := choice.get("logprobs"):
                own["logprobs"] += entries(logprobs)
            if choice["finish_reason"]:
                own["ends"].append([choice["finish_reason"], choice["stop_reason"]])
        for name in ("usage", "coordinates"):
            if told := (event.data or {}).get(name):
                if name == "usage":
                    told = {key: value for key, value in told.items() if key != "prompt_tokens_details"}
                found[name] = told
    return found


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=SLOW) for name in CASES])
def test_a_stream_goes_on_after_the_tokens_that_were_sent(client, engine, name):
    path, body = CASES[name]
    decoded = []

    def observe(dispatch):
        decoded.extend(work for work in dispatch.work if work.is_decoding)

    async def ask():
        tokens, whole = told_tokens(await client.stream(path, body, **{TELL: "1"}))
        num_made = sum(map(len, tokens.values()))
        ids = [number for number, event in enumerate(whole) if event.id is not None]
        assert len(ids) > 3
        cuts = (ids[0], ids[len(ids) // 3], ids[len(ids) // 2], ids[-2], ids[-1])
        for cut in cuts:
            del decoded[:]
            with engine.llm.engine.observe(observe):
                status, rest = await events_of(continued(client, path, body, whole[cut].id, tokens, **{TELL: "1"}))
            assert status == 200, rest
            told, rest = told_tokens(rest)
            assert told == tokens
            together = [*whole[: cut + 1], *rest]
            assert rest[-1].text == "[DONE]"
            assert joined(together) == nearly(joined(whole))
            if path == COMPLETIONS:
                assert content(together) == content(whole)
            else:
                assert gathered(together) == gathered(whole)
            shared = ("id", "created", "model", "system_fingerprint", "object")
            for event in rest:
                assert event.data is None or all(event.data[key] == whole[0].data[key] for key in shared)
            position = StreamPosition.read(whole[cut].id)
            num_sent = sum(part.num_tokens for part in position.choices)
            num_running = sum(not part.has_ended for part in position.choices)
            assert len(decoded) <= num_made - num_sent + num_running  # a step may run ahead of an end

    asyncio.run(ask())


def test_tokens_that_no_answer_begins_with_are_refused(client, make_service):
    path, body = CASES["two answers"]
    _, grammar = CASES["grammar"]

    async def ask():
        tokens, whole = told_tokens(await client.stream(path, body, **{TELL: "1"}))
        at = [event.id for event in whole if event.id][9]

        async def refused(tokens, position=at, path=path, body=body, client=client, **headers):
            status, error = await events_of(continued(client, path, body, position, tokens, **headers))
            return status, error if isinstance(error, dict) else error[-1].data["error"]

        others = {index: [(token + 1) % 4096 for token in ids] for index, ids in tokens.items()}
        assert (await refused(others))[1]["code"] == "resume_differs"  # their text is not what was sent
        status, error = await refused({index: [5000 for _ in ids] for index, ids in tokens.items()})
        assert (status, error["param"]) == (400, SENT)
        eos = min(client.app._service.default.engine.llm.eos_token_ids)
        status, error = await refused({index: [eos for _ in ids] for index, ids in tokens.items()})
        assert (status, "ends answers" in error["message"]) == (400, True)
        for wrong in ("x", "-1", "1,,2", "99999999"):
            data = json.dumps({**body, "stream": True}).encode()
            answer = await client.call("POST", path, body=data, last_event_id=at, **{SENT: wrong})
            assert (answer.status, answer.error["param"]) == (400, SENT)
        status, error = await refused(tokens, sent=[3, 3])
        assert (status, "and [3, 3] are given" in error["message"]) == (400, True)
        off = Client(make_app(make_service()))
        assert (await refused(tokens, client=off))[0] == 403
        assert not told_tokens(await off.stream(path, body, **{TELL: "1"}))[0]
        tokens, whole = told_tokens(await client.stream(CHAT, grammar, **{TELL: "1"}))
        last = [event.id for event in whole if event.id][-2]
        status, error = await refused({0: [tokens[0][0]] * 99}, last, CHAT, grammar)
        assert (status, "the grammar refuses" in error["message"]) == (400, True)

    asyncio.run(ask())
