"""Classes of characters that no part of a pattern tells apart, and their automata written over UTF-8's bytes."""

from collections.abc import Sequence

import numpy as np

from jaxinfer.grammar.char_sets import Ranges
from jaxinfer.grammar.minimize import number_breadth_first
from jaxinfer.grammar.nodes import TooLargeError

_MAX_CELLS = 2**24  # of one array at a time


class Alphabet:
    """The coarsest division of all characters by some sets of them.

    Attributes:
      num_classes: how many classes the characters of the sets make.
      starts: int64[intervals], the code points where the class changes, from 0.
      of_interval: int32[intervals], the class of each, -1 for characters of no set.
    """

    def __init__(self, sets: Sequence[Ranges]):
        flat = np.array([pair for ranges in sets for pair in ranges], np.int64).reshape(-1, 2)
        owner = np.repeat(np.arange(len(sets)), [len(ranges) for ranges in sets])
        self.starts = np.unique(np.concatenate([[0, 0x110000], flat[:, 0], flat[:, 1] + 1]))
        # An interval's signature is the sum of the random numbers of the sets that it is in.
        randoms = np.random.default_rng(0).integers(1, 2**63, len(sets), dtype=np.uint64)
        changes = np.zeros(len(self.starts), np.uint64)
        first, last = np.searchsorted(self.starts, flat[:, 0]), np.searchsorted(self.starts, flat[:, 1] + 1)
        np.add.at(changes, first, randoms[owner])
        np.subtract.at(changes, last, randoms[owner])
        signatures = np.cumsum(changes, dtype=np.uint64)
        distinct, classes = np.unique(signatures, return_inverse=True)
        classes = classes.astype(np.int32)
        if len(distinct) and distinct[0] == 0:  # in no set
            classes -= 1
        self.of_interval = classes
        self.num_classes = int(classes.max(initial=-1)) + 1
        sizes = np.diff(self.starts, append=0x110000)
        self._class_sizes = np.bincount(classes[classes >= 0], sizes[classes >= 0], self.num_classes)
        self._classes_of: dict[Ranges, tuple[int, ...]] = {}
        self._by_id: dict[int, tuple[int, ...]] = {}
        bounds = np.concatenate([[0], np.cumsum([len(ranges) for ranges in sets])])
        for index, ranges in enumerate(sets):
            spans = [classes[first[i] : last[i]] for i in range(bounds[index], bounds[index + 1])]
            own = np.unique(np.concatenate(spans)) if spans else np.zeros(0, np.int32)
            if self._class_sizes[own].sum() != sum(end - start + 1 for start, end in ranges):
                raise RuntimeError("internal error: two sets of characters have one signature")
            self._classes_of[ranges] = tuple(own.tolist())

    def classes_of(self, ranges: Ranges) -> tuple[int, ...]:
        """The classes of one of the sets; the same object is hashed once."""
        classes = self._by_id.get(id(ranges))
        if classes is None:
            classes = self._classes_of[ranges]
            # the pattern's tree keeps sets of several ranges alive, so that their id() is not used again
            if len(ranges) > 1:
                self._by_id[id(ranges)] = classes
        return classes

    def interval_at(self, code_points: np.ndarray) -> np.ndarray:
        """The interval of each code point."""
        return np.searchsorted(self.starts, code_points, side="right") - 1


def to_bytes(
    following: np.ndarray, is_accepting: np.ndarray, alphabet: Alphabet, max_states: int
) -> tuple[np.ndarray, np.ndarray]:
    """The automaton over bytes: int32[Q, 256] and bool[Q], minimal if the given one is.

    A state within a character is the map from its last 1, 2 or 3 bytes to states. Equal maps are one state, so the
    result is minimal: states at ends of characters refuse the bytes 0x80 to 0xBF, which are all that the others take.

    Raises TooLargeError if there are more than `max_states` states.
    """
    num_states, num_classes = following.shape
    blocks, block_of = _blocks(alphabet)
    # Rows that differ only in ASCII have the same states within characters.
    wide = np.unique(np.append(blocks[np.unique(block_of[2:])], num_classes))[:-1]
    padded = np.concatenate([following, np.full((num_states, 1), -1, np.int32)], axis=1)
    rows, row_of = unique_rows(padded[:, [*wide, num_classes]])
    place = np.full(num_classes + 1, len(wide))
    place[wide] = np.arange(len(wide))
    inner = _InnerStates(num_states, max_states)
    one_left = inner.add(rows, place[blocks])  # [rows, blocks]: the state before the last byte
    two_left, three_left = _outer_levels(inner, one_left, block_of)

    table = np.full((num_states + inner.count, 256), -1, np.int32)
    table[:num_states, :0x80] = padded[:, blocks[block_of[:2]].ravel()]
    table[:num_states, 0xC2:0xE0] = one_left[:, block_of[2:32]][row_of]
    table[:num_states, 0xE0:0xF0] = two_left[row_of]
    table[:num_states, 0xF0:0xF5] = three_left[row_of]
    if inner.count:
        table[num_states:, 0x80:0xC0] = inner.rows()
    accepting = np.concatenate([is_accepting, np.zeros(inner.count, bool)])
    return number_breadth_first(table, accepting, 0)


