"""Chat and completions: the tokens of `LLM.generate`, whole or streamed, with every field applied or refused."""

import asyncio

import pytest

from jaxinfer.api.coordinate import Coordinate
from jaxinfer.server.app import ROUTES, make_app
from tests.server.asgi import Client
from tests.server.conftest import is_idle, offline, until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "read a file"}]
PROMPT = "def read_lines(path):"


def run(coroutine):
    return asyncio.run(coroutine)


def texts(events, is_chat):
    """Text, ids and finish reason of each choice of a stream."""
    found: dict[int, list] = {}
    for event in events:
        for choice in (event.data or {}).get("choices", ()):
            one = found.setdefault(choice["index"], ["", [], None])
            one[0] += choice["delta"].get("content", "") if is_chat else choice["text"]
            one[1] += choice.get("token_ids", [])
            assert one[2] is None, "nothing comes after the end"
            one[2] = choice["finish_reason"]
    return {index: tuple(one) for index, one in found.items()}


CASES = [
    {"temperature": 0, "max_tokens": 12},
    {"seed": 3, "max_tokens": 14, "top_k": 20, "repetition_penalty": 1.2},
    {"seed": 5, "max_tokens": 10, "n": 3, "top_p": 0.9, "presence_penalty": 0.5},
    {"seed": 6, "max_tokens": 14, "logit_bias": {"40": 5.0}, "min_p": 0.01, "stop": ["e", "xyz"]},
]


@pytest.mark.parametrize("fields", [*(pytest.param(one, marks=pytest.mark.slow) for one in CASES[:2]), *CASES[2:]])
def test_answers_are_those_of_the_library(engine, client, fields):
    expected = offline(engine, PROMPT, **fields)

    async def ask():
        body = {"model": "tiny", "prompt": PROMPT, "return_token_ids": True, **fields}
        return await client.post(COMPLETIONS, body), await client.stream(COMPLETIONS, body)

    whole, events = run(ask())
    assert whole.status == 200, whole.body
    answer = whole.json
    wanted = [(one.text, one.token_ids, one.finish_reason) for one in expected.outputs]
    assert [(one["text"], one["token_ids"], one["finish_reason"]) for one in answer["choices"]] == wanted
    assert [texts(events, False)[index] for index in range(len(wanted))] == wanted
    assert events[-1].text == "[DONE]"
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert answer["usage"]["completion_tokens"] == sum(len(one[1]) for one in wanted)
    assert whole.headers["x-jaxinfer-seed"] == str(fields.get("seed", 0)) == str(answer["seed"])
    assert answer["system_fingerprint"].startswith("fp_")
    assert len({event.data["id"] for event in events if event.data}) == 1


