"""One body through server, batch and `LLM.chat`: the same prompt, the same parameters, or the same error."""

import asyncio
import dataclasses
import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jaxinfer.batch import open_job
from jaxinfer.engine.request import CompletionOutput, RequestOutput
from jaxinfer.openai import requests
from jaxinfer.sampling import SamplingParams
from jaxinfer.sampling.params import SamplingParamsError
from jaxinfer.tool_calls import answers
from tests.batch.conftest import FakeLLM, read_records
from tests.server.templates import client_of_template

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Qwen's form of calls, a switch and an effort of reasoning, and a name of messages that is this template's own.
TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools><tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.mood }}{% for c in m.tool_calls %}"
    "<tool_call>{{ c | tojson }}</tool_call>{% endfor %};{% endfor %}{{ reasoning_effort }}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


class Doors:
    """One model behind three doors, whose engine answers at once and keeps what it was asked."""

    def __init__(self, engine, make_service, monkeypatch, folder):
        self.llm, self.asked, self._folder = engine.llm, [], folder
        self._client = client_of_template(monkeypatch, engine, make_service, TEMPLATE, self._take)
        monkeypatch.setattr(self.llm, "generate", self._generate)
        self._batch = FakeLLM(**{**vars(self.llm.default_params), "seed": 0})
        for name in ("answer_format", "tokenizer", "client", "max_model_len"):
            monkeypatch.setattr(type(self._batch), name, getattr(self.llm, name), raising=False)
        self._batch.answer_format = self.llm.answer_format
        self._batch.generate_each = self._each

    def _take(self, request):
        self.asked.append((list(request.token_ids), request.params))

    def _prepared(self, prompt, params, *options):
        request = self.llm.prepare(prompt, params, *options)
        self._take(request)
        answers = [CompletionOutput(index, "yes", [5], 3, "stop") for index in range(params.n)]
        prompt_logprobs = None if params.prompt_logprobs is None else [None] * request.num_prompt
        return RequestOutput("0", request.text, request.token_ids, answers, True, prompt_logprobs=prompt_logprobs)

    def _generate(self, prompts, params, *, use_tqdm=None, **options):
        return [self._prepared(*one) for one in zip(prompts, params, strict=True)]

    def _each(self, requests, *, max_queued=None):
        for key, *request in requests:
            try:
                yield key, self._prepared(*request)
            except ValueError as error:
                yield key, error

    def server(self, path, body):
        answer = asyncio.run(self._client.post(path, body))
        if answer.status == 200:
            return None
        assert answer.status == 400, answer.body
        return {name: answer.json["error"][name] for name in ("message", "param", "code")}

    def batch(self, path, body):
        rows, out = self._folder / "in.jsonl", self._folder / "out.jsonl"
        rows.write_text(json.dumps({"custom_id": "a", "url": path, "body": body}))
        with open_job(rows, out, overwrite=True) as job:
            if job.run(self._batch, use_tqdm=False).ok:
                return None
        (record,) = read_records(self._folder / "out.errors.jsonl")
        error = record["response"]["body"]["error"]
        return {name: error[name] for name in ("message", "param", "code")}

    def library(self, body, params):
        kwargs = {name: body[name] for name in ("tools", "tool_choice", "parallel_tool_calls") if name in body}
        try:
            self.llm.chat(body["messages"], params, **kwargs, **template_variables(body))
        except ValueError as error:
            return {"message": str(error), "param": getattr(error, "parameter", None), "code": None}
        return None

    def ask(self, call, *arguments):
        """The requests that reached the engine, or the error."""
        self.asked.clear()
        error = call(*arguments)
        return error or list(self.asked)


def template_variables(body):
    continues = bool(body.get("continue_final_message"))
    generates = body.get("add_generation_prompt")
    effort = {"reasoning_effort": body["reasoning_effort"]} if body.get("reasoning_effort") else {}
    generates = not continues if generates is None else generates
    return {**effort, "add_generation_prompt": generates, "continue_final_message": continues}


@pytest.fixture
def doors(engine, make_service, monkeypatch, tmp_path):
    return Doors(engine, make_service, monkeypatch, tmp_path)


