"""The language of a schema holds the texts that match it, and no others: by the `jsonschema` package and counting."""

import itertools
import json
import random
import re
from decimal import Decimal

import jsonschema
import numpy as np
import pytest

from jaxinfer.grammar.automaton import build_automaton
from jaxinfer.grammar.schema import check_schema
from jaxinfer.grammar.schema_language import language_of
from jaxinfer.grammar.schema_strings import FORMATS, OTHER_FORMATS

CLOSED = {"type": "object", "additionalProperties": False}


def accepts(schema):
    language = language_of(check_schema(schema))
    assert language is not None, schema
    automaton = build_automaton(language)
    return lambda text: automaton.accepts(text.encode())


def closed(required=(), **properties):
    return {**CLOSED, "properties": properties, "required": list(required)}


BRANCHES = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}
EXAMPLES = [
    ({"type": "string"}, ['""', '"a é 😀"', r'"\/\n\u00e9\uD83D\ude00"'], ['"\n"', r'"\ud83d"', r'"\x"', "a", '"']),
    ({"type": "string", "minLength": 1, "maxLength": 2}, ['"😀"', r'"\ud83d\ude00\n"'], ['""', '"abc"']),
    ({"type": "string", "pattern": "a.c"}, ['"xabcx"', '"a\\"c"'], ['"a\\nc"', '"ac"']),
    ({"type": "string", "pattern": r"^[\w.]+$", "maxLength": 3}, ['"a.b"'], ['"abcd"', '"é"', '""']),
    ({"type": "string", "pattern": "^[[&&~^]+$"}, ['"[&~^"'], ['"a"']),
    (
        {"type": "string", "format": "date"},
        ['"2024-02-29"', '"2000-02-29"'],
        ['"2023-02-29"', '"1900-02-29"', '"0000-01-01"'],
    ),
    ({"type": "string", "format": "time"}, ['"23:59:60Z"', '"08:30:06.2+01:00"'], ['"22:59:60Z"', '"08:30:06"']),
    ({"type": "string", "format": "json-pointer"}, ['""', '"/a~1b/0"'], ['"a"', '"/~2"']),
    ({"type": "string", "format": "relative-json-pointer"}, ['"0"', '"12#"', '"1/a"'], ['"01"', '"/a"', '"1#/"']),
    (
        {"type": "string", "format": "uri-reference"},
        ['""', '"a/b?c#d"', '"//h:80/x"', '"http://u@[::1]:8/p%20q"', '"?q"', '"../x:y"', '"urn:a:b"'],
        ['"a b"', '"%zz"', '"http://[::1"', '"é"', '"a#b#c"'],
    ),
    (
        {"type": "string", "format": "iri"},
        ['"http://bücher.example/ä?ö"', '"urn:x"'],
        ['"/a"', '"bücher"', '"http://a b"'],
    ),
    ({"type": "string", "format": "iri-reference"}, ['"ä/ö"', '""', '"//ü"'], ['"a b"', '"<"']),
    (
        {"type": "string", "format": "uri-template"},
        ['""', '"/a{/b*,c:3}{?q}"', '"é{+x.y}"'],
        ['"{"', '"{}"', '"a}"', '"{a b}"', '"{a:0}"', '" "'],
    ),
    (
        {"type": "string", "format": "idn-hostname"},
        ['"пример.com"', '"a-b.c"', '"例え.jp"'],
        ['""', '"-a"', '"a..b"', '"a b"', '"א"'],
    ),
    (
        {"type": "string", "format": "idn-email"},
        ['"é@bücher.de"', '"a@b"', '"用户@例.cn"'],
        ['"@b"', '"a@"', '"a b@c"'],
    ),
    (
        {"type": "string", "format": "regex"},
        ['""', r'"^a(b|c)*[^xy]?\\d{2,}$"', '"(?:a(b))"', '"[a-z]+|x"', r'"\\/"'],
        ['"("', '"a**"', '"["', '"a)"', r'"\\q"', '"{2}"', '"^*"'],
    ),
    ({"type": "string", "format": "color"}, ['""', '"red"'], ["1"]),
    ({"type": "string", "format": "color", "maxLength": 1}, ['"r"'], ['"red"']),
    ({"type": "string", "format": "ipv6"}, ['"::ffff:192.168.0.1"', '"::"'], ['"1::2::3"', '"12345::"']),
    ({"type": "integer"}, ["0", "-7", "123"], ["-0", "01", "1.0", "1e3"]),
    ({"type": "number"}, ["0", "-0.5e-07", "1E3"], ["01", ".5", "1.", "+1"]),
    ({"type": ["null", "boolean"]}, ["null", "true", "false"], ["0"]),
    ({"enum": ["é\n", 1, {"a": [1.5, None]}, 2.0]}, ['"é\\n"', "1", '{"a":[1.5,null]}', "2"], ["true", '"\\u00e9\\n"']),
    ({"type": "integer", "enum": [1, "a", 2.5, True, 7], "maximum": 5}, ["1"], ['"a"', "2.5", "true", "7"]),
    (
        {"type": "array", "items": {"type": "null"}, "maxItems": 2},
        ["[]", "[null]", "[null,null]"],
        ["[null,null,null]"],
    ),
    (
        {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": {"const": 3}, "minItems": 1},
        ["[1]", "[1,2]", "[1,2,3,3]"],
        ["[]", "[2]", "[1,3]", "[1,2,]"],
    ),
    ({"type": "array", "prefixItems": [{"const": 1}, False], "items": {"const": 3}}, ["[]", "[1]"], ["[1,3]"]),
    ({"type": "array", "items": False}, ["[]"], ["[1]"]),
    (closed(a={"const": 1}, b=False), ["{}", '{"a":1}'], ['{"b":1}', '{"a":1,}']),
    (
        {"type": "object", "properties": {"a": {"const": 1}, "ab": {"const": 2}}, "additionalProperties": {"const": 3}},
        ["{}", '{"a":1,"x":3}', '{"abc":3,"":3}', '{"ab":2}'],
        ['{"a":3}', '{"\\u0061":3}', '{"x":1}'],
    ),
    ({**closed(a={"const": 1}, b={"const": 2}), "minProperties": 1}, ['{"a":1}', '{"b":2}'], ["{}"]),
    (
        {"oneOf": BRANCHES, "$defs": {k: closed(["kind"], kind={"const": k}, v={"type": "null"}) for k in "ab"}},
        ['{"kind":"a"}', '{"kind":"b","v":null}'],
        ["{}", '{"kind":"c"}'],
    ),
    ({"type": "integer", "oneOf": [{"maximum": 3}, {"minimum": 5}]}, ["3", "5"], ["4"]),
    (
        {"allOf": [closed(a={"type": "integer"}), {"required": ["a"], "properties": {"a": {"minimum": 5}}}]},
        ['{"a":5}'],
        ["{}", '{"a":4}', '{"a":5,"b":1}'],
    ),
    (
        {**CLOSED, "properties": {"a": {}, "b": {}}, "anyOf": [closed(["a"], a={"const": 1}), closed(b={"const": 2})]},
        ['{"a":1}', '{"b":2}', "{}"],
        ['{"a":1,"b":2}'],
    ),
]


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_examples(index):
    schema, right, wrong = EXAMPLES[index]
    is_accepted = accepts(schema)
    assert [text for text in right if not is_accepted(text)] == []
    assert [text for text in wrong if is_accepted(text)] == []


def test_every_format_of_the_standard_is_applied():
    formats = {"date", "time", "date-time", "duration", "uuid", "email", "idn-email", "hostname", "idn-hostname"}
    formats |= {"ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uri-template", "regex"}
    assert {*FORMATS, *OTHER_FORMATS} == formats | {"json-pointer", "relative-json-pointer"}


def test_optional_properties_come_in_order_in_any_combination():
    for num_required in range(3):
        names = "abcde"
        is_accepted = accepts(closed(["c", "e"][:num_required], **{name: {"const": 0} for name in names}))
        for length in range(5):
            for chosen in itertools.permutations(names, length):
                text = "{" + ",".join(f'"{name}":0' for name in chosen) + "}"
                is_right = list(chosen) == sorted(chosen) and set(["c", "e"][:num_required]) <= set(chosen)
                assert is_accepted(text) == is_right, text


def test_many_branches_are_told_apart_by_a_property():
    branches = [closed(["kind"], kind={"const": f"k{index}"}) for index in range(200)]
    is_accepted = accepts(
        {
            "oneOf": [{"$ref": f"#/$defs/{index}"} for index in range(200)],
            "$defs": {str(index): one for index, one in enumerate(branches)},
        }
    )
    assert is_accepted('{"kind":"k199"}')
    assert language_of(check_schema({"oneOf": [*branches, branches[7]]})) is None


def test_bounds_of_integers_are_exact():
    for low, high in [
        (-12, 105),
        (0, 9),
        (7, 7),
        (95, 1203),
        (-105, -12),
        (None, 30),
        (-30, None),
        (99, None),
        (None, -5),
    ]:
        bounds = {"minimum": low, "maximum": high}
        is_accepted = accepts({"type": "integer"} | {key: bound for key, bound in bounds.items() if bound is not None})
        for value in range(-1400, 1400):
            is_right = (low is None or value >= low) and (high is None or value <= high)
            assert is_accepted(str(value)) == is_right, (low, high, value)


def test_bounds_of_numbers_are_exact():
    texts = [
        f"{whole}{tail}" for whole in range(-13, 14) for tail in ("", ".0", ".1", ".25", ".250", ".26", ".2", ".9")
    ]
    for low, high in [
        (-0.25, 1.25),
        (0, 1),
        (1.2, 1.25),
        (0.1, 12.26),
        (-12.25, -0.2),
        (0.25, 0.25),
        (None, 0.25),
        (-1.2, None),
    ]:
        for keys in (("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")):
            bounds = {key: bound for key, bound in zip(keys, (low, high), strict=True) if bound is not None}
            if low == high and "exclusive" in keys[0]:
                continue
            judge = jsonschema.Draft202012Validator(bounds)
            is_accepted = accepts({"type": "number", **bounds})
            for text in texts:
                is_right = judge.is_valid(float(text)) and not (text[0] == "-" and float(text) == 0)
                assert is_accepted(text) == is_right, (bounds, text)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "object", "properties": {"a": {"type": "null"}}},
        {**CLOSED, "properties": {"a": {"$ref": "#"}}},
        {"type": "array"},
        {"type": "string", "not": {"const": "a"}},
        {"type": "string", "format": "duration"},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "integer", "multipleOf": 3},
        {"type": "array", "items": {"const": 1}, "uniqueItems": True},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 3}]},
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$ref": "#/definitions/a",
            "maxLength": 1,
            "definitions": {"a": {"type": "string"}},
        },
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "string", "maxLength": 1000}, "maxItems": 1000},
            "maxItems": 9,
        },
        {
            "$ref": "#/$defs/0",
            "$defs": {str(i): closed(a={"$ref": f"#/$defs/{i + 1}"}, b={"$ref": f"#/$defs/{i + 1}"}) for i in range(60)}
            | {"60": {"type": "null"}},
        },
    ],
)
def test_what_has_no_table_is_left_to_llguidance(schema):
    assert language_of(check_schema(schema)) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": []},
        closed(["a"], a=False),
        {"type": "integer", "minimum": 5, "maximum": 4},
        {"allOf": [{"type": "null"}, {"type": "string"}]},
    ],
)
def test_a_schema_that_nothing_matches_is_refused(schema):
    with pytest.raises(ValueError, match="no value matches"):
        language_of(check_schema(schema))


