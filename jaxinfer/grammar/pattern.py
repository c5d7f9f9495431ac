"""Regular expressions, in the syntax of Rust's `regex` crate, which llguidance reads, to trees and back.

A text must match the whole pattern. `\\d`, `\\w` and categories are those of Python's version of Unicode.
"""

from __future__ import annotations

from jaxinfer.grammar.char_sets import Ranges
from jaxinfer.grammar.nodes import Alternation, Chars, Concatenation, Node, Repeat, Text
from jaxinfer.grammar.pattern_parser import PatternParser, UnsupportedPattern

__all__ = ["UnsupportedPattern", "parse_pattern", "pattern_of"]

MAX_PATTERN = 16384
"""Characters of a pattern."""
MAX_WRITTEN = 500_000
"""Characters of the pattern that a tree is written as."""


def parse_pattern(text: str, *, is_search: bool = False) -> Node:
    """The tree of a pattern.

    Args:
      is_search: a text that has the pattern anywhere matches, as in JSON schemas; `^` and `$` are the text's ends.

    Raises:
      UnsupportedPattern: names the place of a look-around, a back-reference, a word boundary, an anchor that is not at
        an end, a flag or a Unicode property that is not supported.
      ValueError: the pattern is malformed, too long, too deep, or matches no text.
    """
    if len(text) > MAX_PATTERN:
        raise ValueError(f"the pattern has {len(text)} characters; at most {MAX_PATTERN} are allowed")
    parser = PatternParser(text)
    found = parser.resolve(parser.parse(), starts=True, ends=True, is_open=(is_search, is_search))
    if found is None:
        raise ValueError(f"no text matches the pattern {text[:80]!r}")
    return found


def pattern_of(node: Node) -> str:
    """A pattern of the same language, with explicit ranges of characters, for llguidance.

    Raises ValueError if it would have more than `MAX_WRITTEN` characters.
    """
    pieces: list[str] = []
    num_chars = 0
    written: dict[int, str] = {}
    stack: list[Node | str] = [node]
    while stack:
        item = stack.pop()
        if isinstance(item, Concatenation):
            for part in reversed(item.parts):
                stack += [")", part, "(?:"] if isinstance(part, Alternation) else [part]
            continue
        if isinstance(item, Alternation):
            for option in reversed(item.options):
                stack += [option, "|"]
            stack.pop()
            continue
        if isinstance(item, Repeat):
            counts = f"{{{item.least},{'' if item.most is None else item.most}}}"
            stack += [counts, item.node] if isinstance(item.node, Chars) else [")" + counts, item.node, "(?:"]
            continue
        if isinstance(item, Text):
            item = "".join(map(_literal, item.text)) or "(?:)"
        elif isinstance(item, Chars):
            if id(item.ranges) not in written:
                written[id(item.ranges)] = _bracket(item.ranges)
            item = written[id(item.ranges)]
        pieces.append(item)
        num_chars += len(item)
        if num_chars > MAX_WRITTEN:
            raise ValueError(f"the pattern of this language has more than {MAX_WRITTEN} characters")
    return "".join(pieces)


def _bracket(ranges: Ranges) -> str:
    if not ranges:
        raise ValueError("a set of characters is empty")
    return "[" + "".join(_literal(chr(a)) + ("" if a == b else "-" + _literal(chr(b))) for a, b in ranges) + "]"


def _literal(char: str) -> str:
    if char.isascii():
        return char if char.isalnum() else f"\\x{ord(char):02X}"
    return char if char.isprintable() else f"\\x{{{ord(char):X}}}"
