"""Tables: masks equal llguidance's, states end, forced text is drafted."""

import random
import time

import numpy as np
import pytest

from jaxinfer.data import embedded_path
from jaxinfer.grammar.automaton import build_automaton
from jaxinfer.grammar.nodes import TooLargeError
from jaxinfer.grammar.pattern import parse_pattern, pattern_of
from jaxinfer.grammar.spelling import Spelling
from jaxinfer.grammar.table_builder import TableLimits, TokenTable, build_table
from jaxinfer.grammar.vocabulary import Vocabulary, vocabulary_of
from jaxinfer.text import Tokenizer
from tests.grammar.llguidance_oracle import (
    EverySpelling,
    allowed_tokens,
    check_every_state,
    check_walk,
    follow,
    longest_tokens,
)
from tests.grammar.patterns import COMMON, OBJECT, SIZED

ABC = Vocabulary((b"a", b"b", b"c", b"ab", b"abc", None, b"", b"a", None), (8,))


@pytest.fixture(scope="module")
def demo() -> tuple[Vocabulary, Spelling]:
    path = embedded_path("demo")
    assert path is not None
    tokenizer = Tokenizer.from_dir(path)
    vocabulary = vocabulary_of(tokenizer, [0])
    return vocabulary, Spelling(vocabulary, lambda text: tokenizer.encode(text, False))


def explicit(pattern: str) -> str:
    """With this Python's Unicode, of which llguidance has another version."""
    return pattern_of(parse_pattern(pattern))


def table_of(
    pattern: str, vocabulary: Vocabulary, spelling: Spelling | None = None, limits: TableLimits | None = None
) -> TokenTable:
    return build_table(build_automaton(parse_pattern(pattern)), spelling or longest_tokens(vocabulary), limits)


def test_masks_are_llguidances(demo):
    for pattern in (COMMON[0], "yes|no|très positif|", r"([ab]{2}c){1,3}", r".{1,6}", r"\{\"a\": *-?[0-9]+\}"):
        table = table_of(pattern, *demo)
        check_every_state(table, *demo, explicit(pattern))
        for seed in range(3):
            check_walk(table, *demo, explicit(pattern), seed)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", COMMON)
def test_masks_are_llguidances_for_all_patterns(demo, pattern):
    table = table_of(pattern, *demo)
    if len(table.successors) <= 600:
        check_every_state(table, *demo, explicit(pattern))
    for seed in range(40):
        check_walk(table, *demo, explicit(pattern), seed, steps=80)


def test_a_mask_that_is_wrong_is_found(demo):
    table = table_of("yes|no", *demo)
    table.masks[table.mask_of[1], 5] ^= 1
    with pytest.raises(AssertionError):
        check_every_state(table, *demo, "yes|no")


def test_end_of_sequence_is_allowed_where_a_text_may_end():
    table = table_of("(ab)*", ABC)
    assert table.successors.shape == (3, 5)
    assert allowed_tokens(table, 0) == [0, 3, 7, 8]
    assert [follow(table, tokens) for tokens in ([8], [3], [0], [0, 1], [4], [5], [6])] == [2, 0, 1, 0, -1, -1, -1]
    assert allowed_tokens(table, follow(table, [0])) == [1]
    assert allowed_tokens(table, 2) == [8]
    assert follow(table, [0, 1, 8, 8]) == 2


def test_equal_tokens_are_one_class():
    table = table_of("(ab)*", ABC)
    assert table.classes[0] == table.classes[7]
    assert table.classes[5] == table.classes[6] == table.classes[2]  # refused everywhere
    assert len({table.classes[token] for token in (0, 1, 2, 3, 8)}) == 5


def test_a_text_that_could_not_be_ended_has_no_table():
    """A pattern may go on with a character that no token can write: llguidance allows what leads there."""
    for pattern in ("a(b|cd)", "(ab)*d", "ad", "d"):
        with pytest.raises(ValueError, match="cannot end every text"):
            table_of(pattern, ABC)
    assert follow(table_of("ab|dc", ABC), [0, 1]) > 0  # what no token begins does no harm
    with pytest.raises(ValueError, match="no end-of-sequence id"):
        table_of("a", Vocabulary((b"a",), ()))


def test_forced_text_is_drafted():
    table = table_of("(abc|c)a?bc", ABC)
    drafts = {tokens: table.drafts[follow(table, tokens)] for tokens in ((), (0,), (3,), (4,), (2,), (2, 1), (2, 1, 2))}
    assert drafts == {(): -1, (0,): 1, (3,): 2, (4,): -1, (2,): -1, (2, 1): 2, (2, 1, 2): -1}
    assert table_of("abcb?", ABC).drafts.tolist() == [4, -1, -1, -1]
    assert table_of("abcb?", ABC, EverySpelling(ABC)).drafts.tolist() == [4, 1, 2, -1, -1, -1]
    assert table_of("abca", Vocabulary((b"a", b"b", b"c", b"abca!", None), (4,))).drafts.tolist() == [
        0,
        1,
        2,
        0,
        -1,
        -1,
    ]


