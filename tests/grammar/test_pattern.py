"""Patterns: the same texts match as in llguidance; what is not supported is named with its place."""

import itertools
import random
import unicodedata

import pytest

from jaxinfer.grammar import char_sets
from jaxinfer.grammar.automaton import build_automaton
from jaxinfer.grammar.nodes import Alternation, Chars, Concatenation, Repeat, Text
from jaxinfer.grammar.pattern import UnsupportedPattern, parse_pattern, pattern_of
from tests.grammar.llguidance_oracle import accepts, matcher
from tests.grammar.patterns import COMMON
from tests.timing import processor_seconds

# Patterns, and texts of which some match.
DIALECT = (
    ("a.c", "a\nc", "a\rc", "aéc", "a\U0010ffffc"),
    ("(?s)a.c", "a\nc"),
    (r"\d", "5", "٣", "x"),
    (r"\D\W\S", "é☃x", "5aa", "é☃ "),
    (r"\w", "é", "_", "-", "\u200d", "ⓐ", "\u0301"),
    (r"\s", "\u00a0", "\x0b", "\x1c", "\x85", "\u3000"),
    (r"\n\t\r\f\v\a\x41\x{42}\u0043\u{44}\U00000045\.\/\-\_\ \"", '\n\t\r\f\v\aABCDE./-_ "'),
    (r"^ab$", "ab", "xab", "ab\n"),
    (r"\Aab\z", "ab"),
    ("^^(^a|b$)$$", "a", "b"),
    ("(?:^a$)|b", "a", "b"),
    ("^$", "", "\n"),
    ("a|^b|c$", "a", "b", "c", "xb"),
    ("a||b", "", "a", "b"),
    ("()", "", "a"),
    ("a{2}b{1,}c{0,2}", "aab", "aabbcc", "aabccc", "ab"),
    ("a{ 2 , 3 }b{01}", "aab", "aaab", "aaaab"),
    ("a{0}b", "b", "ab"),
    ("a{1,2}{3}", "aaa", "aaaaaa", "aa", "aaaaaaa"),
    ("(a*)*b**c++d?+e*?", "aabbc", "cdeee", "b"),
    ("(|a)+(a{0})*", "", "aaa"),
    ("}]", "}]"),
    ("[]a][^]a]", "]b", "a]", "a[", "]\n"),
    ("[a-c&&b-z]", "a", "b", "c", "d"),
    ("[a-z--c-f~~e-g]", "b", "c", "d", "e", "f", "g"),
    ("[^a-z&&[a-f]]", "b", "z", "1"),
    ("[a&&&b]?", "", "a", "&"),
    ("[--]", "-"),
    ("[---]", "-"),
    ("[a-]]", "-]", "a]"),
    ("[]-a]", "]", "-", "a", "^"),
    (r"[\w-]", "-", "é"),
    ("[a-z-9]", "-", "5", "9"),
    ("[a--]?", "", "a", "-"),
    (r"[\]\[\^\-\\]", "]", "[", "^", "-", "\\", "a"),
    ("[[a-c][e-g]]", "b", "d", "f"),
    ("[[:alpha:]][[:^space:]]", "a1", "é1", "a "),
    ("[[:foo:]][:a]", "f:", "o:", "ga"),
    ("[a&b][a~b]", "&~", "ab"),
    ("a&&b~", "a&&b~"),
    ("(?i)kS", "ks", "KſS", "\u212aſ", "kx"),
    ("(?i)[^k]", "K", "\u212a", "a"),
    ("(?i)ß[Σ]", "ẞς", "ßσ", "ssσ"),
    ("(?i)İıΐﬅ", "İıΐﬆ", "iıΐﬅ", "İi\u1fd3ﬅ"),
    (r"(?i)\p{Lu}", "a", "1"),
    ("(?i:a)b", "Ab", "AB"),
    ("a(?i)|b", "B", "A"),
    ("((?i)a)b(?i-s:c)(?-i)d", "AbCd", "Abcd", "AbcD"),
    ("(?U)a*(?u)b", "aab"),
    ("(?P<n>a)(?<m.1>b)(?:c)", "abc"),
    (r"\p{L}\pN\P{L}\p{Zs}", "é5- ", "a٣5 ", "55- "),
    ("[😀-😂]é", "😁é"),
    ("# %'\"/", "# %'\"/"),
)


def test_the_same_texts_match_as_in_llguidance():
    for pattern, *texts in DIALECT:
        node = parse_pattern(pattern)
        automaton, written = build_automaton(node), pattern_of(node)
        for text in texts:
            expected = accepts(pattern, text)
            assert automaton.accepts(text.encode()) == expected, (pattern, text)
            assert accepts(written, text) == expected, (pattern, text)


