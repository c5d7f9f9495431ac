"""The scheduler on a fake device (see `fake_device`): one answer per request, whatever the pool, the batch, the luck.

Oracle: the device's model on the prompt alone. Then properties (random work from a seed, which is much faster per
operation, and hypothesis), and bounds. Examples and timings are in test_scheduler_examples.py; test_scheduler_faults.py
plants faults that the checks here must catch.
"""

import random
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jaxinfer.engine.request import MAX_PREEMPTIONS
from jaxinfer.engine.scheduler import SchedulerOptions
from tests.engine.fake_device import MAX_IN_FLIGHT, Engine
from tests.engine.random_work import RandomWork


def options(**changes) -> SchedulerOptions:
    return replace(SchedulerOptions(num_pages=33, page_size=4, max_seqs=4, prefill_chunk=16), **changes)


# Random work.


def run_random_work(
    seeds: range, num_operations: int, has_windows: bool = False, has_states: bool = False, has_host: bool = False
) -> None:
    """At least `num_operations` in all, and nothing that the work is meant to meet is missing."""
    done = preemptions = spared = copies = evictions = failed = refused = reused = saved = back = given_away = 0
    for seed in seeds:
        work = RandomWork(seed, has_windows=has_windows, has_states=has_states, has_host=has_host)
        engine = work.run(num_operations // len(seeds))
        counters = engine.scheduler.counters
        done += engine.num_operations
        preemptions += counters.num_preemptions
        spared += engine.max_preemptions >= MAX_PREEMPTIONS
        copies += counters.copied_pages
        evictions += sum(pool.num_evictions for pool in engine.scheduler.pools.all)
        failed += engine.num_failed
        refused += engine.num_refused
        reused += counters.reused_tokens
        saved += sum(pool.num_evictions for pool in engine.scheduler.saved.pools)
        back += engine.num_back
        given_away += sum(pool.num_evictions for pool in engine.scheduler.tier.pools)
    assert done >= num_operations
    assert min(preemptions, spared, evictions, failed, refused, reused) > 0
    assert (copies > 0) != has_states  # whose answers share no part of a page
    assert (saved > 0) == has_states
    assert (back > 0) == (given_away > 0) == has_host
    print(f"{done} operations: {preemptions} preemptions, {copies} copies, {evictions} evictions, {failed} rows failed")


@pytest.mark.parametrize("part", range(3))
def test_random_work_gives_one_answer(part):
    run_random_work(range(20 * part, 20 * part + 20), 10_000)


def test_random_work_gives_one_answer_with_windows():
    run_random_work(range(40), 20_000, has_windows=True)


@pytest.mark.parametrize("has_windows", [False, True])
def test_random_work_gives_one_answer_with_states(has_windows):
    run_random_work(range(40), 20_000, has_windows, has_states=True)


@pytest.mark.parametrize(
    ("has_windows", "has_states"),
    [
        (False, False),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((True, False), (False, True))),
        (True, True),
    ],
)
def test_random_work_gives_one_answer_with_host_pages(has_windows, has_states):
    run_random_work(range(40), 20_000, has_windows, has_states, has_host=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("has_host", [False, True])
@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("has_windows", [False, True])
@pytest.mark.parametrize("part", range(4))
def test_a_million_operations_give_one_answer(part, has_windows, has_states, has_host):
    run_random_work(range(1000 + 100 * part, 1100 + 100 * part), 250_000, has_windows, has_states, has_host)


def run_aborts(num_aborts: int) -> None:
    """One abort per two steps, in whatever phase a sequence is; sometimes all at once."""
    count = 0
    for seed in range(10):
        work = RandomWork(seed, abort_rate=0.3)
        engine, pool = work.engine, work.engine.scheduler.pool
        while work.num_aborts < num_aborts // 10:
            for _ in range(work.random.randrange(40)):
                work.step()
            for victim in list(engine.live):
                own = [page for page in victim.pages if pool.num_owners(page) == 1]
                engine.abort(victim)
                work.num_aborts += 1
                assert victim.is_finished
                assert all(pool.num_owners(page) == 0 for page in own)
            for _ in range(MAX_IN_FLIGHT):
                engine.step()
            engine.check_idle()
            assert not engine.in_flight
        count += work.num_aborts
    assert count >= num_aborts


def test_a_thousand_aborts_free_their_pages():
    run_aborts(1000)


@pytest.mark.slow
def test_ten_thousand_aborts_free_their_pages():
    run_aborts(10_000)


class Scheduling(RuleBasedStateMachine):
    """The same, with requests, dispatches, deliveries and aborts in an order that hypothesis chooses and shrinks."""

    @initialize(
        num_pages=st.integers(3, 24),
        page_size=st.integers(1, 16),
        max_seqs=st.integers(1, 5),
        prefill_chunk=st.integers(1, 64),
        steps_per_dispatch=st.integers(1, 8),
        max_waiting=st.none() | st.integers(1, 5),
        reuses_prefixes=st.booleans(),
        shuffle_seed=st.none() | st.integers(0, 9),
        is_cautious=st.booleans(),
        failure_rate=st.sampled_from([0.0, 0.1]),
    )
    def start(self, is_cautious, failure_rate, **arguments):
        self.engine = Engine(SchedulerOptions(**arguments), failure_rate=failure_rate)
        if not is_cautious:
            self.engine.scheduler._num_spare = lambda: [0]

    @rule(
        beginning=st.integers(0, 1),
        length=st.integers(1, 24),
        tail=st.integers(0, 1),
        max_tokens=st.integers(1, 24),
        num_answers=st.sampled_from([1, 1, 3]),
        priority=st.sampled_from([0, 0, 1]),
        salt=st.sampled_from(["", "1"]),
        can_reuse=st.booleans(),
    )
    def add(self, beginning, length, tail, max_tokens, num_answers, can_reuse, **arguments):
        capacity = (self.engine.options.num_pages - 1) * self.engine.options.page_size
        prompt = ([beginning + 1] * (length - 1) + [tail + 3])[-capacity:]
        max_tokens = min(max_tokens, capacity + 1 - len(prompt))
        leader = self.engine.add(prompt, max_tokens, can_reuse=can_reuse, **arguments)
        for _ in range(num_answers - 1 if leader else 0):
            self.engine.add(prompt, max_tokens, leader=leader, **arguments)

    @precondition(lambda self: len(self.engine.in_flight) < MAX_IN_FLIGHT)
    @rule()
    def dispatch(self):
        self.engine.dispatch()

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def deliver(self):
        self.engine.deliver()

    @precondition(lambda self: self.engine.live)
    @rule(data=st.data())
    def abort(self, data):
        live = list(self.engine.live)
        self.engine.abort(live[data.draw(st.integers(0, len(live) - 1))])

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.drain()


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)


