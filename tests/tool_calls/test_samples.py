"""Grammar and parser hold together: what a form's grammar allows is a call that matches its tool, and what is broken is
text."""

import functools
import json
import random
import re

import jsonschema
import pytest

from jaxinfer.tool_calls import TOOL_FORMS, Tool, tool_form
from tests.tool_calls.samples import HARD, Sample, matcher, samples, tokenizer, walk

pytest.importorskip("llguidance")

NAMES = sorted(TOOL_FORMS)
FAST = {name: range(200 * number, 200 * number + 200) for number, name in enumerate(NAMES)}
NUM_BROKEN = 125  # of each form, 2,000 of all


@functools.cache
def validator(schema: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(schema))


def check_calls(name: str, one: Sample) -> int:
    """The number of calls, each of which matches its tool."""
    content, calls = tool_form(name).parse(one.text, one.offered)
    schemas = {tool.name: json.dumps(tool.parameters) for tool in one.offered}
    for call in calls:
        call.arguments.encode()
        validator(schemas[call.name]).validate(json.loads(call.arguments))
    # Only Harmony's grammar has other messages before a call that is demanded.
    assert not calls or name == "openai" or not content or one.mode == "auto", one.text
    assert calls or content == one.text
    return len(calls)


def check_samples(name: str, seeds: range) -> None:
    found = list(samples(tool_form(name), seeds))
    assert len(found) >= 0.9 * len(seeds)
    assert sum(any(mark in one.text for mark in HARD) for one in found) > len(seeds) // 4
    for one in found:
        assert check_calls(name, one), one.text


@pytest.mark.parametrize("name", NAMES)
def test_what_a_grammar_allows_is_read_as_calls_that_match_their_tools(name):
    check_samples(name, FAST[name])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_all_that_a_grammar_allows_is_read_as_calls_that_match_their_tools(name):
    check_samples(name, range(10_000, 20_000))


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
def test_where_calls_are_possible_what_a_grammar_allows_is_text_or_calls(name):
    for one in samples(tool_form(name), range(20), "auto"):
        check_calls(name, one)


def broken(numbers: random.Random, text: str) -> str:
    at = numbers.randrange(len(text))
    return text[:at] + numbers.choice(["", *HARD]) + text[at + numbers.randint(0, 3) :]


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
def test_what_is_broken_is_text(name):
    form, numbers = tool_form(name), random.Random(7)
    for one in samples(form, range(FAST[name].start, FAST[name].start + NUM_BROKEN)):
        whole = form.parse(one.text, one.offered, "seed")[1]
        cut = one.text[: numbers.randrange(len(one.text))]
        content, calls = form.parse(cut, one.offered, "seed")
        # Harmony writes no arguments as nothing, and an answer's last token is not in its text.
        assert calls == whole[: len(calls)] or (cut.endswith("<|message|>") and calls[-1].arguments == "{}")
        assert calls or content == cut
        for text in (broken(numbers, one.text), broken(numbers, one.text[: len(one.text) // 2])):
            content, calls = form.parse(text, one.offered)
            assert calls or content == text
            assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
        assert form.parse(one.text, [Tool("another")]) == (one.text, [])


# Names that some forms cannot write, since what stands around a name is in it.
KEYS = (
    *("a b", " a", "a ", "a:b", "a,b", "a}b", "[x", "a>b", "a\nb", "", 'a"b', "a'b", "a\\b", "größe", "a=b", "/a"),
    *("None", "from", "</arg_key>", '<|"|>x', "<escape>y"),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_an_argument_is_read_or_refused(name):
    form = tool_form(name)
    tokens = tokenizer(form.special_texts)
    for key in KEYS:
        inner = {"type": "object", "properties": {key: {"type": "integer"}}, "required": [key]}
        schema = {**inner, "properties": {key: {**inner, "additionalProperties": False}}, "additionalProperties": False}
        offered = (Tool("f", schema),)
        try:
            grammar = form.grammar(offered, "required", True, tokens.special)
        except ValueError:
            with pytest.raises(ValueError, match=re.escape(repr(key))):
                form.grammar(offered, "required", True, tokens.special)
            continue
        text = walk(matcher(grammar, tokens), tokens, random.Random(3), is_hard=False)
        assert text is not None
        assert check_calls(name, Sample(text, offered, "required"))
