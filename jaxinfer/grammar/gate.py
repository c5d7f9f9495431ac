"""Finds the place where an answer's grammar begins: after the reasoning, for models that reason first."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxinfer.grammar.vocabulary import Vocabulary
from jaxinfer.text.reasoning import Channels, Family, starts_inside

_NUM_TAIL = 256  # bytes of the reasoning's end that are looked at


@dataclass
class Gate:
    """Reads an answer up to the end of its reasoning.

    Attributes:
      opening: the token with which reasoning may begin, where that is not decided by the prompt.
      state: "undecided" before such an answer's first token, "reasoning", or "open" where the grammar has begun.
    """

    end: re.Pattern[bytes]
    vocabulary: Vocabulary
    special_texts: Mapping[int, bytes]
    opening: int | None = None
    state: Literal["undecided", "reasoning", "open"] = "reasoning"
    _tail: bytes = field(default=b"", repr=False)

    def feed(self, token: int) -> None:
        """Reads the answer's next token."""
        if self.state == "undecided":
            self.state = "reasoning" if token == self.opening else "open"
        elif self.state == "reasoning":
            text = self.vocabulary.tokens[token] or self.special_texts.get(token, b"")
            self._tail = (self._tail + text)[-_NUM_TAIL:]
            if self.end.search(self._tail):
                self.state = "open"


def gate_of(family: Family, prompt_end: str, vocabulary: Vocabulary, special_texts: Mapping[int, bytes]) -> Gate | None:
    """The gate of an answer to a prompt that ends with this text; None where the answer cannot begin with reasoning.

    `special_texts`: of the tokens that have none in the vocabulary.
    """
    if isinstance(family, Channels):
        start, channel, message = map(re.escape, family.markers[:3])
        end = rf"{channel}final(?:(?!{start}|{channel}|{message}).)*{message}\Z"
        return Gate(re.compile(end.encode(), re.DOTALL), vocabulary, special_texts)
    end = re.compile(re.escape(family.closing.encode()) + rb"\s*\Z")
    if starts_inside(family, prompt_end):
        return Gate(end, vocabulary, special_texts)
    if prompt_end.rstrip().endswith(family.closing):
        return None
    opening = family.opening.encode()
    special = (token for token, text in special_texts.items() if text == opening)
    token = vocabulary.id_of.get(opening) or next(special, None)
    return None if token is None else Gate(end, vocabulary, special_texts, token, "undecided")
