"""Places of tokens of completions in their text: placeholders of parts of characters do not count."""

import random
from importlib import resources

import pytest

from jaxinfer.engine.request import Logprob, RequestOutput
from jaxinfer.openai.writer import LogprobLists
from jaxinfer.sampling import SamplingParams
from jaxinfer.text import Tokenizer
from tests.text.conftest import byte_level, llama2, unigram, wrap

TOKENIZERS = {
    "demo": lambda: Tokenizer.from_dir(resources.files("jaxinfer") / "data" / "demo"),
    "byte-level": lambda: wrap(byte_level()),
    "byte fallback": lambda: wrap(llama2()),
    "byte fallback, Metaspace": lambda: wrap(llama2("first")),
    "unigram": lambda: wrap(unigram()),
}
PIECES = ["😀", " a", "hello", " world", "é", "漢字", "\n", "  ", "x", "user", "🎉🎉"]


def entries(tokenizer, ids):
    return [{token: Logprob(-1.0, 1, tokenizer.decode([token], False))} for token in ids]


def lists_of(tokenizer, ids, **options):
    lists = LogprobLists(tokenizer, **options)
    for token, entry in zip(ids, entries(tokenizer, ids), strict=True):
        lists.add(token, entry, 0)
    return lists.take()


def test_an_emoji_is_one_character():
    tokenizer = TOKENIZERS["demo"]()
    ids = tokenizer.encode("😀 a")
    found = lists_of(tokenizer, ids)
    assert found.tokens == ["\ufffd"] * 4 + [" a"]
    assert found.text_offset == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_offsets_are_places_in_the_text(name):
    tokenizer, numbers = TOKENIZERS[name](), random.Random(7)
    for _ in range(30):
        ids = tokenizer.encode("".join(numbers.choices(PIECES, k=8)), False)
        text, found = tokenizer.decode(ids), lists_of(tokenizer, ids, offset=5)
        offsets = [offset - 5 for offset in found.text_offset]
        assert offsets == sorted(offsets)
        assert offsets[0] == 0
        num_whole = 0
        for number, (token, start) in enumerate(zip(found.tokens, offsets, strict=True)):
            end = [*offsets[1:], len(text)][number]
            if "\ufffd" not in token:
                assert text[start:end].strip(" ") == token.strip(" ")
                num_whole += bool(token)
            elif start < end:
                assert end == start + 1  # the last part of a character
        assert num_whole


def test_special_tokens_count_where_the_text_has_them():
    tokenizer = TOKENIZERS["byte fallback"]()
    bos, a = tokenizer.token_to_id("<s>"), tokenizer.encode("hello", False)
    assert lists_of(tokenizer, [*a, bos, *a]).text_offset[len(a)] == 5
    assert lists_of(tokenizer, [*a, bos, *a]).text_offset[len(a) + 1] == 5
    assert lists_of(tokenizer, [*a, bos, *a], skip_special_tokens=False).text_offset[len(a) + 1] == 8


@pytest.mark.parametrize(("prompt", "second"), [("hello", 0), ("<s>hello", 3)])
def test_an_echo_begins_with_the_prompts_text(prompt, second):
    """Special tokens that the tokenizer adds are not in the text; those that the client wrote are."""
    tokenizer = TOKENIZERS["byte fallback"]()
    bos, a = tokenizer.token_to_id("<s>"), tokenizer.encode("hello", False)
    ids = [bos, *a]
    scores = [None, *entries(tokenizer, a)]
    output = RequestOutput("0", prompt, ids, [], True, prompt_logprobs=scores)
    lists = LogprobLists(tokenizer)
    lists.add_prompt(prompt, output, SamplingParams(prompt_logprobs=0))
    lists.add(a[0], scores[1], 0)
    found = lists.take().text_offset
    assert found[:2] == [0, second]
    assert found[-1] == len(prompt)


def test_offsets_go_on_after_tokens_that_were_told():
    """Also within a character whose first bytes came before."""
    tokenizer = Tokenizer.from_dir(resources.files("jaxinfer") / "data" / "demo")
    generator = random.Random(1)
    tokens = [token for _ in range(40) for token in tokenizer.encode(generator.choice(["é😀", " a", "漢", "x"]))]
    tokens = [token for token in tokens if generator.random() < 0.8]  # with bytes that end no character
    whole, places, ends = LogprobLists(tokenizer), [], []
    for token in tokens:
        places.append(whole._place(token, tokenizer.decode([token], False)))
        ends.append(whole._offset)
    for cut in range(1, len(tokens)):
        rest = LogprobLists(tokenizer, offset=ends[cut - 1])
        rest.pass_over(tokens[:cut])
        assert [rest._place(token, tokenizer.decode([token], False)) for token in tokens[cut:]] == places[cut:], cut
