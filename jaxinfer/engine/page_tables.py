"""Page tables as the host keeps them, one for each group of layers, and ids of pages to copy: arrays for the device."""

from collections.abc import Iterable, Sequence

import numpy as np

from jaxinfer.engine.cache_groups import CacheGroup
from jaxinfer.engine.pages import NULL_PAGE
from jaxinfer.engine.plans import PageCopy
from jaxinfer.engine.request import SequenceState

HostTables = tuple[np.ndarray, ...]


class PageTableRows:
    """int32 [S, P] for each group: the pages of each slot's sequence, NULL_PAGE elsewhere.

    Where prompts are compacted, tables begin after the pages that a prompt has lost, and their numbers follow the
    tables: int32 [S, groups].
    """

    def __init__(self, groups: Sequence[CacheGroup], num_slots: int, pages_per_sequence: int):
        self._tables = tuple(np.zeros((num_slots, pages_per_sequence), np.int32) for _ in groups)
        self._num_sinks = tuple(group.num_sinks for group in groups)
        self._is_compacted = tuple(group.at_end is not None for group in groups)
        self._num_lost = np.zeros((num_slots, len(groups)), np.int32)

    def update(self, sequences: Iterable[SequenceState]) -> bool:
        """Lists the new pages of sequences with slots; returns whether there are any. Pages behind a window, which
        nothing reads, are cleared at the same time."""
        is_changed = False
        for sequence in sequences:
            start, end = sequence.num_listed, len(sequence.pages)
            if start < end and sequence.slot is not None and any(self._is_compacted):
                self._list_compacted(sequence, sequence.slot)
                sequence.num_listed, is_changed = end, True
            elif start < end and sequence.slot is not None:
                for table, pages, num_released, num_sinks in zip(
                    self._tables, sequence.tables, sequence.num_released, self._num_sinks, strict=True
                ):
                    table[sequence.slot, start:end] = pages[start:end]
                    table[sequence.slot, num_sinks:num_released] = NULL_PAGE
                sequence.num_listed, is_changed = end, True
        return is_changed

    def _list_compacted(self, sequence: SequenceState, slot: int) -> None:
        """Lists all pages: those of a prompt that is compacted are others afterwards, in other columns."""
        for group, (table, pages) in enumerate(zip(self._tables, sequence.tables, strict=True)):
            num_lost = sequence.num_released[group] if self._is_compacted[group] else 0
            table[slot, : len(pages) - num_lost] = pages[num_lost:]
            table[slot, len(pages) - num_lost :] = NULL_PAGE
            self._num_lost[slot, group] = num_lost

    @property
    def _arrays(self) -> HostTables:
        return (*self._tables, self._num_lost) if any(self._is_compacted) else self._tables

    def first(self, num_slots: int) -> HostTables:
        """Copies of the first rows: the device may read the host's memory for as long as it computes."""
        return tuple(array[:num_slots].copy() for array in self._arrays)

    def empty(self, num_slots: int) -> HostTables:
        return tuple(np.zeros_like(array[:num_slots]) for array in self._arrays)


def copy_ids(copies: Sequence[PageCopy], groups: Sequence[CacheGroup], size: int) -> tuple[HostTables, HostTables]:
    """Sources and destinations int32 [size] of each group; unused entries copy nothing."""
    sources = tuple(np.zeros(size, np.int32) for _ in groups)
    destinations = tuple(np.full(size, group.num_allocated, np.int32) for group in groups)
    counts = [0] * len(groups)
    for group, source, destination in copies:
        place = counts[group]
        sources[group][place], destinations[group][place] = source, destination
        counts[group] += 1
    return sources, destinations


def state_copies(pairs: Sequence[tuple[int, int]], size: int) -> HostTables:
    """Sources and destinations int32 [size] of states to copy, of which the first `count`, the last array, count."""
    ids = np.zeros((2, size), np.int32)
    if pairs:
        ids[:, : len(pairs)] = np.transpose(pairs)
    return ids[0], ids[1], np.int32(len(pairs))  # pyright: ignore[reportReturnType]
