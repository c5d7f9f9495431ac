"""A stream that was cut is continued: together they are the undisturbed one."""

import asyncio
import random

import pytest

from jaxinfer.server.api_error import APIError
from jaxinfer.server.app import make_app
from jaxinfer.server.auth import Keys
from jaxinfer.server.resume import SentPart, Skipper, StreamPosition
from tests.server.asgi import Client

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"model": "tiny", "prompt": "def read(path):", "max_tokens": 14, "temperature": 0.9, "return_token_ids": True}


def content(events):
    """What a client puts together: text, ids and finish of each choice, and the ids of the events."""
    found: dict[int, list] = {}
    for event in events:
        for choice in (event.data or {}).get("choices", ()):
            one = found.setdefault(choice["index"], ["", [], []])
            one[0] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            one[1] += choice.get("token_ids", [])
            one[2] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return found


CASES = [
    (COMPLETIONS, BODY),
    (COMPLETIONS, {**BODY, "n": 2, "seed": 7}),
    (COMPLETIONS, {**BODY, "echo": True, "seed": 8, "stop": ["e"]}),
    (CHAT, {"messages": [{"role": "user", "content": "read a file"}], "max_tokens": 14, "logprobs": True}),
]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("path", "body"), [pytest.param(*CASES[0], marks=SLOW), CASES[1], pytest.param(*CASES[2], marks=SLOW), CASES[3]]
)
def test_a_cut_stream_is_continued(client, path, body):
    async def ask():
        whole = await client.stream(path, body)
        ids = [number for number, event in enumerate(whole) if event.id is not None]
        for cut in (ids[0], ids[len(ids) // 3], ids[-1]):
            rest = await client.stream(path, body, last_event_id=whole[cut].id)
            assert content([*whole[: cut + 1], *rest]) == content(whole)
            assert rest[-1].text == "[DONE]"
            assert {event.data["id"] for event in rest if event.data} <= {whole[0].data["id"]}
            assert {event.data["created"] for event in rest if event.data} <= {whole[0].data["created"]}

    asyncio.run(ask())


def test_another_process_of_the_same_model_continues_a_stream(make_service, client):
    async def ask():
        whole = await client.stream(COMPLETIONS, BODY)
        rest = await Client(make_app(make_service())).stream(COMPLETIONS, BODY, last_event_id=whole[4].id)
        assert content([*whole[:5], *rest]) == content(whole)

    asyncio.run(ask())


def test_another_request_is_not_continued(client):
    async def ask():
        whole = await client.stream(COMPLETIONS, BODY)
        last = whole[3].id
        for other in ({"max_tokens": 15}, {"prompt": "def x"}, {"temperature": 0.8}, {"stop": "x"}):
            answer = await client.post(COMPLETIONS, {**BODY, **other, "stream": True}, last_event_id=last)
            assert (answer.status, answer.error["code"]) == (409, "resume_differs")
        assert (await client.post(COMPLETIONS, {**BODY, "seed": 1, "stream": True}, last_event_id=last)).status == 400
        for wrong in ("x", "1.2.3.4", last + "-y", last.replace(".", "-"), last[:-1] + "g"):
            assert (await client.post(COMPLETIONS, {**BODY, "stream": True}, last_event_id=wrong)).status == 400
        same = await client.stream(COMPLETIONS, {**BODY, "priority": 3, "user": "x"}, x_jaxinfer_resume=last)
        assert content([*whole[:4], *same]) == content(whole)

    asyncio.run(ask())


def test_another_caller_does_not_continue_a_stream(make_service):
    app = make_app(make_service(api_keys="keys"), Keys({"first-secret-key": "alice", "second-secret-key": "bob"}))
    first, second = (Client(app, authorization=f"Bearer {name}-secret-key") for name in ("first", "second"))

    async def ask():
        whole = await first.stream(COMPLETIONS, BODY)
        answer = await second.post(COMPLETIONS, {**BODY, "stream": True}, last_event_id=whole[4].id)
        assert (answer.status, answer.error["code"]) == (409, "resume_differs")
        rest = await first.stream(COMPLETIONS, BODY, last_event_id=whole[4].id)
        assert content([*whole[:5], *rest]) == content(whole)

    asyncio.run(ask())


def test_an_answer_that_differs_is_not_joined(client):
    async def ask():
        whole = await client.stream(COMPLETIONS, BODY)
        position = StreamPosition.read(whole[6].id)
        position.choices[0].checksum ^= 1
        events = await client.stream(COMPLETIONS, BODY, last_event_id=str(position))
        assert events[-1].data["error"]["code"] == "resume_differs"
        assert not content(events)

    asyncio.run(ask())


def test_other_weights_or_options_are_told_apart(make_service, client):
    other = make_service()
    other.default._fingerprint = other.default.llm.engine.weights.version, "fp_other"

    async def ask():
        whole = await client.stream(COMPLETIONS, BODY)
        answer = await Client(make_app(other)).post(COMPLETIONS, {**BODY, "stream": True}, last_event_id=whole[2].id)
        assert answer.status == 409

    asyncio.run(ask())


def test_answers_that_depend_on_what_else_runs_are_not_resumable(make_service, client, engine, monkeypatch):
    async def ask():
        whole = await client.stream(COMPLETIONS, BODY)
        monkeypatch.setattr(engine.llm, "acceptance", "maximal")
        answer = await client.post(COMPLETIONS, {**BODY, "stream": True}, last_event_id=whole[2].id)
        assert (answer.status, answer.error["code"]) == (409, "not_resumable")
        assert (await client.post(COMPLETIONS, BODY)).headers["x-jaxinfer-resumable"] == "no"

    asyncio.run(ask())


def test_skipping_does_not_depend_on_the_pieces():
    generator = random.Random(3)
    text = "some text, ünd möre of it"
    for _ in range(300):
        sent = SentPart()
        sent.add(text[: (cut := generator.randint(0, len(text)))], generator.randint(0, 9))
        skipper, rest, at = Skipper(sent), "", 0
        while at < len(text):
            piece = text[at : at + generator.randint(1, 6)]
            at += len(piece)
            rest += piece[skipper.skip(piece, 1)[0] :]
        skipper.check_end()
        assert rest == text[cut:]
    short = Skipper(sent)
    if sent.num_chars:
        with pytest.raises(APIError):
            short.check_end()


def test_positions_are_read_as_they_were_written():
    position = StreamPosition("0" * 24, "a" * 16, 2**64 - 1, 3)
    position.choices[1].add("text", 5)
    position.choices[2].has_ended = True
    assert str(StreamPosition.read(str(position))) == str(position)
