"""JSON schemas of Python types, judged by what the libraries themselves accept, and tools from functions."""

import dataclasses
import datetime
import enum
from typing import Annotated, Any, Literal, NewType, NotRequired, TypedDict

import jsonschema
import msgspec
import pytest

from jaxinfer.grammar.python_types import schema_of
from jaxinfer.grammar.schema import check_schema
from jaxinfer.grammar.schema_language import language_of


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(msgspec.Struct):
    x: Annotated[int, msgspec.Meta(ge=0)]
    label: str = ""


class Movie(TypedDict):
    title: str
    year: NotRequired[int]


@dataclasses.dataclass
class Tree:
    """A tree."""

    point: Point
    movie: Movie
    colours: list[Colour] = dataclasses.field(default_factory=list)
    child: "Tree | None" = None


def weather(
    city: str, days: Annotated[int, "how many"] = 3, *, unit: Literal["C", "F"] = "C", where: Point | None = None
):
    """The weather of a city.

    In detail.

    Args:
      city (str): its name,
        with the country
      days: not used, as the type has a description

    Returns:
      words: many
    """


UserId = NewType("UserId", int)


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (int, [1], ["1", None]),
        (UserId, [1], ["1"]),
        (str | None, ["a", None], [1]),
        (Literal["a", 1, None], ["a", 1, None], [True, "b"]),
        (Colour, ["red"], ["green"]),
        (list[Colour], [["red", "blue"], []], [["green"]]),
        (tuple[int, str], [[1, "a"]], [[1], [1, "a", 2]]),
        (tuple[int, ...], [[], [1, 2]], [["a"]]),
        (dict[str, int], [{"a": 1}], [{"a": "b"}]),
        (datetime.date, ["2024-01-01"], [1]),
        (Point, [{"x": 1}, {"x": 0, "label": "a"}], [{"x": -1}, {"x": 1, "y": 2}, {}]),
        (Movie, [{"title": "a"}, {"title": "a", "year": 1}], [{"year": 1}, {"title": "a", "more": 1}]),
        (
            Tree,
            [{"point": {"x": 1}, "movie": {"title": "a"}, "child": {"point": {"x": 1}, "movie": {"title": "b"}}}],
            [{"point": {"x": -1}, "movie": {"title": "a"}}, {"point": {"x": 1}, "movie": {"title": "a"}, "child": {}}],
        ),
        (
            weather,
            [{"city": "a"}, {"city": "a", "where": {"x": 1}}],
            [{}, {"city": "a", "unit": "K"}, {"city": "a", "b": 1}],
        ),
    ],
)
def test_schemas_say_what_the_type_says(kind, right, wrong):
    schema = schema_of(kind)
    schema = schema["parameters"] if kind is weather else schema
    check_schema(schema)
    jsonschema.Draft202012Validator.check_schema(schema)
    judge = jsonschema.Draft202012Validator(schema)
    assert [value for value in right if not judge.is_valid(value)] == []
    assert [value for value in wrong if judge.is_valid(value)] == []


def test_models_of_pydantic_are_closed_and_may_be_told_apart():
    pydantic = pytest.importorskip("pydantic", reason="pydantic is not installed")

    class Cat(pydantic.BaseModel):
        kind: Literal["cat"]
        lives: int = pydantic.Field(ge=1, le=9)

    class Dog(pydantic.BaseModel):
        kind: Literal["dog"]
        name: str

    class Owner(pydantic.BaseModel):
        pet: Cat | Dog = pydantic.Field(discriminator="kind")
        others: list[Cat] = pydantic.Field(default_factory=list)

    class Open(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="allow")
        a: int

    schema = schema_of(Owner)
    judge = jsonschema.Draft202012Validator(schema)
    assert judge.is_valid({"pet": {"kind": "cat", "lives": 3}})
    assert not judge.is_valid({"pet": {"kind": "cat", "lives": 3, "name": "a"}})
    assert not judge.is_valid({"pet": {"kind": "dog", "lives": 3}})
    assert not judge.is_valid({"pet": {"kind": "cat", "lives": 10}})
    assert language_of(check_schema(schema)) is not None  # a oneOf behind references
    assert schema_of(Open)["additionalProperties"] is True


def test_a_function_becomes_a_tool():
    tool = schema_of(weather)
    assert list(tool) == ["name", "description", "parameters"]
    assert tool["name"] == "weather"
    assert tool["description"] == "The weather of a city.\n\nIn detail."
    properties = tool["parameters"]["properties"]
    assert properties["city"] == {"type": "string", "description": "its name, with the country"}
    assert properties["days"] == {"type": "integer", "description": "how many", "default": 3}
    assert tool["parameters"]["required"] == ["city"]


def test_docstrings_of_sphinx_are_read():
    def function(a: int, b: str):
        """What it does.

        :param a: the first,
            in detail
        :param str b: the second
        :returns: nothing
        """

    tool = schema_of(function)
    assert tool["description"] == "What it does."
    descriptions = {name: schema["description"] for name, schema in tool["parameters"]["properties"].items()}
    assert descriptions == {"a": "the first, in detail", "b": "the second"}


def test_errors_name_the_parameter_or_field():
    def untyped(a: int, b):
        pass

    def variadic(*rest: int):
        pass

    def positional(a: int, /):
        pass

    def unknown(a: "Missing"):  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
        pass

    @dataclasses.dataclass
    class Holder:
        handle: complex

    def holds(holder: Holder):
        pass

    for kind, message in [
        (untyped, r"parameter 'b' of untyped\(\) has no type"),
        (variadic, r"parameter 'rest' of variadic\(\): variadic positional"),
        (positional, r"parameter 'a' of positional\(\): positional-only"),
        (unknown, "unknown: name 'Missing' is not defined"),
        (holds, r"Holder\.handle: builtins\.complex has no JSON schema"),
        (dict[int, str], "names of a JSON object are text, not <class 'int'>"),
        (lambda a: a, r"parameter 'a' of <lambda>\(\)"),
    ]:
        with pytest.raises(TypeError, match=message):
            schema_of(kind)


def test_any_has_an_empty_schema():
    assert schema_of(Any) == {}
    assert schema_of(list) == {"type": "array"}
    assert schema_of(dict) == {"type": "object"}
