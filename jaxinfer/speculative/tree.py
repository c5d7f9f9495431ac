"""The static shape of a drafted token tree, as constants of the program that verifies it."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pallas_kernels.paged_attention import MAX_TREE_TOKENS


@dataclass(frozen=True)
class TokenTree:
    """A tree in which every node of depth d has `widths[d]` children: equal widths are equal, hashable and static.

    Nodes are counted breadth first. Node 0 is the root, a sequence's newest token, which is not drafted; the children
    of a node are adjacent and in the order in which they were drawn. A parent comes before its children, so the first
    n nodes are a tree for every n, whose arrays are the first n rows of these; children of n and above are not in it.
    `TokenTree(())` is the root alone. Arrays are NumPy's and cannot be written.

    Raises ValueError where a width is not a positive integer, or for more nodes than a mask of ancestors has bits, 32.
    """

    widths: tuple[int, ...]

    def __post_init__(self):
        object.__setattr__(self, "widths", tuple(self.widths))
        for depth, width in enumerate(self.widths):
            if isinstance(width, bool) or not isinstance(width, int) or width < 1:
                raise ValueError(
                    f"a token tree's widths are at least 1; at depth {depth} of {self.widths} is {width!r}"
                )
        if self.num_nodes > MAX_TREE_TOKENS:
            raise ValueError(
                f"a token tree of widths {self.widths} has {self.num_nodes} nodes, the root included; "
                f"the limit is {MAX_TREE_TOKENS}"
            )

    @property
    def depth(self) -> int:
        """The depth of the leaves: as many drafted tokens can be kept."""
        return len(self.widths)

    @property
    def max_width(self) -> int:
        """The most children of a node."""
        return max(self.widths, default=0)

    @property
    def num_nodes(self) -> int:
        return sum(self.level_sizes)

    @cached_property
    def level_sizes(self) -> tuple[int, ...]:
        """The number of nodes of each depth, from the root's on."""
        sizes = [1]
        for width in self.widths:
            sizes.append(sizes[-1] * width)
        return tuple(sizes)

    @cached_property
    def depths(self) -> np.ndarray:
        """int32[N]: the edges between each node and the root."""
        return _constant(np.repeat(np.arange(self.depth + 1, dtype=np.int32), self.level_sizes))

    @cached_property
    def parents(self) -> np.ndarray:
        """int32[N]; the root's is -1."""
        # In breadth-first order the nodes from 1 on are the children of node 0, then those of node 1, and so on.
        num_children = np.array([*self.widths, 0])[self.depths]
        return _constant(np.concatenate([[-1], np.repeat(np.arange(self.num_nodes), num_children)]).astype(np.int32))

    @cached_property
    def children(self) -> np.ndarray:
        """int32[N, max_width]: the children of each node in order, N where there are fewer."""
        children = np.full((self.num_nodes, self.max_width), self.num_nodes, np.int32)
        nodes = np.arange(1, self.num_nodes)
        parents = self.parents[1:]
        children[parents, nodes - np.searchsorted(parents, parents) - 1] = nodes
        return _constant(children)

    @cached_property
    def first_child(self) -> np.ndarray:
        """int32[N]: the first child of each node, N for a leaf."""
        padding = np.full((self.num_nodes, 1), self.num_nodes, np.int32)
        return _constant(np.concatenate([self.children, padding], axis=1)[:, 0])

    @cached_property
    def ancestors(self) -> np.ndarray:
        """uint32[N]: bit j of a node's is set if node j is an ancestor of it or itself, as in `paged_attention`."""
        masks = np.uint32(1) << np.arange(self.num_nodes, dtype=np.uint32)
        for node, parent in enumerate(self.parents[1:], start=1):
            masks[node] |= masks[parent]
        return _constant(masks)


def chain(length: int) -> TokenTree:
    """The tree of `length` drafted tokens one after another."""
    return TokenTree((1,) * length)


def _constant(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
