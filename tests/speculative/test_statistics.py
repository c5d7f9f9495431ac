"""Counts of speculation and the formulas of its gain: closed forms, sums, simulation."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.speculative.statistics import SpeculationStats, best_length, expected_speedup, mean_tokens

ROUND = st.integers(0, 8).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))
ROUNDS = st.dictionaries(ROUND, st.integers(1, 5))


def test_counts_of_a_few_rounds():
    stats = SpeculationStats.of_rounds({(3, 3): 2, (3, 1): 1, (1, 0): 1, (0, 0): 1}, num_plain_tokens=7, num_cut=1)
    assert (stats.num_rounds, stats.proposed, stats.accepted, stats.num_full) == (5, 10, 7, 2)
    assert (stats.proposed_at, stats.accepted_at) == ((4, 3, 3), (3, 2, 2))
    assert (stats.num_tokens, stats.num_plain_tokens) == (11, 7)
    assert stats.acceptance_rate == 0.7
    assert stats.conditional_rate == 7 / 9, "two rounds ended with a rejection"
    assert stats.acceptance_by_position == (3 / 4, 2 / 3, 2 / 3)
    assert stats.mean_accepted_length == 12 / 5


def test_nothing_was_drafted():
    stats = SpeculationStats()
    assert (stats.acceptance_rate, stats.conditional_rate, stats.mean_accepted_length) == (0, 0, 0)
    assert stats.acceptance_by_position == ()


def test_places_of_a_tree():
    stats = SpeculationStats.of_rounds({(9, 2): 3, (9, 0): 1}, depth=3)
    assert (stats.proposed, stats.proposed_at, stats.accepted_at) == (12, (4, 4, 4), (3, 3, 0))


@pytest.mark.slow
@given(ROUNDS, ROUNDS)
def test_counts_add_up(one, other):
    both = {pair: one.get(pair, 0) + other.get(pair, 0) for pair in {**one, **other}}
    total = SpeculationStats.of_rounds(one) + SpeculationStats.of_rounds(other)
    assert total == SpeculationStats.of_rounds(both)
    assert sum((SpeculationStats.of_rounds({pair: n}) for pair, n in both.items()), SpeculationStats()) == total
    assert (sum(total.proposed_at), sum(total.accepted_at)) == (total.proposed, total.accepted)
    assert 0 <= total.acceptance_rate <= total.conditional_rate <= 1
    since = total - SpeculationStats.of_rounds(one)
    alone = SpeculationStats.of_rounds(other)
    assert (since.num_rounds, since.accepted, since.num_full) == (alone.num_rounds, alone.accepted, alone.num_full)


@pytest.mark.parametrize("rounds", [{(2, 3): 1}, {(2, -1): 1}, {(2, 1): -1}])
def test_impossible_counts(rounds):
    with pytest.raises(ValueError, match="rounds in which"):
        SpeculationStats.of_rounds(rounds)


@given(st.floats(0, 0.999), st.integers(0, 16), st.floats(0, 2), st.floats(0.5, 4))
def test_the_formula_of_the_paper(rate, k, cost, verify):
    closed = (1 - rate ** (k + 1)) / (1 - rate)
    assert mean_tokens(rate, k) == pytest.approx(closed)
    assert expected_speedup(rate, k, cost) == pytest.approx(closed / (1 + k * cost))
    assert expected_speedup(rate, k, cost, verify) == pytest.approx(closed / (verify + k * cost))


def test_everything_or_nothing_is_accepted():
    assert mean_tokens(1.0, 4) == 5
    assert expected_speedup(1.0, 4, 0.25) == 2.5
    assert mean_tokens(0.0, 4) == mean_tokens(0.7, 0) == 1


def test_tokens_of_drawn_rounds():
    rng, rounds = random.Random(0), {}
    for _ in range(20_000):
        got = 0
        while got < 5 and rng.random() < 0.8:
            got += 1
        rounds[5, got] = rounds.get((5, got), 0) + 1
    stats = SpeculationStats.of_rounds(rounds)
    assert stats.conditional_rate == pytest.approx(0.8, abs=0.01)
    assert stats.mean_accepted_length == pytest.approx(mean_tokens(0.8, 5), abs=0.05)
    assert stats.acceptance_by_position == pytest.approx([0.8**place for place in range(1, 6)], abs=0.02)


@given(st.floats(0, 1), st.floats(0, 2), st.integers(0, 12))
def test_no_length_gains_more_than_the_best(rate, cost, most):
    best = best_length(rate, cost, most)
    gain = expected_speedup(rate, best, cost)
    assert all(expected_speedup(rate, k, cost) <= max(gain, 1) for k in range(most + 1))
    assert best == 0 or gain > 1


def test_drafting_pays_when_more_is_accepted_than_it_costs():
    """Leviathan et al. 2023, corollary 3.9."""
    assert best_length(0.3, 0.31) == 0
    assert best_length(0.3, 0.29) == 1
    assert best_length(1.0, 0.01, 10) == 10


def test_best_length_by_what_verifying_takes():
    assert best_length(0.9, 0.0, 4, verify_ratios=[1, 1.1, 1.2, 5, 5]) == 2
    assert best_length(0.9, 0.0, 8, verify_ratios={2: 1.2, 8: 1.5}) == 8
    assert best_length(0.9, 0.0, 8, verify_ratios={2: 9.0}) == 0


@pytest.mark.parametrize("arguments", [(1.1, 2, 0.1), (-0.1, 2, 0.1), (0.5, -1, 0.1), (0.5, 2, -1.0), (0.5, 2, 0, 0.0)])
def test_numbers_out_of_range(arguments):
    with pytest.raises(ValueError, match="got"):
        expected_speedup(*arguments)
    with pytest.raises(ValueError, match="max_length"):
        best_length(0.5, 0.1, -1)
