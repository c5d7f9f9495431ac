"""From texts to rows of tokens: what is calibrated on, and what is held out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_HELD_OUT_IN = 8
_NUM_RANDOM = 128


@dataclass(frozen=True)
class CalibrationRows:
    """int32 [rows, T] each; no token is in both."""

    calibration: np.ndarray
    held_out: np.ndarray


def divide(
    documents: Sequence[Sequence[int]], separator: int | None, *, num_rows: int, length: int, seed: int
) -> CalibrationRows:
    """Pieces of the documents, `separator` after each of these, `num_rows` of all by chance; one in eight held out.

    Raises ValueError for less text than two pieces.
    """
    end = [] if separator is None else [separator]
    stream = np.concatenate([np.asarray([*document, *end], np.int32) for document in documents])
    pieces = stream[: len(stream) // length * length].reshape(-1, length)
    if len(pieces) < 2:
        raise ValueError(f"{len(stream)} tokens of text are fewer than two pieces of {length}")
    chosen = np.random.default_rng(seed).permutation(len(pieces))[:num_rows]
    num_held_out = max(len(chosen) // _HELD_OUT_IN, 1)
    return CalibrationRows(pieces[np.sort(chosen[num_held_out:])], pieces[np.sort(chosen[:num_held_out])])


def random_rows(vocab_size: int) -> np.ndarray:
    """A row of tokens where there is no text, always the same."""
    return np.random.default_rng(0).integers(0, vocab_size, (1, _NUM_RANDOM), dtype=np.int32)