def test_a_chat_is_that_of_the_library(engine, client):
    ids = engine.llm.chat_prompt(MESSAGES)
    expected = offline(engine, ids, seed=4, max_tokens=9).outputs[0]

    async def ask():
        body = {"model": "tiny", "messages": MESSAGES, "seed": 4, "max_completion_tokens": 9}
        body |= {"return_token_ids": True, "logprobs": True, "top_logprobs": 2}
        streamed = {**body, "stream_options": {"include_usage": True}}
        return await client.post(CHAT, body), await client.stream(CHAT, streamed)

    whole, events = run(ask())
    (choice,) = whole.json["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert choice["token_ids"] == expected.token_ids
    assert texts(events, True)[0] == (expected.text, expected.token_ids, "length")
    assert events[0].data["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[0].data["seed"] == 4
    streamed = [
        entry
        for event in events
        for one in (event.data or {}).get("choices", ())
        for entry in (one["logprobs"] or {}).get("content", ())
    ]
    assert streamed == choice["logprobs"]["content"]
    assert len(streamed) == 9
    assert all(len(entry["top_logprobs"]) == 2 for entry in streamed)
    usages = [event.data["usage"] for event in events if event.data]
    assert usages[:-1] == [None] * (len(usages) - 1)
    assert usages[-1] == whole.json["usage"] | {"prompt_tokens_details": usages[-1]["prompt_tokens_details"]}


def test_several_prompts_of_texts_and_ids(engine, client):
    prompts = ["a file", [5, 6, 7]]
    wanted = [one for prompt in prompts for one in offline(engine, prompt, seed=2, n=2, max_tokens=6).outputs]

    async def ask():
        body = {"prompt": prompts, "seed": 2, "n": 2, "max_tokens": 6}
        return await client.post(COMPLETIONS, body), await client.stream(COMPLETIONS, body)

    whole, events = run(ask())
    assert [one["index"] for one in whole.json["choices"]] == [0, 1, 2, 3]
    assert [one["text"] for one in whole.json["choices"]] == [one.text for one in wanted]
    found = texts(events, False)
    assert [found[index][0] for index in range(4)] == [one.text for one in wanted]


def test_echo_scores_a_prompt_as_lm_eval_asks_for_it(engine, client):
    ids = engine.llm.client.tokenize("a file is read")[1]
    scores = offline(engine, ids, temperature=0, max_tokens=1, prompt_logprobs=1).prompt_logprobs

    async def ask():
        body = {"prompt": ids, "echo": True, "max_tokens": 0, "logprobs": 1, "temperature": 0}
        text = {"prompt": "a file is read", "echo": True, "max_tokens": 2, "temperature": 0}
        return await client.post(COMPLETIONS, body), await client.stream(COMPLETIONS, text)

    answer, events = run(ask())
    (choice,) = answer.json["choices"]
    assert choice["text"] == "a file is read"
    assert choice["finish_reason"] == "length"
    found = choice["logprobs"]
    assert found["token_logprobs"] == [
        None if entry is None else pytest.approx(entry[token].logprob) for token, entry in zip(ids, scores, strict=True)
    ]
    assert found["token_logprobs"][0] is None
    assert found["text_offset"][:2] == [0, len(found["tokens"][0])]
    emoji = run(client.post(COMPLETIONS, {"prompt": "😀 a", "echo": True, "max_tokens": 1, "logprobs": 0})).json
    assert emoji["choices"][0]["logprobs"]["text_offset"] == [0, 0, 0, 0, 1, 3]
    assert answer.json["usage"]["completion_tokens"] == 0
    assert texts(events, False)[0][0].startswith("a file is read")


REFUSED = [
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", 5]}, "prompt"),
    (COMPLETIONS, {"prompt": [5, 4096]}, "prompt"),
    (COMPLETIONS, {"prompt": [5, -1]}, "prompt"),
    (COMPLETIONS, {"prompt": [2**70]}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
    (COMPLETIONS, {"prompt": "a", "n": 17}, "n"),
    (COMPLETIONS, {"prompt": ["a"] * 17}, "n"),
    (COMPLETIONS, {"prompt": "a", "n": 2**64}, "n"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p"),
    (COMPLETIONS, {"prompt": "a", "seed": -1}, "seed"),
    (COMPLETIONS, {"prompt": "a", "seed": 2**64}, "seed"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 2**40}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 17}, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": "x" * 1025}, "stop"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"4096": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    (COMPLETIONS, {"prompt": "a", "stream": True, "echo": True, "logprobs": 1}, "stream"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "(a"}}, "structured"),
    (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (COMPLETIONS, {"prompt": "a", "priority": 2**31}, "priority"),
    (COMPLETIONS, {"prompt": "a", "cache_salt": "x" * 1025}, "cache_salt"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "yaml"}}, "response_format"),
    (CHAT, {"messages": MESSAGES, "tool_choice": "required", "tools": [{}]}, "tools"),
    (CHAT, {"messages": MESSAGES, "reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"max_prompt_tokens": 5}}, "chat_template_kwargs"),
    (CHAT, {"messages": MESSAGES, "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
]


def test_what_is_not_applied_is_refused_by_its_name(client):
    async def ask():
        return [await client.post(path, {"model": "tiny", **body}) for path, body, _ in REFUSED]

    for (path, body, param), answer in zip(REFUSED, run(ask()), strict=True):
        assert answer.status == 400, (path, body, answer.body)
        assert answer.error["type"] == "invalid_request_error"
        name = param.removesuffix("[0].content[0]") if param.startswith("messages[") else param
        assert (answer.error["param"] or "").startswith(name) or name in answer.error["message"], (body, answer.error)


def test_other_errors(client, service):
    async def ask():
        long = {"prompt": [5] * 250, "max_tokens": 7}
        assert (await client.post(COMPLETIONS, long)).error["code"] == "context_length_exceeded"
        huge = {"messages": [{"role": "user", "content": "a b " * 50_000}]}
        assert (await client.post(CHAT, huge)).error["code"] == "context_length_exceeded"
        unknown = await client.post(COMPLETIONS, {"model": "other", "prompt": "a"})
        assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
        assert (await client.get("/v2/x")).status == 404
        assert (await client.get(COMPLETIONS)).status == 405
        assert (await client.post(COMPLETIONS, body=b"{")).status == 400
        assert (await client.post(COMPLETIONS, body=b"[" * 60_000)).status == 400
        assert (await client.post(COMPLETIONS, body=b"[" * 100_000)).status == 413
        assert (await client.post(COMPLETIONS, body=b'{"prompt": "a", "temperature": NaN}')).status == 400
        assert (await client.post(COMPLETIONS, body=b'{"prompt": "\xff"}')).status == 400
        assert (await client.post(COMPLETIONS, {"prompt": "a"}, content_type="text/plain")).status == 415
        half = await client.post(COMPLETIONS, body=b'{"prompt": "\\ud800", "max_tokens": 1}')
        assert half.status == 400

    run(ask())
    assert service.default.admission.num_running == service.default.admission.num_waiting == 0


def test_null_is_the_default_and_unknown_fields_are_logged_once(make_service, caplog):
    client = Client(make_app(make_service(ignore_unknown_fields=True)))

    async def ask():
        body = {"prompt": "a", "seed": 1, "max_tokens": 3}
        first = await client.post(COMPLETIONS, body)
        unused = await client.post(CHAT, {"messages": MESSAGES, "top_logprobs": 0, "logprobs": False, "max_tokens": 1})
        assert unused.status == 200
        nulls = dict.fromkeys(("n", "top_p", "stop", "logit_bias", "stream", "logprobs", "user", "suffix"), None)
        more = [await client.post(COMPLETIONS, {**body, **nulls, "frobnicate": 1}) for _ in range(2)]
        messages = [*MESSAGES, {"role": "user", "content": "a", "frobnicated": 1, "frobnicates": 2}]
        assert (await client.post(CHAT, {"messages": messages, "max_tokens": 1})).status == 200
        return first, more

    first, more = run(ask())
    assert all(one.json["choices"] == first.json["choices"] for one in more)
    assert [record.getMessage() for record in caplog.records if "frobnicate" in record.getMessage()] == [
        "/v1/completions: 'frobnicate' is not known and ignored",
        "/v1/chat/completions: 'messages[].frobnicated' is not known and ignored",
        "/v1/chat/completions: 'messages[].frobnicates' is not known and ignored",
    ]


def test_arrays_for_processors_never_come_over_http(client):
    async def ask():
        return await client.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "arrays": {"bias": [1.0]}})

    answer = run(ask())
    assert answer.status == 400
    assert "arrays" in answer.json["error"]["message"]


def test_requests_without_a_seed_are_given_one(engine, client):
    async def ask():
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 1.0}
        return [(await client.post(COMPLETIONS, body)).json for _ in range(2)]

    one, other = run(ask())
    assert one["seed"] != other["seed"]
    expected = offline(engine, PROMPT, max_tokens=8, temperature=1.0, seed=one["seed"])
    assert one["choices"][0]["text"] == expected.outputs[0].text


def test_prompts_are_truncated_from_the_left(engine, client):
    ids = engine.llm.client.tokenize("one two three four five six")[1]
    expected = offline(engine, ids[-3:], temperature=0, max_tokens=4).outputs[0].text

    async def ask():
        body = {"prompt": "one two three four five six", "truncate_prompt_tokens": 3, "temperature": 0, "max_tokens": 4}
        return (await client.post(COMPLETIONS, body)).json

    assert run(ask())["choices"][0]["text"] == expected


def test_other_routes(engine, client, service):
    async def ask():
        assert (await client.get("/health")).status == 200
        assert (await client.get("/ready")).status == 200
        assert (await client.get("/version")).json["version"]
        models = (await client.get("/v1/models")).json
        assert [one["id"] for one in models["data"]] == ["tiny"]
        assert models["data"][0]["max_model_len"] == 256
        found = (await client.get("/v1/models/tiny")).json
        for one in (found, models["data"][0]):
            assert one["status"].pop("idle_seconds") >= 0
        assert found == models["data"][0]
        assert (await client.get("/v1/models/a/b")).status == 404
        found = (await client.post("/tokenize", {"prompt": "a file", "return_token_strs": True})).json
        assert found["tokens"] == engine.llm.client.tokenize("a file")[1]
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
        assert (await client.post("/detokenize", {"tokens": found["tokens"]})).json == {"prompt": "a file"}
        assert (await client.post("/detokenize", {"tokens": [10**9]})).status == 400
        chat = (await client.post("/tokenize", {"messages": MESSAGES})).json
        assert chat["tokens"] == engine.llm.chat_prompt(MESSAGES)
        assert (await client.post("/tokenize", {})).status == 400
        info = (await client.get("/tokenizer_info")).json
        tokenizer = engine.llm.tokenizer
        assert tokenizer.token_to_id(info["eos_token"]) == tokenizer.eos_token_id
        assert info["chat_template"] == tokenizer.chat_template
        schema = (await client.get("/openapi.json")).json
        bodies = [one["post"]["requestBody"] for one in schema["paths"].values() if "post" in one]
        names = {body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2] for body in bodies}
        assert (
            names
            == {route.body.__name__ for route in ROUTES if route.body is not None}
            <= schema["components"]["schemas"].keys()
        )
        assert all("get" in schema["paths"][path] for path in ("/health", "/v1/models/{id}"))

    run(ask())


def test_a_client_that_leaves_frees_what_it_held(engine, client, service):
    async def ask():
        body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "seed": 1}
        streamed = client.send("POST", COMPLETIONS, {**body, "stream": True, "n": 2})
        await streamed.start()
        async for _ in streamed.events():
            break
        streamed.leave()
        whole = client.send("POST", COMPLETIONS, body)
        await until(lambda: engine.llm.engine.has_work)
        whole.leave()
        await asyncio.gather(streamed.task, whole.task)
        await until(lambda: is_idle(engine))
        assert service.default.admission.num_running == service.default.admission.num_waiting == 0
        assert not service.generations

    run(ask())


def test_what_a_request_excludes_itself(client):
    """A finished answer ends whatever min_tokens says; a request that excludes its own answer is the client's error."""
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 1}}}
    body = {"messages": MESSAGES, "response_format": schema, "max_tokens": 9}

    async def ask():
        answer = await client.post(CHAT, {**body, "min_tokens": 5})
        assert (answer.status, answer.json["choices"][0]["message"]["content"]) == (200, "1")
        assert answer.json["choices"][0]["finish_reason"] == "stop"
        answer = await client.post(CHAT, {**body, "allowed_token_ids": [5]})
        assert answer.status == 400
        assert "excluded by allowed_token_ids" in answer.error["message"]
        events = await client.stream(CHAT, {**body, "allowed_token_ids": [5]})
        assert "excluded by allowed_token_ids" in events[-1].data["error"]["message"]

    run(ask())


