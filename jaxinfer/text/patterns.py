"""Reads the regular expressions of a tokenizer.json, to know before they run what they may cost.

`tokenizers` runs them with Oniguruma, which backtracks: `(a+)+$` takes exponential time, `.*x` quadratic, and neither
can be interrupted. The patterns of tokenizers use a small part of the language, and this part is parsed here. What is
outside of it (backreferences, recursion, conditions, ...) is refused. `regex_costs.py` judges the parsed pattern.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

MAX_PATTERN = 16384
"""Characters of one pattern. The longest of known models, a list of all letters, has about 2,000."""
_MAX_DEPTH = 32
_MAX_COUNT = 100_000  # Oniguruma's own limit of {n,m}
INFINITE = 1 << 60

CharTest = Callable[[str], bool]


class PatternError(ValueError):
    """A pattern that is malformed, outside of the supported part of the language, or too expensive."""


@dataclass(frozen=True)
class CharSet:
    """One character for which `test` holds."""

    test: CharTest
    literal: str | None = None


@dataclass(frozen=True)
class Assertion:
    """`^`, `$`, `\\b`, ...: matches the empty string or fails."""


@dataclass(frozen=True)
class Look:
    """A lookahead or lookbehind."""

    body: Node


@dataclass(frozen=True)
class Repetition:
    body: Node
    low: int
    high: int
    """INFINITE without an upper bound."""


@dataclass(frozen=True)
class Chain:
    items: tuple[Node, ...]


@dataclass(frozen=True)
class Alternatives:
    branches: tuple[Node, ...]


Node = CharSet | Assertion | Look | Repetition | Chain | Alternatives


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern: its tree, and the characters named in it (literals and ends of ranges)."""

    root: Node
    named: frozenset[str]
    source: str = field(repr=False)


def parse(source: str) -> Pattern:
    """Raises PatternError."""
    if len(source) > MAX_PATTERN:
        raise PatternError(f"it has {len(source)} characters; at most {MAX_PATTERN} are allowed")
    parser = _Parser(source)
    root = parser.choice(0, ignore_case=False, dot_all=False)
    if parser.at < len(source):
        raise PatternError(f"it has an unmatched ')' at character {parser.at}")
    return Pattern(root, frozenset(parser.named), source)


_CLASS_ESCAPES: dict[str, CharTest] = {
    "d": lambda c: unicodedata.category(c) == "Nd",
    "w": lambda c: c == "_" or unicodedata.category(c)[0] in "LMN" or unicodedata.category(c) == "Pc",
    "s": lambda c: c in "\t\n\x0b\x0c\r\x85" or unicodedata.category(c)[0] == "Z",
    "h": lambda c: c in "0123456789abcdefABCDEF",
}
_CONTROL_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b"}
_ASSERTION_ESCAPES = "AzZbBG"
_POSIX: dict[str, CharTest] = {
    "alpha": lambda c: unicodedata.category(c)[0] in "LM",
    "alnum": lambda c: unicodedata.category(c)[0] in "LMN",
    "upper": lambda c: unicodedata.category(c) == "Lu",
    "lower": lambda c: unicodedata.category(c) == "Ll",
    "punct": lambda c: unicodedata.category(c)[0] in "PS",
    "digit": _CLASS_ESCAPES["d"],
    "space": _CLASS_ESCAPES["s"],
    "word": _CLASS_ESCAPES["w"],
    "xdigit": _CLASS_ESCAPES["h"],
    "blank": lambda c: c == "\t" or unicodedata.category(c) == "Zs",
    "cntrl": lambda c: unicodedata.category(c) == "Cc",
}
_LONG_NAMES = {
    "letter": "L",
    "mark": "M",
    "number": "N",
    "punctuation": "P",
    "symbol": "S",
    "separator": "Z",
    "other": "C",
    "uppercaseletter": "Lu",
    "lowercaseletter": "Ll",
    "titlecaseletter": "Lt",
    "modifierletter": "Lm",
    "otherletter": "Lo",
    "decimalnumber": "Nd",
    "spaceseparator": "Zs",
}
_SCRIPTS = frozenset(
    (
        *("arabic", "armenian", "bengali", "bopomofo", "cyrillic", "devanagari", "ethiopic", "georgian", "greek"),
        *("gujarati", "gurmukhi", "hangul", "hebrew", "hiragana", "kannada", "katakana", "khmer", "lao", "latin"),
        *("malayalam", "mongolian", "myanmar", "oriya", "sinhala", "tamil", "telugu", "thai", "tibetan"),
    )
)


