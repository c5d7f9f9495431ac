"""Streaming detokenization: deltas joined equal the whole decode, for any token ids and any decoder."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders

from jaxinfer.text import StreamingDetokenizer
from jaxinfer.text.token_bytes import byte_level

FUZZ = settings(max_examples=60, derandomize=True, deadline=None)
PIECES = ["[UNK]", "a", "##b", "c</w>", "</w>d", "▁e", "▁▁", " .", "n't", "<0xE4>", "<0xBD>", "<0xA0>", "<0x+F>", "Ġé"]


@pytest.fixture(scope="session")
def stream_tokenizers(toy):
    byte_level = toy.byte_level()
    toy.add_markers(byte_level)
    byte_level.add_tokens(["added with spaces", "▁é"])
    strip_both = decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 1), decoders.Fuse()])
    backends = {
        "byte_level": byte_level,
        "llama2": toy.llama2(),
        "metaspace_first": toy.llama2("first"),
        "gemma": toy.gemma(),
        "unigram_bytes": toy.unigram(),
        "unigram": toy.unigram(byte_fallback=False),
        "wordpiece": toy.with_decoder(decoders.WordPiece(), PIECES),
        "bpe_suffix": toy.with_decoder(decoders.BPEDecoder(), PIECES),
        "metaspace_never": toy.with_decoder(decoders.Metaspace(prepend_scheme="never"), PIECES),
        "strip_tokens": toy.with_decoder(strip_both, PIECES),
        "no_decoder": toy.with_decoder(None, PIECES),
        "regex": toy.with_decoder(decoders.Replace(Regex("[ab]"), "z"), PIECES),
        "ctc": toy.with_decoder(decoders.CTC(pad_token="a"), PIECES),
        "late_replace": toy.with_decoder(decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "z")]), PIECES),
    }
    return {name: toy.wrap(backend) for name, backend in backends.items()}


NAMES = (
    *("byte_level", "llama2", "metaspace_first", "gemma", "unigram_bytes", "unigram", "wordpiece", "bpe_suffix"),
    *("metaspace_never", "strip_tokens", "no_decoder", "regex", "ctc", "late_replace"),
)
BUFFERED = ("ctc", "late_replace")


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
def test_deltas_joined_equal_the_whole_decode(stream_tokenizers, name):
    tokenizer = stream_tokenizers[name]
    # Bytes and control tokens are rare among all ids, and what breaks decoders: draw them more often.
    rare = [i for i in range(tokenizer.vocab_size) if tokenizer.id_to_token(i).startswith("<") or i < 12]
    ids = st.lists(st.one_of(st.sampled_from(rare), st.integers(0, tokenizer.vocab_size - 1)), max_size=20)

    @FUZZ
    @given(st.lists(ids, max_size=4), st.booleans())
    def check(chunks, skip_special_tokens):
        stream = StreamingDetokenizer(tokenizer, skip_special_tokens)
        assert stream.is_incremental == (name not in BUFFERED)
        deltas = [stream.add(chunk) for chunk in chunks]
        text = "".join(deltas) + stream.finalize()
        assert text == tokenizer.decode([i for chunk in chunks for i in chunk], skip_special_tokens)

    check()


@FUZZ
@given(data=st.binary(max_size=24), cut=st.integers(0, 24))
def test_any_bytes_through_both_byte_decoders(stream_tokenizers, data, cut):
    by_level, by_fallback = stream_tokenizers["byte_level"], stream_tokenizers["llama2"]
    alphabet = {by_level.decode([i]): i for i in range(by_level.vocab_size) if len(by_level.decode([i])) == 1}
    runs = [
        (by_fallback, [by_fallback.token_to_id(f"<0x{byte:02X}>") for byte in data]),
        (by_level, [i for byte in data if (i := alphabet.get(chr(byte))) is not None]),
    ]
    for tokenizer, ids in runs:
        stream = StreamingDetokenizer(tokenizer)
        text = stream.add(ids[:cut]) + stream.add(ids[cut:]) + stream.finalize()
        assert text == tokenizer.decode(ids)
        text.encode("utf-8")


@FUZZ
@given(st.text(max_size=20))
def test_a_character_comes_with_its_last_byte(stream_tokenizers, text):
    """After each token, everything that whole UTF-8 characters account for has been sent (byte-level)."""
    tokenizer = stream_tokenizers["byte_level"]
    ids = tokenizer.encode_content(text)
    stream, sent, raw = StreamingDetokenizer(tokenizer, False), "", b""
    for token_id in ids:
        sent += stream.add(token_id)
        raw += byte_level(tokenizer.id_to_token(token_id))
        complete = raw.decode("utf-8", errors="ignore")
        assert sent == complete
        assert "\ufffd" not in sent or "\ufffd" in text
    assert sent + stream.finalize() == text


def test_decoding_token_by_token_is_caught(stream_tokenizers):
    """Inverse test: the joined single decodes, a common shortcut, differ from the whole decode."""
    for name, text in {"byte_level": "é 你好", "llama2": "hello wörld", "wordpiece": "a##b"}.items():
        tokenizer = stream_tokenizers[name]
        ids = [1, 2, 3] if name == "wordpiece" else tokenizer.encode(text, add_special_tokens=False)
        assert "".join(tokenizer.decode([i]) for i in ids) != tokenizer.decode(ids)


def test_a_broken_run_of_byte_tokens_is_all_replaced(stream_tokenizers):
    """Llama 2's decoder takes back a whole character if its run of bytes ends badly; so it is held until the end."""
    tokenizer = stream_tokenizers["llama2"]
    good = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "你".encode()]
    stream = StreamingDetokenizer(tokenizer)
    assert [stream.add(i) for i in good] == ["", "", ""]
    assert stream.add(tokenizer.token_to_id("<0xFF>")) == "\ufffd" * 4
    assert stream.add(tokenizer.token_to_id("<0x41>")) == "\ufffd"
    stream = StreamingDetokenizer(tokenizer)
    assert stream.add(good) == ""
    assert stream.add(tokenizer.token_to_id("▁")) == "你 "


def test_wrong_ids_and_late_calls_are_errors(stream_tokenizers):
    tokenizer = stream_tokenizers["byte_level"]
    stream = StreamingDetokenizer(tokenizer)
    with pytest.raises(
        ValueError, match=rf"token id {tokenizer.vocab_size} is not in .* {tokenizer.vocab_size} tokens"
    ):
        stream.add([tokenizer.vocab_size])
    with pytest.raises(ValueError, match="token id -1"):
        stream.add(-1)
    assert stream.finalize() == ""
    assert stream.finalize() == ""
    with pytest.raises(RuntimeError, match="finished"):
        stream.add([1])
