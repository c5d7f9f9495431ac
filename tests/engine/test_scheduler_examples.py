"""The scheduler by example, without a device: what one plan holds. And what a step costs."""

import random
import statistics
import time
from dataclasses import replace

import pytest

from jaxinfer.engine.pages import NULL_PAGE
from jaxinfer.engine.request import SequenceState
from jaxinfer.engine.scheduler import MAX_QUEUE_SCAN, QueueFullError, RequestTooLargeError, Scheduler, SchedulerOptions
from jaxinfer.engine.tiers.host_tier import HostPoolSize
from tests.engine.fake_device import Engine
from tests.engine.sequences import make_sequence


def options(**changes) -> SchedulerOptions:
    return replace(SchedulerOptions(num_pages=33, page_size=4, max_seqs=4, prefill_chunk=16), **changes)


def plan_and_report(scheduler: Scheduler, token: int = 1):
    """A dispatch whose results come back at once; every sequence makes `token`."""
    plan = scheduler.schedule()
    assert plan is not None
    for chunk in plan.chunks:
        scheduler.confirm(chunk.sequence, chunk.start + chunk.length)
        if chunk.is_last:
            scheduler.append(chunk.sequence, token)
    for sequence in plan.decodes:
        for _ in range(min(plan.num_steps, sequence.num_prompt + sequence.request.max_tokens - len(sequence.tokens))):
            scheduler.append(sequence, token)
    scheduler.check()
    return plan


def add(scheduler: Scheduler, prompt, max_tokens: int = 8, **arguments) -> SequenceState:
    sequence = make_sequence(prompt, max_tokens, **arguments)
    scheduler.add(sequence)
    return sequence


def chunks_of(plan) -> list[tuple[int, int, int, bool]]:
    return [(chunk.sequence.order, chunk.start, chunk.length, chunk.is_last) for chunk in plan.chunks]


def test_prompts_are_stored_in_chunks_beside_decodes():
    scheduler = Scheduler(options())
    first, second = add(scheduler, range(5)), add(scheduler, range(50, 80))
    plan = plan_and_report(scheduler)
    assert plan.admitted == [first, second]
    assert chunks_of(plan) == [(0, 0, 5, True), (1, 0, 11, False)]
    plan = plan_and_report(scheduler)
    assert chunks_of(plan) == [(1, 11, 16, False)]
    assert plan.decodes == [first]
    plan = plan_and_report(scheduler)
    assert chunks_of(plan) == [(1, 27, 3, True)]
    assert plan_and_report(scheduler).decodes == [first, second]


def test_prompts_take_the_rows_that_decoding_sequences_leave():
    scheduler = Scheduler(options(prefill_chunk=16, max_step_tokens=16))
    add(scheduler, range(5))
    add(scheduler, range(50, 80))
    assert [length for _, _, length, _ in chunks_of(plan_and_report(scheduler))] == [5, 11]
    plan = plan_and_report(scheduler)
    assert chunks_of(plan) == [(1, 11, 15, False)]
    assert len(plan.decodes) == 1


def test_several_steps_when_there_is_nothing_else_to_do():
    scheduler = Scheduler(options(steps_per_dispatch=8, max_seqs=2))
    first, second = add(scheduler, range(5), 4), add(scheduler, range(20, 25), 20)
    assert plan_and_report(scheduler).num_steps == 1
    add(scheduler, range(5))
    plan = plan_and_report(scheduler)
    assert plan.num_steps == 3, "somebody waits for a slot: as far as the first known end"
    assert first.num_left == 0
    scheduler.finish(first, "stop")
    plan_and_report(scheduler)
    plan = scheduler.schedule(max_steps=5)
    assert plan is not None
    assert plan.num_steps == 5
    assert scheduler.running[0] is second


def test_several_steps_give_way_to_one_when_pages_are_short():
    scheduler = Scheduler(options(num_pages=5, steps_per_dispatch=8, max_seqs=2))
    add(scheduler, [1, 2, 3], 12), add(scheduler, [5, 6], 12)
    plan_and_report(scheduler)
    plan = scheduler.schedule(can_preempt=False)
    assert plan is not None
    assert (len(plan.decodes), plan.num_steps) == (2, 1)
    assert scheduler.pool.num_owned == 2, "what eight steps would have needed was not taken"


