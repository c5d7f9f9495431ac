"""Answers are as /openapi.json describes them: their status, media type, headers, body, and each event of a stream."""

import asyncio
import functools

import msgspec
import pytest
from jsonschema import Draft202012Validator

from jaxinfer.openai import bodies
from jaxinfer.openai.fields import UNSET
from jaxinfer.server.app import ROUTES, make_app
from jaxinfer.server.auth import Keys
from jaxinfer.server.metrics import STATUSES
from jaxinfer.server.openapi import openapi
from jaxinfer.text.reasoning import Tags
from jaxinfer.tool_calls import AnswerFormat
from tests.server.asgi import Client
from tests.server.conftest import offline

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TURNS = [{"role": "user", "content": "read a file"}]
USAGE = {"stream_options": {"include_usage": True}}
BODIES = [
    (CHAT, {"messages": TURNS, "max_tokens": 3, "n": 2, "logprobs": True, "top_logprobs": 2, **USAGE}),
    (CHAT, {"messages": TURNS, "max_tokens": 3, "return_token_ids": True}),
    (COMPLETIONS, {"prompt": ["a", [5, 6]], "max_tokens": 3, "logprobs": 2, "return_token_ids": True, **USAGE}),
    (COMPLETIONS, {"prompt": "def read(path):", "max_tokens": 3, "stop": ["e", "a", " "], "ignore_eos": True}),
    (RESPONSES, {"input": TURNS, "max_output_tokens": 3, "metadata": {"a": "b"}, "user": "me"}),
    (RESPONSES, {"input": "read", "max_output_tokens": 9, "stop": ["e", "a", " "], "tools": [{"type": "x"}]}),
    (MESSAGES, {"messages": TURNS, "max_tokens": 3}),
    (MESSAGES, {"messages": TURNS, "max_tokens": 9, "stop_sequences": ["e", "a", " "]}),
]
WHOLE_ONLY = [
    (CHAT, {"messages": TURNS, "max_tokens": 1, "prompt_logprobs": 1}),
    (COMPLETIONS, {"prompt": "a file", "echo": True, "max_tokens": 0, "logprobs": 1}),
    (COMPLETIONS, {"prompt": "a file", "max_tokens": 1, "prompt_logprobs": 2}),
    ("/v1/messages/count_tokens", {"messages": TURNS}),
    ("/tokenize", {"prompt": "a file", "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6]}),
    (CHAT + "/render", {"messages": TURNS, "max_tokens": 3, "stream": True}),
    (COMPLETIONS + "/render", {"prompt": ["a", [5, 6]], "cache_salt": "mine"}),
]
WRONG = [
    (CHAT, {}, {}, 400),
    (CHAT, {"messages": TURNS, "model": "other"}, {}, 404),
    (MESSAGES, {"messages": TURNS}, {}, 400),
    (MESSAGES, {"messages": TURNS, "max_tokens": 1, "model": "other"}, {}, 404),
    (RESPONSES, {"input": "a", "background": True}, {}, 400),
    (COMPLETIONS, {"prompt": "a"}, {"content_type": "text/plain"}, 415),
    (COMPLETIONS, {"prompt": "a"}, {"content_length": str(10**9)}, 413),
    (COMPLETIONS, {"prompt": "a"}, {"x_more": "x" * 40_000}, 431),
    (COMPLETIONS, {"prompt": "a"}, {"host": "evil.example"}, 403),
    (COMPLETIONS, {"prompt": "a", "seed": 1}, {"last_event_id": f"{'0' * 24}.{'0' * 16}.1.0-0-0"}, 409),
]


def run(coroutine):
    return asyncio.run(coroutine)


class Described:
    """A client that holds every answer to the description."""

    def __init__(self, client, description):
        self.client, self.description = client, description

    async def call(self, method, path, body=None, **headers):
        answer = await self.client.call(method, path, body, **headers)
        assert self.errors(method, path, answer) == []
        return answer

    def errors(self, method, path, answer):
        template = "/v1/models/{id}" if path.startswith("/v1/models/") else path
        operation = self.description["paths"][template][method.lower()]
        described = operation["responses"].get(str(answer.status))
        if described is None:
            return [f"{path}: status {answer.status} is not described"]
        kind = answer.headers["content-type"].partition(";")[0]
        if kind not in described["content"]:
            return [f"{path}: {kind} is not described"]
        found = [
            f"{path}: no header {name}" for name, one in described["headers"].items() if name not in answer.headers
        ]
        schema = described["content"][kind].get("schema")
        if schema is None:
            return found
        if kind != "text/event-stream":
            return found + self._invalid(schema, answer.json)
        events = [
            dict(line.split(": ", 1) for line in text.split("\n")) for text in answer.body.decode().split("\n\n")[:-1]
        ]
        assert events
        return found + [
            one for event in events for one in self._invalid(schema, event) or self._invalid_data(schema, event)
        ]

    def _invalid(self, schema, value):
        errors = self._validator(msgspec.json.encode(schema)).iter_errors(value)
        return [f"{one.json_path}: {one.message:.300}" for one in errors]

    def _invalid_data(self, schema, event):
        """Validators leave alone what a text holds."""
        if event["data"] == "[DONE]":
            return []
        texts = [one["properties"]["data"] for one in schema.get("anyOf", [schema])]
        (content,) = [text["contentSchema"] for text in texts if "contentSchema" in text]
        return self._invalid(content, msgspec.json.decode(event["data"]))

    @functools.cache  # noqa: B019
    def _validator(self, schema):
        return Draft202012Validator({**msgspec.json.decode(schema), "components": self.description["components"]})


@pytest.fixture
def described(client):
    return Described(client, run(client.get("/openapi.json")).json)


def test_answers_and_their_streams(described):
    async def ask():
        for path, body in BODIES:
            whole = {name: value for name, value in body.items() if name != "stream_options"}
            assert (await described.call("POST", path, whole)).status == 200
            assert (await described.call("POST", path, {**body, "stream": True})).status == 200
        for path, body in WHOLE_ONLY:
            assert (await described.call("POST", path, body)).status == 200

    run(ask())


def test_routes_without_a_body_and_errors(described, make_service):
    async def ask():
        gets = [path for path, one in described.description["paths"].items() if "get" in one and "{" not in path]
        assert {"/health", "/metrics", "/tokenizer_info", "/v1/models"} < set(gets)
        for path in [*gets, "/v1/models/tiny"]:
            assert (await described.call("GET", path)).status == 200
        assert (await described.call("GET", "/v1/models/other")).status == 404
        for path, body, headers, status in WRONG:
            assert (await described.call("POST", path, body, **headers)).status == status, body
        service = make_service()
        described.client = Client(make_app(service))
        service.state = "draining"
        for path in (CHAT, MESSAGES):
            assert (await described.call("POST", path, {})).status == 503
        assert (await described.call("GET", "/ready")).status == 503

    run(ask())


def test_keys_and_their_absence_are_described(make_service):
    app = make_app(make_service(api_keys="keys"), Keys({"first-secret-key": "alice"}))

    async def ask():
        description = (await Client(app).get("/openapi.json", x_api_key="first-secret-key")).json
        described = Described(Client(app), description)
        for path in (CHAT, MESSAGES, RESPONSES):
            assert (await described.call("POST", path, {})).status == 401
        assert (await described.call("GET", "/health")).status == 200
        assert "security" not in description["paths"]["/health"]["get"]

    run(ask())


def test_reasoning(make_service, engine):
    """The tiny model writes no tags, so a text that it does write stands for the closing one."""
    text = offline(engine, engine.llm.chat_prompt(TURNS), seed=3, max_tokens=16).outputs[0].text
    service = make_service()
    middle = text[len(text) // 2 : len(text) // 2 + 3]
    service.default.answers = AnswerFormat(
        engine.llm.tokenizer, "auto", Tags("file", middle)
    )  # the prompt ends with the opening tag
    client = Client(make_app(service))
    limits = {CHAT: "max_tokens", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}

    async def ask():
        described = Described(client, (await client.get("/openapi.json")).json)
        for path, name in limits.items():
            body = {"input" if path == RESPONSES else "messages": TURNS, name: 16, "seed": 3}
            await described.call("POST", path, body)
            await described.call("POST", path, {**body, "stream": True})

    run(ask())


def test_what_is_not_described_is_noticed(described):
    async def ask():
        answer = await described.client.post(CHAT, {"messages": TURNS, "max_tokens": 1})
        assert described.errors("POST", CHAT, answer) == []
        more = {**answer.json, "surprise": 1}
        answer.body = msgspec.json.encode(more)
        assert described.errors("POST", CHAT, answer)

    run(ask())


def test_each_reference_of_the_description_is_in_it():
    description = openapi([route for route in ROUTES if route.method == "POST"], (), True)
    text = msgspec.json.encode(description).decode()
    names = {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= description["components"]["schemas"].keys()


def test_metrics_know_each_status_that_is_described():
    description = openapi([route for route in ROUTES if route.method == "POST"], (), True)
    answers = [status for one in description["paths"].values() for status in one["post"]["responses"]]
    assert {int(status) for status in answers} <= set(STATUSES)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        (CHAT, {"messages": TURNS, "max_tokens": 1}, bodies.ChatRequest.NEUTRAL),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1}, bodies.CompletionRequest.NEUTRAL),
        (RESPONSES, {"input": "a", "max_output_tokens": 1}, bodies.ResponsesRequest.NEUTRAL),
    ],
)
def test_values_that_stand_for_none_are_described_where_they_are_taken(client, path, body, fields):
    async def ask():
        description = (await client.get("/openapi.json")).json
        name = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        is_valid = Draft202012Validator({"$ref": name, "components": description["components"]}).is_valid
        found = {}
        for field in sorted(fields.keys() & description["components"]["schemas"][name.split("/")[-1]]["properties"]):
            for value in UNSET:
                status = (await client.post(path, {**body, field: value})).status
                assert status == (200 if is_valid({**body, field: value}) else 400), (field, value)
                found[field, str(value)] = status
        return found

    found = run(ask())
    if path == RESPONSES:
        assert (found["prompt", "{}"], found["background", "{}"]) == (200, 400)
