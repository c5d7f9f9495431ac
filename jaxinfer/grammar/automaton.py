"""Minimal finite automata of regular languages, over the bytes of their texts in UTF-8.

A tree becomes an automaton over classes of characters (NumPy's arrays hold what is large), which is minimized, and only
then becomes one over bytes.
"""

from dataclasses import dataclass

import numpy as np

from jaxinfer.grammar.char_sets import Ranges
from jaxinfer.grammar.minimize import minimize
from jaxinfer.grammar.nodes import Alternation, Chars, Concatenation, Node, Repeat, Text, TooLargeError, children
from jaxinfer.grammar.utf8 import Alphabet, to_bytes

MAX_STATES = 8192
"""States over bytes, unless the caller says otherwise."""
MAX_SIZE = 100_000
"""Characters and groups of a tree with its counted repetitions written out."""
MAX_DEPTH = 250
"""Nodes within one another."""
MAX_STEPS = 2_000_000
"""Steps that make an automaton deterministic: about a second."""
_MAX_CELLS = 2**24  # states times classes of characters


@dataclass(frozen=True, eq=False)
class Automaton:
    """A minimal deterministic automaton over bytes, with Q states, numbered breadth first; state 0 is the first.

    Attributes:
      next: int32[Q, 256], the state after a byte, -1 where it is refused. Acceptance can be reached from every state.
      is_accepting: bool[Q], where a text may end.
    """

    next: np.ndarray
    is_accepting: np.ndarray

    @property
    def num_states(self) -> int:
        return len(self.next)

    def accepts(self, text: bytes) -> bool:
        state = 0
        for byte in text:
            state = int(self.next[state, byte])
            if state < 0:
                return False
        return bool(self.is_accepting[state])


def build_automaton(node: Node, max_states: int = MAX_STATES) -> Automaton:
    """The minimal automaton of a language.

    Raises:
      TooLargeError: more states than `max_states`, or more of something else than the limits above; found before
        repetitions are written out, and in at most about a second.
      ValueError: no text is in the language.
    """
    _check_size(node)
    alphabet = Alphabet(_character_sets(node))
    following, is_accepting = _determinize(_Positions(node, alphabet), alphabet.num_classes, 2 * max_states)
    following, is_accepting = minimize(following, is_accepting)
    following, is_accepting = to_bytes(following, is_accepting, alphabet, max_states)
    return Automaton(following, is_accepting)


def _check_size(root: Node) -> None:
    """Sizes and depths from the leaves up, each node once however often it is used."""
    sizes: dict[int, tuple[int, int]] = {}
    stack: list[tuple[Node, bool]] = [(root, False)]
    while stack:
        node, is_ready = stack.pop()
        if id(node) in sizes:
            continue
        inner = children(node)
        if not is_ready:
            stack.append((node, True))
            stack += [(child, False) for child in inner]
            if len(stack) > 4 * MAX_SIZE:
                raise TooLargeError(f"the language has more than {MAX_SIZE} characters and groups")
            continue
        copies = max(node.least + 1 if node.most is None else node.most, 1) if isinstance(node, Repeat) else 1
        size = 1 + copies * sum(sizes[id(child)][0] for child in inner)
        size += len(node.text) if isinstance(node, Text) else 0
        depth = 1 + max((sizes[id(child)][1] for child in inner), default=0)
        if size > MAX_SIZE:
            raise TooLargeError(
                f"the language has more than {MAX_SIZE} characters and groups with its repetitions written out"
            )
        if depth > MAX_DEPTH:
            raise TooLargeError(f"the language's tree is more than {MAX_DEPTH} nodes deep")
        sizes[id(node)] = size, depth


def _character_sets(root: Node) -> list[Ranges]:
    """The distinct sets of characters in a tree; a text's characters are sets of one."""
    sets: dict[int, Ranges] = {}
    characters: set[str] = set()
    seen: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        stack += children(node)
        if isinstance(node, Text):
            characters.update(node.text)
        elif isinstance(node, Chars):
            sets[id(node.ranges)] = node.ranges
    return list(dict.fromkeys([*sets.values(), *(((ord(char), ord(char)),) for char in sorted(characters))]))


