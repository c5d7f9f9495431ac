"""Chats get the form that a template reads; it is found by trying the template."""

import json

import pytest

from jaxinfer.text import ChatTemplate
from tests.text.conftest import TEMPLATES

START = "{% for m in messages %}[{{ m.role }}]"
END = "{% endfor %}"
EACH = "{% for c in m.tool_calls %}"
# Templates that read a history in the ways of published ones: what they print of a call with content null.
READERS = {
    # Objects, as JSON; content may be missing (Llama 3.1).
    "object": (
        START + "{% if 'tool_calls' in m %}" + EACH + "{{ c.function.name }}{{ c.function.arguments | tojson }}"
        "{% endfor %}{% else %}{{ m.content }}{% endif %}" + END,
        'weather{"city": "Lima"}',
    ),
    # Objects, one argument after another; content is looked into (Qwen3, Qwen3.5).
    "items": (
        START + "{{ m.content.split('|')[-1] }}{% if m.tool_calls %}" + EACH + "<{{ c.function.name }}>"
        "{% for name, value in c.function.arguments | items %}{{ name }}={{ value }}{% endfor %}{% endfor %}{% endif %}"
        + END,
        "<weather>city=Lima",
    ),
    # Text, added to a string; a call is a message whose content is none (DeepSeek-V3).
    "text, null": (
        START + "{% if m.role == 'assistant' and m['content'] is none %}" + EACH + "{{ c['type'] + ':' + "
        "c['function']['name'] + c['function']['arguments'] }}{% endfor %}{% else %}{{ '' + m['content'] }}{% endif %}"
        + END,
        'function:weather{"city":"Lima"}',
    ),
    # Text, added to a string, beside content that is text (DeepSeek-R1).
    "text": (
        START + "{% if m.role == 'assistant' and 'tool_calls' in m %}" + EACH + "{{ m['content'] + "
        "c['function']['name'] + c['function']['arguments'] }}{% endfor %}{% else %}{{ '' + m['content'] }}{% endif %}"
        + END,
        'weather{"city":"Lima"}',
    ),
    # Whole calls as JSON, and content as it is (null would be printed).
    "whole": (
        START
        + "{{ m.content }}{% if m.tool_calls %}"
        + "{{ m.tool_calls | map(attribute='function') | list | tojson }}{% endif %}"
        + END,
        '[{"name": "weather", "arguments": {"city": "Lima"}}]',
    ),
}
GIVEN = '{"city":"Lima"}'


def call(arguments, name="weather", number=1, **more):
    return {"id": f"call_{number}", "function": {"name": name, "arguments": arguments}, **more}


def history(arguments, **content):
    turn = {"role": "assistant", "tool_calls": [call(arguments)], **content}
    return [{"role": "user", "content": "Q"}, turn, {"role": "tool", "tool_call_id": "call_1", "content": "R"}]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}], ids=repr)
@pytest.mark.parametrize("name", READERS)
def test_a_call_is_printed_whatever_its_form(name, content):
    source, expected = READERS[name]
    template = ChatTemplate(source)
    assert template.render(history(GIVEN, **content)).text == f"[user]Q[assistant]{expected}[tool]R"
    spaced = expected.replace('":"', '": "')  # text is made of an object as JSON usually is
    assert template.render(history(json.loads(GIVEN), **content)).text == f"[user]Q[assistant]{spaced}[tool]R"


@pytest.mark.parametrize("arguments", ["", " \n", None, {}, "{}"], ids=repr)
@pytest.mark.parametrize("name", [name for name in READERS if name != "items"])
def test_no_arguments_are_an_empty_object(name, arguments):
    expected = READERS[name][1].replace(GIVEN, "{}").replace('{"city": "Lima"}', "{}")
    assert ChatTemplate(READERS[name][0]).render(history(arguments)).text == f"[user]Q[assistant]{expected}[tool]R"


def test_arguments_that_are_no_object_stay_text():
    template = ChatTemplate(READERS["object"][0])
    assert template.render(history('{"city": "Li')).text == '[user]Q[assistant]weather"{\\"city\\": \\"Li"[tool]R'
    with pytest.raises(ValueError, match=r"arguments of the call of weather\.x is nan"):
        template.render(history('{"x": NaN}'))


