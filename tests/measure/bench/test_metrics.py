"""Figures against hand-made times, by the definitions."""

import numpy as np
import pytest

from jaxinfer.measure.bench.metrics import (
    Trace,
    cost_per_million,
    distribution,
    figures,
    is_within,
    parse_goodput,
)
from jaxinfer.planning.roofline import RooflinePoint


def trace(sent, times, tokens):
    one = Trace(sent, num_prompt=10)
    for time, count in zip(times, tokens, strict=True):
        one.deliver(time, count)
    return one


def test_a_request_by_the_definitions():
    one = trace(1.0, [1.5, 2.0, 3.5], [1, 4, 4])
    assert (one.ttft, one.e2el, one.num_tokens) == (0.5, 2.5, 9)
    assert one.tpot == pytest.approx((2.5 - 0.5) / 8)
    assert one.gaps == [0.5, 1.5]  # of deliveries, however many tokens they have


def test_an_answer_of_one_token_has_no_tpot_and_keeps_any_limit_of_it():
    one = trace(0.0, [0.2], [1])
    assert one.tpot is None
    assert is_within(one, {"tpot": 1e-9})
    assert not is_within(one, {"ttft": 0.1})


def test_all_figures_of_two_requests():
    found = figures(
        [trace(0.0, [0.1, 0.3], [1, 2]), trace(0.5, [1.0, 2.0], [1, 1])],
        seconds=2.0,
        limits={"ttft": 0.2, "e2el": 1.0},
        price_per_hour=3.6,
    )
    assert found["tokens_per_second"] == {"in": 10.0, "out": 2.5, "total": 12.5}
    assert found["ttft"]["mean"] == pytest.approx(0.3)
    assert found["tpot"]["p50"] == pytest.approx((0.1 + 1.0) / 2)
    assert found["itl"]["p99"] == pytest.approx(np.percentile([0.2, 1.0], 99))
    assert found["goodput"] == {"limits": {"ttft": 0.2, "e2el": 1.0}, "requests_per_second": 0.5, "share": 0.5}
    assert found["cost_per_million_tokens"]["out"] == pytest.approx(0.001 / 2.5 * 1e6)


def test_without_limits_and_price_nothing_is_said_of_them():
    found = figures([trace(0.0, [0.1], [1])], 1.0)
    assert "goodput" not in found
    assert "cost_per_million_tokens" not in found
    assert found["itl"] is None
    assert distribution([]) is None


def test_goodput_is_read_in_milliseconds():
    assert parse_goodput("ttft:500,tpot:50") == {"ttft": 0.5, "tpot": 0.05}
    assert parse_goodput(None) == {}


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "itl:5", "ttft:-1", "", "ttft:0"])
def test_goodput_that_cannot_be_read_is_named(text):
    with pytest.raises(ValueError, match="--goodput"):
        parse_goodput(text)


@pytest.mark.parametrize("batch", [1, 8])
def test_a_plan_has_the_same_names_for_the_same_figures(batch):
    """Steps of a batch that take what a plan's take give the plan's TPOT and tokens/s."""
    point = RooflinePoint(
        batch=batch,
        context=64,
        flops=1e9,
        hbm_bytes=1e9,
        sent_bytes=0.0,
        memory_seconds=0.004,
        compute_seconds=0.001,
        link_seconds=0.0,
        tokens_per_second=batch / 0.004,
    )
    times = [point.seconds * (number + 1) for number in range(50)]
    found = figures([trace(0.0, times, [1] * 50) for _ in range(batch)], times[-1], price_per_hour=7.2)
    assert found["tpot"]["p50"] == pytest.approx(point.to_dict()["tpot"])
    assert found["tokens_per_second"]["out"] == pytest.approx(point.tokens_per_second)
    assert found["cost_per_million_tokens"]["out"] == pytest.approx(cost_per_million(7.2, point.tokens_per_second))
    assert cost_per_million(3.6, 100.0) == pytest.approx(10.0)
