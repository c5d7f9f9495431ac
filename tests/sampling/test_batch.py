"""Rows to arrays: limits, padding, replacing one row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling.batch import (
    BAD_WORD_TOKENS,
    BAD_WORD_WIDTH,
    SamplingBatch,
    SamplingRow,
    make_batch,
    set_row,
    tokenize_bad_words,
)
from jaxinfer.sampling.params import SamplingParams, SamplingParamsError

V = 100


def row(seed=0, eos_token_ids=(), bad_words=(), **params):
    return SamplingRow(SamplingParams(**params), seed, eos_token_ids, bad_words)


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_a_row_becomes_arrays():
    batch = make_batch(
        [
            None,
            SamplingRow(
                SamplingParams(
                    temperature=0.5,
                    top_k=4,
                    top_p=0.25,
                    min_p=0.125,
                    presence_penalty=1,
                    frequency_penalty=-1,
                    repetition_penalty=2,
                    stop_token_ids=(8, 9),
                    min_tokens=3,
                    logprobs=5,
                    logit_bias={1: 1.5, 6: -2},
                    allowed_token_ids=(1, 2, 3, 6),
                ),
                seed=2**40 + 3,
                eos_token_ids=(7, 9),
                bad_words=((1,), (2, 3)),
            ),
        ],
        V,
    )
    scalars = {
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.25,
        "min_p": 0.125,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 2,
        "min_tokens": 3,
        "num_logprobs": 5,
        "has_bias": True,
        "has_bad_words": True,
    }
    for name, value in scalars.items():
        assert getattr(batch, name)[1] == value
    assert batch.seed[1].tolist() == [2**8, 3]
    assert batch.stop_ids[1, :4].tolist() == [8, 9, 7, V]
    assert batch.bad_words[1, :3, -2:].tolist() == [[V, 1], [2, 3], [V, V]]
    bias = {i: float(b) for i, b in enumerate(batch.bias[1]) if b > -np.inf}
    assert bias == {1: 1.5, 2: 0, 3: 0, 6: -2}


def test_shapes_and_dtypes():
    batch = make_batch([None, row()], V)
    assert (batch.num_slots, batch.vocab_size) == (2, V)
    expected = {
        "seed": ((2, 2), np.uint32),
        "bias": ((2, V), np.float32),
        "stop_ids": ((2, 64), np.int32),
        "min_tokens_ids": ((2, 64), np.int32),
        "bad_words": ((2, 256, 16), np.int32),
        "has_bias": ((2,), np.bool_),
        "has_bad_words": ((2,), np.bool_),
        **dict.fromkeys(("top_k", "min_tokens", "num_logprobs"), ((2,), np.int32)),
    }
    assert batch.processors is None  # which the engine's own rows have, if any
    for field in dataclasses.fields(SamplingBatch):
        if field.name == "processors":
            continue
        leaf = getattr(batch, field.name)
        assert (leaf.shape, leaf.dtype) == expected.get(field.name, ((2,), np.float32)), field.name
        assert isinstance(leaf, np.ndarray)


def test_padding_is_one_past_the_end_and_never_negative():
    batch = make_batch([row(stop_token_ids=[3]), None], V)
    for ids in (batch.stop_ids, batch.min_tokens_ids, batch.bad_words):
        assert ids.min() >= 0
        assert ids.max() == V


def test_greedy_rows_carry_no_filters():
    greedy = make_batch([row(temperature=0, top_k=5, top_p=0.5, min_p=0.5)], V)
    assert equal(greedy, make_batch([row(temperature=0)], V))


def test_ignore_eos_still_forbids_it_before_min_tokens():
    batch = make_batch([row(eos_token_ids=(7,), stop_token_ids=[3], ignore_eos=True, min_tokens=2)], V)
    assert batch.stop_ids[0, :2].tolist() == [3, V]
    assert batch.min_tokens_ids[0, :3].tolist() == [3, 7, V]


def test_the_seed_is_the_rows_or_else_that_of_the_params():
    params = SamplingParams(seed=5)
    assert make_batch([SamplingRow(params), SamplingRow(params, seed=6)], V).seed.tolist() == [[0, 5], [0, 6]]
    with pytest.raises(ValueError, match="a row needs a seed"):
        make_batch([SamplingRow(SamplingParams())], V)


@pytest.mark.parametrize(
    ("build", "parameter", "message"),
    [
        (lambda: row(stop_token_ids=[V]), "stop_token_ids", "token id 100, the vocabulary has 100"),
        (lambda: row(eos_token_ids=(V,)), "eos_token_ids", "token id 100"),
        (lambda: row(eos_token_ids=(-1,)), "eos_token_ids", "token id -1"),
        (lambda: row(logit_bias={V: 1}), "logit_bias", "token id 100"),
        (lambda: row(allowed_token_ids=[V]), "allowed_token_ids", "token id 100"),
        (lambda: row(bad_words=((1, V),)), "bad_words", "token id 100"),
        (
            lambda: row(stop_token_ids=range(64), eos_token_ids=(90, 3)),
            "stop_token_ids",
            "64 stop_token_ids and 2 end-of-sequence ids make 65, the limit is 64",
        ),
        (
            lambda: row(bad_words=((1,) * 17,)),
            "bad_words",
            "sequence 0 of bad_words has 17 tokens, the limits are 1..16",
        ),
        (lambda: row(bad_words=((),)), "bad_words", "has 0 tokens"),
        (lambda: row(bad_words=((1,),) * 257), "bad_words", "257 token sequences, the limit is 256"),
        (
            lambda: row(
                allowed_token_ids=[1, 2, 3], stop_token_ids=[1], eos_token_ids=(2,), bad_words=((3,),), min_tokens=1
            ),
            "allowed_token_ids",
            "no token can be generated",
        ),
    ],
)
def test_what_does_not_fit_raises_with_the_numbers(build, parameter, message):
    with pytest.raises(SamplingParamsError, match=message) as refusal:
        make_batch([build()], V)
    assert refusal.value.parameter == parameter


def test_bad_words_without_tokens_are_not_ignored():
    with pytest.raises(ValueError, match="1 bad_words have no token sequences"):
        make_batch([SamplingRow(SamplingParams(bad_words=["x"], seed=0))], V)


@pytest.mark.parametrize("vocab_size", [0, -1, 2**22 + 1])
def test_a_vocabulary_outside_the_limits_raises(vocab_size):
    with pytest.raises(ValueError, match=f"got {vocab_size}"):
        make_batch([None], vocab_size)


def test_replacing_a_row_gives_the_batch_made_with_it_and_never_recompiles():
    requests = [row(seed=i, temperature=i / 4, top_k=i, stop_token_ids=[i], bad_words=((i,),)) for i in range(4)]
    new = row(seed=9, logit_bias={5: 1}, logprobs=2, repetition_penalty=1.5)
    replace = jax.jit(set_row, donate_argnums=0)
    batch = jax.device_put(make_batch([None] * 4, V))
    batch = replace(batch, jnp.int32(0), jax.device_put(make_batch([requests[0]], V)))
    with jax.no_tracing():
        for i in range(1, 4):
            batch = replace(batch, jax.device_put(np.int32(i)), jax.device_put(make_batch([requests[i]], V)))
        assert equal(batch, make_batch(requests, V))
        batch = replace(batch, jax.device_put(np.int32(2)), jax.device_put(make_batch([new], V)))
        assert equal(batch, make_batch([*requests[:2], new, requests[3]], V))
        batch = replace(batch, jax.device_put(np.int32(3)), jax.device_put(make_batch([None], V)))
        assert equal(batch, make_batch([*requests[:2], new, None], V))


def test_replacing_a_row_is_in_place():
    replace = jax.jit(set_row, donate_argnums=0)
    batch = replace(jax.device_put(make_batch([None] * 4, V)), jnp.int32(1), make_batch([row()], V))
    address = batch.bias.unsafe_buffer_pointer()
    batch = replace(batch, jnp.int32(2), make_batch([row()], V))
    assert batch.bias.unsafe_buffer_pointer() == address


def test_bad_words_are_tokenized_by_vllms_rule():
    vocabulary = {"cat": [1], " cat": [2], "ab": [3, 4], " ab": [5, 4], "x": [6], " x": [7, 6], "y": [8], " y": [8]}
    assert tokenize_bad_words(["cat", " ab", "x", "y"], vocabulary.__getitem__) == (
        (1,),
        (2,),
        (3, 4),
        (5, 4),
        (6,),
        (8,),
    )
    with pytest.raises(SamplingParamsError, match="bad word 'z' has no tokens"):
        tokenize_bad_words(["z"], lambda text: [])


def test_as_many_bad_words_as_the_parameters_allow_fit():
    sequences = tuple((i % V,) * BAD_WORD_TOKENS for i in range(BAD_WORD_WIDTH))
    make_batch([row(bad_words=sequences)], V)