def test_content_beside_calls():
    for name, before in (("items", "Look."), ("text", "Look."), ("whole", "Look."), ("text, null", "Look.[assistant]")):
        source, expected = READERS[name]
        text = ChatTemplate(source).render(history(GIVEN, content="Look.")).text
        assert text == f"[user]Q[assistant]{before}{expected}[tool]R"


def test_calls_that_a_template_does_not_print_are_written_in_the_content():
    template = ChatTemplate(START + "{{ m.content }}" + END)
    assert not template.form.shows_tools
    written = '{"name": "weather", "arguments": {"city": "Lima"}}'
    assert template.render(history(GIVEN)).text == f"[user]Q[assistant]{written}[tool]R"
    assert template.render(history(GIVEN, content="Look.")).text == f"[user]Q[assistant]Look.\n{written}[tool]R"


def test_a_template_of_one_call_a_message_gets_them_one_by_one():
    source = (
        START + "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %}" + END
    )
    template = ChatTemplate(
        source.replace("function.name }}", "function.name }}{{ m.tool_calls[0].function.arguments | tojson }}")
    )
    calls = [call("{}", name, number) for number, name in enumerate("ab")]
    turn = {"role": "assistant", "content": None, "tool_calls": calls}
    result = {"role": "tool", "content": "0"}
    for results in (
        [{**result, "tool_call_id": "call_1", "content": "1"}, {**result, "tool_call_id": "call_0"}],
        [result, {**result, "content": "1"}],
    ):
        text = template.render(
            [{"role": "user", "content": "Q"}, turn, *results, {"role": "user", "content": "T"}]
        ).text
        assert text == "[user]Q[assistant]a{}[tool]0[assistant]b{}[tool]1[user]T"


def test_content_joins_reasoning_where_a_template_takes_one_of_them():
    """As of gpt-oss: a call with both is refused."""
    source = (
        START + "{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}"
        "({{ m.thinking or m.content }})"
        + EACH
        + "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}" + END
    )
    template, call_text = ChatTemplate(source), 'weather{"city": "Lima"}'
    for fields, expected in (
        ({"content": "Look."}, "(Look.)"),
        ({"reasoning_content": "why"}, "(why)"),
        ({"reasoning_content": "why", "content": "Look."}, "(why\nLook.)"),
    ):
        assert template.render(history(GIVEN, **fields)).text == f"[user]Q[assistant]{expected}{call_text}[tool]R"


def test_an_empty_list_of_calls_is_no_calls():
    source = START + "{% if 'tool_calls' in m %}CALLS{% else %}{{ m.content }}{% endif %}" + END
    chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "ANSWER", "tool_calls": []}]
    assert ChatTemplate(source).render(chat).text == "[user]Q[assistant]ANSWER"


SYSTEMS = [
    {"role": "system", "content": "A"},
    {"role": "developer", "content": [{"type": "text", "text": "B"}, {"type": "text", "text": "C"}]},
    {"role": "user", "content": "Q"},
    {"role": "developer", "content": "D"},
]
KEEPS = START + "{{ m.content }}" + END
REFUSES = (
    "{% for m in messages %}{% if m.role == 'system' and loop.index0 == 1 %}"
    "{{ raise_exception('not first') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
DROPS = (
    "{% for m in messages %}{% if loop.first or m.role != 'system' %}"
    "[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (KEEPS, "[system]A[system]B\nC[user]Q[system]D"),
        (REFUSES, "[system]A\n\nB\nC[user]Q[system]D"),
        (DROPS, "[system]A\n\nB\nC[user]Q"),
    ],
    ids=["keeps", "refuses", "drops"],
)
def test_system_and_developer_messages(source, expected):
    template = ChatTemplate(source)
    assert template.render(SYSTEMS).text == expected
    assert template.render([SYSTEMS[1], SYSTEMS[2]]).text == "[system]B\nC[user]Q"


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_templates_show(name):
    """The form that is found by trying a template is what it prints of another chat."""
    template = ChatTemplate(TEMPLATES[name], special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"})
    tools = [
        {"type": "function", "function": {"name": "forecast", "description": "d", "parameters": {"type": "object"}}}
    ]
    shown = "forecast" in template.render([{"role": "user", "content": "Q"}], tools=tools).text
    assert template.form.shows_tools == shown


def test_a_template_that_fails_on_everything_is_left_to_fail():
    template = ChatTemplate("{{ raise_exception('no') }}")
    assert template.form.shows_tools
    assert template.form.shows_calls
