"""Reasoning is told from content, wherever the stream is cut."""

import random

import pytest

from jaxinfer.server.reasoning import FAMILIES, ReasoningSplitter, split, starts_inside, tags_of

THINK = FAMILIES["think"]
CASES = [
    ("<think>\na b\n</think>\n\nc d", False, ("a b", "c d")),
    ("  <think>a</think>b</think>", False, ("a", "b</think>")),
    ("no tags <think>x</think>", False, ("", "no tags <think>x</think>")),
    ("a < b </thin </think> c", True, ("a < b </thin", "c")),
    ("<think>never ends </thi", False, ("never ends </thi", "")),
    ("still\n thinking", True, ("still\n thinking", "")),
    ("<thi", False, ("", "<thi")),
    ("", False, ("", "")),
    ("  x", False, ("", "  x")),
]


@pytest.mark.parametrize(("text", "is_inside", "expected"), CASES)
def test_what_is_told_apart(text, is_inside, expected):
    assert split(text, THINK, is_inside) == expected


@pytest.mark.parametrize(("text", "is_inside", "expected"), CASES)
def test_the_result_does_not_depend_on_the_cuts(text, is_inside, expected):
    generator = random.Random(1)
    by_length: dict[int, tuple[str, str]] = {}
    for _ in range(50):
        splitter, found, at = ReasoningSplitter(THINK, is_inside), {"reasoning": "", "content": ""}, 0
        while at < len(text):
            step = generator.randint(1, 4)
            for kind, piece in splitter.feed(text[at : at + step]):
                found[kind] += piece
            at = min(at + step, len(text))
            state = (found["reasoning"], found["content"])
            assert by_length.setdefault(at, state) == state
        for kind, piece in splitter.finish():
            found[kind] += piece
        assert (found["reasoning"], found["content"]) == expected


def test_families_are_found_in_templates():
    assert tags_of("auto", "{{ '<think>' }} x </think>") is THINK
    assert tags_of("auto", "{{ messages }}") is None
    assert tags_of("auto", None) is None
    assert tags_of("none", "</think>") is None
    assert tags_of("mistral", None) is FAMILIES["mistral"]
    assert starts_inside(THINK, "<|Assistant|><think>\n")
    assert not starts_inside(THINK, "<think>\n</think>\n")
