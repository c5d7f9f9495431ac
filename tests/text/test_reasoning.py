"""Reasoning is told from content, wherever the stream is cut."""

import random

import pytest

from jaxinfer.text.reasoning import (
    FAMILIES,
    Remover,
    family_of,
    make_splitter,
    split,
    starts_inside,
)

CHANNELS, THINK = FAMILIES["gpt-oss"], FAMILIES["think"]
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
CHANNEL_CASES = [
    ("<|channel|>analysis<|message|>a b<|end|><|start|>assistant<|channel|>final<|message|>c d", ("a b", "c d")),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>", ("a\nb", "")),
    ("<|channel|>commentary to=f <|message|>{}<|call|>", ("{}", "")),
    (" to=f<|channel|>commentary<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>a", ("{}", "a")),
    ("to=5 is it", ("", "to=5 is it")),
    (" to", ("", " to")),
    (
        "<|channel|>commentary<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
        ("", "a\nb"),
    ),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>", ("a", "")),
    ("<|channel|>final<|message|>a <| b<|return|>", ("", "a <| b")),
    ("<|channel|>analysis<|message|>never ends <|en", ("never ends <|en", "")),
    ("<|channel|>final", ("", "")),
    ("no channels", ("", "no channels")),
    ("<|chan", ("", "<|chan")),
    ("", ("", "")),
]
FAMILY_CASES = [
    *((THINK, *case) for case in CASES),
    *((CHANNELS, text, False, expected) for text, expected in CHANNEL_CASES),
]


@pytest.mark.parametrize(("family", "text", "is_inside", "expected"), FAMILY_CASES)
def test_what_is_told_apart(family, text, is_inside, expected):
    assert split(text, family, is_inside) == expected


@pytest.mark.parametrize(("family", "text", "is_inside", "expected"), FAMILY_CASES)
def test_the_result_does_not_depend_on_the_cuts(family, text, is_inside, expected):
    generator = random.Random(1)
    by_length: dict[int, tuple[str, str]] = {}
    for _ in range(50):
        splitter, found, at = make_splitter(family, is_inside), {"reasoning": "", "content": ""}, 0
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
    assert family_of("auto", "{{ '<think>' }} x </think>") is THINK
    assert family_of("auto", "{{ messages }}") is None
    assert family_of("auto", None) is None
    assert family_of("none", "</think>") is None
    assert family_of("auto", "{{ '<|channel|>analysis<|message|>' }}") is CHANNELS
    assert family_of("mistral", None) is FAMILIES["mistral"]
    assert starts_inside(THINK, "<|Assistant|><think>\n")
    assert not starts_inside(THINK, "<think>\n</think>\n")


def test_special_tokens_are_removed_wherever_the_stream_is_cut():
    text, generator = "a<eos>b <e<eos>c<pad", random.Random(2)
    for _ in range(30):
        remover, found, at = Remover(["<eos>", "<pad>"]), "", 0
        while at < len(text):
            step = generator.randint(1, 3)
            found, at = found + remover.feed(text[at : at + step]), at + step
        assert found + remover.finish() == "ab <ec<pad"


GEMMA = FAMILIES["gemma4"]


@pytest.mark.parametrize(
    ("text", "is_inside", "expected"),
    [
        ("<|channel>thought\na b\n<channel|>c", False, ("a b", "c")),
        ("<|channel>thought\n<channel|>c", False, ("", "c")),
        ("<|channel>a<channel|>c", False, ("a", "c")),
        ("thoughts<channel|>c", True, ("thoughts", "c")),
        ("<|channel>though", False, ("though", "")),
        ("c", False, ("", "c")),
    ],
)
def test_a_word_behind_the_tag_is_no_reasoning(text, is_inside, expected):
    assert split(text, GEMMA, is_inside) == expected
    splitter, found = make_splitter(GEMMA, is_inside), {"reasoning": "", "content": ""}
    for kind, piece in [*(one for char in text for one in splitter.feed(char)), *splitter.finish()]:
        found[kind] += piece
    assert (found["reasoning"], found["content"]) == expected


def test_the_family_of_gemma_4_is_found_and_begins_by_its_prompt():
    assert family_of("auto", "{{- '<|channel>thought\\n' + thinking_text + '\\n<channel|>' -}}") is GEMMA
    assert starts_inside(GEMMA, "<|turn>model\n<|channel>thought\n")
    assert not starts_inside(GEMMA, "<|turn>model\n<|channel>thought\n<channel|>")
