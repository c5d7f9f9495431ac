"""Control tokens of a form are read alike by every route and by `LLM.chat`: reasoning, content and calls apart."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from jaxinfer.cli.output import stream_answer
from jaxinfer.engine.request import CompletionOutput, RequestOutput, StreamDelta
from jaxinfer.sampling import SamplingParams
from jaxinfer.text.reasoning import FAMILIES
from jaxinfer.tool_calls import AnswerFormat
from tests.server.test_tools import ASK, BODIES, CHAT, MESSAGES, RESPONSES, TOOLS, gathered, make_client, run
from tests.tool_calls.test_forced_calls import tokenizer_of

OLLAMA = "/api/chat"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"
CALL = "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
# An answer of gpt-oss, its reasoning, its content and its calls.
ANSWERS = [
    (f"{ANALYSIS}Think.<|end|>{FINAL}Hello", "Think.", "Hello", []),
    (f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|>{FINAL}c", "a\nb", "c", []),
    (f"{ANALYSIS}a<|end|>{CALL.format('stop', '')}", "a", "", [("stop", {})]),
    (f"{ANALYSIS}a<|end|>{CALL.format('stop', '<|call|>')}", "a", "", [("stop", {})]),
    (
        CALL.format("read", '{"path": "a"}<|call|>').removeprefix("<|start|>assistant"),
        "",
        "",
        [("read", {"path": "a"})],
    ),
    (f"{ANALYSIS}a<|end|>{CALL.format('rm', '{}')}<|end|>{FINAL}No", "a\n{}", "No", []),
    (f' to=functions.rm<|channel|>commentary json<|message|>{{"a": 1}}<|end|>{FINAL}No', '{"a": 1}', "No", []),
]
__all__ = ["make_client"]


def of_chat(message, name="reasoning_content", load=json.loads):
    calls = [(one["function"]["name"], load(one["function"]["arguments"])) for one in message.get("tool_calls", ())]
    return message.get(name) or "", message.get("content") or "", calls


def of_message(body):
    found = {kind: [one for one in body["content"] if one["type"] == kind] for kind in ("thinking", "text", "tool_use")}
    texts = ["".join(one[kind] for one in found[kind]) for kind in ("thinking", "text")]
    return (*texts, [(one["name"], one["input"]) for one in found["tool_use"]])


def of_response(body):
    reasoning, content, calls = "", "", []
    for item in body["output"]:
        if item["type"] == "function_call":
            calls.append((item["name"], json.loads(item["arguments"])))
        elif item["type"] == "reasoning":
            reasoning += "".join(part["text"] for part in item.get("content") or item["summary"])
        else:
            content += "".join(part["text"] for part in item["content"])
    return reasoning, content, calls


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), ANSWERS)
def test_every_door_reads_the_same(make_client, engine, monkeypatch, text, reasoning, content, calls):
    expected, family = (reasoning, content, calls), FAMILIES["gpt-oss"]
    client = make_client(text, form="openai", tags=family)

    async def ask():
        body = {"model": "tiny", "messages": ASK, "tools": TOOLS, "think": True, "stream": False}
        return (
            await client.post(CHAT, BODIES[CHAT]),
            await client.stream(CHAT, BODIES[CHAT]),
            await client.post(MESSAGES, BODIES[MESSAGES]),
            await client.post(RESPONSES, BODIES[RESPONSES]),
            await client.post(OLLAMA, body),
        )

    chat, events, message, response, ollama = run(ask())
    assert of_chat(chat.json["choices"][0]["message"]) == expected
    streamed = gathered(events)
    assert (streamed[1], streamed[0], [(one[1], json.loads(one[2])) for one in streamed[2]]) == expected
    assert of_message(message.json) == expected
    assert of_response(response.json) == expected
    assert of_chat(ollama.json["message"], "thinking", dict) == expected

    llm = engine.llm
    output = RequestOutput("0", None, [1], [CompletionOutput(0, text, [5], 3, "stop")], True)
    monkeypatch.setattr(llm, "answer_format", AnswerFormat(llm.tokenizer, "openai", family))
    monkeypatch.setattr(llm, "generate", lambda prompts, params, **_: [output])
    for tools in (TOOLS, None) if not calls else (TOOLS,):
        ((answer,),) = [one.outputs for one in llm.chat(ASK, dataclasses.replace(llm.default_params), tools=tools)]
        named = [(one.name, json.loads(one.arguments)) for one in answer.tool_calls or ()]
        assert (answer.reasoning or "", answer.text, named) == expected


def test_the_command_line_shows_reasoning_before_the_answer_and_keeps_the_answer():
    family = FAMILIES["gpt-oss"]
    answers = AnswerFormat(tokenizer_of(family.markers), "openai", family)
    for text, reasoning, content, calls in ANSWERS:
        if calls:
            continue
        pieces = [StreamDelta(0, text[at : at + 5], []) for at in range(0, len(text), 5)]
        pieces[-1] = dataclasses.replace(pieces[-1], finish_reason="stop")
        llm = SimpleNamespace(stream=lambda prompt, params, pieces=pieces, **_: (one for one in pieces))
        shown = []
        found = stream_answer(llm, [5], None, shown.append, splitter=answers.splitter([5]))
        assert (found, "".join(shown)) == ((content, None), f"{reasoning}\n\n{content}")
    assert not answers.params(SamplingParams()).skip_special_tokens
    assert AnswerFormat(tokenizer_of(()), "none", FAMILIES["think"]).splitter([5]) is None  # its tags are text
