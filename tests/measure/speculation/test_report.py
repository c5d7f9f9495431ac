"""The arithmetic of a comparison of drafts, on made-up runs."""

import pytest

from jaxinfer.measure.speculation.report import (
    DraftReport,
    LengthReport,
    Run,
    compare,
    conclusion,
    recommendation,
    repeats_itself,
    warnings,
)
from jaxinfer.speculative.statistics import SpeculationStats, mean_tokens

PLAIN = Run(0, 0.010, 0.1, [[1, 2, 3]], num_tokens=1000)


def run(k: int, rate: float, round_seconds: float, host_share: float = 0.1, answers=None, num_rounds: int = 10_000):
    """Rounds of which each drafted token is accepted at this rate, given those before."""
    rounds, left = {}, num_rounds
    for accepted in range(k):
        rounds[k, accepted] = round(num_rounds * rate**accepted * (1 - rate))
        left -= rounds[k, accepted]
    rounds[k, k] = left
    stats = SpeculationStats.of_rounds(rounds, num_plain_tokens=1)
    seconds = round_seconds / stats.mean_accepted_length
    return Run(k, seconds, host_share, answers or [[1, 2, 3]], stats.num_tokens, stats)


def test_a_round_is_taken_apart():
    row = compare(run(4, 0.8, round_seconds=0.022), PLAIN, cost_ratio=0.2)
    assert row.stats.conditional_rate == pytest.approx(0.8, abs=1e-3)
    assert row.verify_ratio == pytest.approx(2.2 - 4 * 0.2, abs=1e-3)
    assert row.expected == pytest.approx(mean_tokens(0.8, 4) / 1.8, rel=1e-3)
    assert row.measured == pytest.approx(mean_tokens(0.8, 4) / 2.2, rel=1e-3)
    assert row.if_perfect["acceptance"] == pytest.approx(5 / 2.2, rel=1e-3)
    assert row.if_perfect["draft cost"] == pytest.approx(mean_tokens(0.8, 4) / 1.4, rel=1e-3)
    assert row.if_perfect["verify cost"] == pytest.approx(mean_tokens(0.8, 4) / 1.8, rel=1e-3)
    assert row.num_different == 0


def test_tokens_without_rounds_take_a_plain_step():
    stats = SpeculationStats.of_rounds({(1, 1): 100})
    found = Run(1, (100 * 0.015 + 50 * 0.010) / 250, 0.0, [[1]], num_tokens=250, stats=stats)
    assert compare(found, PLAIN, 0.5).verify_ratio == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("k", "rate", "round_seconds", "cost", "host", "limit", "words"),
    [
        (4, 0.3, 0.012, 0.02, 0.0, "acceptance", "30% of the draft tokens"),
        (4, 0.95, 0.030, 0.45, 0.0, "draft cost", "0.45 of a plain step"),
        (4, 0.95, 0.030, 0.05, 0.0, "verify cost", "2.80 plain steps"),
        (4, 0.95, 0.015, 0.05, 0.8, "host", "80% of the time"),
    ],
)
def test_what_limits_it(k, rate, round_seconds, cost, host, limit, words):
    row = compare(run(k, rate, round_seconds, host), PLAIN, cost)
    assert row.limit == limit
    assert words in conclusion([row])


def test_the_fastest_length_is_recommended_or_none():
    rows = [compare(run(k, 0.8, 0.01 * (1 + 0.2 * k)), PLAIN, 0.1) for k in (1, 2, 4, 8)]
    assert conclusion(rows).startswith("Use num_draft_tokens=4: 1.87x plain decoding.")
    rows = [compare(run(k, 0.1, 0.01 * (1 + 0.5 * k)), PLAIN, 0.4) for k in (1, 2)]
    assert conclusion(rows).startswith("Decode without this draft: 1 draft tokens are best, with 0.73x")


def test_other_answers_are_counted():
    assert compare(run(2, 0.5, 0.01, answers=[[1, 2, 4]]), PLAIN, 0.1).num_different == 1


def test_a_run_of_tokens_that_occurs_twice():
    loop = [1, 2, 3, 4] * 8
    assert repeats_itself(loop)
    assert not repeats_itself(list(range(40)))
    assert not repeats_itself(loop[:16])
    assert repeats_itself([*range(16), 99, *range(16)])
    assert not repeats_itself([*range(16), 99, *range(15)])


def report(draft: str, loads: dict[int, float], rate: float = 0.8, cost: float = 0.1, by_kind=None) -> DraftReport:
    row = compare(run(4, rate, 0.015), PLAIN, cost)
    return DraftReport(draft, [LengthReport(**{**vars(row), "by_kind": by_kind or {}})], loads)


def test_the_best_draft_of_each_load_is_recommended_or_none():
    reports = [report("one", {1: 1.5, 4: 1.2, 16: 0.99}), report("two", {1: 1.4, 4: 1.3, 16: 1.02})]
    assert recommendation(reports) == [
        "With 1 answer at a time use one: 1.50x.",
        "With 4 answers at a time use two: 1.30x.",
        "With 16 answers at a time decode without a draft (two reaches 1.02x).",
    ]
    assert recommendation([report("one", {1: 1.5, 4: 1.2, 16: 1.1})]) == [
        "With 1, 4 and 16 answers at a time use one: 1.50x, 1.20x, 1.10x."
    ]


def test_rules_of_thumb():
    assert warnings(report("one", {})) == []
    assert "0.40 of a plain step" in warnings(report("one", {}, cost=0.4))[0]
    assert "30% of its tokens are accepted" in warnings(report("one", {}, rate=0.3))[0]
    good, poor = (SpeculationStats.of_rounds({(4, n): 100}) for n in (3, 0))
    assert warnings(report("one", {}, by_kind={"code": good, "chat": poor})) == ["It helps little with chat."]
