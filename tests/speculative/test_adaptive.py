"""The adaptive length: its estimates and its choices, one by one."""

import random
import statistics
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.speculative.adaptive import (
    ALLOWANCE,
    MANY_SAMPLES,
    MOST_ADAPTERS,
    SHARE,
    TRIAL_ROUNDS,
    AcceptanceEstimate,
    LengthController,
    SharedRows,
    expected_tokens,
    shared_lengths,
)
from jaxinfer.speculative.statistics import mean_tokens

CHOICES = (1, 2, 4, 8)


def known(seconds: dict[int, float], num_slots: int = 1, **arguments) -> LengthController:
    """A controller that has measured these times, so that nothing is left to be tried."""
    controller = LengthController(tuple(k for k in seconds if k), **arguments)
    for _ in range(25):
        for k in sorted(seconds):
            controller.observe_time(num_slots, k, seconds[k], tokens_per_round=100)
    return controller


def estimate_of(controller: LengthController, rate: float, num_rounds: int = 200) -> AcceptanceEstimate:
    """A sequence whose drafted tokens are accepted at this rate."""
    rng, estimate = random.Random(0), controller.new_estimate()
    for _ in range(num_rounds):
        got = 0
        while got < 4 and rng.random() < rate:
            got += 1
        estimate.observe(4, got)
    return estimate


# Estimates.


@given(st.floats(0, 1), st.integers(0, 16))
def test_expected_tokens_are_those_of_the_paper(rate, k):
    assert expected_tokens(rate, rate, k) == pytest.approx(mean_tokens(rate, k))


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_an_estimate_finds_the_rate(rate):
    estimate = estimate_of(LengthController(CHOICES), rate, num_rounds=1000)
    assert estimate.first_rate == pytest.approx(rate, abs=0.2)
    assert estimate.rate == pytest.approx(rate, abs=0.15)


def test_all_or_nothing_is_told_from_a_steady_rate():
    estimate = LengthController(CHOICES).new_estimate()
    for number in range(300):
        estimate.observe(4, 4 if number % 3 == 0 else 0)
    assert estimate.first_rate == pytest.approx(1 / 3, abs=0.05)
    assert estimate.later_rate > 0.95
    assert expected_tokens(estimate.first_rate, estimate.later_rate, 8) == pytest.approx(1 + 8 / 3, abs=0.4)


def test_an_estimate_follows_a_change():
    estimate = estimate_of(LengthController(CHOICES), 0.9)
    for _ in range(40):
        estimate.observe(4, 0)
    assert estimate.first_rate < 0.3


def test_a_new_sequence_leans_on_the_others():
    controller = LengthController(CHOICES)
    assert controller.new_estimate().rate == pytest.approx(0.7)
    estimate_of(controller, 0.1)
    fresh = controller.new_estimate()
    assert fresh.first_rate == pytest.approx(controller.overall.first_rate)
    assert fresh.rate == pytest.approx(0.1, abs=0.05)
    for _ in range(20):
        fresh.observe(4, 4)
    assert fresh.rate > 0.7 > controller.overall.rate, "its own rounds count more for it than for the others"


@given(st.lists(st.integers(0, 8).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))))
def test_rates_stay_chances(rounds):
    controller = LengthController(CHOICES)
    estimate = controller.new_estimate()
    for asked, accepted in rounds:
        estimate.observe(asked, accepted)
        for one in (estimate, controller.overall):
            assert min(one.first_rate, one.later_rate, one.rate) >= 0
            assert max(one.first_rate, one.later_rate, one.rate) <= 1
    assert estimate.num_rounds == sum(asked > 0 for asked, _ in rounds)


@pytest.mark.parametrize(("asked", "accepted"), [(2, 3), (2, -1), (-1, -1)])
def test_impossible_rounds(asked, accepted):
    with pytest.raises(ValueError, match="cannot be accepted"):
        AcceptanceEstimate().observe(asked, accepted)


# Choices.


@pytest.mark.parametrize(("rate", "expected"), [(0.0, 0), (0.5, 2), (0.8, 4), (1.0, 8)])
def test_the_best_length_by_acceptance(rate, expected):
    controller = known({0: 1.0, 1: 1.15, 2: 1.3, 4: 1.6, 8: 2.2})
    choice = controller.choose(1, [estimate_of(controller, rate, 400)])
    assert choice.num_draft_tokens == expected
    assert choice.lengths == (expected,)
    assert choice.max_rounds is None


def test_a_small_gain_is_left():
    for seconds, expected in ((1.99, 0), (1.90, 1)):
        controller = known({0: 1.0, 1: seconds})
        assert controller.choose(1, [estimate_of(controller, 1.0, 1000)]).num_draft_tokens == expected