def test_the_last_in_rank_gives_way_and_returns_first():
    scheduler = Scheduler(options(num_pages=5, max_seqs=3))
    first, second = add(scheduler, range(8), 9), add(scheduler, range(20, 24), 9)
    plan_and_report(scheduler)
    later = add(scheduler, [1], 1)
    while scheduler.schedule(can_preempt=False) is not None:
        for one in (first, second):
            scheduler.append(one, 1)
    assert [first.slot, second.slot] == [0, 1]
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.decodes == [first]
    assert (second.num_preemptions, second.pages) == (1, [])
    assert scheduler.waiting == [second, later]
    scheduler.check()


def test_priority_goes_before_arrival():
    scheduler = Scheduler(options(max_seqs=1))
    add(scheduler, [1, 2], priority=1)
    urgent = add(scheduler, [3, 4], priority=-1)
    assert plan_and_report(scheduler).admitted == [urgent]


def test_a_beginning_is_computed_once():
    scheduler = Scheduler(options())
    add(scheduler, range(9)), add(scheduler, [*range(8), 60])
    assert chunks_of(plan_and_report(scheduler)) == [(0, 0, 9, True)], "the second waits for the first"
    assert chunks_of(plan_and_report(scheduler)) == [(1, 8, 1, True)]
    third = add(scheduler, range(8))
    plan_and_report(scheduler)
    assert third.num_reused == 4, "the last token is computed, so its page is not reused"
    assert (scheduler.counters.reused_tokens, scheduler.counters.computed_prompt_tokens) == (12, 14)


@pytest.mark.parametrize(
    ("changes", "arguments"), [({}, {"salt": "other"}), ({}, {"can_reuse": False}), ({"reuses_prefixes": False}, {})]
)
def test_a_beginning_is_not_reused(changes, arguments):
    scheduler = Scheduler(options(**changes))
    add(scheduler, range(12))
    plan_and_report(scheduler)
    add(scheduler, range(12), **arguments)
    assert chunks_of(plan_and_report(scheduler)) == [(1, 0, 12, True)]


@pytest.mark.parametrize(("num_prompt", "num_copies"), [(1, 0), (4, 2), (5, 0), (6, 2), (8, 2), (9, 0)])
def test_answers_of_one_request_store_only_the_last_token_of_the_prompt(num_prompt, num_copies):
    scheduler = Scheduler(options())
    leader = add(scheduler, range(num_prompt))
    followers = [add(scheduler, range(num_prompt), leader=leader) for _ in range(2)]
    assert plan_and_report(scheduler).admitted == [leader]
    plan = plan_and_report(scheduler)
    assert plan.admitted == followers
    assert chunks_of(plan) == [(1, num_prompt - 1, 1, True), (2, num_prompt - 1, 1, True)]
    assert len(plan.copies) == scheduler.counters.copied_pages == num_copies
    whole = (num_prompt - 1) // 4
    assert all(one.pages[:whole] == leader.pages[:whole] for one in followers)


def test_many_answers_to_one_prompt_hold_up_no_other_request():
    """Their prompt is computed for some steps, in which the others of its answers wait."""
    scheduler = Scheduler(options(num_pages=400, max_seqs=4))
    leader = add(scheduler, range(20))
    for _ in range(2 * MAX_QUEUE_SCAN):
        add(scheduler, range(20), leader=leader)
    other = add(scheduler, [99])
    assert plan_and_report(scheduler).admitted == [leader]  # 16 of its 20 tokens are all of this step's
    assert plan_and_report(scheduler).admitted == [other]
    assert len(plan_and_report(scheduler).admitted) == 2  # answers of the first, now that its prompt is there


def test_followers_go_on_without_a_leader():
    scheduler = Scheduler(options())
    leader = add(scheduler, range(10))
    follower = add(scheduler, range(10), leader=leader)
    scheduler.schedule()
    scheduler.finish(leader, "stop")  # its row failed
    assert chunks_of(plan_and_report(scheduler)) == [(1, 0, 10, True)]
    assert follower.num_reused == 0


def test_pages_of_a_failed_row_are_never_found():
    scheduler = Scheduler(options(prefill_chunk=8))
    failing = add(scheduler, range(16))
    plan_and_report(scheduler)
    scheduler.schedule()
    scheduler.finish(failing, "stop")
    again = add(scheduler, range(16))
    plan_and_report(scheduler)
    assert again.num_reused == 8