def random_schema(rng, depth):
    kinds = ["string", "integer", "enum", "null", "number"] + ["object", "object", "array", "anyOf", "allOf"] * (
        depth > 0
    )
    kind = rng.choice(kinds)
    if kind == "string":
        return {
            "type": "string",
            **rng.choice([{}, {"maxLength": 2}, {"minLength": 1, "maxLength": 3}, {"pattern": "^a+b?$"}]),
        }
    if kind in ("integer", "number"):
        return {
            "type": kind,
            **rng.choice([{}, {"minimum": -2}, {"exclusiveMaximum": 3}, {"minimum": 0.5, "maximum": 12}]),
        }
    if kind == "enum":
        return {"enum": rng.sample(["a", "é", 1, 2.5, None, True, [1], {"k": "v"}], 3)}
    if kind == "null":
        return {"type": ["null", "boolean"]}
    if kind == "object":
        names = rng.sample("pqrs", rng.randint(0, 3))
        properties = {name: random_schema(rng, depth - 1) for name in names}
        further = rng.choice([False, False, {"type": "integer", "maximum": 3}])
        required = [name for name in names if rng.random() < 0.5]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": further}
    if kind == "array":
        counts = rng.choice([{}, {"minItems": 1}, {"maxItems": 2}])
        prefix = {"prefixItems": [random_schema(rng, 0)]} if rng.random() < 0.3 else {}
        return {"type": "array", "items": random_schema(rng, depth - 1), **counts, **prefix}
    return {kind: [random_schema(rng, depth - 1) for _ in range(2)]}