def test_plain_until_a_plain_step_is_known():
    controller = LengthController(CHOICES)
    for _ in range(2):
        assert controller.choose(4, [controller.new_estimate()]).num_draft_tokens == 0
        controller.observe_time(4, 0, 0.01)
    choice = controller.choose(4, [controller.new_estimate()])
    assert choice.num_draft_tokens > 0, "what nobody has measured is tried"
    assert choice.max_rounds == TRIAL_ROUNDS
    assert controller.choose(8, [controller.new_estimate()]).num_draft_tokens == 0
    assert controller.choose(4, []).lengths == ()


def test_rows_draft_what_they_can_use():
    controller = known({0: 1.0, 4: 1.1, 8: 1.5})
    estimates = [estimate_of(controller, 1.0) for _ in range(3)]
    assert controller.choose(1, estimates, [100, 3, 0]).lengths == (8, 3, 0)
    choice = controller.choose(1, estimates, [2, 2, 2])
    assert (choice.num_draft_tokens, choice.lengths) == (4, (2, 2, 2)), "longer drafts would be thrown away"
    assert controller.choose(1, estimates, [0, 0, -1]).num_draft_tokens == 0


def test_off_at_high_load_and_back_at_once():
    controller = known({0: 1.0, 2: 1.2, 4: 1.4}, num_slots=4)
    for _ in range(25):
        for k, seconds in ((0, 3.0), (2, 12.0), (4, 20.0)):
            controller.observe_time(16, k, seconds, tokens_per_round=100)
    estimates = [estimate_of(controller, 0.8) for _ in range(4)]
    for _ in range(200):
        assert controller.choose(16, estimates * 4).num_draft_tokens == 0, "no acceptance would make it pay"
    assert controller.choose(4, estimates).num_draft_tokens == 4


def test_when_off_it_looks_again_ever_more_rarely():
    controller = known({0: 1.0, 1: 1.2, 2: 1.4})
    estimate = estimate_of(controller, 0.0)
    looks = []
    for number in range(3000):
        choice = controller.choose(1, [estimate])
        if choice.num_draft_tokens:
            assert choice.max_rounds == TRIAL_ROUNDS
            looks.append(number)
        controller.observe_time(1, choice.num_draft_tokens, 1.0 + 0.2 * choice.num_draft_tokens)
    gaps = [later - earlier for earlier, later in pairwise(looks)]
    assert 5 <= len(looks) <= 12
    assert gaps == sorted(gaps)
    assert gaps[-1] == 512


def serve(controller: LengthController, accepted: int, num_dispatches: int = 6) -> tuple[int, int]:
    """A sequence of which so many drafts of each round are accepted: its dispatches that drafted, and its last
    length."""
    estimate, num_drafted, choice = controller.new_estimate(), 0, None
    for _ in range(num_dispatches):
        choice = controller.choose(1, [estimate])
        k, num_rounds = choice.num_draft_tokens, min(choice.max_rounds or 8, 8)
        num_drafted += k > 0
        for _ in range(num_rounds * (k > 0)):
            estimate.observe(k, min(accepted, k))
        tokens = 1 + min(accepted, k)
        controller.observe_time(1, k, (1 + 0.1 * k) * num_rounds, num_rounds, tokens_per_round=tokens)
    assert choice is not None
    return num_drafted, choice.num_draft_tokens


def test_of_new_sequences_that_gain_nothing_one_in_four_is_tried():
    controller = known({0: 1.0, 1: 1.1, 2: 1.2, 4: 1.4, 8: 1.8})
    for _ in range(8):
        serve(controller, 0)
    drafted = [serve(controller, 0)[0] for _ in range(40)]
    assert 8 <= sum(number > 0 for number in drafted) <= 14  # some are tried because it is time
    lengths = [serve(controller, 8)[1] for _ in range(6)]
    assert all(length == 8 for length in lengths[4:]), lengths


def test_a_measurement_far_off_must_be_seen_twice():
    controller = known({0: 1.0, 4: 1.5})
    controller.observe_time(1, 4, 100.0)
    assert controller.seconds(1, 4) == 1.5
    assert controller.budget(1) == ALLOWANCE
    for _ in range(30):
        controller.observe_time(1, 4, 100.0)
    assert controller.seconds(1, 4) == 100.0


def test_a_first_measurement_that_compiled_does_not_stand():
    controller = LengthController((4,), cost_ratio=0.1)
    for seconds in (30.0, 1.0, 1.0):
        controller.observe_time(1, 0, seconds)
    assert controller.seconds(1, 0) == 1.0
    for seconds in (5.0, 1.5, 1.6):
        controller.observe_time(1, 4, seconds)
    assert controller.seconds(1, 4) == 1.5