def test_sequences_move_to_lower_slots_when_a_smaller_program_suffices():
    scheduler = Scheduler(options(), slot_buckets=[1, 2])
    sequences = [add(scheduler, [number]) for number in range(4)]
    plan_and_report(scheduler)
    scheduler.finish(sequences[0], "stop")
    scheduler.finish(sequences[1], "stop")
    plan = plan_and_report(scheduler)
    assert sorted(plan.moves) == [(2, 0), (3, 1)]
    scheduler.finish(sequences[2], "stop")
    assert plan_and_report(scheduler).moves == [(1, 0)]
    assert plan_and_report(scheduler).moves == []


def test_buckets_need_not_hold_all_slots():
    scheduler = Scheduler(options(), slot_buckets=[1, 2])
    for number in range(3):
        add(scheduler, [number])
    plan_and_report(scheduler)
    assert plan_and_report(scheduler).moves == []


def test_too_large_is_refused_with_numbers():
    scheduler = Scheduler(options(num_pages=4))
    scheduler.check_fits(5, 8)
    with pytest.raises(RequestTooLargeError, match=r"5 prompt tokens and max_tokens=9 need 4 pages of 4.* has 3"):
        scheduler.check_fits(5, 9)
    with pytest.raises(ValueError, match="a prompt token"):
        scheduler.check_fits(0, 8)


def test_a_full_queue_refuses():
    scheduler = Scheduler(options(max_seqs=1, max_waiting=1))
    first = add(scheduler, [1])  # for which a slot is free
    add(scheduler, [2])
    with pytest.raises(QueueFullError, match="max_waiting=1"):
        add(scheduler, [3])
    plan_and_report(scheduler)
    scheduler.finish(first, "stop")
    add(scheduler, [3])


def test_finish_may_be_said_twice_and_while_it_waits():
    scheduler = Scheduler(options(max_seqs=1))
    first, second = add(scheduler, [1]), add(scheduler, [2])
    plan_and_report(scheduler)
    for sequence in (first, second, first):
        scheduler.finish(sequence, "stop")
    scheduler.confirm(first, 1)
    scheduler.check()
    assert not scheduler.has_work
    assert scheduler.counters.num_finished == 2


@pytest.mark.parametrize("name", ["num_pages", "page_size", "max_seqs", "prefill_chunk", "steps_per_dispatch"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5, None])
def test_options_are_positive_integers(name, value):
    with pytest.raises(ValueError, match=name):
        options(**{name: value})


@pytest.mark.parametrize("spoil", ["slot", "page", "order"])
def test_check_sees_what_is_spoilt(spoil):
    scheduler = Scheduler(options(max_seqs=1))
    running = add(scheduler, range(5))
    add(scheduler, [1]), add(scheduler, [2])
    plan_and_report(scheduler)
    if spoil == "slot":
        running.slot = None
    elif spoil == "page":
        running.pages.pop()
    else:
        scheduler.waiting.reverse()
    with pytest.raises(RuntimeError):
        scheduler.check()


# Time of the host: it runs while the device works, and must stay far below a decode step.


def decode_alone(num_waiting: int) -> float:
    """Median seconds of schedule() and append() for 64 decoding sequences, a step each."""
    scheduler = Scheduler(options(num_pages=4096, page_size=16, max_seqs=64, prefill_chunk=8192))
    for number in range(64 + num_waiting):
        add(scheduler, [number] * 128, 500)
    plan_and_report(scheduler)
    times = []
    for _ in range(300):
        start = time.perf_counter()
        plan = scheduler.schedule(can_preempt=False)
        assert plan is not None
        for sequence in plan.decodes:
            scheduler.append(sequence, 1)
        times.append(time.perf_counter() - start)
        assert len(plan.decodes) == 64
    return statistics.median(times)


@pytest.mark.alone
@pytest.mark.flaky(reruns=2)  # what else the machine does can only add
@pytest.mark.parametrize("num_waiting", [0, 1000])
def test_a_step_of_64_sequences_costs_little(num_waiting):
    seconds = decode_alone(num_waiting)
    print(f"64 sequences, {num_waiting} waiting: {seconds * 1e6:.0f} us a step")
    assert seconds < 0.0005


def run_prompts(prompts: list[list[int]], reuses_prefixes: bool) -> float:
    """Seconds of a prompt that has nothing in common with the others, of which one token is sampled."""
    scheduler = Scheduler(options(num_pages=8192, page_size=16, prefill_chunk=1024, reuses_prefixes=reuses_prefixes))
    start = time.perf_counter()
    for prompt in prompts:
        add(scheduler, prompt, 1)
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        for chunk in plan.chunks:
            scheduler.confirm(chunk.sequence, chunk.start + chunk.length)
            if chunk.is_last:
                scheduler.append(chunk.sequence, 1)
                scheduler.finish(chunk.sequence, "stop")
    assert scheduler.counters.reused_tokens == 0
    return (time.perf_counter() - start) / len(prompts)


