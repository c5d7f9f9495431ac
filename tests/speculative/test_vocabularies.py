"""Tables between tokenizers: bytes are kept, equal tokens are drafted once, special ones are matched."""

import json
from dataclasses import replace
from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from jaxinfer.models import ModelConfig, TokenMapConfig, bind, init_params
from jaxinfer.speculative import vocabularies
from jaxinfer.speculative.vocabularies import MAX_PIECES, ModelTokens, make_tables, token_tables
from jaxinfer.text.token_bytes import byte_alphabet
from tests.speculative.tiny_vocabularies import byte_fallback_tokenizer, byte_level_tokenizer, tokens_of
from tests.text.conftest import llama2, unigram, wrap
from tests.tiny import TINY

CHAR_OF = {byte: char for char, byte in byte_alphabet().items()}
BUILDERS = {
    "byte level": byte_level_tokenizer,
    "byte fallback": byte_fallback_tokenizer,
    "llama 2": lambda: wrap(llama2(), special_tokens={"bos_token": "<s>", "eos_token": "</s>"}),
    "unigram": lambda: wrap(unigram(), special_tokens={"bos_token": "<s>", "eos_token": "</s>"}),
}


@pytest.fixture(scope="module")
def models_by_name() -> dict[str, ModelTokens]:
    return {name: tokens_of(name, build()) for name, build in BUILDERS.items()}


