"""What llguidance is given: compact JSON, no options from the schema, exact formats, oneOf of disjoint branches."""

import pytest

from jaxinfer.grammar.schema import check_schema
from jaxinfer.grammar.schema_grammar import schema_grammar

pytest.importorskip("llguidance", reason="needs jaxinfer[structured]")

from tests.grammar.schema_suites import by_llguidance


def accepts(schema, **options):
    return by_llguidance(schema_grammar(check_schema(schema), **options))


def test_texts_are_compact_whatever_the_schema_says():
    options = {"whitespace_flexible": True, "lenient": True, "item_separator": ";", "coerce_one_of": True}
    is_accepted = accepts({"type": "object", "x-guidance": options})
    assert is_accepted('{"a":[1,{"b":null}],"c":"d"}')
    assert not any(is_accepted(text) for text in ('{"a": 1}', '{"a":1 }', '{ "a":1}', '{"a":1;"b":2}', "[]", "1"))
    with pytest.raises(ValueError, match="not"):
        accepts({"type": "object", "not": {}, "x-guidance": options})
    with pytest.raises(ValueError, match="oneOf"):
        accepts({"oneOf": [{"type": "integer"}, {"type": "number"}], "x-guidance": options})


def test_whitespace_is_bounded():
    is_accepted = accepts({"type": "object"}, whitespace_pattern="[ \\n]{0,2}")
    assert is_accepted('{"a": \n1}')
    assert is_accepted('{"a":1}')
    assert not is_accepted('{"a":   1}')
    for pattern in ("[ ]*", "[ ]+", ".{0,3}", "[ ]{0,999}", "a?", "[ a]?", "( )?", ""):
        with pytest.raises(ValueError, match="whitespace_pattern must be"):
            accepts({"type": "object"}, whitespace_pattern=pattern)


def test_one_of_behind_references_is_served():
    kinds = {k: {"type": "object", "properties": {"kind": {"const": k}}, "required": ["kind"]} for k in "ab"}
    is_accepted = accepts({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": kinds})
    assert is_accepted('{"kind":"a","x":[1]}')
    assert is_accepted('{"kind":"b"}')
    assert not is_accepted('{"kind":"c"}')


def test_formats_are_exact():
    is_accepted = accepts({"type": "object", "properties": {"day": {"type": "string", "format": "date"}}})
    assert is_accepted('{"day":"2024-02-29"}')
    assert not is_accepted('{"day":"2023-02-29"}')
    is_accepted = accepts({"type": "string", "format": "date", "pattern": "^2"})
    assert is_accepted('"2024-02-29"')
    assert not is_accepted('"1999-01-01"')


def test_names_that_repeat_are_not_counted():
    schema = {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 2}
    with pytest.raises(ValueError, match="#/minProperties: 2 is more than the 0 required properties and one"):
        accepts(schema)
    assert not accepts(schema | {"required": ["a"]})('{"a":null}')
    assert accepts(schema | {"required": ["a"]})('{"a":null,"b":null}')


def test_recursion_is_served():
    schema = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
    }
    is_accepted = accepts({**schema, "additionalProperties": False})
    assert is_accepted('{"next":{"next":null}}')
    assert not is_accepted('{"next":{}}')
