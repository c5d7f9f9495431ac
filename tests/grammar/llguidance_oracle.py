"""llguidance over our vocabularies, as the oracle of patterns and masks."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import numpy as np
import pytest

from jaxinfer.grammar.spelling import MAX_FORCED, Spelling
from jaxinfer.grammar.table_builder import TokenTable
from jaxinfer.grammar.vocabulary import Vocabulary

llguidance = pytest.importorskip("llguidance")
from llguidance.numpy import fill_next_token_bitmask  # noqa: E402

BYTES = Vocabulary((*(bytes([byte]) for byte in range(256)), None), (256,))


class _Wrapped:
    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary):
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.tokens = [
            f"<[{index}]>".encode() if token is None else token for index, token in enumerate(vocabulary.tokens)
        ]
        self.special_token_ids = [index for index, token in enumerate(vocabulary.tokens) if token is None]

    def __call__(self, text: bytes | str) -> list[int]:
        raise NotImplementedError  # only needed for forced text


_tokenizers: dict[int, tuple[Vocabulary, llguidance.LLTokenizer]] = {}


def tokenizer_of(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    if id(vocabulary) not in _tokenizers:
        made = llguidance.LLTokenizer(_Wrapped(vocabulary), len(vocabulary), list(vocabulary.eos_token_ids), slices=[])
        _tokenizers[id(vocabulary)] = vocabulary, made
    return _tokenizers[id(vocabulary)][1]


def matcher(pattern: str, vocabulary: Vocabulary = BYTES) -> llguidance.LLMatcher:
    """Raises ValueError if llguidance refuses the pattern.

    By default it allows one token where text is forced, chosen by the token before it: `no_forcing` is needed for
    masks that are functions of the text so far.
    """
    lark = json.loads(llguidance.LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
    grammar = llguidance.LLMatcher.grammar_from_lark('%llguidance {"no_forcing": true}\n' + lark)
    made = llguidance.LLMatcher(tokenizer_of(vocabulary), grammar, log_level=0)
    if made.is_error():
        raise ValueError(made.get_error())
    return made


def accepts(pattern: str, text: str) -> bool:
    made = matcher(pattern)
    data = list(text.encode())
    return made.try_consume_tokens(data) == len(data) and made.is_accepting()


def longest_tokens(vocabulary: Vocabulary) -> Spelling:
    """Forced text in the longest tokens, without a tokenizer."""
    return Spelling(vocabulary, lambda text: ())


class EverySpelling(Spelling):
    """Forced text in any tokens."""

    def __init__(self, vocabulary: Vocabulary):
        super().__init__(vocabulary, lambda text: ())
        self.tokens = lambda forced: frozenset()  # pyright: ignore[reportAttributeAccessIssue]


def mask_of(made: llguidance.LLMatcher, spelling: Spelling, vocabulary: Vocabulary) -> np.ndarray:
    """llguidance's mask, with one spelling of forced text."""
    mask = np.zeros((1, vocabulary.num_words), np.int32)
    fill_next_token_bitmask(made, mask)
    if spelled := spelling.tokens(made.compute_ff_bytes()[:MAX_FORCED]):
        bits = np.zeros(32 * vocabulary.num_words, bool)
        bits[list(spelled)] = True
        mask &= np.packbits(bits, bitorder="little").view(np.int32)
    return mask[0].view(np.uint32)


def check_every_state(table: TokenTable, vocabulary: Vocabulary, spelling: Spelling, pattern: str) -> None:
    """Compares the masks of all states but the last, each reached by a shortest sequence of tokens."""
    made = matcher(pattern, vocabulary)
    token_of = np.full(table.successors.shape[1], -1)
    token_of[table.classes[::-1]] = np.arange(len(vocabulary))[::-1]
    paths: dict[int, list[int]] = {0: []}
    queue = [0]
    for state in queue:  # grows meanwhile
        path = paths[state]
        if state == len(table.successors) - 1:
            continue
        assert made.reset()
        assert made.consume_tokens(path), path
        assert np.array_equal(mask_of(made, spelling, vocabulary), table.masks[table.mask_of[state]]), (
            pattern,
            state,
            path,
        )
        for target, token in zip(table.successors[state].tolist(), token_of.tolist(), strict=True):
            if target >= 0 and target not in paths:
                paths[target] = [*path, token]
                queue.append(target)
    assert len(paths) == len(table.successors)


def check_walk(
    table: TokenTable, vocabulary: Vocabulary, spelling: Spelling, pattern: str, seed: int, steps: int = 40
) -> int:
    """Compares masks along a random answer; returns how many."""
    made, state, rng = matcher(pattern, vocabulary), 0, random.Random(seed)
    for step in range(steps):
        mask = table.masks[table.mask_of[state]]
        assert np.array_equal(mask_of(made, spelling, vocabulary), mask), (pattern, seed, step)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token = rng.choice(allowed.tolist())
        state = int(table.successors[state, table.classes[token]])
        if token in vocabulary.eos_token_ids:
            assert state == len(table.successors) - 1
            return step + 1
        assert made.consume_token(token)
    return steps


def allowed_tokens(table: TokenTable, state: int) -> list[int]:
    bits = np.unpackbits(table.masks[table.mask_of[state]].view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def follow(table: TokenTable, tokens: Sequence[int]) -> int:
    """The state after these tokens, -1 if one is refused."""
    state = 0
    for token in tokens:
        state = int(table.successors[state, table.classes[token]])
        if state < 0:
            return state
    return state
