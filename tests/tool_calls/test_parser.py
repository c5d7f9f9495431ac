"""What is a call and what is content; ids; hostile texts."""

import json
import math

import pytest

from jaxinfer.tool_calls import TOOL_FORMS, Content, Tool, ToolCallDelta, collect, form_of, tool_form
from tests.timing import processor_seconds

NAMES = sorted(TOOL_FORMS)


def some(names: list[str]) -> pytest.MarkDecorator:
    """Tests one family of each kind of form, and with --slow all."""
    quick = {"hermes", "openai", "kimi_k2", "qwen3_coder", "pythonic", "gemma4"}
    marked = [one if one in quick else pytest.param(one, marks=pytest.mark.slow) for one in names]
    return pytest.mark.parametrize("name", marked)


WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": ["integer", "null"]},
            "on": {"type": "boolean"},
            "any": {},
            "list": {"$ref": "#/$defs/list"},
            "mixed": {"anyOf": [{"type": "string"}, {"type": "number"}]},
            "fixed": {"type": ["string", "null"], "enum": ["None", "a"]},
        },
        "$defs": {"list": {"type": "array"}},
    },
)
TOOLS = [WEATHER, Tool("now")]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def pieces(name: str, text: str, size: int) -> list[Content | ToolCallDelta]:
    parser = tool_form(name).parser(TOOLS, "seed")
    found = [one for at in range(0, len(text), size) for one in parser.feed(text[at : at + size], False)]
    return found + parser.feed("", True)


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        (f"First.\n\n{CALL}", "First.", 1),
        (f"{CALL}\nDone.", "Done.", 1),
        (f"First.\n\n{CALL}\nDone. ", "First.\n\nDone. ", 1),
        (f"First.{CALL} Done.", "First. Done.", 1),
        (f"{CALL}\n\n{CALL}\n", "", 2),
        (f"<tool_call><tool_call>{CALL}", "<tool_call><tool_call>", 1),
        ("  Hello \n", "  Hello \n", 0),
        (" \n ", " \n ", 0),
        (CALL.replace("get_weather", "rm"), CALL.replace("get_weather", "rm"), 0),
        (CALL[:-20], CALL[:-20], 0),  # within the arguments
        (CALL[:-3], "</tool_ca", 1),  # the call is complete
        (CALL.replace("}}", "}}}"), "", 1),
        (CALL.replace("}}\n", "}} }\n}"), "", 1),
        (CALL.replace("}}", "}}]"), "]\n</tool_call>", 1),
        (CALL.replace("}}", "},}"), CALL.replace("}}", "},}"), 0),
        (CALL.replace('{"city"', "{city"), CALL.replace('{"city"', "{city"), 0),
        ("a <tool_cal b", "a <tool_cal b", 0),
        ("a <tool_call", "a <tool_call", 0),
        ('<tool_call>{"name": "now"}</tool_call>', '<tool_call>{"name": "now"}</tool_call>', 0),
        ('<tool_call>[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]</tool_call>', "", 2),
    ],
)
def test_only_complete_calls_of_known_tools_are_calls(text, content, num_calls):
    for size in (1, 7, len(text)):
        found, calls = collect(pieces("hermes", text, size))
        assert (found, len(calls)) == (content, num_calls)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_lost_of_texts_without_calls(name):
    form = tool_form(name)
    for opening in (*form.openings, *form.line_openings):
        for text in (
            opening,
            f"a {opening} b\n {opening}\n{opening * 3}",
            f"{opening}get_weather",
            f'{opening}{{"name": ',
        ):
            for size in (1, 5, len(text)):
                assert collect(pieces(name, text, size)) == (text, [])