@lru_cache(maxsize=256)
def _property(name: str) -> CharTest:
    """`\\p{name}`. An unknown property is taken for any character, which is judged most strictly."""
    plain = name.replace("_", "").replace(" ", "").replace("-", "").lower()
    category = _LONG_NAMES.get(plain) or next((full for full in _CATEGORIES if full.lower() == plain), None)
    if category is not None:
        return lambda c: unicodedata.category(c).startswith(category)
    if plain in _POSIX:
        return _POSIX[plain]
    if plain == "han":
        return lambda c: unicodedata.name(c, "").startswith(("CJK", "KANGXI")) or c in "々〇"
    if plain in _SCRIPTS:
        return lambda c: unicodedata.name(c, "").startswith(plain.upper())
    return lambda c: True


_CATEGORIES = (
    *("L", "Lu", "Ll", "Lt", "Lm", "Lo", "M", "Mn", "Mc", "Me", "N", "Nd", "Nl", "No", "P", "Pc", "Pd", "Ps", "Pe"),
    *("Pi", "Pf", "Po", "S", "Sm", "Sc", "Sk", "So", "Z", "Zs", "Zl", "Zp", "C", "Cc", "Cf", "Co", "Cs", "Cn"),
)


def _within(ranges: Sequence[tuple[str, str]], ignore_case: bool) -> CharTest:
    """Whether a character is in one of many ranges: each test takes the logarithm of their number."""
    merged: list[list[str]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], last)
        else:
            merged.append([first, last])
    starts, ends = [first for first, _ in merged], [last for _, last in merged]

    def test(char: str) -> bool:
        index = bisect_right(starts, char) - 1
        return index >= 0 and char <= ends[index]

    return (lambda c: test(c) or test(c.lower()[:1]) or test(c.upper()[:1])) if ignore_case else test


def _negated(test: CharTest) -> CharTest:
    return lambda c: not test(c)


def _any_of(tests: Sequence[CharTest]) -> CharTest:
    kept = tuple(tests)
    return kept[0] if len(kept) == 1 else lambda c: any(test(c) for test in kept)


