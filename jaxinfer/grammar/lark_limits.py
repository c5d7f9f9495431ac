"""Limits of users' Lark grammars. Without them, llguidance ends the process with a full stack, or takes minutes."""

from __future__ import annotations

import json
import re

from jaxinfer.grammar.schema import check_schema
from jaxinfer.grammar.schema_graph import components

MAX_NESTED_DEFINITIONS = 1_000  # at 3,000, each within the one before, llguidance overflows a stack of 8 MiB
MAX_INTERSECTIONS = 8  # `&` and `~`: 60 regular expressions together did not finish within 15 s

_DEFINITION = re.compile(r"^[ \t]*[?!]?([A-Za-z_]\w*)[^:\n]*:", re.MULTILINE)
_LITERALS = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/(?:[^/\\\n]|\\.)+/|#[^\n]*|%json\s*')


def check_lark(text: str) -> str:
    """The same grammar, if it is safe to compile.

    Raises ValueError where it has more definitions within one another, or more intersections, than the limits of this
    module, or where a JSON schema in it (`%json`) is not one that `check_schema` accepts.
    """
    position = 0
    pieces: list[str] = []
    while True:
        match = _LITERALS.search(text, position)
        between = text[position : match.start() if match else len(text)]
        pieces.append(between)
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
    _check_definitions(" ".join(pieces))
    return text


def _check_definitions(text: str) -> None:
    """Of a grammar without its literals. Definitions that contain one another count as all within one another."""
    starts = list(_DEFINITION.finditer(text))
    ends = [match.start() for match in starts[1:]] + [len(text)]
    bodies: dict[str, str] = {}
    for match, end in zip(starts, ends, strict=True):
        bodies[match[1]] = bodies.get(match[1], "") + " " + text[match.end() : end]
    inner = {name: set(re.findall(r"[A-Za-z_]\w*", body)) & bodies.keys() for name, body in bodies.items()}
    inner[""] = set(bodies)  # contains all
    depths: dict[str, int] = {}
    intersections: dict[str, int] = {}
    for group in components("", lambda name: inner[name]):
        others = {other for name in group for other in inner[name] if other in depths}
        depth = len(group) + max((depths[other] for other in others), default=0)
        depths.update(dict.fromkeys(group, depth))
        if depth > MAX_NESTED_DEFINITIONS + 1:
            raise ValueError(
                f"{group[0] or 'start'}: the grammar has {depth} definitions within one another; at most "
                f"{MAX_NESTED_DEFINITIONS} are accepted"
            )
        for name in group:
            count = sum(bodies.get(name, "").count(sign) for sign in "&~")
            if name.isupper():  # a terminal is one regular expression with the terminals in it
                count += sum(intersections.get(other, 0) for other in inner[name] if other.isupper())
            intersections[name] = count
            if count > MAX_INTERSECTIONS:
                raise ValueError(f"{name}: {count} of `&` and `~` together; at most {MAX_INTERSECTIONS} are accepted")
