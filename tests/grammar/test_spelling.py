"""One spelling for a forced text: by the tokenizer's own tokens, or the longest ones."""

import pytest

from jaxinfer.grammar.spelling import MAX_FORCED, Spelling
from jaxinfer.grammar.vocabulary import Vocabulary

TOKENS = (None, b"a", b"b", b"ab", b"abc", b"b", b"abcde", b"c", b"\xc3", b"\xa9")


@pytest.fixture
def spelling():
    pieces = {"abd": [3], "abc": [1, 2, 7], "b": [5], "xyz": [9]}
    return Spelling(Vocabulary(TOKENS, (0,)), lambda text: pieces.get(text, []))


@pytest.mark.parametrize(
    ("forced", "first", "tokens"),
    [
        (b"abd", 3, {3}),  # the tokenizer's
        (b"abc", 1, {1, 6}),  # and what holds all of it and more
        (b"b", 2, {2, 5}),  # two tokens of one text are one spelling
        (b"ab", 3, {3, 4, 6}),  # no token of the tokenizer's: the longest
        (b"\xc3", 8, {8}),  # ends within a character
        (b"xyz", -1, set()),  # no token begins it
        (b"", -1, set()),
        (b"a" * MAX_FORCED, 1, {1}),
    ],
)
def test_spellings(spelling, forced, first, tokens):
    assert spelling.first(forced) == first
    assert spelling.tokens(forced) == tokens