def of_words(words: list[bytes], name: str = "words") -> ModelTokens:
    """A model whose tokens are these bytes."""
    vocab = {"".join(CHAR_OF[byte] for byte in word): number for number, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    return ModelTokens(name, wrap(backend), len(words))


def check_tables(target: ModelTokens, draft: ModelTokens) -> vocabularies.TokenTables:
    """Properties of any two tokenizers, if the draft has all bytes that the target has."""
    tables = make_tables(target, draft)
    drafted = tables.index[tables.index < draft.size]
    assert len(set(drafted.tolist())) == len(drafted)  # no two target tokens share the draft's probability
    own = {draft.tokenizer.token_bytes(token) for token in range(draft.size)} - {None, b""}
    for token in range(target.size):
        text = target.tokenizer.token_bytes(token) if target.tokenizer.has_id(token) else None
        pieces = [piece for piece in tables.pieces[token].tolist() if piece < draft.size]
        assert len(pieces) == min(tables.counts[token], MAX_PIECES)
        if text is None:
            continue
        joined = b"".join(draft.tokenizer.token_bytes(piece) or b"" for piece in pieces)
        assert joined == text if tables.counts[token] <= MAX_PIECES else text.endswith(joined)
        assert (tables.counts[token] == 1) == (text in own)
        if (its := tables.index[token]) < draft.size:
            assert draft.tokenizer.token_bytes(its) == text
            assert pieces == [its]
    return tables


@pytest.mark.parametrize("names", [*permutations(BUILDERS, 2)], ids=" for ".join)
def test_pieces_have_the_bytes_of_their_token(models_by_name, names):
    draft, target = (models_by_name[name] for name in names)
    tables = check_tables(target, draft)
    assert 100 < tables.num_predicted < min(target.size, draft.size)
    assert token_tables(target, draft).num_predicted == tables.num_predicted


WORDS = st.lists(st.binary(min_size=2, max_size=7), unique=True, max_size=30)


@settings(max_examples=30, derandomize=True, deadline=None)
@given(WORDS, WORDS, st.randoms(use_true_random=False))
def test_any_two_vocabularies(words, others, numbers):
    singles = [bytes([byte]) for byte in range(256)]
    target, draft = [*singles, *words], [*singles, *others]
    numbers.shuffle(target)
    numbers.shuffle(draft)
    tables = check_tables(of_words(target), of_words(draft))
    assert tables.num_predicted == 256 + len(set(words) & set(others))


def test_a_text_is_read_as_the_same_text(models_by_name):
    text = "hello world, the quick brown fox\n\n  jumps: naïve 你好 🎉"
    for draft, target in permutations([models_by_name[name] for name in list(BUILDERS)[:3]], 2):
        tables = make_tables(target, draft)
        tokens = target.tokenizer.encode(text, add_special_tokens=False)
        read = [piece for token in tokens for piece in tables.pieces[token].tolist() if piece < draft.size]
        assert draft.tokenizer.decode(read).strip() == text


def test_tokens_of_single_bytes(models_by_name):
    """`<0x41>` is read as "A", and drafted only where "A" is no token of its own."""
    level, fallback = models_by_name["byte level"], models_by_name["byte fallback"]
    tables = make_tables(fallback, level)
    byte, char = (fallback.tokenizer.token_to_id(name) for name in ("<0x65>", "e"))
    assert tables.pieces[byte, 0] == tables.pieces[char, 0] == level.tokenizer.token_to_id("e")
    assert tables.index[byte] == level.size > tables.index[char]
    rare = fallback.tokenizer.token_to_id("<0xFF>")
    assert tables.index[rare] == tables.pieces[rare, 0] == level.tokenizer.token_to_id(CHAR_OF[0xFF])
    back = make_tables(level, fallback)
    assert back.index[level.tokenizer.token_to_id("e")] == char
    assert back.index[level.tokenizer.token_to_id(CHAR_OF[0xFF])] == rare


def test_special_tokens(models_by_name):
    """By name, by role, and otherwise read as their names and not drafted."""
    level, fallback = models_by_name["byte level"], models_by_name["byte fallback"]
    tables = make_tables(level, fallback)
    for ours, its in (("<|im_start|>", "<s>"), ("<|im_end|>", "</s>")):
        token, wanted = level.tokenizer.token_to_id(ours), fallback.tokenizer.token_to_id(its)
        assert tables.pieces[token].tolist() == [wanted, *[fallback.size] * (MAX_PIECES - 1)]
        assert tables.index[token] == wanted
    other = level.tokenizer.token_to_id("<|eot_id|>")
    assert tables.counts[other] > MAX_PIECES
    assert tables.index[other] == fallback.size
    named = [b"".join(fallback.tokenizer.token_bytes(piece) or b"" for piece in tables.pieces[other].tolist())]
    assert b"<|eot_id|>".endswith(named[0])
    llama = models_by_name["llama 2"]
    same = make_tables(fallback, llama)
    for name in ("<unk>", "<s>", "</s>"):
        assert same.index[fallback.tokenizer.token_to_id(name)] == llama.tokenizer.token_to_id(name)


def test_ends_of_answers_are_read_as_the_end(models_by_name):
    level, fallback = models_by_name["byte level"], models_by_name["byte fallback"]
    turn = level.tokenizer.token_to_id("<|eot_id|>")
    tables = make_tables(ModelTokens("both", level.tokenizer, level.size, (*level.eos_token_ids, turn)), fallback)
    assert tables.pieces[turn, 0] == fallback.tokenizer.eos_token_id
    assert tables.index[turn] == fallback.size  # the first of both is drafted
    assert tables.index[level.eos_token_ids[0]] == fallback.tokenizer.eos_token_id


def test_the_first_token_is_what_the_draft_begins_with(models_by_name):
    llama, level = models_by_name["llama 2"], models_by_name["byte level"]
    assert make_tables(level, llama).first_token == llama.tokenizer.bos_token_id
    assert make_tables(llama, level).first_token is None


def test_a_draft_with_next_to_no_common_token_is_refused():
    target = tokens_of("'target'", byte_level_tokenizer())
    with pytest.raises(ValueError, match=r"'words' cannot draft for 'target': it has 0.0% of the tokens .* 30%"):
        token_tables(target, of_words([b"zz", b"qq"], "'words'"))


def test_tables_of_large_vocabularies_are_kept(models_by_name, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXINFER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(vocabularies, "LEAST_KEPT", 10)
    level, fallback = models_by_name["byte level"], models_by_name["byte fallback"]
    made = token_tables(level, fallback)
    calls: list[None] = []
    monkeypatch.setattr(vocabularies, "make_tables", lambda *models: calls.append(None) or make_tables(*models))
    kept = token_tables(level, fallback)
    assert not calls
    for name, table in {**made.arrays, "counts": made.counts}.items():
        np.testing.assert_array_equal({**kept.arrays, "counts": kept.counts}[name], table)
    assert (kept.size, kept.first_token) == (made.size, made.first_token)
    for number, other_draft in enumerate(("llama 2", "unigram"), start=1):
        token_tables(level, models_by_name[other_draft])
        assert len(calls) == number


def test_a_configuration_keeps_its_map():
    config = ModelConfig.from_dict({**TINY.to_dict(), "token_map": vars(TokenMapConfig(50, 3, first_token=2))})
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ValueError, match="num_pieces must be a positive integer, got 0"):
        TokenMapConfig(50, 0)


def attend_to_itself(layer, q, k, v, window, **options):
    """Attention of tokens that see themselves alone."""
    return jnp.repeat(v, q.shape[-2] // v.shape[-2], axis=-2)


def test_a_model_reads_and_predicts_by_tables():
    """What it computes of a token of its own; of the mean of embeddings where there are several; -inf elsewhere."""
    target, draft = (of_words([b"ab", b"cd", b"e", b"abcd", b"f"]), of_words([b"e", b"ab", b"cd", b"x"]))
    tables = make_tables(target, draft)
    assert tables.index.tolist() == [1, 2, 0, 4, 4]
    assert tables.pieces[:, :2].tolist() == [[1, 4], [2, 4], [0, 4], [1, 2], [4, 4]]
    config = replace(TINY, vocab_size=draft.size, tie_word_embeddings=True)
    params = init_params(config, jax.random.key(3))
    own = bind(config, params)
    positions = np.arange(5)

    def logits(decoder, tokens):
        return np.asarray(decoder.logits(decoder(np.array(tokens), positions, attend_to_itself)))

    for first_token in (None, 3):
        mapped = replace(config, token_map=TokenMapConfig(target.size, MAX_PIECES, first_token))
        found = logits(bind(mapped, {**params, **tables.arrays}), [2, 0, 1, 3, 2])
        mean = (params["embed"][1] + params["embed"][2]) / 2
        more = {**params, "embed": jnp.concatenate([params["embed"], mean[None]])}
        read = [0 if first_token is None else first_token, 1, 2, 4, 0]
        wanted = logits(bind(replace(config, vocab_size=5), more), read)
        np.testing.assert_allclose(found[:, [2, 0, 1]], wanted[:, :3], rtol=1e-5, atol=1e-6)
        assert np.isneginf(found[:, 3:]).all()
    assert logits(own, [0, 1, 2, 3, 0]).shape == (5, draft.size)
