"""Requests with adapters on a fake device, which has in each slot what plans wrote there.

Whatever the order of requests, loads and unloads, each token is made with its own adapter, and nobody waits for ever.
"""

import random
from dataclasses import replace

import pytest

from jaxinfer.engine.adapter_slots import LoadedAdapter
from jaxinfer.engine.scheduler import MAX_OVERTAKEN, SchedulerOptions
from tests.engine.fake_device import Engine
from tests.engine.random_work import RandomWork

OPTIONS = SchedulerOptions(num_pages=200, page_size=4, max_seqs=4, prefill_chunk=16, num_adapters=2)


def loaded(name: str, **more) -> LoadedAdapter:
    return LoadedAdapter(name, f"fingerprint of {name}", None, **more)


class AdapterWork(RandomWork):
    """Random work in which half of the requests name adapters, which are loaded, replaced and unloaded meanwhile."""

    def __init__(self, seed: int, **more):
        super().__init__(seed, **more)
        rng = self.random
        options = replace(self.engine.options, num_adapters=rng.choice([1, 1, 2, 3, 8]))
        is_cautious = not self.is_thrashed
        old = self.engine
        self.engine = Engine(
            options,
            seed=seed + 1,
            failure_rate=old.failure_rate,
            stop_rate=old.stop_rate,
            known_pages_every=8,
            tokens_per_step=old.tokens_per_step,
        )
        if not is_cautious:
            self.engine.scheduler._num_spare = lambda: [0] * len(options.groups)
        self.num_names, self.num_loads = rng.choice([1, 3, 12]), 0
        self.can_pin = rng.random() < 0.5
        self.adapters = [self.load(name) for name in range(self.num_names)]
        self.num_unloads = self.max_running = self.num_blocked = 0

    def load(self, name: int) -> LoadedAdapter:
        """Sometimes the tensors are those of another name, or those that the name had before."""
        self.num_loads += 1
        content = self.random.choice([self.num_loads, self.num_loads, self.random.randint(1, self.num_loads)])
        is_pinned = self.can_pin and self.random.random() < 0.3
        return LoadedAdapter(f"name {name}", f"fingerprint {content}", None, is_pinned=is_pinned)

    def step(self) -> None:
        if self.random.random() < 0.05:
            name = self.random.randrange(self.num_names)
            old, self.adapters[name] = self.adapters[name], self.load(name)
            old.is_unloaded = True
            self.engine.scheduler.adapters.forget(old)
            self.num_unloads += 1
        super().step()
        scheduler = self.engine.scheduler
        running = {one.request.adapter for one in scheduler.running if one.request.adapter}
        self.max_running = max(self.max_running, len({one.fingerprint for one in running}))
        assert self.max_running <= scheduler.options.num_adapters
        self.num_blocked += any(one.num_overtaken for one in scheduler.waiting)

    def more_arguments(self):
        return {"adapter": self.random.choice([None, *self.adapters])}


