"""Grammars of calls, tried with llguidance: recorded answers are accepted, wrong ones refused."""

import functools
import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from jaxinfer.tool_calls import TOOL_FORMS, Tool, tool_form
from tests.tool_calls.record import TOOLS
from tests.tool_calls.samples import ByteTokenizer, matcher, tokenizer, walk
from tests.tool_calls.test_forms import recorded
from tests.tool_calls.test_parser import some

pytest.importorskip("llguidance")

NAMES = sorted(TOOL_FORMS)


@functools.cache
def tools() -> tuple[Tool, ...]:
    return tuple(Tool(tool["name"], {**tool["parameters"], "additionalProperties": False}) for tool in TOOLS)


def num_accepted(grammar: str, tokens: ByteTokenizer, text: str) -> tuple[int, int, bool]:
    """Tokens that are accepted and all tokens of a text, and whether the answer may end behind it."""
    ids = tokens.encode(text)
    one = matcher(grammar, tokens)
    count = one.validate_tokens(ids)
    return count, len(ids), count == len(ids) and one.consume_tokens(ids) and one.is_accepting()


def accepts(grammar: str, tokens: ByteTokenizer, text: str) -> bool:
    return num_accepted(grammar, tokens, text)[2]


def special_of(name: str, answer: dict) -> tuple[str, ...]:
    """The special tokens of the tokenizer of an answer's model: of Mistral's only the later ones have [ARGS]."""
    return ("[TOOL_CALLS]",) if "Nemo" in answer["source"] else tool_form(name).special_texts


def spoken(name: str, *, parallel: bool = True, content: bool = True) -> list[dict]:
    """Recorded answers in the spelling of the form's grammar, which writes JSON where the parser takes Python as well.

    Left out are answers whose values contain special tokens, which the test's tokenizer cannot tell from text.
    """
    found = []
    for answer in recorded(name):
        values = json.dumps(answer["calls"], ensure_ascii=False)
        text = answer["text"].strip("\n").removesuffix("<|call|>")
        if name in ("pythonic", "llama4_pythonic", "lfm2"):
            text = f"[{', '.join(map(python_call, answer['calls']))}]"
            text = f"<|tool_call_start|>{text}<|tool_call_end|>" if name == "lfm2" else text
            answer = {**answer, "content": ""}
        is_spoken = not any(one in values for one in special_of(name, answer))
        is_spoken &= name != "seed_oss" or not ("'" in text or "[" in text)  # lists as Python writes them
        is_spoken &= name != "gemma4" or not answer["content"]  # its template writes the content behind the calls
        if (
            is_spoken
            and (parallel or len(answer["calls"]) == 1)
            and (content or name == "openai" or not answer["content"])
        ):
            found.append({**answer, "text": text})
    assert len(found) >= 15
    return found


def python_call(call: dict) -> str:
    values = {
        key: str(value) if isinstance(value, bool) else json.dumps(value, ensure_ascii=False)
        for key, value in call["arguments"].items()
    }
    return f"{call['name']}({', '.join(f'{key}={value}' for key, value in values.items())})"


def check_accepted(
    name: str, mode: Any, answers: Sequence[dict], offered: Sequence[Tool], expected: bool = True
) -> None:
    for answer in answers:
        tokens = tokenizer(special_of(name, answer))
        grammar = tool_form(name).grammar(offered, mode, True, tokens.special)
        assert accepts(grammar, tokens, answer["text"]) == expected, answer["text"]
        if name != "openai":  # its grammar needs its special tokens
            as_text = tokenizer(())
            if name != "mistral" or "Nemo" in answer["source"]:
                grammar = tool_form(name).grammar(offered, mode, True, {})
                assert accepts(grammar, as_text, answer["text"]) == expected, answer["text"]


@some(NAMES)
def test_recorded_answers_are_accepted(name):
    check_accepted(name, "required", spoken(name, content=False)[:2], tools())
    check_accepted(name, "auto", spoken(name)[-2:], tools())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_all_recorded_answers_are_accepted(name):
    check_accepted(name, "required", spoken(name, content=False), tools())
    check_accepted(name, "auto", spoken(name), tools())


def changed(**schemas: Any) -> list[Tool]:
    """The tools, with other schemas of arguments."""
    found = []
    for tool in tools():
        properties = {key: schemas.get(key, value) for key, value in tool.parameters["properties"].items()}
        found.append(Tool(tool.name, {**tool.parameters, "properties": properties}))
    return found


