"""Reads the regular expressions of a tokenizer.json, to refuse before they run those that can take long.

`tokenizers` runs them with Oniguruma, which backtracks: `(a+)+$` takes exponential time, `.*x` quadratic, and neither
can be interrupted. The patterns of tokenizers use a small part of the language, and this part is parsed here. What is
outside of it (backreferences, recursion, conditions, ...) is refused. The parsed pattern is judged from its form.

A search tries each start in turn, and from one start a backtracking matcher tries every way in which the repetitions
can share the text between them, until the rest of the pattern matches. So the ways are counted:

- A repetition counts only where something after it can fail; the last `[\\r\\n]*` of a pattern never goes back.
- There, a repeated group must match in one way only: `(a+)+x` and `(a|ab)*x` have exponentially many.
- Of two repetitions of the same characters in a row, at most one may go back: `\\s*\\s*x` takes quadratic time.
- A repetition that can go back must end at a word's or a number's end, or at a closing mark: `.*x` scans the whole text
  from every start.
- Options and alternatives in a row multiply: thirty times `a?` have 2**30 ways.

Whether two classes share a character is decided on a sample, which has every character named in the pattern.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

MAX_PATTERN = 16384
"""Characters of one pattern. The longest of known models, a list of all letters, has about 2,000."""
_MAX_DEPTH = 32
_MAX_COUNT = 100_000  # Oniguruma's own limit of {n,m}
INFINITE = 1 << 60

MAX_WAYS = 4096
"""Ways of matching from one start, without unbounded repetitions. Patterns of known models have up to 24."""
_MAX_TESTS = 2_000_000
_LONG = 64
"""A bounded repetition of more is judged as an unbounded one."""

_SAMPLE = frozenset(chr(code) for code in range(128)) | frozenset(
    "\x85\xa0µª²½éÉßǅʰ́ΑαЖж֊אابकाก中々あア한①Ⅷ٣​‘’“”…€™♥＋Ａａ　﷼🎉\u2028\u20dd\ue000\U0001d400\U00020000"
)

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


def check_cost(source: str) -> Pattern:
    """The parsed pattern. Raises PatternError if it is not supported, or takes more than linear time on plain text."""
    pattern = _parse(source)
    _Judge(pattern).ways(pattern.root, can_fail=False)
    return pattern


def min_length(node: Node) -> int:
    """Characters of the shortest match."""
    if isinstance(node, CharSet):
        return 1
    if isinstance(node, Chain):
        return sum(map(min_length, node.items))
    if isinstance(node, Alternatives):
        return min(map(min_length, node.branches))
    return node.low * min_length(node.body) if isinstance(node, Repetition) else 0


def can_match(node: Node, chars: Iterable[str]) -> bool:
    """True if one of the characters can be part of a match."""
    chars = tuple(chars)
    return any(leaf.test(char) for leaf in _leaves(node) for char in chars)


def _parse(source: str) -> Pattern:
    """Raises PatternError."""
    if len(source) > MAX_PATTERN:
        raise PatternError(f"it has {len(source)} characters; at most {MAX_PATTERN} are allowed")
    parser = _Parser(source)
    root = parser.choice(0, ignore_case=False, dot_all=False)
    if parser.at < len(source):
        raise PatternError(f"it has an unmatched ')' at character {parser.at}")
    return Pattern(root, frozenset(parser.named))


_CLASS_ESCAPES = {"d": "digit", "w": "word", "s": "space", "h": "xdigit"}
_CONTROL_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b"}
_ASSERTION_ESCAPES = "AzZbBG"
_GENERAL_CATEGORIES = (
    *("L", "Lu", "Ll", "Lt", "Lm", "Lo", "M", "Mn", "Mc", "Me", "N", "Nd", "Nl", "No", "P", "Pc", "Pd", "Ps", "Pe"),
    *("Pi", "Pf", "Po", "S", "Sm", "Sc", "Sk", "So", "Z", "Zs", "Zl", "Zp", "C", "Cc", "Cf", "Co", "Cs", "Cn"),
)
# Beginnings of the general categories of a class's characters, by its names; and characters that it has besides.
_CATEGORIES = {
    **{name.lower(): (name,) for name in _GENERAL_CATEGORIES},
    "alpha": ("L", "M"),
    "alnum": ("L", "M", "N"),
    "upper": ("Lu",),
    "lower": ("Ll",),
    "punct": ("P", "S"),
    "digit": ("Nd",),
    "space": ("Z",),
    "word": ("L", "M", "N", "Pc"),
    "xdigit": (),
    "blank": ("Zs",),
    "cntrl": ("Cc",),
    "letter": ("L",),
    "mark": ("M",),
    "number": ("N",),
    "punctuation": ("P",),
    "symbol": ("S",),
    "separator": ("Z",),
    "other": ("C",),
    "uppercaseletter": ("Lu",),
    "lowercaseletter": ("Ll",),
    "titlecaseletter": ("Lt",),
    "modifierletter": ("Lm",),
    "otherletter": ("Lo",),
    "decimalnumber": ("Nd",),
    "spaceseparator": ("Zs",),
}
_CHARACTERS = {"space": "\t\n\x0b\x0c\r\x85", "word": "_", "xdigit": "0123456789abcdefABCDEF", "blank": "\t"}
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
    if plain in _CATEGORIES:
        categories, characters = _CATEGORIES[plain], _CHARACTERS.get(plain, "")
        return lambda c: c in characters or unicodedata.category(c).startswith(categories)
    if plain == "han":
        return lambda c: unicodedata.name(c, "").startswith(("CJK", "KANGXI")) or c in "々〇"
    if plain in _SCRIPTS:
        return lambda c: unicodedata.name(c, "").startswith(plain.upper())
    return lambda c: True


def _within(ranges: Sequence[tuple[str, str]], ignore_case: bool) -> CharTest:
    """A test for characters in many ranges, which takes the logarithm of their number."""
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
        escaped = self._escaped()
        return self._literal(escaped, ignore_case) if isinstance(escaped, str) else CharSet(escaped)

    def _escaped(self) -> str | CharTest:
        """After a backslash: a character, or a class of characters."""
        char = self.take()
        if char.lower() in _CLASS_ESCAPES:
            test = _property(_CLASS_ESCAPES[char.lower()])
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
            if char == "x" and self.skip("{"):
                digits = self.until("}")
            else:
                digits = self.peek(4 if char == "u" else 2)
                self.at += 4 if char == "u" else 2
            try:
                return chr(int(digits, 16))
            except (ValueError, OverflowError):
                raise PatternError(f"it has a bad '\\{char}' before character {self.at}") from None
        if char == "0":
            return "\0"
        if char.isalnum() and char.isascii():
            raise self.unsupported(f"'\\{char}'")
        return char

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
            elif isinstance(item := self._range(), tuple):
                ranges.append(item)
            else:
                tests.append(item)
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


def _max_length(node: Node) -> int:
    if isinstance(node, CharSet):
        return 1
    if isinstance(node, Chain):
        return min(sum(map(_max_length, node.items)), INFINITE)
    if isinstance(node, Alternatives):
        return max(map(_max_length, node.branches))
    return min(node.high * _max_length(node.body), INFINITE) if isinstance(node, Repetition) else 0


def _leaves(node: Node) -> Iterable[CharSet]:
    if isinstance(node, CharSet):
        yield node
    elif isinstance(node, (Repetition, Look)):
        yield from _leaves(node.body)
    elif isinstance(node, (Chain, Alternatives)):
        for child in node.items if isinstance(node, Chain) else node.branches:
            yield from _leaves(child)


class _Judge:
    """Counts the ways in which parts of one pattern can match."""

    def __init__(self, pattern: Pattern):
        self._sample = sorted(_SAMPLE | pattern.named)
        self._known: dict[int, frozenset[str]] = {}
        self._num_tests = 0

    def ways(self, node: Node, *, can_fail: bool) -> int:
        """Ways in which `node` can match from one start, where `can_fail` says that what follows may not match.

        Raises PatternError where there are too many.
        """
        if isinstance(node, (CharSet, Assertion)):
            return 1
        if isinstance(node, Look):
            self.ways(node.body, can_fail=True)  # it consumes nothing, so it runs again at every start
            return 1
        if isinstance(node, Alternatives):
            return self._ways_of_choice(node, can_fail)
        return self._ways_of_chain((node,) if isinstance(node, Repetition) else node.items, can_fail)

    def _ways_of_choice(self, node: Alternatives, can_fail: bool) -> int:
        counts = [self.ways(branch, can_fail=can_fail) for branch in node.branches]
        if not can_fail:
            return max(counts)
        return self._bounded(sum(counts) if self._overlap(node.branches) else max(counts))

    def _ways_of_chain(self, items: tuple[Node, ...], can_fail: bool) -> int:
        product = 1
        scanned: list[frozenset[str]] = []  # the classes of repetitions that can go back
        for index, item in enumerate(items):
            fails = can_fail or any(map(_can_fail, items[index + 1 :]))
            if not isinstance(item, Repetition):
                product *= self.ways(item, can_fail=fails)
            elif item.high > 0:
                product *= self._ways_of_repeat(item, fails)
                if fails and item.high > _LONG:
                    chars = self._chars(item.body)
                    if any(chars & other for other in scanned):
                        raise PatternError("two of its repetitions can share the same characters in many ways")
                    scanned.append(chars)
                    self._check_end(items, index, chars)
            self._bounded(product)
        return product

    def _ways_of_repeat(self, node: Repetition, can_fail: bool) -> int:
        body = node.body
        if isinstance(body, CharSet):
            return node.high - node.low + 1 if can_fail and node.high <= _LONG else 1
        if node.high == 1:
            return self.ways(body, can_fail=can_fail) + (1 if can_fail and node.low == 0 else 0)
        if not can_fail and node.low <= 1:
            self.ways(body, can_fail=False)  # the first sharing of the text among the iterations stays
            return 1
        if self.ways(body, can_fail=True) > 1 or not self._has_one_length(body):
            raise PatternError("a repeated group can match in more than one way")
        return node.high - node.low + 1 if can_fail and node.high <= _LONG else 1

    def _has_one_length(self, body: Node) -> bool:
        """True if the iterations of a repeated group can be told apart in one way only: they have one length, or one
        character at their start or end occurs nowhere else in them."""
        if min_length(body) == _max_length(body) > 0:
            return True
        items = body.items if isinstance(body, Chain) else (body,)
        for mark, rest in ((items[0], items[1:]), (items[-1], items[:-1])) if items else ():
            others = frozenset().union(*(self._chars(item) for item in rest))
            if isinstance(mark, CharSet) and not self._chars(mark) & others:
                return not any(isinstance(item, Alternatives) for item in rest)
        return False

    def _check_end(self, items: tuple[Node, ...], index: int, chars: frozenset[str]) -> None:
        """A repetition that can go back may not run over words and spaces, but from a mark to its closing mark."""
        if not (" " in chars and "e" in chars):
            return
        before, after = items[index - 1] if index else None, items[index + 1] if index + 1 < len(items) else None
        if isinstance(before, CharSet) and isinstance(after, CharSet) and before.literal and after.literal:
            is_marked = all(mark.isascii() and mark.isprintable() for mark in (before.literal, after.literal))
            is_mark = not (before.literal + after.literal).isalnum() and " " not in before.literal + after.literal
            if is_marked and is_mark and before.literal in "([{<\"'`%$#|" and after.literal not in chars:
                return
        raise PatternError("one of its repetitions runs over words and spaces and can fail at the end of the text")

    def _overlap(self, branches: tuple[Node, ...]) -> bool:
        """True if two alternatives can start with the same character; some of them may be empty."""
        seen: set[str] = set()
        for branch in branches:
            first = self._first(branch)
            if first is None or seen & first:
                return True
            seen |= first
        return False

    def _first(self, node: Node) -> frozenset[str] | None:
        """Characters with which a match can start; None if it may be empty."""
        if isinstance(node, CharSet):
            return self._chars(node)
        if isinstance(node, Repetition):
            return self._first(node.body) if node.low else None
        if isinstance(node, Alternatives):
            firsts = [self._first(branch) for branch in node.branches]
            return None if None in firsts else frozenset().union(*(chars for chars in firsts if chars is not None))
        if isinstance(node, Chain):
            starts: frozenset[str] = frozenset()
            for item in node.items:
                if isinstance(item, (Assertion, Look)):
                    continue
                first = self._first(item)
                if first is not None:
                    return starts | first
                starts |= self._chars(item)
        return None

    def _chars(self, node: Node) -> frozenset[str]:
        """Characters of the sample that can be part of a match."""
        if isinstance(node, CharSet):
            if id(node) not in self._known:
                self._num_tests += len(self._sample)
                if self._num_tests > _MAX_TESTS:
                    raise PatternError("it has too many classes of characters")
                self._known[id(node)] = frozenset(filter(node.test, self._sample))
            return self._known[id(node)]
        return frozenset().union(*map(self._chars, _leaves(node)))

    def _bounded(self, ways: int) -> int:
        if ways > MAX_WAYS:
            raise PatternError(f"it has more than {MAX_WAYS} ways of matching from one start")
        return ways


def _can_fail(node: Node) -> bool:
    return isinstance(node, (Assertion, Look)) or min_length(node) > 0
