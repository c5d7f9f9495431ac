"""Regular languages over Unicode text, as trees: what patterns and JSON schemas are turned into, and what both the
tables and llguidance are made from, so that they cannot disagree."""

from __future__ import annotations

from dataclasses import dataclass

MAX_CODE_POINT = 0x10FFFF


@dataclass(frozen=True)
class Text:
    """One text."""

    text: str


@dataclass(frozen=True)
class Chars:
    """One character of these ranges of code points, both ends included; sorted, disjoint, without surrogates."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Sequence:
    """One after another; none of them is the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    """One of several; none of them matches nothing."""

    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """`node` at least `least` times, at most `most`, without a limit for None."""

    node: Node
    least: int
    most: int | None


Node = Text | Chars | Sequence | Choice | Repeat
