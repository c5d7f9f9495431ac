"""Recorded answers of each form, as a whole and in every split of the stream."""

import functools
import json
import random
from pathlib import Path

import pytest

from jaxinfer.tool_calls import TOOL_FORMS, Content, Tool, ToolCallDelta, collect, tool_form
from tests.tool_calls.record import TOOLS

RECORDED = Path(__file__).parent / "recorded"
NAMES = sorted(TOOL_FORMS)
FEW = 6


@functools.cache
def recorded(name: str) -> list[dict]:
    return json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))


@functools.cache
def tools() -> tuple[Tool, ...]:
    return tuple(Tool(tool["name"], tool["parameters"], tool["description"]) for tool in TOOLS)


def check_whole(name: str, answer: dict) -> None:
    content, calls = tool_form(name).parse(answer["text"], tools(), "seed")
    assert content.strip() == answer["content"]
    assert [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls] == answer["calls"]
    assert len({call.id for call in calls}) == len(calls)


def streamed(name: str, pieces: list[str]) -> list[Content | ToolCallDelta]:
    parser = tool_form(name).parser(tools(), "seed")
    found = [one for piece in pieces for one in parser.feed(piece, False)]
    return found + parser.feed("", True)


def check_splits(name: str, answer: dict, cuts: range | list[int]) -> None:
    text = answer["text"]
    whole = tool_form(name).parse(text, tools(), "seed")
    for cut in cuts:
        assert collect(streamed(name, [text[:cut], text[cut:]])) == whole, cut
    assert collect(streamed(name, list(text))) == whole


@pytest.mark.parametrize("name", NAMES)
def test_recorded_answers_are_read(name):
    answers = recorded(name)
    assert len(answers) == len({answer["text"] for answer in answers}) == 60
    for answer in answers:
        check_whole(name, answer)


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_gives_what_the_whole_text_gives(name):
    rng = random.Random(7)
    for answer in rng.sample(recorded(name), FEW):
        check_splits(name, answer, rng.sample(range(len(answer["text"])), min(8, len(answer["text"]))))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_split_gives_what_the_whole_text_gives(name):
    for answer in recorded(name):
        check_splits(name, answer, range(len(answer["text"]) + 1))
