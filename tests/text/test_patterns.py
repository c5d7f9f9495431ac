"""Regular expressions of tokenizers: those of known models pass, expensive ones do not."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from checkpoints_convert.gguf.pre_tokenizers import PRE_TOKENIZERS
from jaxinfer.text.patterns import PatternError, can_match, check_cost, min_length
from tests.timing import processor_seconds

KIMI_K2 = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KNOWN = [
    *(step["pattern"]["Regex"] for one in PRE_TOKENIZERS.values() for step in one.steps if "pattern" in step),
    KIMI_K2,
    # GPT-4 with possessive quantifiers; Qwen 3.5; CLIP; BLOOM; DeepSeek Coder; numbers from the right; SMILES.
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s",
    r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    *(r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"[\r\n]", r"\s+$"),
    *(r"(?=(\d{3})+(?!\d))", r"\d{1,3}(?=(?:\d{3})*\b)", r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))"),
    r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])",
    *(r" {2,}", r"\s+", r"\n", r".+", r"\p{L}+(?:'\p{L}+)*", r"\w+|[^\w\s]+", r"\d+(?:[.,]\d+)*"),
    *(r"(?<=[a-z])(?=[A-Z])", r"\s*\n\s*", r"[^\S\n]+", r"https?://\S+", r"\b\w+\b", r"[a-zA-Z0-9_\-]{1,64}"),
    *("", "a|", r"[]a]", r"(?#note)a", r"(?:\p{L}+)+"),
]  # fmt: skip


@pytest.mark.parametrize("pattern", list(dict.fromkeys(KNOWN)))
def test_patterns_of_known_models_pass(pattern):
    with processor_seconds(less_than=0.1):
        check_cost(pattern)
    Regex(pattern)  # Oniguruma takes it too, so that these are tests of its syntax


def seconds(splitter, text):
    started = time.thread_time()
    splitter.pre_tokenize_str(text)
    return time.thread_time() - started


LETTERS = ["a", "b", "[ab]", "[^a]", r"\w", r"\s", ".", " ", "(?i:a)"]
patterns = st.recursive(
    st.sampled_from(LETTERS),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{1,3}", "{2}", "+?", "*+"])).map(
            lambda x: f"(?:{x[0]}){x[1]}"
        ),
        st.lists(inner, min_size=2, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda x: f"(?:{'|'.join(x)})"),
        inner.map(lambda x: f"(?={x})"),
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("num_examples", [25, pytest.param(1500, marks=pytest.mark.slow)])
def test_accepted_patterns_take_little_time_on_plain_text(num_examples):
    """The library itself, on 3,000 characters of words and on runs: an accepted pattern takes no quadratic time."""
    texts = ["ab aab  ba abab\n" * 190, "word and another, " * 160]
    short = texts[0][:200]
    accepted = 0

    @settings(max_examples=num_examples, derandomize=True, deadline=None)
    @given(patterns)
    def check(pattern):
        nonlocal accepted
        try:
            parsed = check_cost(pattern)
        except PatternError:
            return
        accepted += 1
        try:
            splitter = pre_tokenizers.Split(Regex(pattern), "isolated")
        except Exception:  # Oniguruma refuses it itself: `(?:(?=a))*`
            return
        for text in texts:
            assert any(seconds(splitter, text) < 0.3 for _ in range(3)), pattern
        # Against another implementation: no match is shorter, and each has only characters that the pattern names.
        found = [match.group() for match in re.finditer(pattern, short)]
        assert all(len(one) >= min_length(parsed.root) for one in found), pattern
        assert all(can_match(parsed.root, char) for char in set("".join(found))), pattern

    check()
    assert accepted > num_examples / 4


@pytest.mark.parametrize(("pattern", "text"), [(r"(?:a|a)*$", "a"), (r"a*a*a*[bc]", "a"), (r"[^!]*[bc]", "d ")])
def test_refused_patterns_do_take_long(pattern, text):
    """Inverse test: what is refused fails, or takes over 6 times the time on 4 times the text."""
    with pytest.raises(PatternError):
        check_cost(pattern)
    splitter = pre_tokenizers.Split(Regex(pattern), "isolated")
    times = []
    for size in (30, 120) if pattern[0] == "a" else (500, 2000):
        started = time.thread_time()
        try:
            splitter.pre_tokenize_str(text * size + "!c")
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            return
        times.append(time.thread_time() - started)
    assert times[1] > 6 * times[0], times
