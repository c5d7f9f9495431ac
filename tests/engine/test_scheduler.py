"""The scheduler on a fake device (see `fake_device`): one answer per request, whatever the pool, the batch and the luck.

Oracle: the device's model on the prompt alone. Then properties (hypothesis, and a seeded random driver that is much
faster per operation), planted faults that the same checks must catch, and examples.
"""

import random
import time

import pytest
from fake_device import MAX_IN_FLIGHT, Engine
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxinfer.engine.prefix import PrefixTree
from jaxinfer.engine.scheduler import (
    MAX_PREEMPTIONS,
    QueueFullError,
    RequestTooLargeError,
    Scheduler,
    SchedulerOptions,
    Sequence,
)

# The seeded random driver.


def random_engine(seed: int) -> Engine:
    rng = random.Random(seed)
    max_seqs = rng.choice([1, 2, 3, 4, 8, 16])
    options = SchedulerOptions(
        num_pages=rng.choice([3, 4, 6, 9, 14, 24, 60, 200]),
        page_size=rng.choice([1, 2, 3, 4, 8, 16]),
        max_seqs=max_seqs,
        prefill_chunk=rng.choice([1, 2, 3, 5, 8, 16, 64]),
        steps_per_dispatch=rng.choice([1, 1, 2, 3, 8]),
        max_waiting=rng.choice([None, None, 3, 40]),
        reuses_prefixes=rng.random() < 0.9,
        shuffle_seed=rng.choice([None, rng.randrange(1000)]),
    )
    return Engine(
        options,
        slot_buckets=rng.choice([None, (1, 2, 4, 8)]),
        seed=seed,
        failure_rate=rng.choice([0, 0, 0.01, 0.1]),
        stop_rate=rng.choice([0, 0.02]),
        known_pages_every=8,
    )


def add_random_group(engine: Engine, rng: random.Random, beginnings: list[list[int]]) -> None:
    """A prompt that starts like others, asked for once or several times."""
    capacity = min((engine.options.num_pages - 1) * engine.options.page_size, 70)
    prompt = list(rng.choice(beginnings)[: rng.randint(0, 40)]) + [rng.randrange(29) for _ in range(rng.randint(1, 6))]
    prompt = prompt[: rng.randint(1, capacity)]
    arguments = {
        "max_tokens": rng.randint(1, min(capacity + 1 - len(prompt), 24)),
        "priority": rng.choice([0, 0, 0, 1, -1]),
        "salt": rng.choice(["", "", "1", "2"]),
        "can_reuse": rng.random() < 0.9,
    }
    leader = None
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        sequence = engine.add(prompt, leader=leader, **arguments)
        leader = leader or sequence
        arguments["can_reuse"] = True
        if leader is None:
            return


def run_randomly(seed: int, num_operations: int, abort_rate: float = 0.02) -> Engine:
    engine, rng = random_engine(seed), random.Random(seed + 1)
    beginnings = [[rng.randrange(29) for _ in range(40)] for _ in range(3)]
    num_live_wanted = rng.choice([2, 8, 30])
    while engine.num_operations < num_operations:
        for _ in range(rng.choice([3, 40, 200])):
            if len(engine.live) < num_live_wanted and rng.random() < 0.5:
                add_random_group(engine, rng, beginnings)
            if engine.live and rng.random() < abort_rate:
                engine.abort(rng.choice(list(engine.live)))
            engine.step()
        engine.drain()
    return engine


@pytest.mark.parametrize("seed", range(40))
def test_random_work_gives_one_answer(seed):
    run_randomly(seed, 750)