PIECES = (
    *(
        "a",
        "b",
        "é",
        "-",
        "]",
        "[",
        "[^",
        "(",
        "(?:",
        "(?i)",
        "(?s:",
        ")",
        "|",
        "*",
        "+",
        "?",
        "{2}",
        "{1,}",
        "{,3}",
        "{",
        "}",
    ),
    *(
        ".",
        "^",
        "$",
        "\\d",
        "\\w",
        "\\s",
        "\\S",
        "\\-",
        "\\]",
        "\\x61",
        "\\b",
        "&&",
        "--",
        "~~",
        ":alpha:]",
        "a-c",
        "\\p{Lu}",
        "\\",
    ),
)


def check_random_pattern(seed: int) -> str:
    """Compares with llguidance; returns what became of it."""
    rng = random.Random(seed)
    pattern = "".join(rng.choices(PIECES, k=rng.randint(1, 9)))
    try:
        automaton = build_automaton(parse_pattern(pattern))
    except UnsupportedPattern:
        return "unsupported"
    except ValueError as error:
        if "no text matches" in str(error) or "backslash ends" in str(error):
            return "empty"
        with pytest.raises(ValueError, match="regex"):
            matcher(pattern)
        return "refused"
    for _ in range(12):
        text = "".join(rng.choices("abcéA-]k \n1", k=rng.randint(0, 4)))
        assert automaton.accepts(text.encode()) == accepts(pattern, text), (pattern, text)
    return "compared"


def test_random_patterns_mean_what_they_mean_in_llguidance():
    found = [check_random_pattern(seed) for seed in range(100)]
    assert found.count("compared") > 10
    assert found.count("refused") > 20


@pytest.mark.slow
def test_more_random_patterns_mean_what_they_mean_in_llguidance():
    for seed in range(100, 4_000):
        check_random_pattern(seed)


UNSUPPORTED = (
    ("ab(?=c)", 2),
    ("a(?<!b)", 1),
    (r"(a)\1", 3),
    (r"\bfoo", 0),
    (r"foo\Z", 3),
    (r"\<a", 0),
    ("a$b", 1),
    ("x?^a", 2),
    ("(^a)+", 4),
    ("(?m)^a", 4),
    ("(?x) a", 0),
    ("(?-u)a", 0),
    ("(?R).", 0),
    (r"ab\p{Greek}", 2),
    (r"\p{Cs}", 0),
    ("(?>a)", 0),
    ("(?#x)a", 0),
    (r"\é", 0),
    (r"\Qa", 0),
    (r"\101", 0),
)


def test_what_is_not_supported_is_named_with_its_place():
    for pattern, place in UNSUPPORTED:
        with pytest.raises(UnsupportedPattern, match=f"at character {place} of the pattern"):
            parse_pattern(pattern)


REFUSED = (
    ("a(b", "a group is not closed, at character 1"),
    ("a)b", "closes no group, at character 1"),
    ("ab[c", "a class is not closed, at character 2"),
    ("[]", "a class is not closed"),
    ("*a", "nothing to repeat"),
    ("a|*", "nothing to repeat"),
    ("(?i)*", "nothing to repeat"),
    ("a{", "no repetition"),
    ("a{,2}", "no repetition"),
    ("a{2,1}", "no repetition"),
    ("a{4294967296}", "no repetition"),
    ("{", "nothing to repeat"),
    ("[b-a]", "a range has ends"),
    (r"[a-\d]", "a range has ends"),
    (r"\x4", "no code point"),
    (r"\x{110000}", "no code point"),
    (r"\u{d800}", "no code point"),
    ("a\ud800", "a lone surrogate"),
    ("\\", "a backslash ends the pattern"),
    ("(?ii)a", "no right flags"),
    ("(?i-)a", "no right flags"),
    ("(?P<n>a)(?P<n>b)", "a second group is named 'n'"),
    (r"[^\x00-\x{10FFFF}]", "no text matches"),
    (r"a[a&&b]", "no text matches"),
    ("a" * 20_000, "at most 16384"),
    ("(" * 200 + ")" * 200, "groups are nested more than 100"),
    ("a" + "{2}" * 200, "repetitions are nested more than 100"),
    ("[" * 60 + "a" + "]" * 60, "classes are nested more than 32"),
    ("(" * 16_000, "groups are nested more than 100"),
    (r"[\w\W]" * 2500, "ranges in all"),
    ("(?i)[a-z\\w]" * 1000, "ranges in all"),
)


def test_wrong_and_hostile_patterns_are_refused():
    for pattern, message in REFUSED:
        with processor_seconds(less_than=1), pytest.raises(ValueError, match=message):
            parse_pattern(pattern)


SEARCHES = (
    ("b", {"abc": True, "b": True, "ac": False, "a\nb\n": True}),
    ("^b", {"bc": True, "ab": False}),
    ("b$", {"ab": True, "ba": False, "b\n": False}),
    ("^b$", {"b": True, "bb": False}),
    ("^a|b$|c", {"ax": True, "xb": True, "xcx": True, "xa": False, "bx": False}),
    ("(^a|b)c", {"acx": True, "xac": False, "xbcx": True}),
    ("x(a|b$)", {"xxay": True, "yxb": True, "xby": False}),
    ("^(a|b$)", {"ax": True, "b": True, "bx": False, "xb": False}),
    ("(^a$)|b", {"a": True, "xa": False, "xbx": True}),
    ("(ab){2}", {"xababx": True, "abxab": False}),
    ("", {"": True, "x": True}),
)


