"""Rows for heads: texts that repeat themselves are cut, packing loses nothing, vocabularies are what the texts have."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.training.acceptance import simulate_drafts
from jaxinfer.training.head_data import (
    LINE,
    MAX_PROMPT,
    MAX_TEXT_PROMPT,
    MIN_ANSWER,
    OWN_TEMPERATURE,
    HeadTextOptions,
    answers,
    own_prompts,
)
from jaxinfer.training.head_rows import (
    DraftedText,
    chosen_anchors,
    cut_repeats,
    draft_vocabulary,
    index_of,
    pack,
    pieces,
    written_texts,
)
from jaxinfer.training.texts import NO_TOKEN, TargetTextRequest


def text_of(size: int, first: int = 1, start: int = 0) -> DraftedText:
    return DraftedText(np.arange(start, start + size, dtype=np.int32), first)


@given(st.lists(st.integers(3, 12), min_size=1, max_size=12), st.booleans())
def test_packed_rows_have_each_text_once(sizes, is_packed):
    texts = [text_of(size, 2, 100 * number) for number, size in enumerate(sizes)]
    rows = pack(texts, 12, 0.25, is_packed=is_packed)
    found = []
    for row in range(len(rows)):
        for number in range(rows.texts[row].max() + 1):
            own = rows.texts[row] == number
            found.append(rows.tokens[row][own].tolist())
            np.testing.assert_array_equal(rows.positions[row][own], np.arange(own.sum()))
            np.testing.assert_array_equal(rows.weights[row][own], [0.25, *[1.0] * (own.sum() - 2), 0.0])
    assert sorted(found) == sorted(text.tokens.tolist() for text in texts)
    assert is_packed or len(rows) == len(texts)
    assert not rows.weights[rows.texts == NO_TOKEN].any()


def test_anchors_are_places_whose_first_draft_counts():
    """Chains begin a place before, blocks at the place after which the first token is said."""
    rows = pack([text_of(6, 3), text_of(4, 1)], 12, 0.0)
    np.testing.assert_array_equal(np.flatnonzero(rows.weights[0]), [2, 3, 4, 6, 7, 8])
    np.testing.assert_array_equal(np.flatnonzero(rows.anchors(0)[0]), [2, 3, 4, 6, 7, 8])
    np.testing.assert_array_equal(np.flatnonzero(rows.anchors(1)[0]), [1, 2, 3, 6, 7])  # not across texts
    chosen = chosen_anchors(rows.anchors(1), 7)
    np.testing.assert_array_equal(chosen, [[1, 2, 3, 6, 7, 12, 12]])
    some = chosen_anchors(rows.anchors(1), 3, np.random.default_rng(0))
    assert len(set(some[0])) == 3
    assert set(some[0]) <= set(chosen[0])


def test_a_text_is_cut_where_it_repeats_itself():
    prompt, run = list(range(50, 70)), list(range(16))
    tokens = np.array([*prompt, *prompt, *run, 40, *run, 41], np.int32)
    cut = cut_repeats(DraftedText(tokens, 20))
    assert cut.tokens.tolist() == [*prompt, *prompt, *run, 40]  # a prompt may be repeated
    whole = DraftedText(tokens[:-2], 20)
    assert cut_repeats(whole) is whole


def test_written_texts_end_where_the_target_ended():
    requests = [TargetTextRequest((1, 2), 4, 0.0, 0), TargetTextRequest((3,), 4, 0.0, 1)]
    rows = np.array([[1, 2, 5, 6, 7, NO_TOKEN], [3, 4, *[NO_TOKEN] * 4]], np.int32)
    [text] = written_texts(requests, rows)  # an answer of one token leaves nothing to draft
    assert (text.tokens.tolist(), text.first) == ([1, 2, 5, 6, 7], 2)


def test_documents_are_cut_in_pieces():
    found = pieces([np.arange(10), np.arange(2)], 4)
    assert [piece.tokens.tolist() for piece in found] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_draft_vocabulary_is_the_most_frequent_tokens_of_the_answers():
    texts = [DraftedText(np.array([9, 9, 9, 4, 4, 7, 2]), 3), DraftedText(np.array([8, 7, 7]), 1)]
    tokens = draft_vocabulary(texts, 3, 10)
    np.testing.assert_array_equal(tokens, [2, 4, 7])
    np.testing.assert_array_equal(index_of(tokens, 10), [3, 3, 0, 3, 1, 3, 3, 2, 3, 3])
    with pytest.raises(ValueError, match="a draft vocabulary of 11 tokens is more than the target's 10"):
        draft_vocabulary(texts, 11, 10)


def test_simulated_rounds_by_hand():
    """A round accepts the run of right drafts, and the target adds a token."""
    agrees = np.zeros((5, 3), bool)
    agrees[0, :2] = True  # accepts 2, goes on behind the token after them
    agrees[3, 0] = agrees[3, 1] = True  # two tokens are left, both are accepted
    found = simulate_drafts([agrees], 0.5)
    assert (found.num_rounds, found.num_accepted, found.num_proposed, found.num_tokens) == (2, 4, 5, 5)
    assert found.by_position == (1.0, 1.0, 0.0)


def test_prompts_of_the_target_are_those_that_end_each_once(tmp_path):
    """After beginnings in turn. A sample that ran out of room, a repeated and an empty one are left out; a second run
    asks for nothing."""
    said = [[5, 6], [7] * 63, [5, 6], [8, 9, 10], [], [7] * 65, [7] * 64, [4], [5, 6]]
    beginnings = [[], [3], [2] * LINE]
    asked = []

    def generate(requests):
        asked.extend(requests)
        return [said[number] for number in range(len(requests))]

    options = HeadTextOptions(length=128, seed=3)
    arguments = beginnings, [1, 2, 3], len(said), generate, options, tmp_path
    own = [[5, 6], [2] * LINE + [5, 6], [8, 9, 10], [2] * LINE + [7] * 65, [3, 4]]
    for _ in range(2):
        assert own_prompts(*arguments, target="t", show=False) == own
    assert len(asked) == len(said)
    assert len({request.seed for request in asked}) == len(said)
    assert [request.prompt[3:] for request in asked] == [tuple(part) for part in beginnings] * 3
    most = min(MAX_TEXT_PROMPT, 128 - 3 - MIN_ANSWER)
    assert [request.num_tokens for request in asked] == [MAX_PROMPT, MAX_PROMPT - 1, most - LINE] * 3
    assert all(request.temperature == OWN_TEMPERATURE and not request.ignore_eos for request in asked)
    with pytest.raises(ValueError, match="is of a run with target='t', not 'u'"):
        own_prompts(*arguments, target="u", show=False)
    with pytest.raises(ValueError, match="is of a run with header="):
        own_prompts(beginnings[:2], *arguments[1:], target="t", show=False)
    with pytest.raises(ValueError, match="1 of 2 prompts that the model wrote itself ended within 64 tokens"):
        own_prompts(beginnings, [1, 2, 3], 2, generate, options, tmp_path / "few", target="t", show=False)
    with pytest.raises(ValueError, match="no room for 110 of a chat template"):
        own_prompts(
            [[]], range(110), 2, generate, HeadTextOptions(length=120), tmp_path / "long", target="t", show=False
        )


def test_an_answer_has_at_most_so_many_tokens(tmp_path):
    asked = []

    def generate(requests):
        asked.extend(requests)
        return [[5] * request.num_tokens for request in requests]

    options = HeadTextOptions(length=32, answer_tokens=9, held_out_texts=1)
    prompts = [[number] * (3 * number) for number in range(1, 9)]
    answers(prompts, generate, options, tmp_path, target="t", show=False)
    assert sorted(request.num_tokens for request in asked) == [8] + [9] * 7
    with pytest.raises(ValueError, match="answer_tokens must be at least 2, got 1"):
        HeadTextOptions(answer_tokens=1)
