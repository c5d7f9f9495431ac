"""A simulated fleet against servers that run: with virtual devices, and one that computes."""

import asyncio
import os
import time
from dataclasses import replace

import numpy as np
import pytest

from jaxinfer import LLM, AsyncEngine, SamplingParams
from jaxinfer.fleet.simulate.options import ServiceGoal, SimulationOptions
from jaxinfer.fleet.simulate.report import figures_of
from jaxinfer.fleet.simulate.run import SERVED, ReplicaModel, run_fleet
from jaxinfer.fleet.simulate.times import SECOND, StepTimes
from jaxinfer.fleet.simulate.traces import open_trace
from tests.fleet.simulate.real_fleet import MAX_SEQS, TIMES, RealFleet, send_trace

pytestmark = pytest.mark.slow

REPLICAS = 3
REQUESTS = 800  # of fewer, a delay of 30 ms in the arrivals moves the simulated p99 by 20 %
GOAL = ServiceGoal(slo_ttft=1000, slo_itl=240)
LENGTHS = f"prompt=50:200,answer=4:20,requests={REQUESTS}"


@pytest.fixture(scope="module")
def options():
    with LLM("demo", max_seqs=MAX_SEQS, steps_per_dispatch=1) as llm:
        return llm.engine.engines[0].scheduler.options


@pytest.fixture(scope="module")
def fleet():
    with RealFleet(REPLICAS) as fleet:
        yield fleet


def capacity(model):
    """Requests per second of a fleet that always has some waiting."""
    trace = open_trace(f"poisson:rate=1000,{LENGTHS}").first(REQUESTS)
    run = run_fleet(trace, model, REPLICAS, SimulationOptions())
    return REQUESTS / np.quantile(run.last + np.array(trace.times), 0.9) * 0.9 * SECOND


@pytest.mark.timeout(900)
@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_a_fleet_with_virtual_devices_takes_the_simulated_times(fleet, options, share):
    model = ReplicaModel(options, TIMES, 1024)
    trace = open_trace(f"poisson:rate={share * capacity(model):.3f},{LENGTHS}", seed=round(100 * share))
    run = run_fleet(trace, model, REPLICAS, SimulationOptions())
    simulated = figures_of(run, GOAL, 1)
    first, last = send_trace(fleet.port, trace)
    arrivals = np.array(trace.times)
    seconds = (last + arrivals).max() / SECOND
    measured = figures_of(
        replace(run, status=np.full(len(trace), SERVED, np.uint8), first=first, last=last, seconds=seconds), GOAL, 1
    )
    print(f"\nshare {share}, {trace.rate:.2f} requests/s, load average {os.getloadavg()[0]:.1f}")
    for name, figures in (("simulated", simulated), ("measured", measured)):
        print(f"  {name}: goodput {figures.goodput:.3f}/s, TTFT {figures.ttft}, TPOT {figures.tpot}")
    assert measured.goodput == pytest.approx(simulated.goodput, rel=0.05)
    assert measured.ttft[0] == pytest.approx(simulated.ttft[0], rel=0.10)
    assert measured.ttft[2] == pytest.approx(simulated.ttft[2], rel=0.15)


async def timed(engine, prompt, num_tokens):
    """Seconds until the first token, and until the last."""
    begun, first = time.perf_counter(), None
    async for _ in engine.generate(prompt, SamplingParams(max_tokens=num_tokens, ignore_eos=True)):
        first = time.perf_counter() - begun if first is None else first
    return first, time.perf_counter() - begun


async def send(engine, trace):
    begun, numbers = time.perf_counter(), np.random.default_rng(1)

    async def send_one(number):
        await asyncio.sleep(max(trace.times[number] / SECOND - (time.perf_counter() - begun), 0))
        prompt = numbers.integers(10, 250, trace.prompts[number]).tolist()
        return await timed(engine, prompt, trace.answers[number])

    return np.array(await asyncio.gather(*map(send_one, range(len(trace)))))


def fitted(reads):
    """Times of steps, from (tokens of prompts, seconds) of dispatches: those without prompts take their mean, whatever
    their number of sequences, and a prompt's token what it adds on average."""
    tokens, seconds = np.array(reads).T
    plain = np.mean(seconds[tokens == 0])
    token = max(np.sum(seconds[tokens > 0] - plain) / np.sum(tokens), 0)
    of_slots = round(MAX_SEQS * token * SECOND)
    return StepTimes(fixed=round(plain * SECOND) - of_slots, weights=(of_slots,), token=round(token * SECOND))


@pytest.mark.timeout(900)
def test_a_replica_that_computes_takes_the_simulated_times():
    """The embedded model, whose steps' times are fitted in one run, in another one."""
    text = "poisson:rate={},prompt=50:400,answer=20:100,requests={}"

    async def run():
        engine = AsyncEngine("demo", max_seqs=MAX_SEQS)
        engine.llm.warm_up()
        (inner,) = engine.llm.engine.engines
        reads = []

        def on_read(flight, seconds):
            prompts = sum(chunk.length for _, chunk in flight.chunks)
            reads.append((prompts, seconds))

        await send(engine, open_trace(text.format(1000, 10)))
        inner.on_read = on_read
        await send(engine, open_trace(text.format(1000, 40), seed=1))
        times, inner.on_read = fitted(reads), None
        model = ReplicaModel(inner.scheduler.options, times, 1024)
        burst = open_trace(text.format(1000, 40), seed=1)
        rate = 40 / run_fleet(burst, model, 1, SimulationOptions()).seconds
        trace = open_trace(text.format(0.6 * rate, 60), seed=2)
        measured = await send(engine, trace)
        simulated = run_fleet(trace, model, 1, SimulationOptions())
        await engine.close()
        return times, rate, measured.T, (simulated.first / SECOND, simulated.last / SECOND)

    times, rate, measured, simulated = asyncio.run(run())
    print(
        f"\nfixed {times.fixed / 1e9:.2f} ms, token {times.token / 1e6:.1f} us, {rate:.1f}/s, {os.getloadavg()[0]:.1f}"
    )
    for name, real, told in zip(("TTFT", "E2EL"), measured, simulated, strict=True):
        print(f"  {name}: measured {np.percentile(real, (50, 99))}, simulated {np.percentile(told, (50, 99))}")
    for real, told in zip(measured, simulated, strict=True):
        assert np.median(real) == pytest.approx(np.median(told), rel=0.25)
