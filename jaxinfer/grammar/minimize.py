"""Minimization of deterministic automata."""

from __future__ import annotations

import numpy as np


def minimize(following: np.ndarray, is_accepting: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The minimal automaton with the same language, without states from which acceptance cannot be reached.

    Blocks of states are split until all states of a block lead to the same blocks. In each round only the states before
    those whose block changed are looked at again, so that a long chain, which splits off one state a round, is no
    quadratic work.

    Args:
      following: int32[Q, C], -1 where a class of characters is refused; state 0 is the first.
      is_accepting: bool[Q].

    Raises ValueError if no text is accepted.
    """
    is_useful = useful_states(following, is_accepting)
    if not is_useful[0]:
        raise ValueError("no text is in the language")
    following = np.where(is_useful[following] & (following >= 0), following, -1)
    labels = _blocks(following, is_accepting)
    _, first, labels = np.unique(labels, return_index=True, return_inverse=True)
    merged = np.where(following[first] >= 0, labels[following[first]], -1).astype(np.int32)
    if not np.array_equal(merged[labels], np.where(following >= 0, labels[following], -1)):
        raise RuntimeError("internal error: two blocks of states have one signature")
    return number_breadth_first(merged, is_accepting[first], int(labels[0]))


def useful_states(following: np.ndarray, is_accepting: np.ndarray) -> np.ndarray:
    """bool[Q]: acceptance can be reached."""
    is_useful = is_accepting.copy()
    frontier = np.flatnonzero(is_useful)
    starts, sources = _predecessors(following)
    while len(frontier):
        before = _gather(starts, sources, frontier)
        frontier = np.unique(before[~is_useful[before]])
        is_useful[frontier] = True
    return is_useful


def _predecessors(following: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The states before each state, as starts[Q + 1] into sources."""
    num_states = len(following)
    source, symbol = np.nonzero(following >= 0)
    pairs = np.unique(following[source, symbol].astype(np.int64) * num_states + source)
    return np.searchsorted(pairs, np.arange(num_states + 1) * num_states), pairs % max(num_states, 1)


def _gather(starts: np.ndarray, sources: np.ndarray, states: np.ndarray) -> np.ndarray:
    counts = starts[states + 1] - starts[states]
    offsets = np.repeat(starts[states] - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
    return sources[offsets + np.arange(len(offsets))]


def _blocks(following: np.ndarray, is_accepting: np.ndarray) -> np.ndarray:
    """int64[Q], equal for equivalent states."""
    num_states, num_classes = following.shape
    generator = np.random.default_rng(1)
    factors = generator.integers(1, 2**63, num_classes, dtype=np.uint64) | np.uint64(1)
    randoms = generator.integers(1, 2**63, num_states + 3, dtype=np.uint64)  # one a block; the last: refused
    labels = is_accepting.astype(np.int64)
    num_blocks = 2
    signatures = np.zeros(num_states, np.uint64)
    block_signatures = np.zeros(num_states + 2, np.uint64)  # of all states of a block, after each round
    sizes = np.zeros(num_states + 2, np.int64)
    sizes[:2] = np.bincount(labels, minlength=2)
    starts, sources = _predecessors(following)
    affected = np.arange(num_states)
    while len(affected):
        for chunk in np.array_split(affected, 1 + len(affected) * num_classes // 2**22):
            known = np.where(following[chunk] >= 0, labels[following[chunk]], -1)
            signatures[chunk] = (randoms[known] * factors).sum(axis=1, dtype=np.uint64)
        # Groups of affected states of one block and signature.
        order = affected[np.lexsort((signatures[affected], labels[affected]))]
        block, signature = labels[order], signatures[order]
        is_new = np.concatenate([[True], (block[1:] != block[:-1]) | (signature[1:] != signature[:-1])])
        heads = np.flatnonzero(is_new)
        counts = np.diff(heads, append=len(order))
        owner = block[heads]
        # A block keeps its number for states that did not change; else for its largest group.
        num_affected = np.bincount(owner, counts, num_blocks)[owner]
        is_whole = num_affected == sizes[owner]
        by_size = np.lexsort((-counts, owner))
        is_largest = np.zeros(len(heads), bool)
        is_largest[by_size[np.concatenate([[True], owner[by_size][1:] != owner[by_size][:-1]])]] = True
        keeps = np.where(is_whole, is_largest, signature[heads] == block_signatures[owner])
        block_signatures[owner[keeps]] = signature[heads][keeps]
        fresh = num_blocks + np.cumsum(~keeps) - 1
        num_blocks += int((~keeps).sum())
        block_signatures[fresh[~keeps]] = signature[heads][~keeps]
        np.subtract.at(sizes, owner[~keeps], counts[~keeps])
        sizes[fresh[~keeps]] = counts[~keeps]
        is_moved = np.repeat(~keeps, counts)
        labels[order[is_moved]] = np.repeat(fresh, counts)[is_moved]
        affected = np.unique(_gather(starts, sources, order[is_moved]))
    return labels


def number_breadth_first(following: np.ndarray, is_accepting: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray]:
    """The states that are reached from `first`, numbered in the order of `breadth_first`."""
    kept = breadth_first(following, first)
    number = np.full(len(following) + 1, -1, np.int32)  # the last: refused
    number[kept] = np.arange(len(kept))
    return number[following[kept]], is_accepting[kept]


def breadth_first(following: np.ndarray, first: int) -> np.ndarray:
    """The states that are reached from `first`, in the order in which they are found, level by level."""
    is_found = np.zeros(len(following), bool)
    is_found[first] = True
    order = [np.array([first])]
    while len(order[-1]):
        found = following[order[-1]].ravel()
        found = found[found >= 0]
        states, place = np.unique(found[~is_found[found]], return_index=True)
        is_found[states] = True
        order.append(states[np.argsort(place)])
    return np.concatenate(order)