def test_what_the_draft_has_missed_is_counted():
    controller = known({0: 1.0, 4: 1.5})
    old, new = controller.new_estimate(), controller.new_estimate(100)
    assert controller.start([old], 0, 8) == 0
    assert controller.start([old, new], 4, 4) == 108
    assert controller.start([old, new], 4, 4) == 0


def test_catching_up_is_paid_for_but_is_no_measurement():
    controller = known({0: 1.0, 4: 1.5})
    for _ in range(3):
        controller.observe_time(1, 4, 9.5, 1, 2.5, num_behind=100)
    assert controller.seconds(1, 4) == 1.5
    assert controller.budget(1) == pytest.approx(ALLOWANCE - 3 * 8 + 3 * (2.5 - 1.5) + 3 * SHARE * 2.5, abs=2)
    for _ in range(200):
        controller.observe_time(1, 4, 9.5, 1, 2.5, num_behind=100)
    assert controller.seconds(1, 4) == 9.5, "where it always catches up, that is what a round takes"


def test_a_hiccup_while_catching_up_does_not_stop_drafting():
    controller = known({0: 1.0, 4: 1.5})
    for number in range(50):  # answers, each of which begins with catching up
        seconds = 60.0 if number % 7 == 3 else 3.5
        controller.observe_time(1, 4, seconds, 1, 2.5, num_behind=100)
        assert controller.budget(1) > 20
        controller.observe_time(1, 4, 6.0, 4, 2.5)


def test_a_trial_begins_with_catching_up():
    controller = LengthController((4,))
    for _ in range(3):
        controller.observe_time(1, 0, 1.0)
    estimate = controller.new_estimate(500)
    first = controller.choose(1, [estimate])
    assert (first.num_draft_tokens, first.max_rounds) == (4, 1)
    assert controller.start([estimate], 4, 1) == 500
    second = controller.choose(1, [estimate])
    assert (second.num_draft_tokens, second.max_rounds) == (4, TRIAL_ROUNDS)
    assert controller.start([estimate], 4, 2) == 0
    assert controller.choose(1, [estimate]).num_draft_tokens == 0, "until the outcome is known"


def test_no_trial_that_must_catch_up_with_more_than_the_purse_holds():
    controller = known({0: 1.0, 2: 1.3}, num_slots=4)
    for _ in range(5):
        controller.observe_time(4, 2, 101.0, 1, 1.0, num_behind=100)  # a step for each token
    estimate = estimate_of(controller, 0.0)
    estimate.num_behind = 10_000
    for _ in range(1000):
        controller.observe_time(4, 0, 8.0, 8)
        assert controller.choose(4, [estimate]).num_draft_tokens == 0


def test_what_is_not_measured_is_guessed():
    controller = LengthController(CHOICES, cost_ratio=0.1)
    for num_slots in (1, 4):
        for _ in range(5):
            controller.observe_time(num_slots, 0, 1.0)
    assert controller.seconds(1, 4) == pytest.approx(1.4), "as if verifying were free"
    for _ in range(5):
        controller.observe_time(1, 4, 3.0)
    assert controller.seconds(1, 2) == pytest.approx(2.0), "between plain and the measured one"
    assert controller.seconds(1, 8) == pytest.approx(3.4), "only the drafting added"
    assert controller.seconds(4, 4) == pytest.approx(3.0), "a busier machine is not relatively faster"


def test_a_draft_of_blocks_costs_a_pass_whatever_it_drafts():
    controller = LengthController(CHOICES, cost_ratio=0.4, drafts_at_once=True)
    for _ in range(5):
        controller.observe_time(1, 0, 1.0)
    assert [controller.seconds(1, k) for k in CHOICES] == pytest.approx([1.4] * 4)
    assert controller.choose(1, [controller.new_estimate()]).num_draft_tokens
    for _ in range(5):
        controller.observe_time(1, 2, 1.7)
    assert controller.seconds(1, 8) == pytest.approx(1.7)


def test_an_empty_budget_stops_it():
    """Predictions may be wrong; what really came of the rounds counts."""
    controller = known({0: 1.0, 4: 1.5})
    estimate = estimate_of(controller, 0.9)
    num_rounds = 0
    while controller.choose(1, [estimate]).num_draft_tokens:
        controller.observe_time(1, 4, 1.5, tokens_per_round=1.0)
        num_rounds += 1
        assert num_rounds < 1000
    assert num_rounds * 0.5 == pytest.approx(ALLOWANCE, rel=0.1)
    controller.observe_time(1, 0, 100.0, num_rounds=100)
    assert controller.budget(1) <= 100 * SHARE, "it fills slowly"


@pytest.mark.parametrize(
    "arguments", [{"choices": ()}, {"choices": (0, 2)}, {"choices": (True,)}, {"cost_ratio": -0.1}, {"prior_rate": 2}]
)
def test_arguments_out_of_range(arguments):
    with pytest.raises(ValueError, match="got"):
        LengthController(**{"choices": CHOICES, **arguments})