class _Parser:
    """Recursive descent over one pattern (Ruby's syntax, as `onig` compiles it)."""

    def __init__(self, source: str):
        self.source, self.at = source, 0
        self.named: set[str] = set()

    def peek(self, length: int = 1) -> str:
        return self.source[self.at : self.at + length]

    def take(self) -> str:
        if self.at >= len(self.source):
            raise PatternError("it ends in the middle of an element")
        self.at += 1
        return self.source[self.at - 1]

    def skip(self, text: str) -> bool:
        if self.source.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def until(self, end: str) -> str:
        stop = self.source.find(end, self.at)
        if stop < 0:
            raise PatternError(f"a {end!r} is missing after character {self.at}")
        text, self.at = self.source[self.at : stop], stop + len(end)
        return text

    def unsupported(self, what: str) -> PatternError:
        return PatternError(f"it uses {what} at character {self.at}, which is not supported")

    def choice(self, depth: int, *, ignore_case: bool, dot_all: bool) -> Node:
        if depth > _MAX_DEPTH:
            raise PatternError(f"it is nested more than {_MAX_DEPTH} levels deep")
        branches: list[Node] = []
        items: list[Node] = []
        while self.at < len(self.source) and self.peek() != ")":
            if self.skip("|"):
                branches.append(Chain(tuple(items)))
                items = []
            elif (flags := self._inline_flags()) is not None:
                ignore_case, dot_all = flags.get("i", ignore_case), flags.get("m", dot_all)
            else:
                items.append(self._quantified(self._atom(depth, ignore_case, dot_all)))
        branches.append(Chain(tuple(items)))
        return branches[0] if len(branches) == 1 else Alternatives(tuple(branches))

    def _inline_flags(self) -> dict[str, bool] | None:
        """`(?i)`, which holds to the end of its group."""
        if self.peek(2) != "(?" or ")" not in self.source[self.at :]:
            return None
        text = self.source[self.at + 2 : self.source.index(")", self.at)]
        if not text or text.strip("im-"):
            return None
        self.at += len(text) + 3
        return self._flags(text)

    def _flags(self, text: str) -> dict[str, bool]:
        on, _, off = text.partition("-")
        if (on + off).strip("im"):
            raise self.unsupported(f"the flags {text!r:.20}")
        return dict.fromkeys(on, True) | dict.fromkeys(off, False)

    def _atom(self, depth: int, ignore_case: bool, dot_all: bool) -> Node:
        char = self.take()
        if char == "(":
            return self._group(depth, ignore_case, dot_all)
        if char == "[":
            return CharSet(self._char_class(depth, ignore_case))
        if char == ".":
            return CharSet(lambda c: dot_all or c != "\n")
        if char in "^$":
            return Assertion()
        if char == "\\":
            return self._escape(ignore_case)
        if char in "*+?":
            raise PatternError(f"it has nothing to repeat before {char!r} at character {self.at - 1}")
        return self._literal(char, ignore_case)

    def _literal(self, char: str, ignore_case: bool) -> CharSet:
        self.named.update((char, char.lower()[:1], char.upper()[:1]) if ignore_case else (char,))
        return CharSet(_within([(char, char)], ignore_case), char)

    def _group(self, depth: int, ignore_case: bool, dot_all: bool) -> Node:
        is_look = False
        if self.peek() == "*":
            raise self.unsupported("a callout")
        if self.skip("?"):
            if self.skip("#"):
                self.until(")")
                return Chain(())
            is_look = any(self.skip(mark) for mark in ("=", "!", "<=", "<!"))
            if not is_look and not any(self.skip(mark) for mark in (":", ">")):
                if self.skip("<"):
                    self.until(">")  # a name
                elif self.peek() and self.peek() in "im-":
                    flags = self._flags(self.until(":"))
                    ignore_case, dot_all = flags.get("i", ignore_case), flags.get("m", dot_all)
                else:
                    raise self.unsupported(f"the group '(?{self.peek()}'")
        body = self.choice(depth + 1, ignore_case=ignore_case, dot_all=dot_all)
        if not self.skip(")"):
            raise PatternError("a ')' is missing")
        return Look(body) if is_look else body

    def _quantified(self, node: Node) -> Node:
        while (bounds := self._bounds()) is not None:
            if isinstance(node, (Assertion, Look)) and bounds[1] > 1:
                raise self.unsupported("a repeated assertion")
            node = Repetition(node, *bounds)
        return node

    def _bounds(self) -> tuple[int, int] | None:
        """A quantifier. Lazy and possessive ones are judged as greedy ones, which take at least as long."""
        char = self.peek()
        if char and char in "*+?":
            self.at += 1
            if not self.skip("?"):
                self.skip("+")
            return {"*": (0, INFINITE), "+": (1, INFINITE), "?": (0, 1)}[char]
        if char != "{" or "}" not in self.source[self.at :]:
            return None
        low, comma, high = self.source[self.at + 1 : self.source.index("}", self.at)].partition(",")
        if not all(part == "" or (part.isascii() and part.isdigit() and len(part) <= 6) for part in (low, high)):
            return None
        if not low and not high:
            return None
        bounds = (int(low or 0), (int(high) if high else INFINITE) if comma else int(low))
        if bounds[0] > _MAX_COUNT or _MAX_COUNT < bounds[1] < INFINITE or bounds[0] > bounds[1]:
            raise PatternError(f"it has the repetition {{{low}{comma}{high}}}")
        self.until("}")
        self.skip("?")
        return bounds

    def _escape(self, ignore_case: bool) -> Node:
        char = self.peek()
        if char and char in _ASSERTION_ESCAPES:
            self.at += 1
            return Assertion()
        if char and (char in "gkKRXyYNO" or char in "123456789"):
            raise self.unsupported(f"'\\{char}'")
        found = self._escaped()
        return self._literal(found, ignore_case) if isinstance(found, str) else CharSet(found)

    def _escaped(self) -> str | CharTest:
        """After a backslash: a character, or a class of characters."""
        char = self.take()
        if char.lower() in _CLASS_ESCAPES:
            test = _CLASS_ESCAPES[char.lower()]
            return test if char.islower() else _negated(test)
        if char in "pP":
            if not self.skip("{"):
                raise self.unsupported(f"'\\{char}' without a name")
            name = self.until("}")
            test = _property(name.removeprefix("^"))
            return _negated(test) if (char == "P") != name.startswith("^") else test
        if char in _CONTROL_ESCAPES:
            return _CONTROL_ESCAPES[char]
        if char in "xu":
            digits = self.until("}") if char == "x" and self.skip("{") else self._hex(4 if char == "u" else 2)
            try:
                return chr(int(digits, 16))
            except (ValueError, OverflowError):
                raise PatternError(f"it has a bad '\\{char}' before character {self.at}") from None
        if char == "0":
            return "\0"
        if char.isalnum() and char.isascii():
            raise self.unsupported(f"'\\{char}'")
        return char

    def _hex(self, length: int) -> str:
        digits, self.at = self.peek(length), self.at + length
        return digits

    def _char_class(self, depth: int, ignore_case: bool) -> CharTest:
        """After `[`: ranges, escapes, nested classes, and intersections with `&&`."""
        if depth > _MAX_DEPTH:
            raise PatternError(f"it is nested more than {_MAX_DEPTH} levels deep")
        is_negated = self.skip("^")
        parts: list[CharTest] = []
        tests: list[CharTest] = []
        ranges: list[tuple[str, str]] = []

        def end_part() -> None:
            parts.append(_any_of([_within(ranges, ignore_case), *tests]))
            tests.clear()
            ranges.clear()

        is_first = True
        while is_first or self.peek() != "]":
            is_first = False
            if self.skip("[:"):
                name = self.until(":]")
                test = _property(name.removeprefix("^"))
                tests.append(_negated(test) if name.startswith("^") else test)
            elif self.skip("["):
                tests.append(self._char_class(depth + 1, ignore_case))
            elif self.skip("&&"):
                end_part()
            elif isinstance(found := self._range(), tuple):
                ranges.append(found)
            else:
                tests.append(found)
        self.at += 1
        end_part()
        test = parts[0] if len(parts) == 1 else lambda c: all(part(c) for part in parts)
        return _negated(test) if is_negated else test

    def _range(self) -> tuple[str, str] | CharTest:
        first = self._class_char()
        if not isinstance(first, str):
            return first
        self.named.add(first)
        if self.peek() != "-" or self.peek(2) == "-]":
            return first, first
        mark, self.at = self.at, self.at + 1
        last = "" if self.peek() == "[" else self._class_char()
        if not isinstance(last, str) or not last:  # `[a-\d]`: the '-' is a character
            self.at = mark
            return first, first
        if last < first:
            raise PatternError(f"it has the empty range {first!r}-{last!r}")
        self.named.add(last)
        return first, last

    def _class_char(self) -> str | CharTest:
        char = self.take()
        if char != "\\":
            return char
        if self.peek() == "b":
            self.at += 1
            return "\b"
        return self._escaped()