def random_value(rng, schema):
    """A value that a schema describes, more or less, with properties in its order."""
    if rng.random() < 0.1:
        return rng.choice(["a", "", 0, 3, -2.5, None, True, [], {}, [1], {"p": 1}])
    if "enum" in schema:
        return rng.choice(schema["enum"])
    for kind in ("anyOf", "allOf"):
        if kind in schema:
            return random_value(rng, rng.choice(schema[kind]))
    kind = schema["type"]
    if kind == "string":
        return rng.choice(["", "a", "ab", "aab", "é\n", "😀" * 3, 'a"\\b', "b"])
    if kind == "integer":
        return rng.randint(-4, 14)
    if kind == "number":
        return rng.choice([-2, -2.25, 0, 0.5, 0.49, 2.999, 3, 12, 12.5, 100])
    if kind == "array":
        items = [random_value(rng, schema["items"]) for _ in range(rng.randint(0, 3))]
        return [random_value(rng, one) for one in schema.get("prefixItems", [])][: len(items)] + items[1:]
    if kind == "object":
        names = [name for name in schema["properties"] if rng.random() < 0.7]
        found = {name: random_value(rng, schema["properties"][name]) for name in names}
        return found | ({"t": rng.randint(0, 5)} if rng.random() < 0.2 else {})
    return rng.choice([None, True])


