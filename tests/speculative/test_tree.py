"""Token trees against a walk that follows the definition, one node at a time."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.speculative import TokenTree, chain

trees = (
    st.lists(st.integers(1, 5), max_size=6)
    .filter(lambda widths: sum(np.cumprod([1, *widths])) <= 32)
    .map(lambda widths: TokenTree(tuple(widths)))
)


def walk(widths):
    """(parent, depth) of each node, breadth first."""
    nodes, level = [(-1, 0)], [0]
    for depth, width in enumerate(widths, start=1):
        following = []
        for parent in level:
            for _ in range(width):
                following.append(len(nodes))
                nodes.append((parent, depth))
        level = following
    return nodes


@given(trees)
def test_arrays_follow_the_definition(tree):
    nodes = walk(tree.widths)
    count = len(nodes)
    assert tree.num_nodes == count
    assert sum(tree.level_sizes) == count
    assert tree.depth == max(depth for _, depth in nodes)
    np.testing.assert_array_equal(tree.parents, [parent for parent, _ in nodes])
    np.testing.assert_array_equal(tree.depths, [depth for _, depth in nodes])
    for node in range(count):
        children = [other for other, (parent, _) in enumerate(nodes) if parent == node]
        padding = [count] * (tree.max_width - len(children))
        assert list(tree.children[node]) == children + padding
        line, up = 0, node
        while up >= 0:
            line, up = line | 1 << up, nodes[up][0]
        assert tree.ancestors[node] == line
        assert line.bit_count() == tree.depths[node] + 1
    assert tree.children.shape == (count, tree.max_width)
    kinds = {name: getattr(tree, name).dtype for name in ("parents", "depths", "children", "ancestors")}
    assert kinds.pop("ancestors") == np.uint32
    assert set(kinds.values()) == {np.dtype(np.int32)}


@given(trees, st.data())
def test_the_first_nodes_are_a_tree(tree, data):
    count = data.draw(st.integers(1, tree.num_nodes))
    assert np.all(tree.parents[1:count] >= 0)
    assert np.all(tree.parents[:count] < np.arange(count))
    assert np.all(tree.ancestors[:count].astype(np.uint64) < 2**count)
    for node in range(1, count):
        # All older sisters are there: a node's children are a prefix of its children in the whole tree.
        sisters = tree.children[tree.parents[node]]
        assert list(sisters[: list(sisters).index(node)]) == list(range(sisters[0], node))


@pytest.mark.parametrize("length", [0, 1, 4, 31])
def test_a_chain(length):
    tree = chain(length)
    assert (tree.num_nodes, tree.depth, tree.max_width) == (length + 1, length, min(length, 1))
    np.testing.assert_array_equal(tree.parents, np.arange(-1, length))
    # The mask of a chain is causal.
    np.testing.assert_array_equal(tree.ancestors, [2 ** (node + 1) - 1 for node in range(length + 1)])


def test_an_example():
    tree = TokenTree((3, 2, 1))
    assert tree.num_nodes == 16
    assert list(tree.children[0]) == [1, 2, 3]
    assert list(tree.children[2]) == [6, 7, 16]
    assert tree.ancestors[13] == 1 << 13 | 1 << 7 | 1 << 2 | 1


def test_equal_widths_share_a_program():
    traced = []

    def run(tree, x):
        traced.append(tree)
        return x + tree.children.sum()

    jitted = jax.jit(run, static_argnums=0)
    jitted(TokenTree((2, 1)), 1)
    jitted(TokenTree([2, 1]), 1)  # pyright: ignore[reportArgumentType]
    jitted(TokenTree((1, 2)), 1)
    assert [tree.widths for tree in traced] == [(2, 1), (1, 2)]


def test_arrays_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        chain(2).parents[0] = 0


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ((0,), "at depth 0 of (0,) is 0"),
        ((2, -1), "at depth 1 of (2, -1) is -1"),
        ((2, 1.5), "is 1.5"),
        ((True,), "is True"),
        ((2, 2, 2, 2, 2), "has 63 nodes, the root included; the limit is 32"),
        ((1,) * 32, "has 33 nodes"),
        ((2**40,), "has 1099511627777 nodes"),
    ],
)
def test_impossible_widths_raise(widths, message):
    with pytest.raises(ValueError) as raised:
        TokenTree(widths)
    assert message in str(raised.value)
