"""Automata: Python's `re` as the oracle, minimal, and bounded."""

import random
import re

import numpy as np
import pytest

from jaxinfer.grammar import automaton as automaton_module
from jaxinfer.grammar.automaton import Automaton, build_automaton
from jaxinfer.grammar.char_sets import union
from jaxinfer.grammar.nodes import Alternation, Chars, Concatenation, Node, Repeat, Text, TooLargeError
from jaxinfer.grammar.pattern import parse_pattern, pattern_of
from tests.grammar.patterns import COMMON
from tests.timing import processor_seconds

LETTERS = "abé你😀"


def random_tree(rng: random.Random, depth: int) -> Node:
    leaves, inner = ("text", "chars"), ("concatenation", "alternation", "repeat", "repeat")
    kind = rng.choice(leaves if depth == 0 else (*leaves, *inner))
    if kind == "text":
        return Text("".join(rng.choices(LETTERS, k=rng.randint(1, 2))))
    if kind == "chars":
        ends = sorted(rng.sample([96, 97, 98, 99, 232, 233, 0x4F60, 0x4FFF, 0x1F5FF, 0x1F600, 0x10FFFF], 2))
        return Chars(union(((ends[0], ends[1]),)))
    if kind == "repeat":
        least = rng.randint(0, 2)
        return Repeat(random_tree(rng, depth - 1), least, rng.choice([None, least + 1, least + 2]))
    parts = tuple(random_tree(rng, depth - 1) for _ in range(rng.randint(2, 3)))
    if kind == "concatenation":
        return Concatenation(parts)
    return Alternation((*parts, Text("")) if rng.random() < 0.2 else parts)


def texts_of(rng: random.Random, automaton: Automaton, count: int) -> list[str]:
    """Random texts, and random walks of the automaton, some with a character changed."""
    found = ["".join(rng.choices(LETTERS, k=rng.randint(0, 6))) for _ in range(count)]
    for _ in range(count):
        state, data = 0, bytearray()
        for _ in range(30):
            if automaton.is_accepting[state] and rng.random() < 0.3:
                break
            allowed = np.flatnonzero(automaton.next[state] >= 0)
            if not len(allowed):
                break
            data.append(rng.choice(allowed.tolist()))
            state = automaton.next[state, data[-1]]
        text = data.decode(errors="ignore")
        found.append(text)
        if text:
            place = rng.randrange(len(text))
            found.append(text[:place] + rng.choice(LETTERS) + text[place + 1 :])
    return found


def python_pattern(node: Node) -> str:
    """Python writes code points in other ways."""
    return re.sub(r"\\x\{([0-9A-F]+)\}", lambda match: f"\\U{int(match[1], 16):08x}", pattern_of(node))


def ends(node: Node, text: str, starts: frozenset[int]) -> frozenset[int]:
    """Where matches of a tree end that begin at one of `starts`: the definition, without an automaton."""
    if isinstance(node, Text):
        return frozenset(start + len(node.text) for start in starts if text.startswith(node.text, start))
    if isinstance(node, Chars):
        return frozenset(
            start + 1
            for start in starts
            if start < len(text) and any(a <= ord(text[start]) <= b for a, b in node.ranges)
        )
    if isinstance(node, Alternation):
        return frozenset().union(*(ends(option, text, starts) for option in node.options))
    if isinstance(node, Concatenation):
        for part in node.parts:
            starts = ends(part, text, starts)
        return starts
    for _ in range(node.least):
        starts = ends(node.node, text, starts)
    found, reached = starts, starts
    for _ in range(len(text) + 1 if node.most is None else node.most - node.least):
        reached = ends(node.node, text, reached)
        found |= reached
    return found


def check_tree(node: Node, rng: random.Random, count: int = 8) -> None:
    automaton = build_automaton(node)
    for text in texts_of(rng, automaton, count):
        is_match = len(text) in ends(node, text, frozenset([0]))
        assert automaton.accepts(text.encode()) == is_match, (pattern_of(node), text)
    assert_minimal(automaton)


def assert_minimal(automaton: Automaton) -> None:
    """Every state is reached and useful, and no two are equivalent (Moore's algorithm, without its shortcuts)."""
    labels = automaton.is_accepting.astype(int)
    while True:
        rows = [(label, *labels[row], *(row < 0)) for label, row in zip(labels, automaton.next, strict=True)]
        numbers: dict[tuple, int] = {}
        refined = np.array([numbers.setdefault(row, len(numbers)) for row in rows])
        if len(numbers) == labels.max() + 1:
            break
        labels = refined
    assert len(numbers) == automaton.num_states
    reached = {0, *np.unique(automaton.next[automaton.next >= 0]).tolist()}
    assert reached == set(range(automaton.num_states))


def test_random_trees_match_by_definition():
    for seed in range(25):
        rng = random.Random(seed)
        check_tree(random_tree(rng, 3), rng)


@pytest.mark.slow
def test_more_random_trees_match_by_definition():
    for seed in range(25, 600):
        rng = random.Random(seed)
        check_tree(random_tree(rng, rng.randint(2, 4)), rng, 20)


