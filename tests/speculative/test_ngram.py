"""Drafts that are looked up, against a plain search."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.sampling import make_batch, make_state
from jaxinfer.speculative import DraftRows, DraftSlots, NgramProposer, chain, propose_ngram

LENGTH, COUNT, VOCAB = 40, 5, 6
SETTINGS = NgramProposer(min_match=2, max_match=4)


@jax.jit
def propose(sequence, positions, num_nodes):
    num_slots = sequence.shape[0]
    nothing = make_batch([None] * num_slots, VOCAB), make_state([None] * num_slots, VOCAB)
    rows = DraftRows(positions, num_nodes > 0, num_nodes, jnp.zeros((num_slots, 1), jnp.int32), *nothing)
    draft = DraftSlots(sequence, jnp.zeros((num_slots,), jnp.int32))
    return propose_ngram(SETTINGS, draft, rows, chain(COUNT))


def search(tokens: list[int]) -> list[int]:
    """Tokens after the longest earlier match of the end, the latest of several; none where too few match."""
    best, place = 0, -1
    for end in range(1, len(tokens)):
        length = 0
        while length < SETTINGS.max_match and length < end and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= best and length > 0:
            best, place = length, end
    if best < SETTINGS.min_match:
        return []
    longer = list(tokens)
    while len(longer) < len(tokens) + COUNT:
        longer.append(longer[place + len(longer) - len(tokens)])
    return longer[len(tokens) :]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=LENGTH - COUNT - 1), min_size=3, max_size=3))
def test_it_finds_what_a_search_finds(rows):
    sequence = np.full((3, LENGTH), VOCAB - 1, np.int32)  # what stands beyond the end is not looked at
    for row, tokens in zip(sequence, rows, strict=True):
        row[: len(tokens)] = tokens
    positions = np.array([len(tokens) - 1 for tokens in rows], np.int32)
    found = jax.device_get(propose(sequence, positions, np.full(3, COUNT + 1, np.int32)))
    for number, tokens in enumerate(rows):
        expected = search(tokens)
        assert found.num_nodes[number] == (COUNT + 1 if expected else 1)
        assert found.tokens[number, 0] == tokens[-1]
        if expected:
            assert found.tokens[number, 1:].tolist() == expected


@pytest.mark.parametrize("limit", [1, 3])
def test_no_row_gets_more_than_it_may_use(limit):
    sequence = np.tile(np.array([1, 2, 3], np.int32), (1, 14))[:, :LENGTH]
    found = jax.device_get(propose(sequence, np.array([20], np.int32), np.array([limit], np.int32)))
    assert found.num_nodes.tolist() == [limit]
