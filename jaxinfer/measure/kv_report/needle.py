"""The needle task: a line of code in a text, repeated at its end. Plain Python: no JAX here.

Greedy decoding copies the line if each of its tokens is the most probable one after the right ones before it. So one
pass over the whole text, the copy included, shows whether the model would write it. Models that are too small to copy
a whole line still find its tokens more probable: the same text without the first occurrence shows by how much.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

DEPTHS = (0.0, 0.25, 0.75, 1.0)
_NOUNS = ("retry", "buffer", "token", "worker", "cursor", "header", "packet", "socket", "record", "thread")
_VERBS = ("load", "parse", "reset", "merge", "flush", "count", "fetch", "split", "write", "check")
_COLOURS = ("amber", "cobalt", "ivory", "olive", "coral", "indigo", "maroon", "silver", "violet", "teal")


@dataclass(frozen=True)
class Needle:
    """A text that ends with a copy of a line.

    Attributes:
      tokens: of the text. num_copied: its last tokens, that the model has to write. depth: of the line's first
        occurrence, as a share of the place before the copy; None where there is none.
    """

    tokens: list[int]
    num_copied: int
    depth: float | None


def needle_lines(count: int) -> list[tuple[str, str]]:
    """Heads of different methods, each as the part that is given the second time, and the part that is copied."""
    random = np.random.default_rng([0, 7])
    lines: dict[str, str] = {}
    while len(lines) < count:
        verb, noun, colour, other = (words[random.integers(len(words))] for words in (_VERBS, _NOUNS, _COLOURS, _NOUNS))
        lines[f"    def {verb}_{noun}_from"] = f"_{colour}_{other}(self, {colour}):"
    return list(lines.items())


def make_needles(
    encode: Callable[[str], Sequence[int]],
    start: Sequence[int],
    filler: Sequence[int],
    num_tokens: int,
    lines: Sequence[tuple[str, str]],
    depths: Sequence[float] = DEPTHS,
) -> list[Needle]:
    """Texts of `num_tokens` tokens: one with each line that lacks its first occurrence, then for each depth one with
    each line. `start` begins each, `filler` is repeated as needed. [] where a line would be more than a quarter of the
    text."""
    needles = []
    for depth in (None, *depths):
        for number, (given, copied) in enumerate(lines):
            head, tail, end = list(encode("\n" + given)), list(encode(copied)), list(encode("\n"))
            line = [] if depth is None else [*head, *tail, *end]
            room = num_tokens - len(start) - len(line) - len(head) - len(tail)
            if 4 * (len(head) + len(tail) + len(start)) > num_tokens:
                return []
            # What lies before the copy is the same with and without the first occurrence.
            first = number * len(filler) // len(lines) - room
            between = [filler[(first + place) % len(filler)] for place in range(room)]
            cut = round((depth or 0.0) * room)
            tokens = [*start, *between[:cut], *line, *between[cut:], *head, *tail]
            needles.append(Needle(tokens, len(tail), depth))
    return needles


def score_copy(needle: Needle, log_probs: np.ndarray) -> tuple[bool, float]:
    """True if all tokens of the copy are the most probable ones, and their mean log-probability; `log_probs` are
    [num_copied, V], before each of these tokens."""
    targets = np.asarray(needle.tokens[-needle.num_copied :])
    chosen = log_probs[np.arange(len(targets)), targets]
    return bool(np.all(log_probs.argmax(-1) == targets)), float(chosen.mean())
