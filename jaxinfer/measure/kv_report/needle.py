"""The needle task: a line of code in a text, repeated at its end. Plain Python: no JAX here.

Greedy decoding copies the line if each of its tokens is the most probable one after the right ones before it. So one
pass over the whole text, the copy included, shows whether the model would write it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_NOUNS = ("retry", "buffer", "token", "worker", "cursor", "header", "packet", "socket", "record", "thread")
_VERBS = ("load", "parse", "reset", "merge", "flush", "count", "fetch", "split", "write", "check")
_COLOURS = ("amber", "cobalt", "ivory", "olive", "coral", "indigo", "maroon", "silver", "violet", "teal")


@dataclass(frozen=True)
class Needle:
    """A text that ends with a copy of a line.

    Attributes:
      tokens: of the text. num_copied: its last tokens, that the model has to write. depth: of the line's first
        occurrence, as a share of the place before the copy.
    """

    tokens: list[int]
    num_copied: int
    depth: float


def needle_lines(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Different assignments, each as the part that is given the second time, and the part that has to be copied."""
    random = np.random.default_rng([seed, 7])
    found: dict[str, str] = {}
    while len(found) < count:
        noun, verb, other, colour = (words[random.integers(len(words))] for words in (_NOUNS, _VERBS, _NOUNS, _COLOURS))
        found[f"{noun}_{colour}_{len(found)} ="] = f" {verb}_{other}({random.integers(10, 1000)}, {colour!r})"
    return list(found.items())


def make_needles(
    encode: Callable[[str], Sequence[int]],
    start: Sequence[int],
    filler: Sequence[int],
    num_tokens: int,
    lines: Sequence[tuple[str, str]],
    depths: Sequence[float] = DEPTHS,
) -> list[Needle]:
    """Texts of `num_tokens` tokens, for each depth one with each line; `start` begins each, `filler` is repeated as
    needed. [] where a line would be more than a quarter of the text."""
    found = []
    for depth in depths:
        for number, (given, copied) in enumerate(lines):
            head, tail, end = list(encode("\n" + given)), list(encode(copied)), list(encode("\n"))
            room = num_tokens - len(start) - 2 * (len(head) + len(tail)) - len(end)
            if room < 0 or 4 * (len(head) + len(tail)) > num_tokens:
                return []
            first = number * len(filler) // len(lines)
            between = [filler[(first + place) % len(filler)] for place in range(room)]
            cut = round(depth * room)
            tokens = [*start, *between[:cut], *head, *tail, *end, *between[cut:], *head, *tail]
            found.append(Needle(tokens, len(tail), depth))
    return found


def is_copied(needle: Needle, best: np.ndarray) -> bool:
    """Whether all tokens of the copy are the most probable ones; `best` int[num_copied + 1] are those after each of the
    text's last num_copied + 1 tokens."""
    return best[:-1].tolist() == needle.tokens[-needle.num_copied :]
