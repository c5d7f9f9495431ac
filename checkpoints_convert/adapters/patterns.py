"""Patterns of module names in `adapter_config.json`: matched as PEFT does, in a time that no pattern can make long.

A pattern may come from anyone, and Python's `re` can take years for some of 20 characters. Those with repetitions or
alternatives are therefore compiled to automata, whose compilation is bounded and whose matching is linear.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jaxinfer.grammar.automaton import build_automaton
from jaxinfer.grammar.pattern import parse_pattern

Matches = Callable[[str], bool]

_PLAIN = re.compile(r"\^?(?:[A-Za-z0-9_.\-]|\\\.)*\$?")  # nothing that `re` could try in several ways


def whole_name(pattern: str) -> Matches:
    """A test for names that the whole of a pattern matches (`re.fullmatch`).

    Raises ValueError for a pattern that is malformed, or with something that has no automaton, such as look-around.
    """
    if _PLAIN.fullmatch(pattern):
        compiled = re.compile(pattern)
        return lambda name: compiled.fullmatch(name) is not None
    automaton = build_automaton(parse_pattern(_without_first_boundaries(pattern)))
    return lambda name: automaton.accepts(name.encode())


def end_of_name(pattern: str) -> Matches:
    """A test for names that a pattern matches from a dot, or the beginning, to the end (`(.*\\.)?(pattern)$`).

    Raises as `whole_name`.
    """
    if _PLAIN.fullmatch(pattern):
        compiled = re.compile(rf"(.*\.)?({pattern})$")
        return lambda name: compiled.match(name) is not None
    if pattern.startswith("^"):
        if _has_alternatives(pattern):  # of which only the first would begin where names do
            raise ValueError("'^' with an alternative outside of brackets is not supported")
        return whole_name(pattern)
    return whole_name(rf"(?:.*\.)?(?:{_without_first_boundaries(pattern)})")


def is_plain(pattern: str) -> bool:
    """True for a pattern that takes no automaton."""
    return _PLAIN.fullmatch(pattern) is not None


def _has_alternatives(pattern: str) -> bool:
    """True for a `|` outside of groups and classes."""
    depth = 0
    for character in re.sub(r"\\.|\[\^?\]?[^\]]*\]", "", pattern):
        depth += (character == "(") - (character == ")")
        if character == "|" and depth == 0:
            return True
    return False


def _without_first_boundaries(pattern: str) -> str:
    """The pattern without a `\\b` where a name begins, which says nothing there: one tool that many adapters are made
    with writes them, and automata have no boundaries."""
    pieces, depth, place = [], 0, 0
    can_begin = True  # nothing but opening brackets since the beginning, or since an alternative of the whole
    while place < len(pattern):
        width = 2 if pattern[place] == "\\" else 3 if pattern.startswith("(?:", place) else 1
        piece = pattern[place : place + width]
        place += width
        depth += piece.startswith("(") - (piece == ")")
        if piece == r"\b" and can_begin and pattern[place : place + 1].isalnum():
            continue
        pieces.append(piece)
        can_begin = (can_begin and piece in ("(", "(?:", "^")) or (piece == "|" and depth == 0)
    return "".join(pieces)


@dataclass(frozen=True)
class NameSet:
    """Names of modules, each of which matches itself and every name that ends with a dot and it."""

    names: frozenset[str]

    def matching(self, name: str) -> str | None:
        """The longest of the names that matches; None if none does."""
        return next((part for part in suffixes(name) if part in self.names), None)


def suffixes(name: str) -> Iterable[str]:
    """The name, and what follows each of its dots."""
    yield name
    while "." in name:
        name = name.partition(".")[2]
        yield name
