"""The needle task's texts and scores."""

import numpy as np
import pytest

from jaxinfer.measure.kv_report.needle import Needle, make_needles, needle_lines, score_copy


def encode(text: str) -> list[int]:
    return list(text.encode())


LINES = [(" ab", "cd"), (" ef", "gh")]
FILLER = list(range(200, 250))


def positions(tokens: list[int], part: list[int]) -> list[int]:
    return [place for place in range(len(tokens)) if tokens[place : place + len(part)] == part]


def test_lines_are_different_and_the_same_each_time():
    lines = needle_lines(40)
    assert lines == needle_lines(40)
    assert len({given for given, _ in lines}) == 40


def test_a_line_lies_at_its_depth_and_at_the_end():
    needles = make_needles(encode, [1], FILLER, 64, LINES, (0.0, 0.5, 1.0))
    assert [needle.depth for needle in needles] == [None, None, 0.0, 0.0, 0.5, 0.5, 1.0, 1.0]
    assert {len(needle.tokens) for needle in needles} == {64}
    room = 64 - 1 - 7 - 6  # a line with a newline before and after it, the copy without the latter, and the first token
    for number, needle in enumerate(needles):
        line = encode("\n" + "".join(LINES[number % 2]))
        first = [] if needle.depth is None else [1 + round(needle.depth * room)]
        assert positions(needle.tokens, line) == [*first, 64 - len(line)]
        assert needle.num_copied == 2
        assert needle.tokens[0] == 1
        if needle.depth != 1:
            assert needle.tokens[-20:] == needles[number % 2].tokens[-20:]  # as without the first occurrence


def test_a_text_that_is_too_short_has_none():
    assert make_needles(encode, [], FILLER, 23, LINES) == []
    assert make_needles(encode, [], FILLER, 24, LINES) != []


def test_a_copy_is_right_if_each_token_is_the_most_probable():
    needle = Needle([5, 6, 0, 2], 2, 0.5)
    logits = np.log(np.array([[0.5, 0.2, 0.3], [0.1, 0.2, 0.7]]))
    is_copied, mean = score_copy(needle, logits)
    assert is_copied
    assert mean == pytest.approx(np.log([0.5, 0.7]).mean())
    is_copied, mean = score_copy(needle, logits[::-1])
    assert not is_copied
    assert mean == pytest.approx(np.log([0.1, 0.3]).mean())
