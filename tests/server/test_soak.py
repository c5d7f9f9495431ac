"""Random load, good and bad, over sockets; and whether the benchmarks notice what they claim to notice."""

import asyncio
import socket
import urllib.parse

import pytest

from benchmarks.serving_overload import FLOOD, STEADY, Overload, OverloadOptions, Phase, Shot, report
from benchmarks.serving_soak import Soak, SoakOptions, SoakReport, judge
from jaxinfer.server.app import make_app
from jaxinfer.server.auth import Keys
from jaxinfer.server.listening import listen
from tests.server.conftest import is_idle
from tests.server.test_bench_over_http import listening


def port_of(url):
    return urllib.parse.urlsplit(url).port


@pytest.mark.slow
def test_random_load_leaves_nothing(make_service, engine):
    service = make_service()
    with listening(make_app(service)) as url:
        options = SoakOptions(requests=60, minutes=0.01, connections=16, seed=3, interval=1)
        found = asyncio.run(Soak(port_of(url), None, options).run())
    assert not [line for line in found.wrong if "programs were compiled" not in line]  # they were not compiled before
    assert found.counts.total() == 60
    assert found.num_compared > 0
    assert is_idle(engine)
    assert not service.generations
    admission = service.default.admission
    assert admission.num_running == admission.num_waiting == admission.num_waiting_tokens == 0


@pytest.mark.slow
def test_too_much_load_is_refused_and_nothing_is_lost(make_service, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"{STEADY} steady\n{FLOOD} flood\n")
    with listening(make_app(make_service(max_queued=8), Keys.read(keys))) as url:
        options = OverloadOptions(
            seconds=0.6,
            capacity_seconds=0.4,
            ramp_seconds=0.2,
            rounds=1,
            streams=8,
            steady_period=0.2,
            prompt_tokens=8,
            answer_tokens=12,
        )
        found = asyncio.run(Overload(port_of(url), options).run())
    assert (found["num_lost"], found["num_other"], found["num_steady_refused"]) == (0, 0, 0)
    assert found["num_refused"] > 0
    assert 1 <= found["retry_after"]["p50"] <= found["retry_after"]["max"] <= 120


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the kernel gives up no connection by time")
def test_a_connection_that_nobody_reads_is_given_up():
    with listen("127.0.0.1", 0, 0.3) as listener, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        served, _ = listener.accept()
        with served:
            served.settimeout(20)
            with pytest.raises(OSError, match=r"timed out|reset|Broken pipe") as error:
                served.sendall(bytes(1 << 26))
            assert error.value.errno is not None  # the kernel's error, not that of settimeout


FACTS = {"seconds": 0.0, "requests": 0, "compilations": 2, "running": 0, "waiting": 0, "pages": 0}
OWN = {"rss_mib": 1000.0, "threads": 9, "descriptors": 20}


def judged(last, own=OWN):
    samples = [{**FACTS, **own, "seconds": float(second)} for second in range(0, 1801, 60)]
    samples[-1] |= last
    found = SoakReport(samples=samples)
    judge(found, samples[0])
    return found.wrong


def test_claims_of_a_soak_are_judged():
    assert judged({}) == []
    assert judged({}, own={}) == []
    assert judged({"rss_mib": 1025.0}) == []
    for wrong, told in (
        ({"rss_mib": 1040.0}, "memory"),
        ({"pages": 1}, "pages"),
        ({"running": 1}, "running"),
        ({"compilations": 3}, "compiled"),
        ({"descriptors": 40}, "descriptors"),
    ):
        (line,) = judged(wrong)
        assert told in line


def shots(number, first, *, status=200, is_whole=True):
    found = []
    for index in range(number):
        shot = Shot.__new__(Shot)
        shot.start, shot.first, shot.last, shot.status = index / number * 10, first, first, status
        shot.is_whole, shot.retry_after = is_whole and status == 200, 9
        found.append(shot)
    return found


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        ({}, None),
        ({"flood": shots(80, 0.1) + shots(300, 0.01, status=429)}, "goodput"),
        ({"flood": [*shots(100, 0.1), *shots(300, 0.06, status=429)]}, "p99"),
        ({"flood": [*shots(100, 0.1), *shots(1, 0.1, is_whole=False), *shots(300, 0.01, status=429)]}, "lost"),
        ({"steady": shots(5, 0.3)}, "first token"),
        ({"steady": [*shots(5, 0.1), *shots(1, 0.01, status=429)]}, "refused"),
    ],
)
def test_claims_of_an_overload_are_judged(changes, claim):
    normal = {"flood": [*shots(100, 0.1), *shots(300, 0.01, status=429)], "steady": shots(5, 0.1)}
    alone, capacity = Phase(0, 10, shots(5, 0.1)), Phase(0, 10, shots(5, 0.1), shots(100, 0.1))
    found = report(alone, [capacity], [Phase(0, 10, **{**normal, **changes})], OverloadOptions())
    assert [one for one in found["wrong"] if claim is None or claim not in one] == []
    assert bool(found["wrong"]) == (claim is not None)