@pytest.mark.alone
@pytest.mark.flaky(reruns=2)  # what else the machine does can only add
def test_reuse_that_finds_nothing_costs_little():
    rng = random.Random(0)
    prompts = [[rng.randrange(30000) for _ in range(1000)] for _ in range(100)]
    # The best of several rounds: a full garbage collection takes longer than a round.
    without, with_reuse = (min(run_prompts(prompts, reuses) for _ in range(5)) for reuses in (False, True))
    print(f"a prompt of 1000 tokens: {without * 1e6:.0f} us, {with_reuse * 1e6:.0f} us with prefix reuse")
    assert with_reuse < 0.001


def test_pages_of_its_own_are_no_hit_of_a_preempted_sequence():
    """They are found again, but nobody else had computed them; those of the sequence before it are a hit."""
    scheduler = Scheduler(options())
    first = add(scheduler, range(10))
    plan_and_report(scheduler)
    second = add(scheduler, range(12))
    plan_and_report(scheduler)
    for sequence in (second, first):
        scheduler.preempt(sequence)
    plan_and_report(scheduler)
    assert (first.num_reused, first.num_cached) == (8, 0)
    assert (second.num_reused, second.num_cached) == (12, 8)


def test_a_preempted_sequence_with_a_state_is_planned_anew():
    """From the last state that was saved, with pieces that end at the borders of the tokens it has by then."""
    scheduler = Scheduler(options(has_states=True, num_saved_states=4, save_interval=8))
    one = add(scheduler, range(30), max_tokens=20)

    def pieces(count: int) -> list[tuple[int, int, bool]]:
        plans = [plan_and_report(scheduler) for _ in range(count)]
        assert plans[0].admitted == [one]
        assert not any(plan.admitted or plan.copies for plan in plans[1:])
        return [(chunk.start, chunk.length, chunk.saves_to != NULL_PAGE) for plan in plans for chunk in plan.chunks]

    def preempt() -> None:
        scheduler.preempt(one)
        scheduler.check()
        assert (one.saved, one.save_at, one.num_stored, one.num_drafted) == ({}, [], 0, 0)

    assert pieces(1) == [(0, 16, False)]
    preempt()  # before its border: pages are cached, and no state, which is saved for whoever shares them
    assert pieces(2) == [(0, 16, True), (16, 8, True)]
    assert (one.restore_from, one.num_reused) == (NULL_PAGE, 0)
    preempt()
    assert pieces(1) == [(24, 6, False)]
    assert (one.restore_from != NULL_PAGE, one.num_reused) == (True, 24)
    while len(one.tokens) < 36:
        plan_and_report(scheduler)
    preempt()  # its answer has passed the next border
    assert pieces(2) == [(24, 8, True), (32, 4, False)]
    scheduler.saved.pools[0].drop_idle()
    scheduler.check()
    preempt()  # with its states gone
    assert pieces(3)[:2] == [(0, 16, False), (16, 16, True)]
    assert (one.restore_from, one.num_reused) == (NULL_PAGE, 0)


def test_all_cached_beginnings_can_be_dropped():
    """On the device and in host memory, while others run."""
    sizes = (HostPoolSize(40, 8),)
    engine = Engine(SchedulerOptions(num_pages=9, page_size=4, max_seqs=2, prefill_chunk=16, host_pools=sizes))
    prompts = [[number] * 20 for number in range(1, 5)]
    for prompt in prompts:
        engine.add(prompt, 1)
        engine.drain()
    tree, tier = engine.scheduler.prefixes, engine.scheduler.tier
    known = [tree.num_known(make_sequence(prompt).keys(4, 20)) for prompt in prompts]
    assert known == [5, 5, 5, 5]
    assert tier.pools[0].num_used > 0
    engine.add(prompts[0], 8)
    engine.step()
    engine.scheduler.drop_prefixes()
    engine.check()
    assert [tree.num_known(make_sequence(prompt).keys(4, 20)) for prompt in prompts][1:] == [0, 0, 0]
    engine.drain()
    engine.scheduler.drop_prefixes()
    assert (tree.num_pages, tree._roots, tier.used_bytes) == (0, {}, 0)
