"""Vocabularies: the bytes of tokens are what the tokenizer decodes, and what llguidance reads."""

import pytest
from tokenizers import AddedToken, decoders

from jaxinfer.grammar.vocabulary import Vocabulary, vocabulary_of
from jaxinfer.text import Tokenizer
from tests.grammar.llguidance_oracle import llguidance
from tests.text import conftest as toy

# Tokenizers that llguidance cannot read, or reads otherwise than they decode.
BACKENDS = {
    "byte_level": toy.byte_level,
    "markers_in_vocab": lambda: toy.byte_level_with_markers_in_vocab(ignore_merges=False),
    "llama2": toy.llama2,
    "metaspace_first": lambda: toy.llama2("first"),
    "gemma": toy.gemma,
    "unigram": toy.unigram,
    "unigram_no_bytes": lambda: toy.unigram(byte_fallback=False),
}


def made(name: str) -> Tokenizer:
    backend = BACKENDS[name]()
    toy.add_markers(backend)
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("a b", "你", "\n\n\n")])
    return toy.wrap(backend)


@pytest.mark.parametrize("name", BACKENDS)
def test_tokens_are_decoded_to_their_bytes(name):
    """Between other tokens; one that is part of a character is left out."""
    tokenizer = made(name)
    vocabulary = vocabulary_of(tokenizer, [1], tokenizer.vocab_size + 5)
    assert len(vocabulary) == tokenizer.vocab_size + 5
    around = tokenizer.token_to_id("a")
    count = 0
    for token_id, data in enumerate(vocabulary.tokens):
        if token_id in tokenizer.special_ids or not tokenizer.has_id(token_id):
            assert data is None
            continue
        assert data is not None
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        assert tokenizer.decode([around, token_id, around]) == f"a{text}a", tokenizer.id_to_token(token_id)
        count += 1
    assert count > 50


@pytest.mark.parametrize("name", [name for name in BACKENDS if name not in ("unigram", "unigram_no_bytes")])
def test_llguidance_reads_the_same_bytes(name):
    """Apart from `<tool_call>` and its like, which are special to llguidance, and 0xFF, with which those begin."""
    tokenizer = made(name)
    vocabulary = vocabulary_of(tokenizer, [1])
    theirs = llguidance.LLTokenizer(tokenizer._backend.to_str(), n_vocab=len(vocabulary), eos_token=1)
    for token_id, data in enumerate(vocabulary.tokens):
        if theirs.is_special_token(token_id):
            assert data is None or data == b"\xff" or tokenizer.id_to_token(token_id) in toy.NON_SPECIAL
        else:
            assert data == theirs.decode_bytes([token_id])


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.BPEDecoder(), decoders.CTC()])
def test_texts_that_depend_on_neighbours_are_refused(decoder):
    tokenizer = toy.wrap(toy.with_decoder(decoder, ["<unk>", "a", "##b"]))
    with pytest.raises(ValueError, match="tokens have texts of their own"):
        vocabulary_of(tokenizer, [1])


def test_what_a_vocabulary_is_known_by():
    one = Vocabulary((b"a", None, b"ab", b"a", b""), (1,))
    assert one.id_of == {b"a": 0, b"ab": 2}
    assert one.longest == 2
    assert [len(level.bytes) for level in one.trie] == [1, 1]
    others = [
        Vocabulary((b"a", None, b"ab", b"a", b""), (3,)),
        Vocabulary((b"a", b"", b"ab", b"a", b""), (1,)),
        Vocabulary((b"aa", None, b"b", b"a", b""), (1,)),
    ]
    assert len({vocabulary.digest for vocabulary in (one, *others)}) == 4
    assert vocabulary_of(made("byte_level"), [5, 1, 5, 99999]).eos_token_ids == (1, 5)