def run_random_work(seeds: range, num_operations: int, **more) -> None:
    preemptions = reused = unloads = blocked = moved = done = 0
    for seed in seeds:
        work = AdapterWork(seed, **more)
        engine = work.run(num_operations // len(seeds))
        done += engine.num_operations
        preemptions += engine.scheduler.counters.num_preemptions
        reused += engine.scheduler.counters.reused_tokens
        unloads, blocked = unloads + work.num_unloads, blocked + work.num_blocked
        slots = engine.scheduler.adapters
        moved += slots.num_moved
        assert not slots.running
        assert not [one.name for one in slots.resident if one.is_unloaded], "what was unloaded keeps its slot"
    print(f"{done} operations: {moved} moved, {unloads} unloaded, {blocked} steps blocked, {preemptions} preemptions")
    assert min(preemptions, reused, unloads, blocked, moved) > 0


def test_random_work_gives_each_the_answer_of_its_adapter():
    run_random_work(range(40), 16_000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("has_windows", [False, True])
def test_half_a_million_operations_give_each_the_answer_of_its_adapter(has_windows, has_states):
    run_random_work(range(1000, 1200), 500_000, has_windows=has_windows, has_states=has_states)


def prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(97) for _ in range(6)]


@pytest.mark.parametrize("is_with_base", [False, True])
def test_a_stream_of_requests_for_adapters_in_slots_starves_nobody(is_with_base):
    """At most MAX_OVERTAKEN are admitted before it, of its own arrival or later, and then what runs has to end."""
    engine, rng = Engine(replace(OPTIONS, max_seqs=16)), random.Random(0)
    resident = [loaded("a"), loaded("b")]
    stream = [*resident, None] if is_with_base else resident
    for adapter in resident:
        engine.add(prompt(rng), 12, adapter=adapter)
    for _ in range(3):
        engine.step()
    patient = engine.add(prompt(rng), 4, adapter=loaded("c"))
    assert patient is not None
    seen, num_after = set(engine.scheduler.running), 0
    for _ in range(4000):
        for adapter in stream if len(engine.scheduler.waiting) < 20 else ():
            engine.add(prompt(rng), rng.randint(8, 20), adapter=adapter)
        engine.step()
        admitted = set(engine.scheduler.running) - seen
        seen |= admitted
        if patient.slot is not None:
            break
        num_after += len(admitted)
    else:
        raise AssertionError(f"{num_after} were admitted, and it waits")
    assert num_after == patient.num_overtaken == MAX_OVERTAKEN
    engine.drain()


@pytest.mark.parametrize("num_others", [0, 1, 3])
def test_where_all_slots_are_pinned_others_run_too(num_others):
    engine, rng = Engine(OPTIONS), random.Random(1)
    for name in "ab":
        engine.add(prompt(rng), 3, adapter=loaded(name, is_pinned=True))
    engine.drain()
    for number in range(num_others):
        engine.add(prompt(rng), 5, adapter=engine.scheduler.adapters.resident[number % 2])
    waiting = engine.add(prompt(rng), 3, adapter=loaded("c"))
    engine.drain()
    assert waiting is not None
    assert waiting.is_finished


def test_an_adapter_moves_ahead_while_its_request_waits():
    engine, rng = Engine(replace(OPTIONS, max_seqs=1)), random.Random(2)
    engine.add(prompt(rng), 12, adapter=loaded("a"))
    engine.step()
    engine.add(prompt(rng), 4, adapter=(ahead := loaded("b")))
    for _ in range(4):  # some of which deliver
        engine.step()
    assert engine.scheduler.adapters.slot_of(ahead) is not None
    assert [one.name for one in engine.scheduler.adapters.running] == ["a"]
    moved = engine.scheduler.adapters.num_moved
    engine.drain()
    assert engine.scheduler.adapters.num_moved == moved == 2


def test_what_was_moved_ahead_leaves_with_a_request_that_ends_before_it_runs():
    engine, rng = Engine(replace(OPTIONS, max_seqs=1)), random.Random(3)
    engine.add(prompt(rng), 12, adapter=loaded("a"))
    ahead = loaded("b", is_pinned=True)
    waiting = engine.add(prompt(rng), 4, adapter=ahead)
    while engine.scheduler.adapters.slot_of(ahead) is None:
        engine.step()
    ahead.is_unloaded = True
    assert waiting is not None
    engine.abort(waiting)
    assert [one.name for one in engine.scheduler.adapters.resident] == ["a"]
    engine.drain()


def test_a_preempted_sequence_goes_on_with_its_adapter():
    """Its slot may have another one meanwhile, or it may have been unloaded."""
    rng = random.Random(4)
    engine = Engine(replace(OPTIONS, num_pages=12, num_adapters=1))
    adapter = loaded("a")
    engine.scheduler._num_spare = lambda: [0]
    for _ in range(4):
        engine.add(prompt(rng), 30, adapter=adapter)
    for _ in range(10):
        engine.step()
    adapter.is_unloaded = True
    engine.scheduler.adapters.forget(adapter)
    engine.add(prompt(rng), 8, adapter=loaded("b"))
    engine.drain()
    assert engine.scheduler.counters.num_preemptions > 0
    assert [one.name for one in engine.scheduler.adapters.resident] == ["b"]
