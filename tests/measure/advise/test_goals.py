"""When a trial is better, the same, or out of the limits: by arithmetic."""

import pytest

from jaxinfer.measure.advise.goals import Goal, TrialResult, compare, judge, spread

BASE = TrialResult(one=(1.0, 1.0, 1.0), rate=(100.0, 100.0, 100.0), needed_bytes=1000, cache_tokens=50, kl=0.0)


def row(**values):
    return TrialResult(**{"arguments": {"max_seqs": 4}, "rate": (100.0,), "one": (1.0,), **values})


@pytest.mark.parametrize(
    ("goal", "values", "verdict", "ratio"),
    [
        ("cost", {"rate": (150.0, 150.0)}, "better", 1.5),
        ("cost", {"rate": (50.0, 50.0)}, "worse", 0.5),
        ("cost", {"rate": (101.0, 101.0)}, "same", 1.01),
        ("latency", {"one": (0.5, 0.5)}, "better", 2.0),
        ("users", {"cache_tokens": 100}, "better", 2.0),
        ("users", {}, "unknown", None),
        ("quality", {"rate": (150.0, 150.0)}, "better", 1.5),
    ],
)
def test_verdicts(goal, values, verdict, ratio):
    its = judge(Goal(goal), row(**values), [BASE])
    assert (its.verdict, its.ratio) == (verdict, ratio if ratio is None else pytest.approx(ratio))


def test_what_is_within_the_spread_of_its_repeats_is_no_difference():
    steady, shaky = row(rate=(140.0, 140.0, 140.0)), row(rate=(60.0, 140.0, 220.0))
    assert judge(Goal("cost"), steady, [BASE]).verdict == "better"
    its = judge(Goal("cost"), shaky, [BASE])
    assert (its.verdict, its.noise) == ("same", pytest.approx(80 / 140))
    assert spread((60.0, 140.0, 220.0)) == pytest.approx(80 / 140)


def test_one_repeat_that_was_interrupted_hides_nothing():
    its = judge(Goal("cost"), row(rate=(20.0, 138.0, 140.0, 141.0, 142.0)), [BASE])
    assert (its.verdict, its.noise) == ("better", pytest.approx(3 / 140))


def test_a_baseline_that_drifts_hides_what_is_smaller():
    later = TrialResult(rate=(160.0, 160.0))
    assert judge(Goal("cost"), row(rate=(150.0, 150.0)), [BASE, later]).verdict == "same"
    assert judge(Goal("cost"), row(rate=(300.0, 300.0)), [BASE, later]).verdict == "better"


def test_limits_rule_out_whatever_it_gains():
    fast = row(arguments={"quantize": "int4-g128"}, rate=(900.0, 900.0), kl=0.2, needed_bytes=10)
    its = judge(Goal("cost", max_kl=0.1), fast, [BASE])
    assert (its.verdict, its.ratio) == ("ruled out", 9.0)
    assert "KL 0.2" in (its.why or "")
    assert judge(Goal("cost", max_kl=0.3), fast, [BASE]).verdict == "better"
    assert judge(Goal("cost", max_kl=0.3, memory=9), fast, [BASE]).verdict == "ruled out"


def test_a_trial_without_figures_has_a_reason():
    its = judge(Goal("cost"), TrialResult({"draft": "ngram"}, "failed: no room"), [BASE])
    assert (its.verdict, its.why, its.ratio) == ("ruled out", "failed: no room", None)


def test_a_baseline_that_keeps_no_limit_is_beaten_by_one_that_does():
    none, some = TrialResult(goodput=(0.0, 0.0)), row(goodput=(2.0, 2.0))
    assert judge(Goal("users"), some, [none]).verdict == "better"
    assert judge(Goal("users"), row(goodput=(0.0, 0.0)), [none]).verdict == "same"


def test_four_bits_whose_kl_nobody_measured_are_in_doubt():
    four = row(arguments={"quantize": "int4-g128"}, rate=(300.0,))
    assert judge(Goal("cost", is_planned=True), four, [BASE]).verdict == "in doubt"
    eight = row(arguments={"quantize": "int8"}, rate=(300.0,))
    assert judge(Goal("cost", is_planned=True), eight, [BASE]).verdict == "better"


def test_turns_are_compared_one_by_one():
    """Each with the other of its turn: a machine that slows down by half changes no ratio."""
    speeds = (1.0, 0.7, 0.5)
    base = [TrialResult(rate=(100 * speed,)) for speed in speeds]
    its = compare(Goal("cost"), [TrialResult(rate=(110 * speed,)) for speed in speeds], base)
    assert (its.verdict, its.ratio) == ("better", pytest.approx(1.1))
    mixed = [TrialResult(rate=(rate,)) for rate in (120.0, 69.0, 55.0)]
    assert compare(Goal("cost"), mixed, base).verdict == "same"
    assert compare(Goal("cost"), base, mixed[:1] * 3).verdict == "worse"
