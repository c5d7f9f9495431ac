"""Log-probabilities of given tokens: the closed form, ranks, ties, a vocabulary smaller than what is asked."""

import functools

import jax
import numpy as np
import pytest

from jaxinfer.sampling.sampler import token_logprobs

compute = jax.jit(token_logprobs, static_argnames="num_top")
logits_of = functools.partial(np.random.default_rng(0).normal, 0, 4)


def test_against_float64_and_a_sort():
    logits = logits_of((6, 50)).astype(np.float32)
    targets = np.array([0, 7, 49, 3, 3, 10], np.int32)
    got = compute(logits, targets, num_top=20)
    wide = logits.astype(np.float64)
    expected = wide - np.logaddexp.reduce(wide, axis=-1, keepdims=True)
    np.testing.assert_allclose(got.logprob, expected[np.arange(6), targets], rtol=1e-6, atol=1e-6)
    order = np.argsort(-logits, axis=-1, kind="stable")
    assert np.array_equal(got.top_ids, order[:, :20])
    np.testing.assert_allclose(
        got.top_logprobs, np.take_along_axis(expected, order[:, :20], axis=-1), rtol=1e-6, atol=1e-6
    )
    assert got.rank.tolist() == [1 + order[i].tolist().index(t) for i, t in enumerate(targets)]


def test_ties_share_the_better_rank_and_are_listed_by_id():
    got = compute(np.float32([[1, 2, 2, 0]] * 3), np.array([1, 2, 0], np.int32), num_top=4)
    assert got.rank.tolist() == [1, 1, 3]
    assert got.top_ids[0].tolist() == [1, 2, 0, 3]


def test_a_small_vocabulary_is_padded():
    got = compute(np.zeros((1, 3), np.float32), np.array([2], np.int32), num_top=5)
    assert got.top_ids[0].tolist() == [0, 1, 2, 3, 3]
    assert got.top_logprobs[0, 3:].tolist() == [-np.inf] * 2


def test_forbidden_tokens_have_no_probability():
    got = compute(np.float32([[0, -np.inf, 0]]), np.array([1], np.int32), num_top=3)
    assert (got.logprob[0], int(got.rank[0])) == (-np.inf, 3)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_row_is_the_same_bit_for_bit_whatever_the_call_holds(num_rows):
    logits = logits_of((6, 50)).astype(np.float32)
    targets = np.arange(6, dtype=np.int32)
    together = compute(logits, targets, num_top=20)
    for start in range(0, 6, num_rows):
        part = slice(start, start + num_rows)
        alone = compute(logits[part], targets[part], num_top=20)
        for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
            assert np.array_equal(a, b[part])