def test_a_search_matches_anywhere():
    for pattern, texts in SEARCHES:
        automaton = build_automaton(parse_pattern(pattern, is_search=True))
        assert {text: automaton.accepts(text.encode()) for text in texts} == texts


def test_trees_are_written_as_patterns():
    node = Concatenation(
        (Alternation((Text("a|\n"), Text(""))), Repeat(Text("xy"), 2, None), Repeat(Chars(((45, 45), (93, 93))), 0, 3))
    )
    assert pattern_of(node) == r"(?:a\x7C\x0A|(?:))(?:xy){2,}[\x2D\x5D]{0,3}"
    for pattern in COMMON:
        written = pattern_of(parse_pattern(pattern))
        assert pattern_of(parse_pattern(written)) == written
    with pytest.raises(ValueError, match="more than 500000 characters"):
        pattern_of(parse_pattern(r"\w" * 500))


def check_set(pattern: str, ranges: char_sets.Ranges, codes: list[int]) -> None:
    """Compares with llguidance for assigned characters: its Unicode has more of them than Python's."""
    made = matcher(pattern)
    wrong = [
        chr(code)
        for code in codes
        if not 0xD800 <= code <= 0xDFFF
        and unicodedata.category(chr(code)) != "Cn"
        and (made.validate_tokens(list(data := chr(code).encode())) == len(data)) != char_sets.contains(ranges, code)
    ]
    assert wrong == []


CLASSES = {r"\w": char_sets.word_characters, r"\s": lambda: char_sets.SPACES, r"\d": lambda: char_sets.category("Nd")}


@pytest.mark.parametrize("pattern", CLASSES)
def test_classes_are_those_of_llguidance_at_their_ends(pattern):
    ranges = CLASSES[pattern]()
    codes = {code for start, end in ranges for code in (start - 1, start, end, min(end + 1, 0x10FFFF))}
    check_set(pattern, ranges, sorted(codes - {-1}))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CLASSES, "L", "Lu", "Ll", "Lt", "M", "N", "P", "S", "Z", "Zs", "Cc"])
def test_classes_are_those_of_llguidance(name):
    ranges = CLASSES[name]() if name in CLASSES else char_sets.category(name)
    check_set(name if name in CLASSES else rf"\p{{{name}}}", ranges, list(range(0x110000)))


@pytest.mark.slow
def test_case_is_ignored_as_in_llguidance():
    wrong = []
    for code in range(0x1F000):
        char = chr(code)
        if unicodedata.category(char) in ("Lu", "Ll", "Lt", "Mn", "Nl", "So") and len(char.casefold()) < 4:
            made = matcher(f"(?i){char}")
            ranges = char_sets.ignoring_case(((code, code),))
            others = {
                *char.lower(),
                *char.upper(),
                *char.casefold(),
                *(chr(c) for a, b in ranges for c in range(a, b + 1)),
            }
            for other in others:
                data = list(other.encode())
                if (made.validate_tokens(data) == len(data)) != char_sets.contains(ranges, ord(other)):
                    wrong.append((char, other))
    # Cased letters that Python's Unicode lacks fold in llguidance's to ones that it has.
    assert wrong == []


def test_sets_agree_with_python_sets():
    rng = random.Random(3)
    bounds = [0, 5, 60, 0xD7FF, 0xE000, 0x10FFFF]
    points = sorted({min(max(bound + delta, 0), 0x10FFFF) for bound in bounds for delta in range(-4, 9)})
    points = [point for point in points if not 0xD800 <= point <= 0xDFFF]

    def drawn() -> char_sets.Ranges:
        return char_sets.union(tuple(sorted(rng.sample(points, 2))) for _ in range(rng.randint(0, 4)))  # pyright: ignore

    def members(ranges: char_sets.Ranges) -> set[int]:
        return {point for point in points if any(start <= point <= end for start, end in ranges)}

    for _ in range(200):
        one, other = drawn(), drawn()
        assert members(char_sets.union(one, other)) == members(one) | members(other)
        assert members(char_sets.intersection(one, other)) == members(one) & members(other)
        assert members(char_sets.difference(one, other)) == members(one) - members(other)
        assert members(char_sets.complement(one)) == set(points) - members(one)
        for found in (char_sets.union(one, other), char_sets.complement(one)):
            assert all(a <= b for a, b in found)
            assert all(left[1] < right[0] for left, right in itertools.pairwise(found))
            assert not any(start <= 0xDFFF and end >= 0xD800 for start, end in found)
