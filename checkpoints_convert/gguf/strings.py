"""Positions of the strings of a GGUF array: each is a length of 8 bytes and as many bytes, one after the other.

Vocabularies have up to a million of them, at which reading them one by one takes most of a start. Nearly all have 1 to
255 bytes, so that seven bytes of their lengths are zero: such places are found at once, and are those of strings
wherever each begins where the one before ends.
"""

import struct

import numpy as np

LENGTH = struct.Struct("<Q")
_STEPS = 64  # strings that are read one by one before the next place is looked for


def string_starts(raw: bytes, limit: int) -> tuple[np.ndarray, int]:
    """Positions (int64) of the strings of `raw`, which begins with one: those whose length lies in it, at most `limit`.
    And the position after the last of them, which may be beyond the end."""
    likely, after, breaks = _likely(raw)
    parts, position, num_left = [np.zeros(0, np.int64)], 0, limit
    while num_left and position + LENGTH.size <= len(raw):
        first = int(np.searchsorted(likely, position))
        if first < len(likely) and likely[first] == position:
            nearest = int(np.searchsorted(breaks, first))
            last = int(breaks[nearest]) if nearest < len(breaks) else len(likely) - 1
            last = min(last, first + num_left - 1)
            parts.append(likely[first : last + 1])
            position = int(after[last])
        else:
            found, position = _one_by_one(raw, position, min(num_left, _STEPS))
            parts.append(np.asarray(found, np.int64))
        num_left -= len(parts[-1])
    return np.concatenate(parts), position


def _likely(raw: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places that look like the lengths of short strings, where such strings end, and the indices of those that end
    elsewhere than where the next one is."""
    data = np.frombuffer(raw, np.uint8)
    num_places = max(len(data) - LENGTH.size + 1, 0)
    is_likely = data[:num_places] != 0
    for byte in range(1, LENGTH.size):
        is_likely &= data[byte : byte + num_places] == 0
    places = np.flatnonzero(is_likely)
    after = places + LENGTH.size + data[places]
    return places, after, np.flatnonzero(after[:-1] != places[1:])


def _one_by_one(raw: bytes, position: int, limit: int) -> tuple[list[int], int]:
    found = []
    while len(found) < limit and position + LENGTH.size <= len(raw):
        found.append(position)
        position += LENGTH.size + LENGTH.unpack_from(raw, position)[0]
    return found, position
