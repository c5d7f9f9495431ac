"""Servers of a published model, killed under their streams: another one goes on, token for token."""

import pytest
import uvloop

from tests.fleet.front.test_kills import (
    KINDS,
    MOST_DELAY,
    Process,
    expected_answers,
    run_kills,
    told,
    watched,
)

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(3600)]
NUM_KILLS, NUM_STREAMS = 10, 6
PREFILL = 0.5  # seconds, of 150 tokens beside steps of the other streams
SHOWN = [KINDS[number] for number in (0, 1, 3, 6)]  # it has no adapter, and calls no tools
SIZES = {"max_seqs": 8, "max_model_len": 512}


def check(answers, delays, metrics):
    assert told(answers, delays, metrics, NUM_KILLS) < MOST_DELAY + PREFILL
    assert int(metrics["jaxinfer_front_continued_total"]) >= NUM_KILLS // 2
    assert metrics["jaxinfer_front_given_up_total"] == "0"


def test_streams_outlive_kills(model_path):
    sizes = [part for name, size in SIZES.items() for part in (f"--{name.replace('_', '-')}", str(size))]
    serve = ("-m", "jaxinfer.cli", "serve", str(model_path("smollm2")), *sizes)

    def make_server():
        # The suite's flags make programs that compile fast and run slowly.
        return Process(*serve, "--accept-sent-tokens", "--drain-timeout", "0", XLA_FLAGS="")

    check(*run_kills(make_server, SHOWN, 3, NUM_KILLS, NUM_STREAMS))


def test_streams_outlive_kills_under_ray(model_path, tmp_path):
    pytest.importorskip("ray.serve")
    from tests.fleet.ray_serve.fleets import Fleet, KilledReplica

    values = {"model": str(model_path("smollm2")), "options": SIZES, "num_replicas": 3, "placement": {"num_cpus": 0.2}}
    fleet = Fleet(tmp_path, values, XLA_FLAGS="")

    async def everything():
        await fleet.until_ready()
        expected = await expected_answers(fleet, SHOWN)
        killed = [KilledReplica(fleet, number) for number in range(3)]
        answers, delays = await watched([fleet.port], SHOWN, expected, killed, NUM_KILLS, NUM_STREAMS)
        return answers, delays, await fleet.metrics()

    try:
        check(*uvloop.run(everything()))
    finally:
        fleet.close()