def test_reports_that_cannot_be():
    controller = LengthController((2, 4))
    with pytest.raises(ValueError, match=r"3 draft tokens are not among \(2, 4\)"):
        controller.observe_time(1, 3, 1.0)
    with pytest.raises(ValueError, match="not a measurement"):
        controller.observe_time(1, 2, 0.0)
    with pytest.raises(ValueError, match="no plain step of 4 slots"):
        controller.seconds(4, 0)
    with pytest.raises(ValueError, match="1 limits for 2 rows"):
        controller.choose(1, [controller.new_estimate()] * 2, [3])


@pytest.mark.alone
@pytest.mark.flaky(reruns=2)  # what else the machine does can only add
def test_a_choice_for_64_rows_costs_little():
    controller = known({0: 1.0, 1: 1.1, 2: 1.2, 4: 1.5, 8: 2.0}, num_slots=64)
    estimates = [estimate_of(controller, 0.7, 20) for _ in range(64)]
    seconds = []
    for _ in range(50):
        start = time.perf_counter()
        controller.choose(64, estimates, [100] * 64)
        for estimate in estimates:
            estimate.observe(4, 2)
        seconds.append(time.perf_counter() - start)
    print(f"a choice for 64 rows and a round of results: {statistics.median(seconds) * 1e6:.0f} us")
    assert statistics.median(seconds) < 0.002


def test_rows_are_shared_by_what_is_likely_to_be_accepted():
    no_limit = [100, 100, 100]
    assert shared_lengths([(0.9, 0.9), (0.1, 0.1), (0.5, 0.5)], no_limit, 8, 9) == [7, 1, 1]
    assert shared_lengths([(0.9, 0.9)] * 3, no_limit, 8, 9) == [3, 3, 3]
    assert shared_lengths([(0.9, 0.9)] * 3, [1, 100, 0], 8, 9) == [1, 8, 0]
    assert shared_lengths([(0.9, 0.9), (0.1, 0.1)], no_limit[:2], 8, 1) == [1, 0]
    assert shared_lengths([(0.0, 0.0)] * 2, no_limit[:2], 2, 9) == [2, 2]


def shared_controller(seconds: dict[int, float], num_slots: int = 4) -> LengthController:
    controller = LengthController((2, 4, 8), shared=SharedRows(8, 4, above=1))
    for k, spent in seconds.items():
        for _ in range(MANY_SAMPLES):
            controller.observe_time(num_slots, k, spent, tokens_per_round=100)
    return controller


def test_rows_are_shared_where_sequences_differ():
    """Rows cost time: eight drafts of the sequences that accept them, and few of the others, are best."""
    controller = shared_controller({0: 1.0, 2: 1.6, 4: 2.2, 8: 4.0})
    for _ in range(MANY_SAMPLES):
        controller.observe_time(4, 8, 2.3, tokens_per_round=100, shares_rows=True)
    good, poor = estimate_of(controller, 0.95), estimate_of(controller, 0.1)
    choice = controller.choose(4, [good, poor, poor, good])
    assert (choice.num_draft_tokens, choice.shares_rows) == (8, True)
    assert sum(choice.lengths) == 16
    assert choice.lengths[0] == choice.lengths[3] == 7
    assert choice.lengths[1] == choice.lengths[2] == 1
    alone = controller.choose(1, [good])
    assert not alone.shares_rows, "the fewest slots have no such rounds"


def test_rows_are_not_shared_where_they_are_free():
    controller = shared_controller({0: 1.0, 2: 1.1, 4: 1.2, 8: 1.3})
    good = estimate_of(controller, 0.95)
    choice = controller.choose(4, [good] * 4)
    assert (choice.num_draft_tokens, choice.shares_rows, choice.lengths) == (8, False, (8,) * 4)


def test_shared_rows_are_of_two_choices():
    with pytest.raises(ValueError, match="is not made of two of"):
        LengthController((2, 4), shared=SharedRows(8, 4, above=1))


def test_new_sequences_begin_with_the_rate_of_their_adapter():
    controller = LengthController(CHOICES)
    for _ in range(100):
        controller.new_estimate(adapter="far").observe(4, 0)
        controller.new_estimate(adapter="near").observe(4, 4)
    rates = {name: controller.new_estimate(adapter=name).first_rate for name in ("far", "near", "", "new")}
    assert rates["far"] < 0.15 < 0.4 < rates[""] < 0.6 < 0.85 < rates["near"]
    assert rates["new"] == pytest.approx(rates[""], abs=0.05)
    for number in range(MOST_ADAPTERS):
        controller.new_estimate(adapter=f"later {number}")
    assert controller.new_estimate(adapter="far").first_rate == pytest.approx(rates[""], abs=0.05), "it was forgotten"