def test_a_prompt_that_is_only_scored_may_be_as_long_as_the_model_takes(client):
    ids = [5 + number % 90 for number in range(257)]  # the model takes 256
    body = {"prompt": ids[:256], "max_tokens": 0, "echo": True, "logprobs": 0}

    async def ask():
        answer = await client.post(COMPLETIONS, body)
        assert answer.status == 200, answer.body
        assert len(answer.json["choices"][0]["logprobs"]["tokens"]) == 256
        answer = await client.post(COMPLETIONS, {**body, "prompt": ids})
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert "max_tokens" not in answer.error["message"]

    run(ask())


UNSET = {
    CHAT: (
        *(("tool_choice", ""), ("reasoning_effort", ""), ("response_format", ""), ("response_format", {})),
        *(("guided_regex", ""), ("guided_choice", []), ("structured_outputs", {}), ("service_tier", "")),
        *(("function_call", ""), ("functions", []), ("stream_options", {}), ("model", ""), ("stop", [])),
        *(("top_k", 0), ("top_k", -1), ("min_p", 0), ("seed", None), ("max_tokens", None), ("tools", [])),
    ),
    "/v1/responses": (("tool_choice", ""), ("previous_response_id", ""), ("conversation", {}), ("reasoning", {})),
    "/v1/messages": (("service_tier", ""), ("tool_choice", {}), ("stop_sequences", []), ("system", "")),
    "/api/chat": (
        *(("think", ""), ("format", ""), ("options", {"num_predict": -1, "num_gpu": -1, "main_gpu": 0, "top_k": 0})),
        ("options", {"repeat_last_n": 64, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "typical_p": 1}),
    ),
}
EXTREMES = {
    CHAT: (
        *(("temperature", 1e-6, "0 takes the most probable token"), ("top_p", 0, "1 keeps all tokens")),
        *(("seed", -1, "leave it out for a random one"), ("max_tokens", -1, "leave it out for as many as fit")),
        *(("repetition_penalty", 0, "1 changes nothing"), ("stop", "", "leave it out"), ("min_p", -1, "0 keeps all")),
        *(("timeout", 0, "leave it out"), ("best_of", 0, "leave it out"), ("verbosity", "high", "or send 'medium'")),
        *(("prediction", {"type": "content"}, "leave it out"), ("truncate_prompt_tokens", 0, "or -1 for all")),
    ),
    "/v1/messages": (("max_tokens", 0, "at least 1"), ("temperature", 1e-7, "0 takes"), ("top_k", -2, "-1 or 0 keeps")),
    "/api/chat": (
        *(("options", {"seed": -1}, "leave it out"), ("options", {"num_ctx": 0}, "must be 2 to 256")),
        *(("options", {"mirostat": 2}, "or send 0"), ("options", {"repeat_penalty": 1.1, "repeat_last_n": 64}, "-1")),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("path", UNSET)
def test_stand_ins_for_not_given(client, path):
    """Clients of other engines send these where they leave a field empty."""
    limit = {CHAT: "max_tokens", "/v1/responses": "max_output_tokens", "/v1/messages": "max_tokens"}.get(path)
    base = {"input": "hi"} if path == "/v1/responses" else {"messages": MESSAGES}
    base |= {limit: 2} if limit else {"model": "tiny", "stream": False, "options": {"num_predict": 2}}

    async def ask():
        for name, value in UNSET[path]:
            body = {**base, name: value}
            if isinstance(value, dict) and name == "options":
                body[name] = {"num_predict": 2, **{key: one for key, one in value.items() if key != "num_predict"}}
            answer = await client.post(path, body)
            assert answer.status == 200, (name, value, answer.body)

    run(ask())


@pytest.mark.parametrize("path", EXTREMES)
def test_extremes_are_refused_with_the_value_to_use(client, path):
    async def ask():
        for name, value, use in EXTREMES[path]:
            limit = {} if path == "/api/chat" else {"max_tokens": 2}
            body = {"model": "tiny", "messages": MESSAGES, **limit, name: value}
            answer = await client.post(path, body)
            assert answer.status == 400, (name, value, answer.body)
            error = answer.json["error"]
            assert use in (error if isinstance(error, str) else error["message"])

    run(ask())


def test_answers_have_their_coordinates_if_the_body_asks(engine, client):
    """Those of a stream come with its end, and are the same."""
    asked = {"model": "tiny", "prompt": [PROMPT, "x"], "n": 2, "seed": 5, "max_tokens": 5, "return_coordinate": True}
    chat = {"model": "tiny", "messages": MESSAGES, "seed": 4, "max_completion_tokens": 4, "return_coordinate": True}
    usage = {"stream_options": {"include_usage": True}}

    async def ask():
        answers = [await client.post(COMPLETIONS, asked), await client.post(CHAT, chat)]
        streams = [await client.stream(COMPLETIONS, asked), await client.stream(CHAT, {**chat, **usage})]
        return answers, streams, await client.post(COMPLETIONS, {**asked, "max_tokens": 0})

    answers, streams, refused = run(ask())
    assert [len(answer.json["coordinates"]) for answer in answers] == [4, 1]
    for answer, events in zip(answers, streams, strict=True):
        (told,) = [event.data for event in events if "coordinates" in (event.data or {})]
        assert told["coordinates"] == answer.json["coordinates"]
        assert told["choices"] == []
    given = [entry for answer in answers for entry in answer.json["coordinates"]]
    assert {entry["model"] for entry in given} == {"tiny"}
    coordinates = [Coordinate.from_dict(entry) for entry in given]
    assert {len(coordinate.token_ids) for coordinate in coordinates} == {4, 5}
    checks = engine.llm.replay(coordinates)  # it is idle
    assert all(check.is_equal for check in checks)
    assert (refused.status, refused.json["error"]["param"]) == (400, "return_coordinate")
