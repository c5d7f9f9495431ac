"""Regular languages over Unicode text, as trees: what patterns and JSON schemas are turned into, and what both the
tables and llguidance are made from, so that they cannot disagree."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """One text."""

    text: str


@dataclass(frozen=True)
class Chars:
    """One character of these ranges of code points, both ends included; sorted, disjoint, without surrogates."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Concatenation:
    """One after another; none of them is the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alternation:
    """One of several; none of them matches nothing."""

    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """`node` at least `least` times, at most `most`, without a limit for None."""

    node: Node
    least: int
    most: int | None


Node = Text | Chars | Concatenation | Alternation | Repeat

EMPTY = Text("")


def children(node: Node) -> tuple[Node, ...]:
    """The nodes directly within one."""
    if isinstance(node, Concatenation):
        return node.parts
    if isinstance(node, Alternation):
        return node.options
    return (node.node,) if isinstance(node, Repeat) else ()


class TooLargeError(ValueError):
    """A language whose automaton or table is larger than a limit, or takes longer to build."""


def concat(parts: list[Node | None]) -> Node | None:
    """One after another; None is the language without any text."""
    kept: list[Node] = []
    for part in parts:
        if part is None:
            return None
        if isinstance(part, Text) and kept and isinstance(kept[-1], Text):
            kept[-1] = Text(kept[-1].text + part.text)
        elif part != EMPTY:
            kept.extend(part.parts if isinstance(part, Concatenation) else [part])
    return EMPTY if not kept else kept[0] if len(kept) == 1 else Concatenation(tuple(kept))


def alternate(options: list[Node | None]) -> Node | None:
    """One of several; None is the language without any text."""
    kept = [option for option in options if option is not None]
    return None if not kept else kept[0] if len(kept) == 1 else Alternation(tuple(kept))


def repeat(node: Node | None, least: int, most: int | None) -> Node | None:
    """A node several times; None is the language without any text."""
    if most == 0 or node == EMPTY or (node is None and least == 0):
        return EMPTY
    return node if node is None or (least == 1 and most == 1) else Repeat(node, least, most)


def chars(ranges: tuple[tuple[int, int], ...]) -> Node | None:
    """One character of a set."""
    if not ranges:
        return None
    return Text(chr(ranges[0][0])) if len(ranges) == 1 and ranges[0][0] == ranges[0][1] else Chars(ranges)
