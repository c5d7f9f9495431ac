"""The texts of a tokenizer's tokens, as bytes, for grammars."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """V token ids of a model.

    Attributes:
      tokens: the bytes that each id adds to a text; None for special tokens and ids without a token, which no grammar
        allows. eos_token_ids: end an answer; allowed where it may end.
    """

    tokens: Sequence[bytes | None]
    eos_token_ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_words(self) -> int:
        """uint32 words of a mask: bit v % 32 of word v // 32 is token v."""
        return -(-len(self.tokens) // 32)

    @cached_property
    def digest(self) -> str:
        """Names its contents, in caches on disk."""
        digest = hashlib.blake2b(digest_size=16)
        for token in self.tokens:
            digest.update(b"\xff\xff" if token is None else len(token).to_bytes(2, "little") + token)
        digest.update(repr(self.eos_token_ids).encode())
        return digest.hexdigest()


def vocabulary_of(tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    """TEMPORARY: byte-level only."""
    import json

    spec = json.loads(tokenizer._files.tokenizer_json)
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in keep]
    decode = {chr(b): b for b in keep} | {chr(256 + i): b for i, b in enumerate(rest)}
    tokens: list[bytes | None] = [None] * vocab_size
    for text, number in spec["model"]["vocab"].items():
        tokens[number] = bytes(decode[c] for c in text)
    for one in spec["added_tokens"]:
        tokens[one["id"]] = None
    return Vocabulary(tokens, eos_token_ids)
