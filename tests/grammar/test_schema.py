"""Schemas over a limit are refused within a second, with the place and the number; real ones are not."""

import json

import pytest

from jaxinfer.grammar.schema import check_schema
from tests.timing import processor_seconds

CLOSED = {"type": "object", "additionalProperties": False}


def nested(count, hold, inner):
    for _ in range(count):
        inner = hold(inner)
    return inner


def two(index):
    """A choice of two objects, which no sibling tells apart."""
    return {"anyOf": [{"type": "object", "properties": {f"{name}{index}": {"type": "null"}}} for name in "xy"]}


def chain(count, hold, last):
    return {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{i}": hold(f"#/$defs/d{i + 1}") for i in range(count)} | {f"d{count}": last},
    }


HOSTILE = {
    "deep": (nested(5000, lambda inner: {"items": inner}, {}), r"#/items/items/.* nested deeper than 64 levels"),
    "deep text": ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested deeper than 64 levels"),
    "unfinished": ('{"a":' * 20, "is not JSON"),
    "long text": ('{"description":"' + "x" * 2_000_000 + '"}', "2000018 bytes; at most 1048576"),
    "many values": ({"anyOf": [{"const": i} for i in range(100_000)]}, "#/anyOf: 100000 values; at most 50000"),
    "many alternatives": ({"anyOf": [{"const": i} for i in range(2_000)]}, "#: 2000 alternatives .* at most 1024"),
    "multiplied alternatives": ({"allOf": [two(i) for i in range(11)]}, "#: 2048 alternatives"),
    "alternatives of a property": (
        {"allOf": [{"type": "object", "properties": {"a": two(i)}} for i in range(11)]},
        "#/allOf/0/properties/a: 2048 alternatives",
    ),
    "large enum": ({"properties": {"a/b": {"enum": list(range(20_000))}}}, "#/properties/a~1b/enum: 20000 values"),
    "many properties": ({"properties": {f"p{i}": {} for i in range(2_000)}}, "#/properties: 2000 properties"),
    "long pattern": ({"type": "string", "pattern": "a|" * 10_000}, "#/pattern: a pattern of 20000 characters"),
    "many patterns": ({"allOf": [{"pattern": f"a{i}"} for i in range(30)]}, "#: 30 patterns for one text; at most 8"),
    "patterns of an item": (
        {"allOf": [{"items": {"pattern": f"a{i}"}} for i in range(30)]},
        "#/allOf/0/items: 30 patterns for one text",
    ),
    "long chain": (chain(5000, lambda ref: {"$ref": ref}, {}), "501 schemas within one another"),
    "long chain of properties": (
        chain(1000, lambda ref: {"properties": {"a": {"$ref": ref}}}, {}),
        "schemas within one another",
    ),
    "reference to itself": ({"$ref": "#"}, "#: a circle of `\\$ref`s"),
    "circle": (chain(1, lambda ref: {"anyOf": [{}, {"$ref": ref}]}, {"allOf": [{"$ref": "#"}]}), "a circle of"),
    "never ends": ({**CLOSED, "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#: no finite value matches"),
    "list never ends": ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "no finite value matches"),
    "remote": ({"items": {"$ref": "https://example.com/a.json"}}, "#/items/\\$ref: .* nothing is fetched"),
    "file": ({"$ref": "file:///etc/hostname"}, "nothing is fetched"),
    "nowhere": ({"$ref": "#/$defs/a"}, "names nothing in this schema"),
    "large number": ('{"const":1' + "0" * 1_000 + "}", "1001 digits; at most 400"),
    "infinite number": ('{"maximum":1e999}', "#/maximum: inf is not a finite number"),
    "not a number": ('{"const":NaN}', "NaN"),
    "lone surrogate": ({"const": "\ud800"}, "#/const: the text has a lone surrogate"),
    "no JSON": ({"const": {1, 2}}, "#/const: set is no JSON value"),
    "no object": ("[]", "must be an object, not list"),
    "negative count": ({"minLength": -1}, "#/minLength: -1 is not a count"),
    "large count": ({"maxItems": 2**40}, "#/maxItems: 1099511627776 is more than"),
    "wrong types": ({"items": {"properties": []}}, "#/items/properties: must be an object"),
    "unhashable": ({"required": [[]], "type": "object"}, "#/required"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_refused_within_a_second(name):
    schema, message = HOSTILE[name]
    with processor_seconds(less_than=1), pytest.raises(ValueError, match=message):
        check_schema(schema)


def test_counts_that_are_written_as_floats_are_whole_numbers():
    """llguidance refuses 2.0, which JSON Schema has for 2."""
    given = {"type": "array", "minItems": 1.0, "maxItems": 2.0, "items": {"type": "string", "maxLength": 3.0}}
    checked = check_schema({**given, "const": [2.0]})
    counts = [checked["minItems"], checked["maxItems"], checked["items"]["maxLength"]]
    assert [(count, type(count)) for count in counts] == [(1, int), (2, int), (3, int)]
    assert type(checked["const"][0]) is float


def test_a_checked_schema_is_a_copy_without_shared_objects():
    inner = {"type": "string"}
    schema = {"type": "object", "properties": {"a": inner, "b": inner}}
    checked = check_schema(schema)
    assert checked == schema == check_schema(json.dumps(schema))
    assert checked["properties"]["a"] is not checked["properties"]["b"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}},
        {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"type": "null"}}},
        {"$ref": "#named", "$defs": {"a": {"$anchor": "named", "type": "null"}}},
        {"$id": "https://example.com/root", "$ref": "item", "$defs": {"a": {"$id": "item", "type": "null"}}},
        {"properties": {"$ref": {"type": "string"}, "enum": {"const": {"$ref": "https://example.com/"}}}},
        {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "null"}}},
    ],
)
def test_local_references_and_recursion_that_ends_are_accepted(schema):
    assert check_schema(schema) == schema