def test_forced_text_has_one_spelling():
    """The longest token, or one that holds all of it and goes on; anything where there is a choice."""
    assert allowed_tokens(table_of("abcb?", ABC), 0) == [4]
    assert allowed_tokens(table_of("ab[ac]?c", ABC), 0) == [3, 4]
    table = table_of("(ca|cb)c", ABC)
    assert [allowed_tokens(table, follow(table, tokens)) for tokens in ((), (2,), (2, 0))] == [[2], [0, 1, 7], [2]]
    assert allowed_tokens(table_of("(abc)?", ABC), 0) == [0, 3, 4, 7, 8]  # it may end


def test_forced_tokens_of_a_compact_object(demo):
    """Greedy drafts from the start spell the object's fixed text."""
    table = table_of(r'\{"name":"[a-z]{2}","age":[0-9]\}', *demo)
    state, text = 0, b""
    while table.drafts[state] >= 0:
        text += demo[0].tokens[table.drafts[state]] or b""
        state = int(table.successors[state, table.classes[table.drafts[state]]])
    assert text == b'{"name":"'


def test_limits_are_named(demo):
    node = build_automaton(parse_pattern("[a-z]{1,20}"))
    for limits, named in (
        (TableLimits(max_states=20), "22 states; at most 20"),
        (TableLimits(max_classes=5), "classes of tokens; at most 5"),
        (TableLimits(max_masks=3), "masks"),
        (TableLimits(max_bytes=1000), "at most 1000 bytes"),
        (TableLimits(max_bytes=10_000), "at most 4096 and 10000"),
    ):
        with pytest.raises(TooLargeError, match=named):
            build_table(node, demo[1], limits)


def test_tables_of_random_vocabularies_agree_with_their_bytes():
    """Every transition is that of the token's bytes, where it can still end."""
    rng = random.Random(5)
    automaton = build_automaton(parse_pattern("(a|b)*a(a|b){2}|cé{0,3}"))
    for _ in range(4):
        texts = ["".join(rng.choices("abcé", k=rng.randint(1, 5))).encode() for _ in range(40)]
        vocabulary = Vocabulary((*texts, b"\xc3", b"\xa9", b"a", b"b", b"c", b"\xa9\xc3", None), (46,))
        table = build_table(automaton, EverySpelling(vocabulary))
        number = {0: 0}
        queue = [0]
        for state in queue:
            for token in range(46):
                target = state
                for byte in vocabulary.tokens[token] or b"":
                    target = int(automaton.next[target, byte]) if target >= 0 else -1
                found = int(table.successors[number[state], table.classes[token]])
                assert (found < 0) == (target < 0)
                if target >= 0 and target not in number:
                    number[target] = found
                    queue.append(target)
                assert target < 0 or number[target] == found
            assert (table.successors[number[state], table.classes[46]] >= 0) == automaton.is_accepting[state]
        assert len(number) + 1 == len(table.successors)


def large_vocabulary(size: int = 131_072, seed: int = 0) -> Vocabulary:
    """Pieces of words, numbers, punctuation, white space and other scripts, as tokenizers of this size have them."""
    rng = random.Random(seed)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    texts = {bytes([byte]) for byte in range(256)}
    texts |= {b" " * count for count in range(1, 129)} | {b"\n" * count for count in range(1, 60)}
    while len(texts) < size - 1:
        kind = rng.random()
        if kind < 0.08:
            ranges = rng.choice([(0x4E00, 0x9FFF), (0x400, 0x4FF), (0xE0, 0x17F), (0x1F600, 0x1F64F)])
            word = "".join(chr(rng.randint(*ranges)) for _ in range(rng.choice([1, 2, 2, 3])))
        elif kind < 0.12:
            word = str(rng.randrange(1000))
        else:
            word = "".join(rng.choices(letters, weights=range(26, 0, -1), k=rng.randint(2, 10)))
            word = rng.choice([str, str, str.capitalize, str.upper])(word)
            word = rng.choice([" ", " ", " ", "", "", '"', '":', '":"', "_", "."]) + word
        texts.add(word.encode())
    tokens = sorted(texts)
    rng.shuffle(tokens)
    return Vocabulary((*tokens, None), (size - 1,))


@pytest.mark.slow
def test_a_vocabulary_of_131072():
    """Masks equal llguidance's, and the sizes and times of the reference's four examples."""
    vocabulary = large_vocabulary()
    spelling = longest_tokens(vocabulary)
    start = time.process_time()
    assert sum(len(level.bytes) for level in vocabulary.trie) > 131_072
    print(f"\ntree of tokens: {time.process_time() - start:.2f} s, once a vocabulary")
    for name, pattern in SIZED.items():
        start = time.process_time()
        automaton = build_automaton(parse_pattern(pattern))
        middle = time.process_time()
        table = build_table(automaton, spelling)
        end = time.process_time()
        states, classes = table.successors.shape
        print(
            f"{name}: {states} states, {classes} classes, {len(table.masks)} masks, {table.num_bytes / 2**20:.2f} MiB; "
            f"automaton {middle - start:.2f} s, table {end - middle:.2f} s"
        )
        assert end - start < 4
        for seed in range(6):
            check_walk(table, vocabulary, spelling, explicit(pattern), seed)
    assert np.count_nonzero(table_of(OBJECT, vocabulary).drafts >= 0) > 20