def random_text(rng, automaton):
    """A text that an automaton accepts, from a random walk; None if the walk is long."""
    state, found = 0, bytearray()
    while len(found) < 400:
        if automaton.is_accepting[state] and rng.random() < 0.5:
            return found.decode()
        allowed = np.flatnonzero(automaton.next[state] >= 0)
        if not len(allowed):
            return found.decode()
        byte = int(rng.choice(allowed))
        found.append(byte)
        state = int(automaton.next[state, byte])
    return None


def number_of(text):
    """Exact, unless the exponent is larger than Python's decimals have."""
    return Decimal(text) if len(text.lower().partition("e")[2]) < 6 else 0.0


def is_compact(text):
    return not re.search(r"\s", re.sub(r'"(?:[^"\\]|\\.)*"', "", text))


def disagreements(seed, num_values=30):
    """Texts on which the language and the judge differ, and how many of the texts are right."""
    rng = random.Random(seed)
    schema = random_schema(rng, 2)
    checked = check_schema(schema)
    judge = jsonschema.Draft202012Validator(schema)
    values = [random_value(rng, schema) for _ in range(num_values)]
    try:
        language = language_of(checked)
    except ValueError:
        return [value for value in values if judge.is_valid(value)], 0
    if language is None:
        return [], 0
    automaton = build_automaton(language, 100_000)
    found, num_right = [], 0
    for value in values:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        is_right = judge.is_valid(value)
        num_right += is_right
        if automaton.accepts(text.encode()) != is_right:
            found.append((schema, text))
    for _ in range(num_values):
        text = random_text(rng, automaton)
        if text is not None:
            num_right += 1
            if not judge.is_valid(json.loads(text, parse_float=number_of)) or not is_compact(text):
                found.append((schema, text))
    return found, num_right


def check_seeds(seeds):
    found, num_right = zip(*map(disagreements, seeds), strict=True)
    assert [one for group in found for one in group] == []
    return sum(num_right)


def test_random_schemas_agree_with_the_judge():
    assert check_seeds(range(12)) > 50


@pytest.mark.slow
def test_many_random_schemas_agree_with_the_judge():
    assert check_seeds(range(100, 300)) > 4_000