def check_pattern(pattern: str, count: int) -> None:
    node = parse_pattern(pattern)
    automaton, compiled = build_automaton(node), re.compile(python_pattern(node))
    for text in texts_of(random.Random(0), automaton, count):
        assert automaton.accepts(text.encode()) == (compiled.fullmatch(text) is not None), (pattern, text)


def test_patterns_agree_with_python():
    for pattern in COMMON[10:14]:
        check_pattern(pattern, 20)


@pytest.mark.slow
def test_all_patterns_agree_with_python():
    for pattern in COMMON:
        check_pattern(pattern, 200)


def test_every_code_point_is_one_character():
    one = build_automaton(parse_pattern("(?s)."))
    assert one.num_states == 9
    for code in [
        0,
        0x7F,
        0x80,
        0x7FF,
        0x800,
        0xFFF,
        0x1000,
        0xD7FF,
        0xE000,
        0xFFFF,
        0x10000,
        0x3FFFF,
        0x40000,
        0x10FFFF,
    ]:
        assert one.accepts(chr(code).encode())
    for data in (
        b"\x80",
        b"\xc0\x80",
        b"\xc1\xbf",
        b"\xe0\x9f\xbf",
        b"\xed\xa0\x80",
        b"\xf0\x8f\xbf\xbf",
        b"\xf4\x90\x80\x80",
        b"\xf5\x80\x80\x80",
        b"\xc3",
        b"\xff",
        b"",
        b"ab",
    ):
        assert not one.accepts(data)


def test_sets_of_characters_are_exact():
    """Each range of a random set, at its ends, in all lengths of UTF-8."""
    rng = random.Random(1)
    for _ in range(5):
        points = sorted(rng.sample([*range(0x20, 0xD000, 37), *range(0x10000, 0x10FF00, 4111)], 40))
        pairs = zip(points[::2], points[1::2], strict=True)
        kept = [(start, end) for start, end in pairs if not start < 0xD800 <= end]
        automaton = build_automaton(Chars(tuple(kept)))
        for code in {code for a, b in kept for code in (a - 1, a, b, b + 1, (a + b) // 2)}:
            assert automaton.accepts(chr(code).encode()) == any(a <= code <= b for a, b in kept)


@pytest.mark.parametrize(
    ("pattern", "num_states"),
    [
        ("[ab]{0,1000}", 1001),
        pytest.param("a{1000}", 1001, marks=pytest.mark.slow),
        pytest.param("a{0,8000}", 8001, marks=pytest.mark.slow),
        pytest.param("([ab]{0,8000}c)*", 8001, marks=pytest.mark.slow),
        pytest.param("([ab]{0,500}c)*", 501, marks=pytest.mark.slow),
        pytest.param("(a|b)*a(a|b){8}", 512, marks=pytest.mark.slow),
        pytest.param(r"\w{1,12}", None, marks=pytest.mark.slow),
        pytest.param("|".join(f"{number * 7919 % 10007}" for number in range(1000)), None, marks=pytest.mark.slow),
    ],
)
def test_a_thousand_states_take_less_than_a_second(pattern, num_states):
    node = parse_pattern(pattern)
    with processor_seconds(less_than=1):
        automaton = build_automaton(node)
    assert num_states in (None, automaton.num_states)


def deep(levels: int) -> Node:
    node: Node = Text("a")
    for _ in range(levels):
        node = Repeat(Concatenation((node, Text("b"))), 0, 1)
    return node


def shared(levels: int) -> Node:
    node: Node = Text("a")
    for _ in range(levels):
        node = Concatenation((node, node))
    return node


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: parse_pattern("((((a{99}){99}){99}){99}){99}"), "more than 100000 characters"),
        (lambda: parse_pattern("a{4294967295}"), "more than 100000 characters"),
        (lambda: parse_pattern("(a|b)*a(a|b){20}"), "more than 16384 states"),
        (lambda: deep(5000), "nodes deep"),
        (lambda: shared(60), "more than 100000 characters"),
        pytest.param(
            lambda: Alternation(tuple(Text(f"option {number}") for number in range(100_000))),
            "more than 100000 characters",
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda: parse_pattern("(a?){5000}"), "steps", marks=pytest.mark.slow),
        pytest.param(lambda: parse_pattern("(.*a){60}.*(b.{30}|c.{40})"), "steps|states", marks=pytest.mark.slow),
        pytest.param(lambda: parse_pattern(r"\w{1,300}"), "more than 8192 states", marks=pytest.mark.slow),
    ],
)
def test_what_is_too_large_is_refused_within_a_second(make, message):
    node = make()
    with processor_seconds(less_than=1), pytest.raises(TooLargeError, match=message):
        build_automaton(node)


def test_an_empty_set_of_characters_matches_nothing():
    with pytest.raises(ValueError, match="no text is in the language"):
        build_automaton(Concatenation((Text("a"), Chars(()))))
    assert build_automaton(Alternation((Chars(()), Text("a")))).num_states == 2
    assert build_automaton(Repeat(Chars(()), 0, None)).num_states == 1


def test_a_smaller_limit_is_kept_to():
    node = parse_pattern("[a-z]{1,20}")
    assert build_automaton(node, max_states=21).num_states == 21
    with pytest.raises(TooLargeError, match="more than 20 states"):
        build_automaton(node, max_states=20)
    assert automaton_module.MAX_STATES >= 4096
