"""Positions of strings: found at once or one by one, the places are the same."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints_convert.gguf.file import string_starts


def stored(texts):
    return b"".join(struct.pack("<Q", len(text)) + text for text in texts)


def one_by_one(raw, limit):
    starts, position = [], 0
    while len(starts) < limit and position + 8 <= len(raw):
        starts.append(position)
        position += 8 + int.from_bytes(raw[position : position + 8], "little")
    return starts, position


# Zeros within texts look like lengths.
TEXTS = st.lists(
    st.one_of(
        st.binary(max_size=9),
        st.lists(st.sampled_from([0, 1, 8, 255]), max_size=20).map(bytes),
        st.integers(250, 600).map(lambda size: b"x" * size),
        st.integers(1, 30).map(lambda size: struct.pack("<Q", size) * 3),
    ),
    max_size=200,
)


@given(TEXTS, st.integers(0, 250), st.integers(0, 30), st.binary(max_size=40))
def test_places_are_those_of_a_loop(texts, limit, num_cut, rest):
    raw = stored(texts) + rest
    raw = raw[: max(len(raw) - num_cut, 0)]
    starts, after = string_starts(raw, limit)
    assert (starts.tolist(), after) == one_by_one(raw, limit)


@pytest.mark.parametrize("text", [b"", b"x" * 256, struct.pack("<Q", 8)], ids=["empty", "long", "of lengths"])
def test_many_of_an_unlikely_kind(text):
    raw = stored([text] * 10_000)
    starts, after = string_starts(raw, 10_000)
    assert starts.tolist() == list(range(0, len(raw), len(text) + 8))
    assert after == len(raw)


def test_a_length_beyond_any_file():
    starts, after = string_starts(stored([b"ab"]) + b"\xff" * 8, 5)
    assert (starts.tolist(), after) == ([0, 10], 18 + 2**64 - 1)
