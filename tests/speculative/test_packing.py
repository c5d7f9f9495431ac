"""Rows of a pass over drafts of different lengths: properties over drawn lengths and chances."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.speculative.packing import all_rows, packed_rows, within_budget

LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def taken(rows) -> dict[int, tuple[int, int]]:
    """(slot, node) of each row that takes part."""
    starts, counts = np.asarray(rows.starts), np.asarray(rows.num_nodes)
    return {int(starts[slot]) + node: (slot, node) for slot in range(len(counts)) for node in range(int(counts[slot]))}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(0, 4))
def test_each_node_has_one_row(lengths, spare):
    num_nodes = np.array(lengths, np.int32)
    total = int(num_nodes.sum())
    for rows in (packed_rows(num_nodes, max(total + spare, 1)), all_rows(num_nodes, 5)):
        found = taken(rows)
        assert len(found) == total, "no two nodes share a row"
        for row, (slot, node) in found.items():
            assert (int(rows.slots[row]), int(rows.nodes[row])) == (slot, node)
        nodes = np.tile(np.arange(5), (len(lengths), 1))
        places = np.asarray(rows.at(nodes))
        for row, (slot, node) in found.items():
            assert places[slot, node] == row
        assert places.max() < rows.num_rows


@settings(max_examples=60, deadline=None)
@given(st.data(), LENGTHS)
def test_a_budget_goes_to_the_likeliest_drafts(data, lengths):
    num_nodes, most = np.array(lengths, np.int32), 5
    shape = len(lengths) * (most - 1)
    chances = data.draw(st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]), min_size=shape, max_size=shape))
    chances = np.array(chances, np.float32).reshape(len(lengths), most - 1)
    active = int((num_nodes > 0).sum())
    budget = data.draw(st.integers(active, active + shape))
    kept = np.asarray(within_budget(num_nodes, chances, budget))
    assert ((kept > 0) == (num_nodes > 0)).all(), "each root has a row"
    assert (kept <= num_nodes).all()
    assert kept.sum() == min(num_nodes.sum(), budget), "no row is left unused, and none is missing"
    value = np.cumprod(chances, axis=1)
    inside = [value[slot, node] for slot, count in enumerate(kept) for node in range(max(count - 1, 0))]
    outside = [
        value[slot, node]
        for slot, (count, total) in enumerate(zip(kept, num_nodes, strict=True))
        for node in range(max(count - 1, 0), max(total - 1, 0))
    ]
    if inside and outside:
        assert min(inside) >= max(outside)


def test_a_sure_draft_takes_the_rows_of_an_unsure_one():
    chances = np.array([[0.9, 0.9, 0.9, 0.9], [0.1, 0.1, 0.1, 0.1]], np.float32)
    assert within_budget(np.array([5, 5], np.int32), chances, 6).tolist() == [5, 1]
    assert within_budget(np.array([5, 5], np.int32), chances[::-1], 6).tolist() == [1, 5]
    assert within_budget(np.array([2, 5], np.int32), chances, 6).tolist() == [2, 4]


@pytest.mark.parametrize("lengths", [[0, 0], [0, 3], [3, 0, 2]])
def test_slots_without_nodes_have_no_rows(lengths):
    rows = packed_rows(np.array(lengths, np.int32), 8)
    assert len(taken(rows)) == sum(lengths)
