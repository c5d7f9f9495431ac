"""A fleet under Ray Serve whose replicas are killed under streams of all kinds: none is lost, all tokens are equal."""

import os

import pytest
import uvloop

from tests.fleet.front.test_kills import KINDS, expected_answers, told, watched

pytest.importorskip("ray.serve")
from tests.fleet.ray_serve.fleets import LLM_OPTIONS, KilledReplica, tiny_fleet

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(4 * 3600)]
NUM_KILLS = int(os.environ.get("JAXINFER_RAY_KILLS", "10"))
NUM_STREAMS = 12


def test_streams_of_all_kinds_outlive_kills_of_replicas(tmp_path):
    options = {**LLM_OPTIONS, "max_seqs": 8, "num_pages": 200}  # two take the streams of three
    fleet = tiny_fleet(tmp_path, options=options)

    async def everything():
        await fleet.until_ready()
        expected = await expected_answers(fleet, KINDS)
        killed = [KilledReplica(fleet, number) for number in range(3)]
        answers, delays = await watched([fleet.port], KINDS, expected, killed, NUM_KILLS, NUM_STREAMS)
        return answers, delays, await fleet.metrics(), sum(one.num_kills for one in killed)

    try:
        answers, delays, metrics, num_kills = uvloop.run(everything())
    finally:
        fleet.close()
    told(answers, delays, metrics, num_kills)
    assert num_kills == NUM_KILLS
    assert len(answers) > 5 * NUM_KILLS
    assert not any(answer.num_breaks for answer in answers)
    assert int(metrics["jaxinfer_front_continued_total"]) > NUM_KILLS / 2
    assert metrics["jaxinfer_front_given_up_total"] == "0"
