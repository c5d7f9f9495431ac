"""Classes of characters that no part of a pattern tells apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Ranges = tuple[tuple[int, int], ...]


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
        found, classes = np.unique(signatures, return_inverse=True)
        classes = classes.astype(np.int32)
        if len(found) and found[0] == 0:  # in no set
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
        """The classes of one of the sets. Asked for with the same object it does not hash it again."""
        found = self._by_id.get(id(ranges))
        if found is None:
            found = self._classes_of[ranges]
            if (
                len(ranges) > 1
            ):  # kept by the tree, unlike the sets of one character, which are made as they are asked for
                self._by_id[id(ranges)] = found
        return found

    def interval_at(self, code_points: np.ndarray) -> np.ndarray:
        """The interval of each code point."""
        return np.searchsorted(self.starts, code_points, side="right") - 1
