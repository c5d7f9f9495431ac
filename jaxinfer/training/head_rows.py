"""Rows of texts for training heads: cut where they repeat themselves, packed, with what each token counts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.training.texts import NO_TOKEN, TargetTextRequest

REPEATED = 16  # tokens in a row that a text has twice, from which on it goes in circles


@dataclass(frozen=True)
class DraftedText:
    """A text, int32 [T]; from number `first` on, its tokens are those that a head is to draft."""

    tokens: np.ndarray
    first: int


@dataclass(frozen=True)
class HeadRows:
    """Packed texts.

    Attributes:
      tokens, positions: int32 [N, L].
      texts: int32 [N, L], the number of each token's text in its row, NO_TOKEN for none.
      weights: float32 [N, L], what the choice of the token after each place counts.
    """

    tokens: np.ndarray
    positions: np.ndarray
    texts: np.ndarray
    weights: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def anchors(self, distance: int) -> np.ndarray:
        """bool [N, L]: places whose first draft token, which is said after `distance` places more, counts."""
        is_anchor = np.zeros(self.weights.shape, bool)
        later = slice(distance, None), slice(None, self.weights.shape[1] - distance)
        same_text = self.texts[:, later[0]] == self.texts[:, later[1]]
        is_anchor[:, later[1]] = (self.weights[:, later[0]] > 0) & same_text
        return is_anchor


def cut_repeats(text: DraftedText) -> DraftedText:
    """The text up to the second of two equal runs of REPEATED tokens in what follows its prompt."""
    seen: set[bytes] = set()
    tokens = np.ascontiguousarray(text.tokens)
    for start in range(text.first, len(tokens) - REPEATED + 1):
        run = tokens[start : start + REPEATED].tobytes()
        if run in seen:
            return DraftedText(tokens[:start], text.first)
        seen.add(run)
    return text


def written_texts(requests: Sequence[TargetTextRequest], rows: np.ndarray) -> list[DraftedText]:
    """Texts that a target wrote (`write_texts`), cut where it repeats itself, if at least two tokens are left."""
    texts = [
        cut_repeats(DraftedText(row[row != NO_TOKEN], len(request.prompt)))
        for request, row in zip(requests, rows, strict=True)
    ]
    return [text for text in texts if len(text.tokens) - text.first > 1]


def one_each(texts: Sequence[DraftedText], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows int32 [N, length] with one text each, NO_TOKEN after its end, and the `first` of each, int32 [N]."""
    rows = np.full((len(texts), length), NO_TOKEN, np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text.tokens)] = text.tokens
    return rows, np.array([text.first for text in texts], np.int32)


def pieces(documents: Sequence[np.ndarray], length: int) -> list[DraftedText]:
    """Documents in pieces of `length` tokens, of which all count; the last piece of each may be shorter."""
    cut = [document[start : start + length] for document in documents for start in range(0, len(document), length)]
    return [DraftedText(piece, 1) for piece in cut if len(piece) > 2]


def pack(texts: Sequence[DraftedText], length: int, prompt_weight: float, *, is_packed: bool = True) -> HeadRows:
    """Rows of `length` tokens with several texts each, the longest first, or with one each."""
    order = sorted(range(len(texts)), key=lambda number: (-len(texts[number].tokens), number))
    filled: list[tuple[int, list[DraftedText]]] = []
    for number in order:
        text = texts[number]
        size = len(text.tokens)
        place = next((i for i, (used, _) in enumerate(filled) if is_packed and used + size <= length), None)
        if place is None:
            filled.append((size, [text]))
        else:
            used, row = filled[place]
            filled[place] = used + size, [*row, text]
    shape = len(filled), length
    tokens, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    numbers, weights = np.full(shape, NO_TOKEN, np.int32), np.zeros(shape, np.float32)
    for row, (_, parts) in enumerate(filled):
        start = 0
        for number, text in enumerate(parts):
            size = len(text.tokens)
            here = slice(start, start + size)
            tokens[row, here], positions[row, here], numbers[row, here] = text.tokens, np.arange(size), number
            weights[row, start : start + size - 1] = np.where(np.arange(1, size) < text.first, prompt_weight, 1.0)
            start += size
    return HeadRows(tokens, positions, numbers, weights)


def draft_vocabulary(texts: Sequence[DraftedText], size: int, vocab_size: int) -> np.ndarray:
    """int32 [size], ascending: the tokens that a head drafts, which the texts have most often; the lowest of equals.

    Raises ValueError for more than the target has.
    """
    if size > vocab_size:
        raise ValueError(f"a draft vocabulary of {size} tokens is more than the target's {vocab_size}")
    counts = np.zeros(vocab_size, np.int64)
    for text in texts:
        counts += np.bincount(text.tokens[text.first :], minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def index_of(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """int32 [V]: the place of each of the target's tokens in a smaller vocabulary, or that vocabulary's size."""
    index = np.full(vocab_size, len(tokens), np.int32)
    index[tokens] = np.arange(len(tokens), dtype=np.int32)
    return index


def chosen_anchors(is_anchor: np.ndarray, count: int, random: np.random.Generator | None = None) -> np.ndarray:
    """int32 [B, count]: anchors of each row of bool [B, L], ascending, at random if there are more; then L for none."""
    chosen = np.full((len(is_anchor), count), is_anchor.shape[1], np.int32)
    for row, flags in enumerate(is_anchor):
        places = np.flatnonzero(flags)
        if len(places) > count:
            places = places[:count] if random is None else np.sort(random.choice(places, count, replace=False))
        chosen[row, : len(places)] = places
    return chosen
