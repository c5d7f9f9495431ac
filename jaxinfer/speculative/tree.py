"""The static shape of a draft token tree: constants of the program that verifies it."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pallas_kernels.paged_attention import MAX_TREE_TOKENS


@dataclass(frozen=True)
class TokenTree:
    """A tree in which every node of depth d has `widths[d]` children. Hashable, and static in jitted programs.

    Nodes are numbered breadth first. Node 0 is the root: a sequence's newest token, which is not a draft token. The
    children of a node are adjacent, in the order in which the draft sampled or ranked them, best first. For every n,
    the first n nodes are a tree too: the first n rows of each array, without children numbered n and above.
    `TokenTree(())` is the root alone.
    Arrays are NumPy's and read-only.

    Raises ValueError if a width is not a positive integer, or for more than 32 nodes, the bits of an ancestor mask.
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
        """The depth of the leaves, which is the largest number of draft tokens that can be accepted."""
        return len(self.widths)

    @property
    def max_width(self) -> int:
        """The largest number of children of a node."""
        return max(self.widths, default=0)

    @property
    def num_nodes(self) -> int:
        return sum(self.level_sizes)

    @cached_property
    def level_sizes(self) -> tuple[int, ...]:
        """The number of nodes of each depth, starting with the root's."""
        sizes = [1]
        for width in self.widths:
            sizes.append(sizes[-1] * width)
        return tuple(sizes)

    @cached_property
    def depths(self) -> np.ndarray:
        """int32[N]: the depth of each node."""
        return _constant(np.repeat(np.arange(self.depth + 1, dtype=np.int32), self.level_sizes))

    @cached_property
    def parents(self) -> np.ndarray:
        """int32[N]: the parent of each node, -1 for the root."""
        # In breadth-first order the nodes from 1 on are the children of node 0, then those of node 1, and so on.
        num_children = np.array([*self.widths, 0])[self.depths]
        return _constant(np.concatenate([[-1], np.repeat(np.arange(self.num_nodes), num_children)]).astype(np.int32))

    @cached_property
    def children(self) -> np.ndarray:
        """int32[N, max_width]: the children of each node in order, padded with N."""
        children = np.full((self.num_nodes, self.max_width), self.num_nodes, np.int32)
        nodes = np.arange(1, self.num_nodes)
        parents = self.parents[1:]
        children[parents, nodes - np.searchsorted(parents, parents) - 1] = nodes
        return _constant(children)

    @cached_property
    def ancestors(self) -> np.ndarray:
        """uint32[N]: ancestor masks of `paged_attention`: bit j of mask i is set if j is i or an ancestor of i."""
        masks = np.uint32(1) << np.arange(self.num_nodes, dtype=np.uint32)
        for node, parent in enumerate(self.parents[1:], start=1):
            masks[node] |= masks[parent]
        return _constant(masks)


def chain(length: int) -> TokenTree:
    """A tree without branches: `length` draft tokens in a row."""
    return TokenTree((1,) * length)


def _constant(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