def with_argument(name: str, key: str) -> list[dict]:
    return [one for one in spoken(name, content=False) if key in one["calls"][0]["arguments"]][:2]


@some(NAMES)
@pytest.mark.parametrize("mode", ["required", "auto"])
def test_arguments_that_do_not_match_are_refused(name, mode):
    check_accepted(
        name, mode, with_argument(name, "days"), changed(days={"type": "array", "items": {"type": "string"}}), False
    )
    check_accepted(name, mode, with_argument(name, "unit"), changed(unit={"type": "string", "enum": ["kelvin"]}), False)
    lacking = [one for one in spoken(name) if one["calls"][0]["arguments"].keys() == {"city", "days"}][:2]
    stricter = [Tool(one.name, {**one.parameters, "required": list(one.parameters["properties"])}) for one in tools()]
    check_accepted(name, mode, lacking, stricter, False)


@some(NAMES)
def test_other_answers_are_refused(name):
    some = spoken(name, content=False)[:2]
    check_accepted(name, "auto", some, [Tool("another")], False)
    check_accepted(name, "required", [{**one, "text": "Hello"} for one in some], tools(), False)
    check_accepted(name, "required", [{**one, "text": one["text"][:-9]} for one in some], tools(), False)
    for answer in [one for one in spoken(name, content=False) if len(one["calls"]) > 1][:2]:
        tokens = tokenizer(special_of(name, answer))
        for mode in ("required", "auto"):
            assert not accepts(tool_form(name).grammar(tools(), mode, False, tokens.special), tokens, answer["text"])


@some(NAMES)
def test_text_alone_is_accepted_where_calls_are_possible(name):
    texts = ["", "Hello\n\n- [1] {a}", "see <b> and ```python\nf(x)\n```"]
    if name == "openai":
        texts = [
            f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>{one}"
            for one in texts
        ]
    tokens = tokenizer(tool_form(name).special_texts)
    for text in texts:
        assert accepts(tool_form(name).grammar(tools(), "auto", True, tokens.special), tokens, text)
        assert name == "openai" or accepts(tool_form(name).grammar(tools(), "auto", True, {}), tokenizer(()), text)


@some(NAMES)
def test_text_cannot_spell_a_call_with_ordinary_tokens(name):
    answer = spoken(name, content=False)[0]
    tokens = tokenizer(special_of(name, answer))
    grammar = tool_form(name).grammar([Tool("another")], "auto", True, tokens.special)
    before = tokens.encode("<|channel|>final<|message|>Hi") if name == "openai" else []
    call = "<|start|>assistant to=functions.now<|message|>{}" if name == "openai" else answer["text"]
    one = matcher(grammar, tokens)
    assert one.validate_tokens([*before, *call.encode()]) in range(len(before), len(before) + len(call.encode()))


WALKED = {
    "type": "object",
    "properties": {
        "note": {"type": "string"},
        "code": {"type": "string", "minLength": 2, "maxLength": 5, "pattern": "^[A-Z]"},
        "unit": {"enum": ["a b", "c"]},
        "flag": {"type": "boolean"},
        "count": {"type": "integer"},
        "list": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        "some": {"anyOf": [{"type": "null"}, {"type": "integer"}]},
        "inner": {
            "type": "object",
            "properties": {"z": {"type": "number", "minimum": -9.5, "maximum": 1000}, "y": {"$ref": "#/$defs/d"}},
            "required": ["y"],
        },
    },
    "required": ["note", "flag", "inner"],
    "additionalProperties": False,
    "$defs": {"d": {"type": ["null", "boolean"]}},
}


def check_walks(name: str, seeds: range) -> None:
    offered = [Tool("walk", WALKED), Tool("no-arguments")]
    num_calls = 0
    for seed in seeds:
        tokens = tokenizer(tool_form(name).special_texts if seed % 2 or name == "openai" else ())
        grammar = tool_form(name).grammar(offered, "required", seed % 3 > 0, tokens.special)
        text = walk(matcher(grammar, tokens), tokens, random.Random(seed), is_hard=seed % 2 > 0)
        if text is None:
            continue
        content, calls = tool_form(name).parse(text, offered)
        assert calls, text
        assert name == "openai" or not content, text
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), WALKED if call.name == "walk" else {"maxProperties": 0})
        num_calls += len(calls)
    assert num_calls >= len(seeds) // 2


@some(NAMES)
def test_what_a_grammar_allows_is_a_call_with_valid_arguments(name):
    check_walks(name, range(2))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_a_grammar_allows_is_always_a_call_with_valid_arguments(name):
    check_walks(name, range(60))
