"""Figures of fleets, the search for their size, and the times of steps on chips."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.engine.options import EngineOptions
from jaxinfer.fleet.simulate.model import replica_model
from jaxinfer.fleet.simulate.options import ServiceGoal, SimulationOptions
from jaxinfer.fleet.simulate.report import figures_of, parse_replicas, search_replicas
from jaxinfer.fleet.simulate.run import QUEUE_FULL, SERVED, FleetRun
from jaxinfer.fleet.simulate.times import MILLISECOND, SECOND, StepTimes
from jaxinfer.fleet.simulate.traces import ArrivalTrace
from jaxinfer.models import abstract_params
from jaxinfer.planning import PlanRequest, parse_place
from jaxinfer.planning.counted import count
from jaxinfer.planning.step_model import predict
from tests.planning.plan_models import LLAMA_3_8B, LLAMA_3_70B, MIXTRAL_8X7B

pytestmark = pytest.mark.slow


def planned(config, place, **options):
    values = {"max_model_len": 4096, "max_seqs": 64, **options}
    return PlanRequest("m", config, abstract_params(config, jnp.bfloat16), parse_place(place), EngineOptions(**values))


def test_figures():
    trace = ArrivalTrace("t", [0, 0, 0, 0], [10] * 4, [11, 11, 1, 5])
    times = np.array([[100, 1100], [3000, 3500], [50, 50], [-1, -1]], np.int64) * MILLISECOND
    status = np.array([SERVED, SERVED, SERVED, QUEUE_FULL], np.uint8)
    run = FleetRun(trace, 2, status, *times.T, 10.0, 23, 9, 0, 0, 10, 30, 0)
    figures = figures_of(run, ServiceGoal(slo_ttft=200, slo_itl=100, chip_price=3.6), 4)
    assert (figures.num_good, figures.share, figures.refused) == (2, 0.5, 1)
    assert (figures.ttft[0], figures.tpot[0]) == (100, 75)
    assert (figures.goodput, figures.tokens_per_second, figures.mean_batch) == (0.2, 2.3, 1)
    assert figures.prefix_hits == 0.25
    assert figures.cost_per_million == pytest.approx(3.6 * 8 * 10 / 3600 / 23e-6)
    assert figures_of(run, ServiceGoal(slo_ttft=200, slo_itl=99), 4).num_good == 1


def test_the_search_finds_the_smallest_fleet():
    trace = ArrivalTrace("t", [0], [1], [1])
    empty = np.zeros(1, np.int64)
    run = FleetRun(trace, 1, np.zeros(1, np.uint8), empty, empty, 1.0, 1, 1, 0, 0, 0, 1, 0)
    goal = ServiceGoal()
    for enough in (2, 3, 11, 37, 64):

        def fleet(size, enough=enough):
            good = figures_of(run, goal, 1)
            return replace(good, num_replicas=size, num_good=int(size >= enough))

        rows, needed = search_replicas(2, 64, 0.99, fleet)
        assert needed == enough
        assert len(rows) <= 12
    assert search_replicas(2, 36, 0.99, fleet)[1] is None
    assert parse_replicas("8") == ([8], False)
    assert parse_replicas("2..64") == ([2, 64], True)
    for text in ("", "0", "4..2", "a", "3,2"):
        with pytest.raises(ValueError, match="ascending"):
            parse_replicas(text)


@pytest.mark.parametrize("config", [LLAMA_3_8B, MIXTRAL_8X7B], ids=["dense", "experts"])
def test_decode_steps_are_those_of_the_step_model(config):
    request = planned(config, "h200x1")
    spec = request.spec()
    counted = count(spec, spec.config, spec.placed_params, spec.cache)
    times = StepTimes.of(request.place.chip, spec, counted)
    for batch in (1, 8, 64):
        for context in (100, 4000):
            predicted = predict(request.place.chip, spec, counted, batch, context).seconds
            taken = times.products(batch, batch) + batch * times.decoding(context)
            assert taken / SECOND == pytest.approx(predicted, rel=0.02)


def test_several_devices_share_and_exchange():
    one, eight = (replica_model(planned(LLAMA_3_8B, place)) for place in ("v6e:1x1", "v6e:2x4"))
    assert (one.num_chips, eight.num_chips) == (1, 8)
    assert eight.options.num_pages > 8 * one.options.num_pages
    assert eight.times.weights[0] * 8 == pytest.approx(one.times.weights[0], rel=0.06)
    assert eight.times.key * 8 == pytest.approx(one.times.key, rel=0.01)
    assert (one.times.exchange, eight.times.exchange > 0) == (0, True)
    assert any("exchanges are estimated" in note for note in eight.times.notes)
    v5p = replica_model(planned(LLAMA_3_8B, "v5p:2x2x1"))
    assert any("the roofline, a lower bound" in note for note in v5p.times.notes)
    with pytest.raises(ValueError, match="does not fit"):
        replica_model(planned(LLAMA_3_70B, "v6e:1x1"))
    with pytest.raises(ValueError, match="the mesh has expert"):
        replica_model(replace(planned(MIXTRAL_8X7B, "v6e:2x4"), mesh="expert=8"))
    two = replica_model(replace(planned(LLAMA_3_8B, "v6e:2x4"), mesh="data=2,model=4"))
    assert two.num_chips == 4


def test_options_of_a_fleet_are_checked():
    for values, message in (
        ({"routing": "random"}, "'random'"),
        ({"mtbf": 0}, "above 0"),
        ({"max_waiting": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            SimulationOptions(**values)
