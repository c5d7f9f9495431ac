"""Stop strings: the streamed text equals the whole text cut at the first stop, whatever the pieces."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.text import StopResult, StopStringMatcher

FUZZ = settings(max_examples=150, derandomize=True, deadline=None)
SMALL = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


def cut_whole(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """Oracle: try every end from left to right, longest stop first."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include_stop else end - len(stop)], stop
    return text, None


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


def stream(matcher: StopStringMatcher, pieces: list[str]) -> tuple[str, str | None]:
    results = [matcher.feed(piece) for piece in pieces]
    matched = results[-1].matched if results else None
    return "".join(result.text for result in results) + matcher.flush(), matched


@FUZZ
@given(SMALL, STOPS, st.lists(st.integers(0, 30), max_size=8), st.booleans())
def test_streamed_equals_whole(text, stops, cuts, include_stop):
    matcher = StopStringMatcher(stops, include_stop)
    assert stream(matcher, pieces_of(text, cuts)) == cut_whole(text, stops, include_stop)
    assert matcher.matched == cut_whole(text, stops, include_stop)[1]


@FUZZ
@given(SMALL, STOPS)
def test_holds_back_only_what_may_become_a_stop(text, stops):
    matcher, sent = StopStringMatcher(stops), ""
    for end, char in enumerate(text, start=1):
        result = matcher.feed(char)
        sent += result.text
        if result.matched is not None:
            break
        held = text[len(sent) : end]
        longest = max((n for stop in stops for n in range(len(stop)) if text[:end].endswith(stop[:n])), default=0)
        assert len(held) == longest


def test_a_matcher_that_holds_nothing_back_is_caught():
    """Inverse test: the comparison fails for a matcher that searches each piece by itself."""
    pieces = pieces_of("organ gani zation", [7, 9])
    naive = []
    for piece in pieces:
        if "gani" in piece:
            break
        naive.append(piece)
    assert "".join(naive) != cut_whole("organ gani zation", ["gani"], False)[0]
    assert stream(StopStringMatcher(["gani"]), pieces) == ("organ ", "gani")


def test_stop_inside_a_word_and_across_pieces():
    assert stream(StopStringMatcher(["gani"]), [" or", "gan", "ization"]) == (" or", "gani")
    assert StopStringMatcher(["gani"]).feed(" organization") == StopResult(" or", "gani")


def test_nothing_after_the_stop_is_sent():
    matcher = StopStringMatcher(["\n\n"], include_stop=True)
    assert matcher.feed("a\n\nb") == StopResult("a\n\n", "\n\n")
    assert matcher.feed("c") == StopResult("", "\n\n")
    assert matcher.flush() == ""


def test_one_string_is_one_stop_and_no_stop_holds_nothing():
    assert StopStringMatcher("ab").feed("xaby") == StopResult("x", "ab")
    assert StopStringMatcher([]).feed("xaby") == StopResult("xaby", None)


def test_limits_say_their_numbers():
    with pytest.raises(ValueError, match="17 stop strings were given; at most 16"):
        StopStringMatcher(["a"] * 17)
    with pytest.raises(ValueError, match=r"stop\[1\] has 1025 characters; 1 to 1024"):
        StopStringMatcher(["a", "b" * 1025])
    with pytest.raises(ValueError, match=r"stop\[0\] has 0 characters"):
        StopStringMatcher([""])
    with pytest.raises(ValueError, match=r"stop\[0\] must be a string, not int"):
        StopStringMatcher([3])
    StopStringMatcher(["a" * 1024] * 16)