def test_arguments_are_passed_on_as_the_model_wrote_them():
    text = '<tool_call>{"arguments": {"days": 1.50e1, "city": "a\nb\\u00e9", "city": 1}, "name": "get_weather"}'
    (call,) = tool_form("hermes").parse(text, TOOLS)[1]
    assert call.arguments == '{"days": 1.50e1, "city": "a\\nb\\u00e9", "city": 1}'
    text = json.dumps({"name": "get_weather", "arguments": json.dumps({"city": "é"})})
    (call,) = tool_form("hermes").parse(f"<tool_call>{text}", TOOLS)[1]
    assert json.loads(call.arguments) == {"city": "é"}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "5", "5"),
        ("city", "None", "None"),
        ("days", "5", 5),
        ("days", "None", None),
        ("days", "5.5", "5.5"),
        ("on", "True", True),
        ("on", " false ", False),
        ("on", "yes", "yes"),
        ("any", "[1]", [1]),
        ("any", "plain", "plain"),
        ("list", "['a', (1, None)]", ["a", [1, None]]),
        ("list", '["</parameter>"]', ["</parameter>"]),
        ("list", "[1, f(2)]", "[1, f(2)]"),
        ("list", '["a\nb"]', ["a\nb"]),
        ("fixed", "None", "None"),
        ("mixed", "1e3", 1000.0),
        ("mixed", "007", "007"),
        ("unknown", "7", 7),
    ],
)
def test_plain_text_gets_the_type_of_the_schema(key, text, value):
    text = f"<function=get_weather>\n<parameter={key}>\n{text}\n</parameter>\n</function>"
    (call,) = tool_form("qwen3_coder").parse(text, TOOLS)[1]
    assert json.loads(call.arguments) == {key: value}


def test_json_without_a_tag_streams_unless_it_is_a_call():
    parser = tool_form("llama3_json").parser(TOOLS)
    assert parser.feed('{"answer": ', False) == [Content('{"answer":')]
    assert parser.feed('"now", "name": "now"}', True) == [Content(' "now", "name": "now"}')]
    text = '{"name": "now", "parameters": {}}'
    assert [call.name for call in tool_form("llama3_json").parse(f"{text}\n{text}; {text}", TOOLS)[1]] == ["now"] * 3
    text = f"See:\n  {text} is a call, x {text} is none"
    content, calls = tool_form("llama3_json").parse(text, TOOLS)
    assert (content, len(calls)) == ('See:\nis a call, x {"name": "now", "parameters": {}} is none', 1)


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        ("city='Rome', days=-1", {"city": "Rome", "days": -1}),
        ("city = 'a' \"b\" ,list=[1, (2.5e-1,), {'k': None}],", {"city": "ab", "list": [1, [0.25], {"k": None}]}),
        ("on=true, any=null", {"on": True, "any": None}),
        ("city='a\\'b\\n\\d\nc'", {"city": "a'b\n\\d\nc"}),
        ("from=1, None='a', True=[], lambda={}", {"from": 1, "None": "a", "True": [], "lambda": {}}),
        ("größe=1_000, any=(1), list=(1,), on=-2.", {"größe": 1000, "any": 1, "list": [1], "on": -2.0}),
        ('city="a\\/b\\ud83d\\ude00", any="\\ud83d"', {"city": "a/b😀", "any": "\ud83d"}),
        ("", {}),
        *(
            (code, None)
            for code in (
                "'Rome'",
                "city=x",
                "city=f'x'",
                "city=b'x'",
                "any={1: 2}",
                "any={1}",
                "**{'a': 1}",
                "on=1 any=1",
            )
        ),
        *((f"any=1{chain * 50_000}", None) for chain in ("+1", " -1", ".a", "()", "[0]", " if 1 else 1")),
        *((f"any={chain * 50_000}1", None) for chain in ("-", "not ", "lambda:", "1,")),
        ("any=1e999", {"any": math.inf}),  # a JSON number, as the grammar allows it
    ],
)
def test_python_literals_are_written_as_json(code, arguments):
    text = f"[get_weather({code})]"
    content, calls = tool_form("pythonic").parse(text, TOOLS)
    assert (content, [json.loads(call.arguments) for call in calls]) == (
        (text, []) if arguments is None else ("", [arguments])
    )


def test_ids_are_those_of_the_form_and_depend_on_the_seed():
    first, second = tool_form("hermes").parse(CALL + CALL, TOOLS, "a")[1]
    assert first.id.startswith("call_")
    assert len(first.id) == 29
    assert first.id != second.id
    assert tool_form("hermes").parse(CALL, TOOLS, "a")[1][0].id == first.id
    assert tool_form("hermes").parse(CALL, TOOLS, "b")[1][0].id != first.id
    (call,) = tool_form("mistral").parse("[TOOL_CALLS]now[ARGS]{}", TOOLS, "a")[1]
    assert len(call.id) == 9
    assert call.id.isalnum()
    (call,) = tool_form("mistral").parse("[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}", TOOLS, "a")[1]
    assert call.id == "abc123def"
    one = "<|tool_call_begin|>functions.now:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    calls = tool_form("kimi_k2").parse(one.format(1) + one.format(1) + one.format(0), TOOLS)[1]
    assert [call.id for call in calls] == ["functions.now:1", "functions.now:2", "functions.now:0"]


