"""Calls that are demanded, token by token under the masks that a model gets, where a form's tags are special tokens."""

import dataclasses
import json
import random
from importlib import resources

import jsonschema
import numpy as np
import pytest

from jaxinfer.grammar.compiler import make_compiler
from jaxinfer.text import Tokenizer, read_tokenizer_files
from jaxinfer.tool_calls import TOOL_FORMS, AnswerFormat, tool_form

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "to": {"enum": ["Rome", "größe", 'a "b"']},
        "days": {"type": "integer", "maximum": 99, "minimum": 1},
        "json": {"type": "boolean"},
        "from": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["to", "json"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]


def tokenizer_of(tags: tuple[str, ...]) -> Tokenizer:
    files = read_tokenizer_files(resources.files("jaxinfer") / "data" / "demo")
    return Tokenizer(dataclasses.replace(files, extra_special_tokens=tags))


def forced_answer(tokenizer: Tokenizer, form: str, choice: object, seed: int) -> str:
    """A random answer under the masks, which may never allow nothing, in which the tokens are accepted."""
    offer = AnswerFormat(tokenizer, form, None).offer(TOOLS, choice)
    assert offer is not None
    structured = offer.structured()
    assert structured is not None
    ends = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    compiler = make_compiler(tokenizer, tokenizer.vocab_size, ends)
    matcher, numbers = compiler.compile(structured).start(), random.Random(seed)
    vocabulary = compiler.library.vocabulary
    masks = np.zeros((1, vocabulary.num_words), np.uint32)
    ids: list[int] = []
    while len(ids) < 3_000:
        compiler.library.fill([matcher], masks)
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist()
        assert allowed, (matcher.error, tokenizer.decode(ids, skip_special_tokens=False), matcher.forced)
        ending = [one for one in allowed if one in tokenizer.special_ids]
        assert not any(b"\xff" in (vocabulary.tokens[one] or b"") for one in allowed)  # no text has this byte
        ids.append(numbers.choice(ending if ending and numbers.random() < 0.5 else allowed))
        assert matcher.accept(ids[-1:]) == 1
        if ids[-1] in vocabulary.eos_token_ids:
            return tokenizer.decode(ids[:-1], skip_special_tokens=False)
    raise AssertionError(tokenizer.decode(ids, skip_special_tokens=False))


def check_forced(tokenizer: Tokenizer, name: str, seeds: range) -> None:
    only = {"type": "function", "function": {"name": "get_weather"}}
    for seed in seeds:
        text = forced_answer(tokenizer, name, only if seed % 2 else "required", seed)
        offer = AnswerFormat(tokenizer, name, None).offer(TOOLS, "required")
        assert offer is not None
        calls = tool_form(name).parse(text, offer.use.tools)[1]
        assert calls, text
        assert {call.name for call in calls} <= ({"get_weather"} if seed % 2 else {"get_weather", "now"})
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMA if call.name == "get_weather" else {})


@pytest.mark.matrix
@pytest.mark.parametrize("name", sorted(TOOL_FORMS))
def test_a_demanded_call_is_made_where_tags_are_special_tokens(name):
    check_forced(tokenizer_of(tool_form(name).special_texts), name, range(3))