texts = st.sampled_from(["", "hi", "größer 😀", "a\nb"])
parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "text", "input_text", "image_url"])},
    optional={"text": texts, "annotations": st.just([]), "txet": st.just("a")},
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "user", "assistant", "system", "developer", "tool", "two words"])},
    optional={
        "content": st.none() | texts | texts | st.lists(parts, min_size=1, max_size=2) | st.just(5),
        "tool_calls": st.just([]) | st.just([CALL]) | st.just([{**CALL, "index": 0}]) | st.just([{**CALL, "kind": 1}]),
        "mood": st.just("glad"),
        "refusal": st.none() | st.just("no"),
        "reasoning_content": texts,
        "tool_call_id": st.just("call_1"),
        "contnet": st.just("x"),
    },
)
plain = st.builds(lambda text: [{"role": "user", "content": text}], texts)
shared = {
    "temperature": st.sampled_from([0, 0.5, 1e-7, "warm", None]),
    "top_p": st.sampled_from([0.5, 0, 2]),
    "top_k": st.sampled_from([-1, 0, 5, -2]),
    "seed": st.sampled_from([1, 2, -1]),
    "n": st.sampled_from([1, 2, 0]),
    "stop": st.sampled_from(["x", ["x", "y"], [], ""]),
    "max_tokens": st.sampled_from([1, 5, 5, -1, 10_000]),
    "min_tokens": st.sampled_from([0, 2, 9]),
    "logit_bias": st.sampled_from([{"7": 1}, {"word": 1}, {"99999": 1}]),
    "response_format": st.sampled_from([{"type": "json_object"}, {"type": "text"}, {}, {"type": "xml"}]),
    "guided_regex": st.sampled_from(["[ab]+", "(a", ""]),
    "truncate_prompt_tokens": st.sampled_from([3, -1, 0, 10_000]),
    "prompt_logprobs": st.sampled_from([1, 99]),
    "priority": st.sampled_from([0, 2**40]),
    "cache_salt": st.sampled_from(["", "x", "x" * 2000]),
    "timeout": st.sampled_from([60]),
    "metadata": st.sampled_from([{"a": "b"}, {}, 1]),
    "user": st.sampled_from(["me", None]),
    "best_of": st.sampled_from([1, 3]),
    "service_tier": st.sampled_from(["auto", "flex"]),
    "store": st.sampled_from([False, True]),
    "return_token_ids": st.sampled_from([True, "yes"]),
    "frobnicate": st.just(1),
}
chat_fields = {
    **shared,
    "max_completion_tokens": st.sampled_from([5, 6]),
    "logprobs": st.sampled_from([True, False, 3]),
    "top_logprobs": st.sampled_from([0, 2, 99]),
    "tools": st.sampled_from([[TOOL], [], [TOOL, TOOL], [{**TOOL, "fuction": {}}], [{"type": "function"}]]),
    "tool_choice": st.sampled_from(["auto", "none", "", "required", {"type": "function", "function": {"name": "x"}}]),
    "parallel_tool_calls": st.sampled_from([True, False, 2]),
    "functions": st.sampled_from([[], [{}]]),
    "reasoning_effort": st.sampled_from(["", "low", "none"]),
    "add_generation_prompt": st.sampled_from([True, False]),
    "continue_final_message": st.sampled_from([True, False]),
    "chat_template_kwargs": st.sampled_from([{}, {"tools": []}, {"bos_token": "a"}]),
}
prompts = st.sampled_from(["hi", ["a", "b"], [5, 6], [[5], "x"], [], [5, "x"], [99_999], "word " * 400])
completion_fields = {**shared, "echo": st.booleans(), "logprobs": st.sampled_from([0, 2, True]), "suffix": st.just("")}


GROUPS = (
    ("tools", "tool_choice", "parallel_tool_calls"),
    ("tools", "tool_choice", "response_format"),
    ("logprobs", "top_logprobs", "prompt_logprobs"),
    ("max_tokens", "max_completion_tokens", "min_tokens"),
    ("add_generation_prompt", "continue_final_message", "reasoning_effort"),
)


def few(needed, fields, *groups):
    """Bodies of few fields, since with many each would be refused; those of a group come together."""
    names = st.lists(st.sampled_from(sorted(fields)), unique=True, max_size=3)
    alone = names.map(lambda chosen: {**needed, **{name: fields[name] for name in chosen}})
    together = st.sampled_from(groups or ((),)).map(lambda group: {**needed, **{name: fields[name] for name in group}})
    return (alone | alone | together).flatmap(st.fixed_dictionaries)


def same(server, batch):
    """True if two doors asked for the same; a seed that neither was given is each one's own."""
    if isinstance(server, dict) or isinstance(batch, dict):
        return server == batch
    without = [[(ids, dataclasses.replace(params, seed=0)) for ids, params in one] for one in (server, batch)]
    return without[0] == without[1]


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(body=few({"messages": plain | plain | st.lists(messages, max_size=3)}, chat_fields, *GROUPS))
@example(body={"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "parallel_tool_calls": False})
def test_a_chat_is_read_alike(doors, body):
    server, batch = doors.ask(doors.server, CHAT, body), doors.ask(doors.batch, CHAT, body)
    assert same(server, batch), (server, batch)
    params = params_of(doors.llm, body)
    if params is not None:
        library = doors.ask(doors.library, body, params)
        if isinstance(server, dict) and server["code"] == "context_length_exceeded":
            assert isinstance(library, dict)
            return
        if isinstance(library, dict):
            assert isinstance(server, dict)
            assert server["message"] == library["message"]
            assert server["param"] == (library["param"] or "messages")  # the only argument that it can be about
        else:
            assert same(server, library), (server, library)


def params_of(llm, body):
    """The body's parameters as a user of the library gives them; None for what is not theirs to say, or wrong."""
    if not body["messages"]:  # no conversation, where the library takes several
        return None
    if not body.keys() <= {*OF_LIBRARY, *(one.name for one in dataclasses.fields(SamplingParams))}:
        return None
    given = {name: value for name, value in body.items() if name not in OF_LIBRARY and value is not None}
    if "logprobs" in given or not isinstance(body.get("parallel_tool_calls", True), bool):
        return None
    try:
        base = {**vars(llm.default_params), "max_tokens": None}
        return SamplingParams.from_dict({**base, **given})
    except SamplingParamsError:
        return None


OF_LIBRARY = {"messages", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "user"} | {
    "add_generation_prompt",
    "continue_final_message",
}


@pytest.mark.slow
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(body=few({"prompt": prompts}, completion_fields))
def test_a_completion_is_read_alike(doors, body):
    server, batch = doors.ask(doors.server, COMPLETIONS, body), doors.ask(doors.batch, COMPLETIONS, body)
    assert same(server, batch), (server, batch)


def test_the_library_reads_the_tools_of_many_conversations_once(doors, monkeypatch):
    num_read = []
    for module in (requests, answers):
        monkeypatch.setattr(
            module, "check_tools", lambda *given, read=module.check_tools: num_read.append(1) or read(*given)
        )
    for number in (1, 30):
        num_read.clear()
        doors.asked.clear()
        doors.llm.chat([[{"role": "user", "content": "hi"}]] * number, tools=[TOOL])
        assert (len(num_read), len(doors.asked)) == (2, number)
    assert doors.llm.chat([], tools=[TOOL]) == []
