"""One spelling for a text that a grammar forces.

`{"name":` could be written in many tokens, and a mask of all of them lets a model stray into pieces that it has never
seen together. Where only one text can follow, masks allow the token with which the tokenizer itself would begin it, and
tokens that hold all of it and go on. That is a function of the forced text alone, so masks from the host and tables
agree; and such a token can be drafted without a model.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import takewhile

from jaxinfer.grammar.vocabulary import Vocabulary

MAX_FORCED = 256  # bytes of a forced text that are looked at


class Spelling:
    """How a tokenizer spells forced texts.

    Args:
      vocabulary: its tokens. encode: turns a text into token ids, without special tokens.
      name: tells apart tokenizers that do so in other ways, in caches on disk.
    """

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], Sequence[int]], name: str = ""):
        self.vocabulary, self.encode, self.name = vocabulary, encode, name
        self.tokens = lru_cache(maxsize=4096)(self._tokens)
        self.first = lru_cache(maxsize=4096)(self._first)

    def _tokens(self, forced: bytes) -> frozenset[int]:
        """Tokens that may follow where `forced` must: those with the text of the first token, and those that hold all
        of it and more. Empty for any, where no token begins it."""
        first = self.first(forced)
        if first < 0:
            return frozenset()
        text = self.vocabulary.tokens[first] or b""
        tokens = {token for _, token in takewhile(lambda pair: pair[0] == text, self._from(text))}
        if len(forced) < MAX_FORCED:
            tokens.update(token for other, token in self._from(forced) if len(other) > len(forced))
        return frozenset(tokens)

    def _first(self, forced: bytes) -> int:
        """The token that begins a forced text: the tokenizer's, or else the longest; -1 if there is none."""
        try:
            ids = self.encode(forced.decode())
        except UnicodeDecodeError:  # it ends within a character
            ids = ()
        if ids and (text := self.vocabulary.tokens[ids[0]]) and forced.startswith(text):
            return self.vocabulary.id_of[text]
        lengths = range(min(len(forced), self.vocabulary.longest), 0, -1)
        return next((token for end in lengths if (token := self.vocabulary.id_of.get(forced[:end])) is not None), -1)

    @cached_property
    def _sorted(self) -> list[tuple[bytes, int]]:
        return sorted((text, token) for token, text in enumerate(self.vocabulary.tokens) if text)

    def _from(self, start: bytes) -> Iterator[tuple[bytes, int]]:
        """Texts that begin so, with their tokens."""
        place = bisect_left(self._sorted, (start, -1))
        while place < len(self._sorted) and self._sorted[place][0].startswith(start):
            yield self._sorted[place]
            place += 1
