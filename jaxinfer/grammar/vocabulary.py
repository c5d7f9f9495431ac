"""The texts of a tokenizer's tokens, as bytes, for grammars."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxinfer.text import Tokenizer
from jaxinfer.text.token_bytes import byte_decoder


@dataclass(frozen=True, eq=False)
class TrieLevel:
    """The distinct beginnings of a length of all tokens.

    Attributes:
      parents: each one's number among those that are one byte shorter. bytes: its last byte.
      tokens: ids of the tokens of this length. ends: the number of each.
    """

    parents: np.ndarray
    bytes: np.ndarray
    tokens: np.ndarray
    ends: np.ndarray


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

    @cached_property
    def id_of(self) -> dict[bytes, int]:
        """The lowest id of each text; end-of-sequence ids and empty texts are left out."""
        ids = range(len(self.tokens) - 1, -1, -1)
        return {token: index for index in ids if (token := self.tokens[index]) and index not in self.eos_token_ids}

    @property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return len(self.trie)

    @cached_property
    def trie(self) -> tuple[TrieLevel, ...]:
        """The tree of all tokens by levels, from length 1 on. About 20 bytes per byte of the tokens."""
        texts = [token or b"" for token in self.tokens]
        lengths = np.array([len(text) for text in texts], np.int64)
        order = np.argsort(-lengths, kind="stable")
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])[order]
        data = np.frombuffer(b"".join(texts), np.uint8)
        lengths = lengths[order]
        node = np.zeros(len(order), np.int64)
        levels = []
        for depth in range(int(lengths.max(initial=0))):
            count = int(np.searchsorted(-lengths, -depth, side="left"))  # tokens longer than `depth`
            keys, node = np.unique(node[:count] * 256 + data[starts[:count] + depth], return_inverse=True)
            is_end = lengths[:count] == depth + 1
            parents, last = np.divmod(keys, 256)
            levels.append(
                TrieLevel(parents.astype(np.int32), last.astype(np.uint8), order[:count][is_end], node[is_end])
            )
        return tuple(levels)


def vocabulary_of(tokenizer: Tokenizer, eos_token_ids: Iterable[int], vocab_size: int | None = None) -> Vocabulary:
    """The vocabulary of a tokenizer: what each token adds to a text that has begun, as the tokenizer decodes it.

    Special tokens add nothing; other added tokens (`<tool_call>`) add their text.

    Args:
      vocab_size: ids of the model; rows past the tokenizer's last token have no text.

    Raises ValueError if a token's text depends on its neighbours, so that no grammar over texts can be applied
    (WordPiece, and tokenizers without a decoder).
    """
    to_bytes, names = byte_decoder(tokenizer.decoder_spec), tokenizer.tokens_by_id()
    tokens: list[bytes | None] = [None] * (max(names, default=-1) + 1 if vocab_size is None else vocab_size)
    for token_id, token in names.items():
        if token_id < len(tokens) and token_id not in tokenizer.special_ids:
            tokens[token_id] = to_bytes(token)
    eos = tuple(sorted({int(token_id) for token_id in eos_token_ids if 0 <= token_id < len(tokens)}))
    return Vocabulary(tuple(tokens), eos)
