"""Texts that are too long are refused early, and no other ones are."""

import json
import random
import time
import tracemalloc

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers

from jaxinfer.data import embedded_path
from jaxinfer.text import TextTooLongError, Tokenizer

ENGLISH = "The quick brown fox jumps over the lazy dog, and it's 3 o'clock.\n"


@pytest.fixture(scope="module")
def demo():
    return Tokenizer.from_dir(embedded_path("demo"))


def texts(size):
    chars = random.Random(0)
    marks = ["<|im_end|>", "hello ", "</s>", "   ", "\n\n", "é", "你好", "e\u0301", "naïve "]
    return {
        "english": (ENGLISH * (size // len(ENGLISH) + 1))[:size],
        "spaces": " " * size,
        "one letter": "a" * size,
        "chinese": "你好世界" * (size // 4),
        "letters": "".join(chars.choices("abcdefghijklmnopqrstuvwxyzABC0123+/", k=size)),
        "mixed": "".join(chars.choices(marks, k=size // 5)),
        "accents": "e" + "\u0301" * size,
    }


def make(toy, name):
    if name == "byte_level":
        return toy.byte_level()
    if name == "drops_accents":
        backend = toy.byte_level()
        backend.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Strip()])
        return backend
    if name == "word_level":
        return toy.with_decoder(None, ["<unk>", "a", "hello"])
    if name == "strips_around":
        backend = toy.byte_level()
        backend.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False)])
        return backend
    return getattr(toy, name)()


SIZES = [70_000, pytest.param(400_000, marks=pytest.mark.slow)]
SLOW = ("llama2", "gemma", "unigram", "drops_accents", "word_level", "strips_around")
FAMILIES = ["byte_level", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_that_fits_is_never_refused(toy, family, size):
    tokenizer = toy.wrap(make(toy, family))
    for name, text in texts(size).items():
        if name not in ("english", "mixed", "accents") and size == 70_000:
            continue
        ids = tokenizer.encode(text)
        assert tokenizer.encode(text, max_tokens=len(ids)) == ids, (family, name)
        if len(ids) > 20_000:
            with pytest.raises(TextTooLongError, match=rf"bytes of text are more than {len(ids) // 10} tokens"):
                tokenizer.encode(text, max_tokens=len(ids) // 10)


def test_spaces_that_a_token_takes_with_it_do_not_count(toy):
    tokenizer = toy.wrap(make(toy, "strips_around"))
    text = " " * 100_000 + "<mask>" + " " * 3000
    ids = tokenizer.encode(text)
    assert len(ids) == 1
    assert tokenizer.encode(text, max_tokens=10) == ids


def test_cuts_between_pieces_do_not_count(toy):
    """Each cut makes more tokens: they are 24 letters long, and a piece is no multiple of that."""
    units = ["abc" * number for number in (1, 2, 4, 8)]
    merges = [("a", "b"), ("ab", "c"), *((unit, unit) for unit in units[:3])]
    vocab = {token: index for index, token in enumerate(("a", "b", "c", "ab", *units))}
    tokenizer = toy.wrap(tokenizers.Tokenizer(models.BPE(vocab, merges)))
    text = units[3] * 4000
    assert tokenizer.encode(text, max_tokens=4000) == [vocab[units[3]]] * 4000
    with pytest.raises(TextTooLongError):
        tokenizer.encode(text, max_tokens=2000)


def test_four_megabytes_are_refused_in_no_time(demo):
    text = ENGLISH * (4_000_000 // len(ENGLISH))
    tracemalloc.start()
    try:
        started = time.thread_time()
        with pytest.raises(TextTooLongError, match=r"bytes of text are more than 1024 tokens"):
            demo.encode(text, max_tokens=1024)
        seconds, (_, peak) = time.thread_time() - started, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seconds < 0.5
    assert peak < 4 * len(text)


def test_a_limit_near_the_length_stops_early(demo):
    """The limit allows more bytes than the longest token's: the text is tokenized until it is passed."""
    text = ENGLISH * (400_000 // len(ENGLISH))
    started = time.thread_time()
    with pytest.raises(TextTooLongError):
        demo.encode(text, max_tokens=20_000)
    early = time.thread_time() - started
    started = time.thread_time()
    demo.encode(text)
    assert early < 0.6 * (time.thread_time() - started)


def test_a_dropped_text_is_not_counted(toy):
    backend = toy.byte_level()
    backend.normalizer = normalizers.Replace("x", "")
    tokenizer = toy.wrap(backend)
    assert tokenizer.encode("x" * 70_000 + "a", max_tokens=3) == tokenizer.encode("a")


def test_a_normalizer_may_not_grow_a_long_text(toy):
    spec = json.loads(toy.byte_level().to_str())
    spec["normalizer"] = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 400}
    tokenizer = toy.wrap(tokenizers.Tokenizer.from_str(json.dumps(spec)))
    assert len(tokenizer.encode("a cab")) > 300
    for encode in (tokenizer.encode, tokenizer.encode_content):
        with pytest.raises(ValueError, match=r"normalizer makes more than \d+ bytes of a text of 200000"):
            encode("a" * 200_000)


def test_long_chats_are_refused(demo):
    long = "word " * 10_000_000
    for content in (long, [{"type": "text", "text": long}], "word " * 50_000):
        started = time.thread_time()
        with pytest.raises(TextTooLongError, match="bytes of text are more than 1024 tokens"):
            demo.apply_chat_template([{"role": "user", "content": content}], max_prompt_tokens=1024)
        assert time.thread_time() - started < 0.5
    messages = [{"role": "user", "content": "word " * 100}]
    assert demo.apply_chat_template(messages, max_prompt_tokens=1024) == demo.apply_chat_template(messages)
    nested = "x"
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(ValueError, match="nested more than 32"):
        demo.apply_chat_template([{"role": "user", "content": nested}], max_prompt_tokens=1024)
