"""What a simulated fleet says, against servers that run: with virtual devices, and one that computes."""

import os
from dataclasses import replace

import numpy as np
import pytest

from jaxinfer import LLM
from jaxinfer.fleet.simulate.options import FleetOptions, ServiceGoal
from jaxinfer.fleet.simulate.report import figures_of
from jaxinfer.fleet.simulate.run import SERVED, ReplicaModel, run_fleet
from jaxinfer.fleet.simulate.times import SECOND
from jaxinfer.fleet.simulate.traces import open_trace
from tests.fleet.simulate.real_fleet import MAX_SEQS, TIMES, RealFleet, send_trace

pytestmark = pytest.mark.slow

REPLICAS = 3
REQUESTS = 200
GOAL = ServiceGoal(slo_ttft=2000, slo_itl=240)
LENGTHS = f"prompt=50:400,answer=10:60,requests={REQUESTS}"


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
    run = run_fleet(trace, model, REPLICAS, FleetOptions())
    return REQUESTS / np.quantile(run.last + np.array(trace.times), 0.9) * 0.9 * SECOND


@pytest.mark.timeout(900)
@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_a_fleet_with_virtual_devices_takes_the_simulated_times(fleet, options, share):
    model = ReplicaModel(options, TIMES, 1024)
    trace = open_trace(f"poisson:rate={share * capacity(model):.3f},{LENGTHS}", seed=round(100 * share))
    run = run_fleet(trace, model, REPLICAS, FleetOptions())
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
