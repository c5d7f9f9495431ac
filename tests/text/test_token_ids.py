"""Token ids of prompts: integers only, with the position of what is none."""

import re

import numpy as np
import pytest

from jaxinfer.text import read_token_ids


@pytest.mark.parametrize(
    "prompt", [[3, 4], (3, 4), np.array([3, 4]), np.array([3, 4], np.uint8), [np.int32(3), 4], iter([3, 4])]
)
def test_integers_are_ids(prompt):
    ids = read_token_ids(prompt, 5)
    assert ids == [3, 4]
    assert {type(one) for one in ids} == {int}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([True], "the prompt has True at position 0, which is no token id: ids are integers"),
        ([1.0], "has 1.0 at position 0"),
        ([1, 2, "3"], "has '3' at position 2"),
        ([None], "has None at position 0"),
        ([1, np.float32(2)], r"has np.float32\(2.0\) at position 1"),
        ([np.bool_(True)], r"has np.True_ at position 0"),
        (np.array([1.0]), "has 1.0 at position 0"),
        (np.array([False]), "has False at position 0"),
        (np.array([[1, 2]]), r"has \[1, 2\] at position 0"),
        ([[1, 2]], r"has \[1, 2\] at position 0"),
        (5, "a prompt is a text or a list of token ids, got 5"),
        (b"ab", "a prompt is a text or a list of token ids, got b'ab'"),
        ({1: 2}, "a prompt is a text or a list of token ids"),
        ([1, 7], "token id 7 is outside the vocabulary of 5, at position 1"),
        ([-1], "token id -1 is outside the vocabulary of 5, at position 0"),
        ([10**5000], "token id an integer of 16610 bits is outside"),
    ],
)
def test_others_are_refused(prompt, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_token_ids(prompt, 5)
    assert len(re.sub("e", "", str(caught.value))) < 120
