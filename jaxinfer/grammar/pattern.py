"""Regular expressions, in the syntax of Rust's `regex` crate, which llguidance reads, to trees and back.

A text must match the whole pattern. `\\d`, `\\w` and categories are those of Python's version of Unicode.
"""

import re
from dataclasses import dataclass, replace

from jaxinfer.grammar import char_sets
from jaxinfer.grammar.char_sets import Ranges
from jaxinfer.grammar.nodes import (
    Alternation,
    Chars,
    Concatenation,
    Node,
    Repeat,
    Text,
    alternate,
    chars,
    concat,
    repeat,
)

MAX_PATTERN = 16384
"""Characters of a pattern."""
MAX_WRITTEN = 500_000
"""Characters of the pattern that a tree is written as."""
MAX_GROUPS = 100
"""Groups within one another."""
MAX_CLASSES = 32
"""Classes in brackets within one another."""
MAX_RANGES = 250_000
"""Ranges of characters that the classes of a pattern are computed from, in all."""
MAX_COUNT = 2**32 - 1

ANY = Chars(char_sets.ALL)

_ESCAPED = {"a": "\a", "f": "\f", "t": "\t", "n": "\n", "r": "\r", "v": "\v"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_GROUP_NAME = re.compile(r"\?P?<([A-Za-z_][A-Za-z0-9_.\[\]]*)>")
_COUNTS = re.compile(r"\{\s*([0-9]+)\s*(,?)\s*([0-9]*)\s*\}")
_ASCII_CLASS = re.compile(r"\[:(\^?)([a-z]+):\]")


class UnsupportedPattern(ValueError):
    """A pattern that may be right, with something that has no tree here."""


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
    parser = _PatternParser(text)
    tree = parser.resolve(parser.parse(), starts=True, ends=True, is_open=(is_search, is_search))
    if tree is None:
        raise ValueError(f"no text matches the pattern {text[:80]!r}")
    return tree


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


@dataclass(frozen=True)
class _Anchor:
    """`^` or `$`, while the tree is built."""

    sign: str
    place: int


@dataclass(frozen=True)
class _Flags:
    ignore_case: bool = False
    dot_all: bool = False
    multi_line: bool = False


class _PatternParser:
    """Recursive descent; depths are bounded."""

    def __init__(self, text: str):
        self.text, self.at = text, 0
        self._anchored: set[int] = set()  # ids of nodes that contain an anchor, which are kept
        self._kept: list[object] = []
        self._names: set[str] = set()
        self._num_ranges = 0

    def error(self, what: str, place: int | None = None) -> ValueError:
        return ValueError(f"{what}, at character {self.at if place is None else place} of the pattern {self._shown()}")

    def unsupported(self, what: str, place: int | None = None) -> UnsupportedPattern:
        place = self.at if place is None else place
        return UnsupportedPattern(f"{what} is not supported, at character {place} of the pattern {self._shown()}")

    def _shown(self) -> str:
        return repr(self.text if len(self.text) <= 80 else self.text[:80] + "...")

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def skip(self, text: str) -> bool:
        if self.text.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    # Trees

    def parse(self) -> Node | None:
        """The whole pattern; None if no text matches."""
        node = self.alternation(0, _Flags())
        if self.at < len(self.text):
            raise self.error("')' closes no group")
        return node

    def alternation(self, depth: int, flags: _Flags) -> Node | None:
        """Alternatives up to ")" or the end. A flag holds from its place to the end of its group."""
        if depth > MAX_GROUPS:
            raise self.error(f"groups are nested more than {MAX_GROUPS} deep")
        options: list[Node | None] = []
        parts: list[Node | None] = []
        while self.at < len(self.text) and self.peek() != ")":
            if self.skip("|"):
                options.append(self._joined(parts))
                parts = []
            elif (changed := self._flags_only(flags)) is not None:
                flags = changed
                if (sign := self.peek()) and sign in "*+?{":
                    raise self.error(f"{sign!r} has nothing to repeat")
            else:
                parts.append(self._quantified(self._atom(depth, flags)))
        options.append(self._joined(parts))
        return self._made(alternate(options), options)

    def _joined(self, parts: list[Node | None]) -> Node | None:
        if not any(self._has_anchor(part) for part in parts):
            return concat(parts)
        if None in parts:
            return None
        return self._made(Concatenation(tuple(part for part in parts if part is not None)), parts)

    def _has_anchor(self, node: object) -> bool:
        return isinstance(node, _Anchor) or id(node) in self._anchored

    def _made(self, node: Node | None, children: list[Node | None]) -> Node | None:
        if node is not None and any(self._has_anchor(child) for child in children):
            self._anchored.add(id(node))
            self._kept.append(node)
        return node

    def resolve(self, node: object, starts: bool, ends: bool, is_open: tuple[bool, bool]) -> Node | None:
        """The tree without anchors, which may stand only where the whole pattern starts or ends.

        Args:
          starts, ends: whether the node is at the pattern's start, and end.
          is_open: whether any text may come before it, and after it, if it has no anchor there.
        """
        if isinstance(node, Alternation) and self._has_anchor(node):
            return alternate([self.resolve(option, starts, ends, is_open) for option in node.options])
        is_split = isinstance(node, Concatenation) and self._has_anchor(node)
        parts: list[object] = list(node.parts) if is_split else [node]  # pyright: ignore[reportAttributeAccessIssue]
        opens, closes = is_open
        while starts and parts and isinstance(parts[0], _Anchor) and parts[0].sign == "^":
            opens, parts = False, parts[1:]
        while ends and parts and isinstance(parts[-1], _Anchor) and parts[-1].sign == "$":
            closes, parts = False, parts[:-1]
        resolved: list[Node | None] = []
        before, after = opens, closes
        for index, part in enumerate(parts):
            if isinstance(part, _Anchor):
                raise self.unsupported("an anchor that is not at an end of the pattern", part.place)
            if self._has_anchor(part):  # it says itself where any text may come before or after it
                is_first, is_last = index == 0, index == len(parts) - 1
                before, after = before and not is_first, after and not is_last
                sides = (opens and is_first, closes and is_last)
                part = self.resolve(part, starts and is_first, ends and is_last, sides)
            resolved.append(part)  # pyright: ignore[reportArgumentType]
        anything: list[Node | None] = [Repeat(ANY, 0, None)]
        return concat([*(anything if before else ()), *resolved, *(anything if after else ())])

    # Pieces

    def _flags_only(self, flags: _Flags) -> _Flags | None:
        """`(?i)`."""
        match = re.compile(r"\(\?([A-Za-z-]*)\)").match(self.text, self.at)
        if match is None:
            return None
        place, self.at = self.at, match.end()
        return self._with_flags(flags, match[1], place)

    def _with_flags(self, flags: _Flags, text: str, place: int) -> _Flags:
        on, dash, off = text.partition("-")
        letters = on + off
        if not letters or len(set(letters)) < len(letters) or (dash and not off) or set(letters) - set("imsUuxR"):
            raise self.error(f"'(?{text}' has no right flags", place)
        if set(letters) & set("xR") or "u" in off:
            raise self.unsupported(f"the flag of '(?{text}'", place)
        names = {"i": "ignore_case", "s": "dot_all", "m": "multi_line"}  # U only tells which match is preferred
        return replace(flags, **{names[letter]: letter in on for letter in letters if letter in names})

    def _atom(self, depth: int, flags: _Flags) -> Node | None:
        place, char = self.at, self.peek()
        self.at += 1
        if char == "(":
            return self._group(depth, flags, place)
        if char == "[":
            return chars(self._bracket(0, flags))
        if char == ".":
            return ANY if flags.dot_all else chars(char_sets.complement(((10, 10),)))
        if char in "^$":
            return self._anchor(char, flags, place)
        if char == "\\":
            return self._escape_outside(flags, place)
        if char in "*+?{":
            raise self.error(f"{char!r} has nothing to repeat (write '\\{char}' for the character)", place)
        return self._literal(char, flags)

    def _anchor(self, sign: str, flags: _Flags, place: int) -> Node:
        if flags.multi_line:
            raise self.unsupported(f"{sign!r} at the ends of lines", place)
        return _Anchor(sign, place)  # pyright: ignore[reportReturnType] - `resolve` takes them out

    def _literal(self, char: str, flags: _Flags) -> Node | None:
        if 0xD800 <= ord(char) <= 0xDFFF:
            raise self.error("a lone surrogate", self.at - 1)
        if not flags.ignore_case:
            return Text(char)
        return chars(self._folded(char_sets.of_texts(char)))

    def _group(self, depth: int, flags: _Flags, place: int) -> Node | None:
        if any(self.text.startswith(sign, self.at) for sign in ("?=", "?!", "?<=", "?<!")):
            raise self.unsupported("look-around", place)
        if match := _GROUP_NAME.match(self.text, self.at):
            if match[1] in self._names:
                raise self.error(f"a second group is named {match[1]!r}", place)
            self._names.add(match[1])
            self.at = match.end()
        elif self.skip("?"):
            end = self.text.find(":", self.at, self.at + 16)
            if end < 0 or not all(char.isalpha() or char == "-" for char in self.text[self.at : end]):
                raise self.unsupported(f"the group '({self.text[place + 1 : place + 4]}'", place)
            letters, self.at = self.text[self.at : end], end + 1
            flags = self._with_flags(flags, letters, place) if letters else flags
        node = self.alternation(depth + 1, flags)
        if not self.skip(")"):
            raise self.error("a group is not closed", place)
        return node

    def _quantified(self, node: Node | None) -> Node | None:
        while (sign := self.peek()) and sign in "*+?{":
            place = self.at
            if self._has_anchor(node):
                raise self.unsupported("a repeated anchor")
            if sign == "{":
                least, most = self._counts()
            else:
                self.at += 1
                least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
            self.skip("?")  # lazy: the same texts match
            if isinstance(node, Repeat) and (node.least, node.most) == (0, None):
                continue  # any number of any number
            self._check_depth(node, place)
            node = repeat(node, least, most)
        return node

    def _check_depth(self, node: Node | None, place: int) -> None:
        depth = 0
        while isinstance(node, Repeat):
            node, depth = node.node, depth + 1
        if depth > MAX_GROUPS:
            raise self.error(f"repetitions are nested more than {MAX_GROUPS} deep", place)

    def _counts(self) -> tuple[int, int | None]:
        match = _COUNTS.match(self.text, self.at)
        if match is None:
            raise self.error("'{' begins no repetition {m}, {m,} or {m,n} (write '\\{' for the character)")
        least, most = int(match[1][:11]), int(match[3][:11]) if match[3] else None if match[2] else int(match[1][:11])
        if (match[3] and not match[2]) or max(least, most or 0) > MAX_COUNT or (most is not None and most < least):
            raise self.error(f"{match[0][:40]!r} is no repetition")
        self.at = match.end()
        return least, most

    # Characters

    def _escape_outside(self, flags: _Flags, place: int) -> Node | None:
        char = self.peek()
        if char in ("A", "z"):
            self.at += 1
            return self._anchor("^" if char == "A" else "$", replace(flags, multi_line=False), place)
        escaped = self._escape(flags, place)
        return self._literal(escaped, flags) if isinstance(escaped, str) else chars(escaped)

    def _escape(self, flags: _Flags, place: int) -> str | Ranges:
        """After a backslash: a character, or a set of them."""
        char = self.peek()
        if not char:
            raise self.error("a backslash ends the pattern", place)
        self.at += 1
        if char in "0123456789":
            raise self.unsupported("a back-reference or octal number", place)
        if char in _HEX_DIGITS:
            return self._hex(_HEX_DIGITS[char], place)
        if char in "dDwWsS":
            ranges = {
                "d": lambda: char_sets.category("Nd") or (),
                "w": char_sets.word_characters,
                "s": lambda: char_sets.SPACES,
            }[char.lower()]()
            return ranges if char.islower() else self._computed(char_sets.complement(ranges))
        if char in "pP":
            return self._property(flags, is_negated=char == "P", place=place)
        if char in _ESCAPED:
            return _ESCAPED[char]
        if char.isalnum() or char in "<>" or not char.isascii():
            raise self.unsupported(f"'\\{char}'", place)
        return char

    def _hex(self, length: int, place: int) -> str:
        match = re.compile(rf"\{{([0-9A-Fa-f]{{1,8}})\}}|[0-9A-Fa-f]{{{length}}}").match(self.text, self.at)
        code = int(match[1] or match[0], 16) if match else 0x110000
        if match is None or code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise self.error(f"'\\{self.text[place + 1]}' is followed by no code point", place)
        self.at = match.end()
        return chr(code)

    def _property(self, flags: _Flags, *, is_negated: bool, place: int) -> Ranges:
        match = re.compile(r"\{([A-Z][a-z]?)\}|([A-Z])").match(self.text, self.at)
        name = (match[1] or match[2]) if match else ""
        ranges = char_sets.category(name) if name not in ("", "Cs") else None
        if match is None or ranges is None:
            raise self.unsupported("a Unicode property that is not a category such as \\p{L} or \\p{Lu}", place)
        self.at = match.end()
        if flags.ignore_case:
            ranges = self._folded(ranges)
        return self._computed(char_sets.complement(ranges)) if is_negated else ranges

    def _computed(self, ranges: Ranges) -> Ranges:
        self._num_ranges += len(ranges) + 1
        if self._num_ranges > MAX_RANGES:
            raise self.error(f"classes have more than {MAX_RANGES} ranges in all")
        return ranges

    def _bracket(self, depth: int, flags: _Flags) -> Ranges:
        """After "[": ranges, escapes, classes within it; "&&", "--" and "~~", from left to right."""
        place = self.at - 1
        if depth > MAX_CLASSES:
            raise self.error(f"classes are nested more than {MAX_CLASSES} deep")
        is_negated = self.skip("^")
        sets: list[Ranges] = []
        while self.skip("-"):
            sets.append(((45, 45),))
        if not sets and self.skip("]"):
            sets.append(((93, 93),))
        left: Ranges = ()
        operator = ""
        while True:
            sign = self.text[self.at : self.at + 2]
            if not sign:
                raise self.error("a class is not closed", place)
            if sign[0] == "]" or sign in ("&&", "--", "~~"):
                left = self._operate(operator, left, self._united(sets, flags))
                if sign[0] == "]":
                    break
                sets, operator = [], sign
                self.at += 2
            elif sign[0] == "[":
                sets.append(self._nested(depth, flags))
            else:
                sets.append(self._range(flags))
        self.at += 1
        return self._computed(char_sets.complement(left)) if is_negated else left

    def _united(self, sets: list[Ranges], flags: _Flags) -> Ranges:
        self._num_ranges += sum(len(ranges) for ranges in sets)
        ranges = self._computed(sets[0] if len(sets) == 1 else char_sets.union(*sets))
        return self._folded(ranges) if flags.ignore_case and ranges else ranges

    def _folded(self, ranges: Ranges) -> Ranges:
        self._num_ranges += min(sum(end - start for start, end in ranges), 1000)
        return self._computed(char_sets.ignoring_case(ranges))

    def _operate(self, operator: str, left: Ranges, right: Ranges) -> Ranges:
        if not operator:
            return right
        if operator == "&&":
            return self._computed(char_sets.intersection(left, right))
        apart = char_sets.difference(left, right)
        return self._computed(apart if operator == "--" else char_sets.union(apart, char_sets.difference(right, left)))

    def _nested(self, depth: int, flags: _Flags) -> Ranges:
        match = _ASCII_CLASS.match(self.text, self.at)
        if match and match[2] in char_sets.ASCII_CLASSES:
            self.at = match.end()
            ranges = char_sets.ASCII_CLASSES[match[2]]
            return char_sets.complement(ranges) if match[1] else ranges
        self.at += 1
        return self._bracket(depth + 1, flags)

    def _range(self, flags: _Flags) -> Ranges:
        place = self.at
        first = self._item(flags)
        if self.peek() != "-" or self.text[self.at + 1 : self.at + 2] in ("]", "-", ""):
            return char_sets.of_texts(first) if isinstance(first, str) else first
        self.at += 1
        last = self._item(flags)
        if not isinstance(first, str) or not isinstance(last, str) or first > last:
            raise self.error("a range has ends that are no characters in order", place)
        return char_sets.union(((ord(first), ord(last)),))

    def _item(self, flags: _Flags) -> str | Ranges:
        place, char = self.at, self.peek()
        self.at += 1
        return self._escape(flags, place) if char == "\\" else char
