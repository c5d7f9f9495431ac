"""Limits of users' Lark grammars. Without them, llguidance ends the process with a full stack, or takes minutes."""

from __future__ import annotations

import json
import re

from jaxinfer.grammar.schema import check_schema

MAX_DEFINITIONS = 1_000  # at 8,000, each within the one before, llguidance overflows a stack of 8 MiB
MAX_INTERSECTIONS = 8  # `&` and `~`: 60 regular expressions together did not finish within 15 s

_LITERALS = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/(?:[^/\\\n]|\\.)+/|#[^\n]*|%json\s*')


def check_lark(text: str) -> str:
    """The same grammar, if it is safe to compile.

    Raises ValueError where it has more definitions or intersections than the limits of this module, or where a JSON
    schema in it (`%json`) is not one that `check_schema` accepts.
    """
    num_definitions = num_intersections = position = 0
    while True:
        match = _LITERALS.search(text, position)
        between = text[position : match.start() if match else len(text)]
        num_definitions += between.count(":")
        num_intersections += between.count("&") + between.count("~")
        if match is None:
            break
        position = match.end()
        if match[0].startswith("%json"):
            try:
                schema, position = json.JSONDecoder().raw_decode(text, position)
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(
                    f"%json at character {match.start()} of the grammar: no JSON schema follows"
                ) from error
            try:
                check_schema(schema)
            except ValueError as error:
                raise ValueError(f"%json at character {match.start()} of the grammar: {error}") from error
    if num_definitions > MAX_DEFINITIONS:
        raise ValueError(f"the grammar has {num_definitions} definitions; at most {MAX_DEFINITIONS} are accepted")
    if num_intersections > MAX_INTERSECTIONS:
        raise ValueError(
            f"the grammar has {num_intersections} of `&` and `~`; at most {MAX_INTERSECTIONS} are accepted"
        )
    return text
