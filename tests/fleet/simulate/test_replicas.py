"""Replicas in modelled time: the engine's own steps, and many at once as each by itself."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.engine.cache_groups import CacheGroup
from jaxinfer.engine.scheduler import QueueFullError, SchedulerOptions
from jaxinfer.fleet.simulate.jumps import JumpingReplica, can_jump
from jaxinfer.fleet.simulate.options import SimulationOptions
from jaxinfer.fleet.simulate.replica import SimulatedReplica
from jaxinfer.fleet.simulate.run import LOST, QUEUE_FULL, SERVED, TOO_LONG, ReplicaModel, run_fleet
from jaxinfer.fleet.simulate.sequence import SimulatedSequence
from jaxinfer.fleet.simulate.times import StepTimes
from jaxinfer.fleet.simulate.traces import ArrivalTrace, open_trace

MS = 10**9
TIMES = StepTimes(fixed=2 * MS, weights=(8 * MS,), token=19_000_001, logit=1_000_003, key=11_007, pair=634.5)
CONVERSATIONS = "conversations:rate=12,turns=5,prompt=1:200,answer=1:200,think=5,requests={}"
POISSON = "poisson:rate={},prompt=1:800,answer=1:200,requests={}"


def replica_model(times=TIMES, max_model_len=100_000, **options):
    defaults = {"num_pages": 2000, "page_size": 16, "max_seqs": 16, "prefill_chunk": 512, "max_step_tokens": 528}
    return ReplicaModel(SchedulerOptions(**{**defaults, **options}), times, max_model_len)


def assert_equal(trace, model, num_replicas=3, **options):
    """Both ways of passing time give the same of every request; returns the run."""
    runs = [run_fleet(trace, model, num_replicas, SimulationOptions(**options), jumps=jumps) for jumps in (True, False)]
    jumped, stepped = runs
    for name in ("status", "first", "last"):
        np.testing.assert_array_equal(getattr(jumped, name), getattr(stepped, name), err_msg=name)
    for name in ("seconds", "num_steps", "reused_tokens", "computed_tokens", "num_preemptions", "num_failovers"):
        assert getattr(jumped, name) == getattr(stepped, name), name
    assert jumped.num_events < stepped.num_events
    return jumped


@pytest.mark.slow
def test_a_request_alone_takes_the_sum_of_its_steps():
    trace = ArrivalTrace("one", [0], [600], [3])
    run = run_fleet(trace, replica_model(), 1)
    chunks = [TIMES.products(512, 1) + TIMES.prompt(0, 512), TIMES.products(88, 1) + TIMES.prompt(512, 88)]
    decodes = [TIMES.products(1, 1) + TIMES.decoding(context) for context in (601, 602)]
    assert (run.first[0], run.last[0]) == (sum(chunks), sum(chunks) + sum(decodes))
    assert (run.num_steps, run.computed_tokens) == (4, 600)


def test_a_request_waits_for_the_two_dispatches_that_were_sent_before_it():
    trace = ArrivalTrace("two", [0, 10**6], [100, 100], [30, 2])
    run = run_fleet(trace, replica_model(), 1)
    first = TIMES.products(100, 1) + TIMES.prompt(0, 100)
    second = TIMES.products(1, 1) + TIMES.decoding(101)
    third = TIMES.products(101, 2) + TIMES.prompt(0, 100) + TIMES.decoding(102)
    assert run.first[1] == first + second + third - 10**6


def test_many_steps_at_once_are_each_step_by_itself():
    run = assert_equal(open_trace(CONVERSATIONS.format(200)), replica_model(num_pages=250, max_seqs=8))
    assert run.num_preemptions  # pages ran short
    assert run.reused_tokens


LIMITS = {
    "plenty": (POISSON.format(20, 10_000), {"reuses_prefixes": False}, {}),
    "few-pages": (POISSON.format(20, 3000), {"num_pages": 200, "reuses_prefixes": False}, {}),
    "overload": (POISSON.format(60, 2000), {"num_pages": 100, "reuses_prefixes": False}, {"routing": "round-robin"}),
    "prefixes": (CONVERSATIONS.format(3000), {"num_pages": 900}, {"routing": "prefix"}),
    "evictions": (CONVERSATIONS.format(2000), {"num_pages": 300}, {}),
    "failures": (CONVERSATIONS.format(2000), {"num_pages": 900}, {"mtbf": 0.01, "restart_time": 3.0}),
    "full-queues": (
        "gamma:rate=60,cv=3,prompt=1:800,answer=1:200,requests=2000",
        {"num_pages": 150, "max_seqs": 8, "max_waiting": 5},
        {},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITS)
def test_many_steps_at_once_are_each_step_by_itself_at_every_limit(name):
    text, engine, fleet = LIMITS[name]
    run = assert_equal(open_trace(text, seed=1), replica_model(**engine), **fleet)
    assert run.num_preemptions or name in ("plenty", "prefixes", "failures", "full-queues")
    assert (run.num_failovers > 0) == (name == "failures")
    assert ((run.status == QUEUE_FULL).sum() > 0) == (name == "full-queues")


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rate=st.floats(5, 100),
    num_pages=st.integers(64, 1000),
    page_size=st.sampled_from([16, 32, 64]),
    max_seqs=st.integers(1, 20),
    chunk=st.integers(32, 600),
    reuses=st.booleans(),
    kind=st.sampled_from(["poisson", "conversations"]),
    mtbf=st.sampled_from([None, None, 0.003]),
    routing=st.sampled_from(["least-load", "prefix", "round-robin"]),
)
def test_any_engine_passes_many_steps_at_once(
    seed, rate, num_pages, page_size, max_seqs, chunk, reuses, kind, mtbf, routing
):
    text = f"{kind}:rate={rate},prompt=1:200,answer=1:100,requests=150" + (",shared=64" if kind[0] == "c" else "")
    model = replica_model(
        num_pages=num_pages,
        page_size=page_size,
        max_seqs=max_seqs,
        prefill_chunk=chunk,
        max_step_tokens=chunk + max_seqs,
        reuses_prefixes=reuses,
    )
    assert_equal(open_trace(text, seed), model, routing=routing, mtbf=mtbf, restart_time=2.0, seed=seed)


@pytest.mark.slow
def test_what_a_replica_refuses():
    model = replica_model(max_model_len=100, max_seqs=1, max_waiting=1)
    trace = ArrivalTrace("five", [0, 0, 0, 0], [50, 50, 50, 90], [10, 10, 10, 11])
    run = run_fleet(trace, model, 1)
    assert run.status.tolist() == [SERVED, SERVED, QUEUE_FULL, TOO_LONG]
    replica = SimulatedReplica(model.options, TIMES, lambda sequence, now: None)
    for number in range(2):
        replica.add(SimulatedSequence(number, 5, 5), 0)
    with pytest.raises(QueueFullError, match="1 requests wait"):
        replica.add(SimulatedSequence(2, 5, 5), 0)


@pytest.mark.slow
def test_windows_are_simulated_step_by_step():
    windows = replica_model(more_groups=(CacheGroup(100, 64),)).options
    assert not can_jump(windows, TIMES)
    with pytest.raises(ValueError, match="step by step"):
        JumpingReplica(windows, TIMES, lambda sequence, now: None)
    run = run_fleet(ArrivalTrace("one", [0], [300], [40]), ReplicaModel(windows, TIMES, 1000), 1)
    assert run.status.tolist() == [SERVED]
    with pytest.raises(ValueError, match="got 8"):
        SimulatedReplica(replica_model(steps_per_dispatch=8).options, TIMES, lambda sequence, now: None)


@pytest.mark.slow
def test_a_stream_goes_on_at_another_replica():
    """The replica fails while an answer is decoded: the other one computes the prompt and what was sent."""
    model = replica_model()
    trace = ArrivalTrace("one", [0], [100], [2000])
    whole = run_fleet(trace, model, 2)
    run = run_fleet(trace, model, 2, SimulationOptions(mtbf=0.004, restart_time=1.0, seed=3))
    assert run.num_failovers
    assert run.status.tolist() == [SERVED]
    assert run.first[0] == whole.first[0]
    assert 100 < run.computed_tokens - 100 < 100 + 2000 * run.num_failovers
    assert whole.last[0] < run.last[0] < whole.last[0] + 1000 * MS * run.num_failovers


@pytest.mark.slow
def test_a_request_that_two_replicas_did_not_begin_is_lost():
    slow = replica_model(StepTimes(fixed=10**6 * MS))
    run = run_fleet(ArrivalTrace("one", [0], [5], [5]), slow, 2, SimulationOptions(mtbf=0.01, restart_time=1.0))
    assert run.status.tolist() == [LOST]
    assert run.num_failovers == 1