def test_the_first_delta_of_a_call_names_it_and_the_others_have_its_arguments():
    found = pieces("hermes", f"Text {CALL}{CALL}", 3)
    deltas = [one for one in found if isinstance(one, ToolCallDelta)]
    assert [delta.index for delta in deltas] == [0, 0, 1, 1]
    assert (
        [delta.id is not None for delta in deltas] == [delta.name is not None for delta in deltas] == [True, False] * 2
    )
    assert [delta.arguments for delta in deltas] == ["", '{"city": "Rome"}'] * 2


def test_other_headers_of_harmony_are_left_for_the_reasoning():
    form = tool_form("openai")
    before = "<|channel|>analysis<|message|>I see.<|end|>"
    after = "<|start|>assistant<|channel|>final<|message|>Hi"
    call = "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
    assert form.is_before_reasoning
    assert form.parse(before + after, TOOLS) == (before + after, [])
    content, calls = form.parse(before + call + after, TOOLS)
    assert (content, [call.name for call in calls]) == (before + after, ["now"])
    browser = call.replace("functions.now", "browser.open")
    assert form.parse(browser, TOOLS) == (browser, [])


def check_time(name: str, num_chars: int, limit: float) -> None:
    form = tool_form(name)
    heads = [*form.openings, *(f"\n{char}" for char in form.line_openings)]
    for unit in [*heads, f'{heads[0]}{{"name": "now", "arguments": {{"x": "', f"{heads[0]}now{{" + "[" * 200]:
        text = (unit * (num_chars // len(unit) + 1))[:num_chars]
        with processor_seconds(less_than=limit):
            assert collect(pieces(name, text, 3)) == (text, [])
            assert collect(pieces(name, text, len(text))) == (text, [])


@some(NAMES)
def test_hostile_texts_take_linear_time(name):
    check_time(name, 4_000, 1)  # 0.03 s


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_long_hostile_texts_take_linear_time(name):
    check_time(name, 60_000, 8)  # 0.5 s; quadratic time would be many minutes


@some(NAMES)
def test_deep_nesting_is_no_call(name):
    depth = 100_000
    for text in (f"{{{chr(34)}a{chr(34)}:" * depth, "[" * depth + "]" * depth):
        for opening in (*tool_form(name).openings, ""):
            whole = f'{opening}{{"name": "now", "arguments": {text}'
            assert collect(pieces(name, whole, len(whole))) == (whole, [])
    value = f"<function=get_weather>\n<parameter=list>\n{'[' * depth}\n</parameter>\n</function>"
    assert tool_form("qwen3_coder").parse(value, TOOLS)[1]


TEMPLATES = {
    "hermes": "return a json object within <tool_call></tool_call> XML tags",
    "qwen3_coder": "<tool_call>\\n<function=example>\\n<parameter=p>",
    "seed_oss": "<seed:tool_call>\\n<function=example>\\n<parameter=p>",
    "mistral": "{{- '[TOOL_CALLS]' }}",
    "llama3_json": '{"name": function name, "parameters": dictionary of argument name and its value}',
    "llama4_pythonic": "{{- '<|python_start|>' }}",
    "deepseek_v31": "'<｜tool▁calls▁begin｜>' + tool['function']['name']",
    "deepseek_v3": "'<｜tool▁calls▁begin｜>' + '```json'",
    "glm45": "<tool_call>{function-name}\n<arg_key>",
    "glm47": "<tool_call>{function-name}<arg_key>",
    "openai": "<|channel|>commentary<|call|>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "gemma4": "<|tool_call>call:",
    "functiongemma": "<start_function_call>call:",
    "granite": "respond only with <|tool_call|> followed by a JSON list",
    "pythonic": "[func_name1(params_name1=params_value1)]",
    "lfm2": "List of tools: <|tool_list_start|>[",
    "deepseek_v32": "'<｜DSML｜function_calls>'",
    "deepseek_v4": "{% set dsml = '｜DSML｜' %}'<' + dsml + 'tool_calls>'",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_form_is_found_by_its_template(name):
    form = form_of(TEMPLATES[name])
    assert form is tool_form(name)


def test_unknown_forms():
    assert form_of("{{ message.content }}") is None
    with pytest.raises(ValueError, match="did you mean 'hermes'"):
        tool_form("hermse")
