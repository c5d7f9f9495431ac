"""From the tools of a request to reasoning, content and calls of its answers."""

import dataclasses
import json
import random
from importlib import resources
from pathlib import Path

import pytest

from jaxinfer.sampling import SamplingParams
from jaxinfer.text import Tokenizer, read_tokenizer_files
from jaxinfer.text.reasoning import FAMILIES
from jaxinfer.tool_calls import TOOL_FORMS, AnswerFormat, Content, Reasoning, ToolCallDelta, collect

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time", "strict": True}}
PROMPT = [5, 6, 7]


def demo_files(**changes):
    return dataclasses.replace(read_tokenizer_files(resources.files("jaxinfer") / "data" / "demo"), **changes)


@pytest.fixture(scope="module")
def tokenizer():
    """The tags of Mistral's calls and of its reasoning are special tokens."""
    tags = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
    templates = {"default": "{{ messages[0].content }}[TOOL_CALLS][THINK][/THINK]{{ tools }}"}
    return Tokenizer(demo_files(extra_special_tokens=tags, chat_templates=templates))


def weather(city: str, days: int = 1) -> str:
    """Tells the weather.

    Args:
      city: its name.
    """
    return ""


def test_a_python_function_is_a_tool():
    offer = AnswerFormat(None, "hermes").offer([weather])
    (shown,) = offer.shown
    assert (shown["type"], shown["function"]["name"]) == ("function", "weather")
    assert shown["function"]["description"] == "Tells the weather."
    assert shown["function"]["parameters"]["required"] == ["city"]
    assert not offer.use.needs_grammar


def test_the_template_gets_the_tools_that_may_be_called():
    answers = AnswerFormat(None, "hermes")
    assert answers.offer(None) is answers.offer([WEATHER], "none") is None
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [WEATHER]}}
    assert answers.offer([WEATHER, TIME], allowed).shown == [WEATHER]
    named = {"type": "function", "function": {"name": "time"}}
    assert answers.offer([WEATHER, TIME], named).shown == [WEATHER, TIME]  # the grammar forbids the other
    formless = AnswerFormat(None, "none")
    assert not formless.offer([WEATHER]).is_read
    for choice, tools, is_parallel in (("required", [WEATHER], None), (None, [TIME], None), (None, [WEATHER], False)):
        assert answers.offer(tools, choice, is_parallel).structured().grammar
        with pytest.raises(ValueError, match="tool_parser can name it"):
            formless.offer(tools, choice, is_parallel)
    with pytest.raises(ValueError, match="did you mean 'hermes'"):
        AnswerFormat(None, "herms")


def test_special_tags_are_kept_until_the_answer_is_read(tokenizer):
    answers = AnswerFormat(tokenizer)
    assert (answers.form.name, answers.reasoning_name) == ("mistral", "mistral")
    offer = answers.offer([WEATHER])
    assert not answers.params(SamplingParams(), offer).skip_special_tokens
    text = '[THINK]a[/THINK]Yes.[TOOL_CALLS]weather[ARGS]{"city": "x"}<|endoftext|>'
    reasoning, read, calls = answers.read(text, PROMPT, 3, offer)
    assert (reasoning, read) == ("a", "Yes.")
    assert [(one.name, one.arguments) for one in calls] == [("weather", '{"city": "x"}')]
    assert answers.read(text, PROMPT, 3, offer)[2] == calls  # their ids too
    assert answers.read(text, PROMPT, 4, offer)[2] != calls
    assert answers.read(text, PROMPT, 3, offer, skip_special_tokens=False)[1].endswith("Yes.<|endoftext|>")
    assert answers.read(text[:20], PROMPT, 3) == ("a", "Yes.", [])
    grammar = answers.offer([WEATHER], "required").structured()
    assert f"<[{tokenizer.token_to_id('[TOOL_CALLS]')}]>" in grammar.grammar
    assert grammar.reasoning == "mistral"


def test_a_template_gets_the_fields_of_a_tool_that_it_cannot_do_without():
    bare = {"type": "function", "function": {"name": "time", "description": None}}
    for read, is_left in (("description + ''", False), ("name", True), ("parameters.properties | length", False)):
        template = f"{{{{ messages[0].content }}}}{{% for one in tools %}}{{{{ one.function.{read} }}}}{{% endfor %}}"
        tokenizer = Tokenizer(demo_files(chat_templates={"default": template}))
        (shown,) = AnswerFormat(tokenizer, "hermes").offer([bare]).shown
        tokenizer.render_chat([{"role": "user", "content": "a"}], tools=[shown])
        assert (shown == bare) == is_left


def test_structured_output_of_a_chat_begins_after_the_reasoning(tokenizer):
    params = SamplingParams(structured={"regex": "a"})
    assert AnswerFormat(tokenizer).params(params).structured.reasoning == "mistral"
    assert AnswerFormat(None).params(params) is params
    explicit = SamplingParams(structured={"regex": "a", "reasoning": "none"})
    assert AnswerFormat(tokenizer).params(explicit) is explicit
    with pytest.raises(ValueError, match="exclude each other"):
        AnswerFormat(tokenizer).params(params, AnswerFormat(tokenizer).offer([WEATHER]))


TEXTS = {
    "hermes": (
        FAMILIES["think"],
        '<think>\nNo <tool_call>{"name": "weather", "arguments": {"city": "no"}}</tool_call>\n</think>\n\nIt is'
        '<|endoftext|>\n<tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</tool_call>',
    ),
    "openai": (
        FAMILIES["gpt-oss"],
        "<|channel|>analysis<|message|>No<|end|><|start|>assistant<|channel|>final<|message|>It is<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "x"}<|call|>',
    ),
}


@pytest.mark.parametrize("form", TEXTS)
def test_every_split_of_a_stream_is_read_alike(form):
    family, text = TEXTS[form]
    offer = AnswerFormat(None, form, family).offer([WEATHER])

    def read(pieces):
        reader = offer.reader(PROMPT, 3, family, False, ("<|endoftext|>",))
        parts = [one for piece in pieces for one in reader.feed(piece, False)] + reader.feed("", True)
        reasoning = "".join(one.text for one in parts if isinstance(one, Reasoning))
        kinds = [type(one) for one in parts if not isinstance(one, Content)]
        assert kinds == sorted(kinds, key=[Reasoning, ToolCallDelta].index)
        content, calls = collect(one for one in parts if not isinstance(one, Reasoning))
        return reasoning, content, calls

    whole = read([text])
    assert whole[0].startswith("No")
    assert whole[1] == "It is"
    assert [json.loads(one.arguments) for one in whole[2]] == [{"city": "x"}]
    cuts = random.Random(7).sample(range(len(text)), 40)
    assert all(read([text[:cut], text[cut:]]) == whole for cut in cuts)
    assert read(list(text)) == whole


def test_every_form_is_in_the_documentation():
    page = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")
    assert [name for name in TOOL_FORMS if f"| `{name}` |" not in page] == []