class _Positions:
    """A tree as positions (Glushkov's construction): each is one character to be read, and has those that may follow.

    Attributes:
      first: positions that a text may begin with. `END` among positions: the text may end.
      classes: the classes of characters that each position reads.
    """

    END = 0

    def __init__(self, root: Node, alphabet: Alphabet):
        self.classes: list[tuple[int, ...]] = [()]  # the first is `END`
        self._alphabet = alphabet
        self._branches: list[list[int]] = []  # of points between positions: where one can go on without a character
        self._targets: list[int] = [-1]  # the point after each position
        self._follow: dict[int, frozenset[int]] = {}
        self.num_steps = 0
        end = self._point([~self.END])
        self.first = self._reachable([self._compile(root, end)])

    def follow(self, read: list[int]) -> frozenset[int]:
        """Positions that may be read after one of these."""
        if len(read) > 4:  # their own sets would have much in common
            return self._reachable([self._targets[position] for position in read])
        sets = [self._follow_one(position) for position in read]
        self.count(sum(map(len, sets)))
        return sets[0].union(*sets[1:]) if len(sets) > 1 else sets[0]

    def _follow_one(self, position: int) -> frozenset[int]:
        if (positions := self._follow.get(position)) is None:
            positions = self._follow[position] = self._reachable([self._targets[position]])
        return positions

    def _point(self, branches: list[int]) -> int:
        """Branches are points, or `~p` for a position p."""
        self._branches.append(branches)
        return len(self._branches) - 1

    def _position(self, ranges: Ranges, after: int) -> int:
        self.classes.append(self._alphabet.classes_of(ranges))
        self._targets.append(after)
        return self._point([~(len(self.classes) - 1)])

    def _compile(self, node: Node, after: int) -> int:
        """The point before the node, where `after` is the point after it. Its depth was checked."""
        if isinstance(node, Text):
            for char in reversed(node.text):
                after = self._position(((ord(char), ord(char)),), after)
            return after
        if isinstance(node, Chars):
            return self._position(node.ranges, after)
        if isinstance(node, Concatenation):
            for part in reversed(node.parts):
                after = self._compile(part, after)
            return after
        if isinstance(node, Alternation):
            return self._point([self._compile(option, after) for option in node.options])
        entry = after
        if node.most is None:
            entry = self._point([after])
            self._branches[entry].append(self._compile(node.node, entry))
        else:
            for _ in range(node.most - node.least):
                entry = self._point([after, self._compile(node.node, entry)])
        for _ in range(node.least):
            entry = self._compile(node.node, entry)
        return entry

    def _reachable(self, points: list[int]) -> frozenset[int]:
        """Positions that can be read next at one of the points."""
        positions: set[int] = set()
        seen, stack = set(points), list(points)
        while stack:
            for branch in self._branches[stack.pop()]:
                if branch < 0:
                    positions.add(~branch)
                elif branch not in seen:
                    seen.add(branch)
                    stack.append(branch)
        self.count(len(seen))
        return frozenset(positions)

    def count(self, steps: int) -> None:
        self.num_steps += steps
        if self.num_steps > MAX_STEPS:
            raise TooLargeError(f"the language's automaton takes more than {MAX_STEPS} steps to build")


def _determinize(positions: _Positions, num_classes: int, max_states: int) -> tuple[np.ndarray, np.ndarray]:
    """The subset construction: int32[Q, classes] and bool[Q]. A state is the set of positions that may be read next, so
    that those with the same future are often one already."""
    max_states = min(max_states, _MAX_CELLS // max(1, num_classes))
    numbers = {positions.first: 0}
    states = [positions.first]
    rows: list[np.ndarray] = []
    for state in states:  # grows meanwhile
        by_class: dict[int, list[int]] = {}
        for position in state:
            for number in positions.classes[position]:
                by_class.setdefault(number, []).append(position)
        positions.count(sum(map(len, by_class.values())) + len(state) + 8)
        row = np.full(num_classes, -1, np.int32)
        merged: dict[tuple[int, ...], int] = {}
        for number, read in by_class.items():
            key = tuple(read)
            target = merged.get(key)
            if target is None:
                union = positions.follow(read)
                target = merged[key] = numbers.setdefault(union, len(states))
                if target == len(states):
                    states.append(union)
                    if len(states) > max_states:
                        raise TooLargeError(f"the language's automaton has more than {max_states} states")
            row[number] = target
        rows.append(row)
    is_accepting = np.array([_Positions.END in state for state in states])
    return np.stack(rows).reshape(len(states), num_classes), is_accepting
