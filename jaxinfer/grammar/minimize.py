"""Minimization of deterministic automata."""

from collections.abc import Iterable

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
    """int32[Q], equal for equivalent states."""
    starts, sources = _predecessors(following)
    labels = np.append(is_accepting, -1).astype(np.int32)  # the last: refused
    sizes = [int((~is_accepting).sum()), int(is_accepting.sum())]
    rows: list[bytes] = [b"", b""]  # the labels after each of a block's states, which are equal after each round
    affected: Iterable[int] = range(len(following))
    while affected:
        blocks: dict[int, dict[bytes, list[int]]] = {}
        for state in affected:
            block, row = int(labels[state]), labels[following[state]].tobytes()
            blocks.setdefault(block, {}).setdefault(row, []).append(state)
        moved: list[int] = []
        for block, groups in blocks.items():
            # A block keeps its number for the states that did not change, or else for its largest group.
            if sum(map(len, groups.values())) == sizes[block]:
                rows[block] = max(groups, key=lambda row: len(groups[row]))
            for row, states in groups.items():
                if row != rows[block]:
                    labels[states] = len(rows)
                    sizes[block] -= len(states)
                    sizes.append(len(states))
                    rows.append(row)
                    moved += states
        affected = {source for state in moved for source in sources[starts[state] : starts[state + 1]].tolist()}
    return labels[:-1]


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
        targets = following[order[-1]].ravel()
        targets = targets[targets >= 0]
        states, place = np.unique(targets[~is_found[targets]], return_index=True)
        is_found[states] = True
        order.append(states[np.argsort(place)])
    return np.concatenate(order)