# Nobody starves.


@pytest.mark.slow
@pytest.mark.parametrize("num_small", [1, 4])
def test_a_large_request_is_not_overtaken_for_ever(num_small):
    engine = Engine(options(num_pages=17))
    rng = random.Random(0)
    for _ in range(8):
        engine.add([rng.randrange(97) for _ in range(8)], 20)
    large = engine.add([rng.randrange(97) for _ in range(50)], 10)
    assert large is not None
    while not large.is_finished:
        for _ in range(num_small):
            engine.add([rng.randrange(97) for _ in range(4)], 12)
        engine.step()
        assert engine.num_schedules < 8 * 20 + 50 + 10 + 10
    engine.drain()


def test_a_request_that_waits_for_anothers_prompt_is_not_overtaken_for_ever():
    """A stream of prompts that share more and more of its beginning: each is worth waiting for, but they end."""
    engine = Engine(options(num_pages=65, prefill_chunk=4))
    prompt = list(range(48))
    engine.add([*prompt[:5], 60], 4)
    engine.step()
    patient = engine.add(prompt, 4)
    assert patient is not None
    for number in range(200):
        if patient.is_finished:
            break
        engine.add([*prompt[: min(4 * number + 8, 44)], 70 + number % 20], 4)
        engine.step()
    assert patient.is_finished
    engine.drain()
