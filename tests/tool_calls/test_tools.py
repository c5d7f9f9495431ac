"""What a request says about tools, and what is refused."""

import contextlib

import pytest

from jaxinfer.tool_calls import Tool, check_tools, tool_form
from jaxinfer.tool_calls.lark import MAX_CHARS
from tests.timing import processor_seconds


def tool(name: str = "f", **function) -> dict:
    return {"type": "function", "function": {"name": name, **function}}


def test_tools_and_choices():
    tools = [tool("a", parameters={"type": "object"}, strict=True), tool("b", description="B", parameters=None)]
    use = check_tools(tools)
    assert (use.mode, use.is_parallel, [one.name for one in use.tools]) == ("auto", True, ["a", "b"])
    assert use.tools[0].is_strict
    assert use.needs_grammar  # one of them is strict
    assert not check_tools(tools[1:]).needs_grammar
    assert use.tools[1].parameters["additionalProperties"] is False
    assert check_tools(tools[:1]).needs_grammar
    assert check_tools(tools, parallel_tool_calls=False).needs_grammar
    assert check_tools(tools, "none").mode == check_tools(None).mode == check_tools([], "auto").mode == "none"
    use = check_tools(tools, "required")
    assert (use.mode, use.needs_grammar) == ("required", True)
    use = check_tools(tools, {"type": "function", "function": {"name": "b"}})
    assert (use.mode, use.is_parallel, [one.name for one in use.tools]) == ("required", False, ["b"])
    use = check_tools(tools, {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("a")]}})
    assert (use.mode, use.is_parallel, [one.name for one in use.tools]) == ("auto", True, ["a"])


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ("x", None, "tools must be a list"),
        ([1], None, r"tools\[0\] must be an object"),
        ([{"type": "web_search"}], None, r"tools\[0\]\.type"),
        ([{"type": "function"}], None, r"tools\[0\]\.function must"),
        ([tool("a b")], None, r"tools\[0\]\.function\.name"),
        ([tool("a"), tool("a")], None, r"tools\[1\]\.function\.name 'a' is the name of two"),
        ([tool(description=1)], None, r"function\.description must"),
        ([tool(description="x" * 40_000)], None, r"description has 40,000 characters; at most 32,768"),
        ([tool(strict="yes")], None, r"function\.strict"),
        ([tool(parameters=[])], None, r"function\.parameters must"),
        ([tool(parameters={"type": "string"})], None, r"function\.parameters must"),
        ([tool(parameters={"enum": [float("nan")]})], None, r"parameters\.enum\[0\] is nan"),
        ([tool(parameters={"enum": ["x" * 300_000]})], None, r"parameters has 300,\d+ characters"),
        ([tool(f"f{i}") for i in range(129)], None, "129 entries; at most 128"),
        (
            [tool(f"f{i}", parameters={"enum": ["x" * 200_000]}) for i in range(9)],
            None,
            r"to tools\[5\] have more than",
        ),
        ([tool()], "any", "tool_choice must be"),
        ([tool()], 1, "tool_choice must be"),
        ([], "required", "needs tools"),
        ([tool()], {"type": "function", "function": {"name": "g"}}, "'g' is not among the tools"),
        ([tool()], {"type": "function"}, "tool_choice must be"),
        ([tool()], {"type": "allowed_tools"}, "allowed_tools must have"),
        ([tool()], {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [1]}}, r"tools\[0\] must be"),
    ],
)
def test_wrong_tools_are_refused_with_their_place(tools, choice, message):
    with pytest.raises(ValueError, match=message):
        check_tools(tools, choice)


def test_wrong_parallel_tool_calls():
    with pytest.raises(ValueError, match="parallel_tool_calls must be"):
        check_tools([tool()], None, "no")  # type: ignore[arg-type]


def nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


MANY = {f"p{index}": {"$ref": "#/$defs/d"} for index in range(400)}
CIRCLE = {"d": {"anyOf": [{"$ref": "#/$defs/d"}] * 50}}
TREE = {"d": {"type": "object", "properties": {f"q{index}": {"$ref": "#/$defs/d"} for index in range(50)}}}
HOSTILE = {
    "deep": (nested(1_000), "nested more than 32 levels"),
    "enum": (
        {"type": "object", "properties": {"a": {"enum": [f"{n:x}" for n in range(100_000)]}}},
        "characters as JSON",
    ),
    "circle": ({"type": "object", "properties": MANY, "$defs": CIRCLE}, None),
    "tree": ({"type": "object", "properties": MANY, "$defs": TREE}, None),
    "large": ({"type": "object", "properties": MANY, "$defs": {"d": {"enum": ["x" * 200_000]}}}, None),
    "remote": ({"type": "object", "properties": {"a": {"$ref": "https://example.org/a"}}}, None),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_schemas_are_refused_or_written_in_a_second(name):
    schema, message = HOSTILE[name]
    if message is not None:
        with processor_seconds(less_than=1), pytest.raises(ValueError, match=message):
            check_tools([tool(parameters=schema)])
        return
    offered = check_tools([tool(parameters=schema)]).tools
    special = dict.fromkeys(tool_form("openai").special_texts, 1)
    for form in ("openai", "hermes", "qwen3_coder", "glm45", "gemma4", "pythonic"):
        with processor_seconds(less_than=1):
            with contextlib.suppress(ValueError):
                assert len(tool_form(form).grammar(offered, "required", True, special)) < MAX_CHARS
            tool_form(form).parse("<tool_call><function=f><parameter=p1>1</parameter></function>", offered)


@pytest.mark.parametrize(
    ("form", "schema", "message"),
    [
        ("qwen3_coder", {"anyOf": [{}]}, "'anyOf' cannot be enforced"),
        ("qwen3_coder", {"required": ["a"]}, "required 'a' is not among"),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "a|b"}}}, "f.a: the pattern 'a|b'"),
        ("glm45", {"properties": {"a": {"type": ["string", "object"]}}}, "f.a: a string or another value"),
        ("qwen3_coder", {"properties": {"a": {"enum": ["a", 1]}}}, "f.a: an enum"),
        ("pythonic", {"properties": {"a b": {}}}, "'a b' is no name"),
        ("pythonic", {"properties": {"a": {"$ref": "#"}}}, r"properties.a: \$ref '#'"),
        ("gemma4", {"properties": {"a": {"type": "string", "contentEncoding": "x"}}}, "f.a: 'contentEncoding'"),
        (
            "gemma4",
            {"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "integer"}]}}},
            "f.a: these alternatives",
        ),
        ("openai", {}, "special token <|start|>"),
    ],
)
def test_what_a_form_cannot_enforce_is_refused_with_its_place(form, schema, message):
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        tool_form(form).grammar([Tool("f", {"type": "object", **schema}, is_strict=True)], "required")


def test_what_cannot_be_enforced_is_free_unless_the_tool_is_strict():
    schema = {"anyOf": [{}], "properties": {"a": {"type": "string", "pattern": "a|b"}, "b": {"not": {}}}}
    for form in ("qwen3_coder", "glm45", "gemma4", "pythonic"):
        assert tool_form(form).grammar([Tool("f", schema)], "required")
        with pytest.raises(ValueError, match="cannot be enforced"):
            tool_form(form).grammar([Tool("f", schema, is_strict=True)], "required")


def test_a_grammar_needs_tools_and_a_mode():
    with pytest.raises(ValueError, match="at least one tool"):
        tool_form("hermes").grammar([], "required")
    with pytest.raises(ValueError, match="needs no grammar"):
        tool_form("hermes").grammar([Tool("f")], "none")