def _blocks(alphabet: Alphabet) -> tuple[np.ndarray, np.ndarray]:
    """Characters in blocks of 64, those that differ in their last byte: the distinct ones, as classes [N, 64] with
    `num_classes` for characters of no set, and which of them each block is, [17408]. Most are of one class."""
    starts = np.arange(0, 0x110000, 64)
    first, last = alphabet.interval_at(starts), alphabet.interval_at(starts + 63)
    classes = np.where(alphabet.of_interval < 0, alphabet.num_classes, alphabet.of_interval)
    block_of = classes[first].astype(np.int64)
    block_of[0xD800 // 64 : 0xE000 // 64] = alphabet.num_classes  # surrogates
    is_mixed = first != last
    is_mixed[0xD800 // 64 : 0xE000 // 64] = False
    mixed = starts[is_mixed][:, None] + np.arange(64)
    kinds, kind_of = unique_rows(classes[alphabet.interval_at(mixed)])
    block_of[is_mixed] = alphabet.num_classes + 1 + kind_of
    uniform = np.repeat(np.arange(alphabet.num_classes + 1)[:, None], 64, axis=1)
    return np.concatenate([uniform, kinds.reshape(-1, 64)]), block_of


def _outer_levels(inner: "_InnerStates", one_left: np.ndarray, block_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The states after the first byte of 3, [rows, 16], and of 4, [rows, 5]."""
    none = one_left.shape[1]
    padded = np.concatenate([one_left, np.full((len(one_left), 1), -1, np.int32)], axis=1)
    pages = block_of.reshape(-1, 64).copy()  # [272, 64]: 4,096 characters each
    pages[0, :32] = none  # overlong encodings: U+0000 to U+07FF must not take 3 bytes
    kinds, kind_of = unique_rows(pages)
    two_left = inner.add(padded, kinds)
    planes = np.full((5, 64), two_left.shape[1])
    planes.reshape(-1)[16 : len(pages)] = kind_of[16:]  # from U+10000 on
    padded = np.concatenate([two_left, np.full((len(two_left), 1), -1, np.int32)], axis=1)
    return two_left[:, kind_of[:16]], inner.add(padded, planes)


def unique_rows(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows, in the order in which they come first, and which of them each row is. Many times faster than
    `np.unique` over an axis, which sorts."""
    numbers: dict[bytes, int] = {}
    array = np.ascontiguousarray(array)
    row_of = np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in array], np.int64)
    first = np.full(len(numbers), len(array))
    np.minimum.at(first, row_of, np.arange(len(array)))
    return array[first], row_of


class _InnerStates:
    """States within characters, each the map from 64 bytes to states; equal ones once."""

    def __init__(self, first: int, max_states: int):
        self._numbers: dict[bytes, int] = {bytes(np.full(64, -1, np.int32)): -1}
        self._first, self._max_states = first, max_states
        self._check(first)

    @property
    def count(self) -> int:
        return len(self._numbers) - 1

    def rows(self) -> np.ndarray:
        """int32[count, 64]."""
        return np.frombuffer(b"".join(list(self._numbers)[1:]), np.int32).reshape(-1, 64)

    def add(self, targets: np.ndarray, maps: np.ndarray) -> np.ndarray:
        """int32[R, M]: the states that map 64 bytes to `targets[r, maps[m]]`, for targets [R, N] and maps [M, 64]."""
        states = np.empty((len(targets), len(maps)), np.int32)
        step = max(1, _MAX_CELLS // max(1, maps.size))
        for low in range(0, len(targets), step):
            rows = np.ascontiguousarray(targets[low : low + step][:, maps].reshape(-1, 64), np.int32)
            states[low : low + step] = np.array([self._number(row.tobytes()) for row in rows]).reshape(-1, len(maps))
        return states

    def _number(self, row: bytes) -> int:
        number = self._numbers.get(row)
        if number is None:
            number = self._numbers[row] = self._first + self.count
            self._check(number + 1)
        return number

    def _check(self, num_states: int) -> None:
        if num_states > self._max_states:
            raise TooLargeError(f"the language's automaton has more than {self._max_states} states")
