"""Reasoning is told from content, wherever the stream is cut."""

import asyncio
import random

import pytest

from jaxinfer.server.app import make_app
from jaxinfer.text.reasoning import (
    FAMILIES,
    Remover,
    Tags,
    family_of,
    hidden_tokens,
    make_splitter,
    split,
    starts_inside,
)
from tests.server.asgi import Client

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
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>", ("ab", "")),
    ("<|channel|>commentary to=f <|message|>{}<|call|>", ("", "{}")),
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


def test_tags_that_are_special_tokens(engine, make_service):
    """The text has special tokens then, to tell the reasoning; the client sees none of them."""
    tokenizer = engine.llm.tokenizer
    one, other = (tokenizer.decode([token], skip_special_tokens=False) for token in sorted(tokenizer.special_ids)[:2])
    family = Tags(one, other)
    hidden = hidden_tokens(family, tokenizer)
    assert hidden is not None
    assert not {one, other} & set(hidden)
    assert hidden_tokens(THINK, tokenizer) is None
    service = make_service()
    service.tags, service.hidden = family, hidden
    client = Client(make_app(service))
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 6, "seed": 1, "ignore_eos": True}
    body["logit_bias"] = {str(sorted(tokenizer.special_ids)[0]): 100}  # only opening tags

    async def ask():
        whole = await client.post("/v1/chat/completions", body)
        events = await client.stream("/v1/chat/completions", body)
        return whole.json["choices"][0]["message"], events

    message, events = asyncio.run(ask())
    assert message["content"] == ""
    assert message["reasoning_content"] == one * 5  # the first one is the tag
    deltas = [choice["delta"] for event in events for choice in (event.data or {}).get("choices", ())]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == one * 5
