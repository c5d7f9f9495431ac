"""Lark grammars that would end the process, or take minutes, are refused."""

import json
import time

import pytest

from jaxinfer.grammar.compiler import check_lark

CHAIN = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(1_000)} | {"d1000": {}}
HOSTILE = {
    "rules": (
        "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(8_000)),
        "1002 definitions within one another; at most 1000",
    ),
    "intersections": ("start: T\nT: " + " & ".join(f"/(.*a{i}.*)/" for i in range(60)), "T: 59 of `&` and `~`"),
    "spread intersections": (
        "start: T0\n" + "\n".join(f"T{i}: /a{i}/ & T{i + 1}" for i in range(60)) + "\nT60: /b/",
        "T51: 9 of `&` and `~` together; at most 8",
    ),
    "schema": (
        "start: %json " + json.dumps({"$ref": "#/$defs/d0", "$defs": CHAIN}),
        "%json at character 7 of the grammar: .* schemas within one another",
    ),
    "no schema": ("start: %json start", "%json at character 7 of the grammar: no JSON schema follows"),
    "deep schema": ("start: %json " + "[" * 100_000, "no JSON schema follows"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_within_a_second(name):
    text, message = HOSTILE[name]
    start = time.process_time()
    with pytest.raises(ValueError, match=message):
        check_lark(text)
    assert time.process_time() - start < 1


def test_many_definitions_beside_one_another_are_accepted():
    text = (
        "start: " + " | ".join(f"r{i}" for i in range(5_000)) + "\n" + "\n".join(f'r{i}: "a" A' for i in range(5_000))
    )
    assert check_lark(text + "\nA: /a/") == text + "\nA: /a/"


def test_literals_are_not_counted():
    text = "start: A\n" + "\n".join(f'A{i}: "&:~\\"&" | /[&:~\\/]+/ // & : ~' for i in range(50))
    assert check_lark(text) == text
    text = '%llguidance {"no_forcing": true}\nstart: "a" %json {"type": "object", "x-guidance": {"lenient": false}} "b"'
    assert check_lark(text) == text
