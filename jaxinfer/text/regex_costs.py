"""Whether a pattern of a tokenizer.json can take long, decided from its form.

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

from collections.abc import Iterable

from jaxinfer.text.patterns import (
    INFINITE,
    Alternatives,
    Assertion,
    Chain,
    CharSet,
    Look,
    Node,
    Pattern,
    PatternError,
    Repetition,
    parse,
)

MAX_WAYS = 4096
"""Ways of matching from one start, without unbounded repetitions. Patterns of known models have up to 24."""
_MAX_TESTS = 2_000_000
_LONG = 64
"""A bounded repetition of more is judged as an unbounded one."""

_SAMPLE = frozenset(chr(code) for code in range(128)) | frozenset(
    "\x85\xa0µª²½éÉßǅʰ́ΑαЖж֊אابकाก中々あア한①Ⅷ٣​‘’“”…€™♥＋Ａａ　﷼🎉\u2028\u20dd\ue000\U0001d400\U00020000"
)


def check_cost(source: str) -> Pattern:
    """The parsed pattern. Raises PatternError if it is not supported, or takes more than linear time on plain text."""
    pattern = parse(source)
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
    """Whether one of the characters can be part of a match."""
    chars = tuple(chars)
    return any(leaf.test(char) for leaf in _leaves(node) for char in chars)


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
        """Whether the iterations of a repeated group can be told apart in one way only: they have one length, or one
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
        """Whether two alternatives can start with the same character; some of them may be empty."""
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
            return None if None in firsts else frozenset().union(*(one for one in firsts if one is not None))
        if isinstance(node, Chain):
            found: frozenset[str] = frozenset()
            for item in node.items:
                if isinstance(item, (Assertion, Look)):
                    continue
                first = self._first(item)
                if first is not None:
                    return found | first
                found |= self._chars(item)
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
