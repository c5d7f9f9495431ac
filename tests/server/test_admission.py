"""Who waits, who is refused, and whose turn it is."""

import asyncio
import random

import pytest

from jaxinfer.server.admission import Admission
from jaxinfer.server.api_error import APIError
from jaxinfer.server.app import make_app
from tests.server.asgi import Client
from tests.server.conftest import is_idle, until


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def admission(capacity=2, max_queued=3, max_queued_tokens=1000):
    clock = Clock()
    return Admission(capacity, max_queued, max_queued_tokens, clock), clock


def waiting(place, *tickets):
    """Lets the tickets wait for their turn, without an event loop."""
    for ticket in tickets:
        place._wait(ticket)


def test_too_many_answers_are_refused_and_leaving_makes_room():
    place, _ = admission()
    tickets = [place.enter("", 1, 10) for _ in range(5)]
    with pytest.raises(APIError, match="wait already") as error:
        place.enter("", 1, 10)
    assert error.value.status == 429
    assert int(error.value.headers["retry-after"]) >= 1
    tickets[0].leave()
    place.enter("", 1, 10)
    with pytest.raises(APIError):
        place.enter("", 1, 10)


def test_answers_that_another_server_began_do_not_wait_again():
    place, _ = admission(capacity=1, max_queued=1)
    first, second = place.enter("", 1, 10), place.enter("", 1, 10)
    waiting(place, first, second)
    with pytest.raises(APIError):
        place.enter("", 1, 10)
    begun = place.enter("", 2, 10, is_continued=True)
    waiting(place, begun)
    assert begun.is_running
    assert begun.rank < first.rank
    first.leave()
    assert not second.is_running  # there is no room yet
    begun.leave()
    assert second.is_running
    second.leave()
    assert place.num_running == place.num_waiting == place.num_waiting_tokens == 0


def test_n_answers_count_n():
    place, _ = admission()
    place.enter("", 4, 10)
    with pytest.raises(APIError):
        place.enter("", 2, 10)
    place.enter("", 1, 10)


def test_a_request_that_is_larger_than_all_room_runs_alone():
    place, _ = admission()
    ticket = place.enter("", 9, 10**6)
    waiting(place, ticket)
    assert ticket.is_running


def test_prompt_tokens_that_wait_are_limited():
    place, _ = admission(capacity=1, max_queued=100)
    place.enter("", 1, 600)
    with pytest.raises(APIError, match="prompt tokens"):
        place.enter("", 1, 600)
    place.enter("", 1, 300)


def test_retry_after_is_that_of_the_rate_at_which_answers_end():
    place, clock = admission(capacity=1, max_queued=100)
    for _ in range(11):
        ticket = place.enter("", 1, 1)
        waiting(place, ticket)
        clock.now += 0.5
        ticket.leave(10)
    for _ in range(20):
        place.enter("", 1, 1)
    assert place.retry_after == 10  # 20 wait, 2 end in a second
    clock.now += 1000
    assert place.retry_after == 5  # unknown


def test_a_key_of_few_requests_does_not_wait_behind_one_of_many():
    place, _ = admission(capacity=1, max_queued=100)
    first = place.enter("busy", 1, 10)
    waiting(place, first)
    busy = [place.enter("busy", 1, 10) for _ in range(20)]
    waiting(place, *busy)
    quiet = place.enter("quiet", 1, 10)
    waiting(place, quiet)
    first.leave(100)
    assert quiet.is_running
    assert not any(one.is_running for one in busy)


def test_a_key_of_few_requests_goes_first_among_those_that_wait_in_the_engine():
    place, _ = admission(capacity=4, max_queued=100)
    busy = [place.enter("busy", 1, 10) for _ in range(20)]
    waiting(place, *busy)
    quiet = place.enter("quiet", 1, 10)
    waiting(place, quiet)
    busy[0].leave(60)
    assert quiet.is_running
    assert all(quiet.rank < one.rank for one in busy[1:4])
    assert busy[1].rank < busy[2].rank < busy[3].rank


def test_a_slot_stays_free_for_a_key_at_a_low_rate():
    place, clock = admission(capacity=5, max_queued=100)
    place.num_unreserved = 3
    first = place.enter("quiet", 1, 10)
    first.leave()
    busy = [place.enter("busy", 1, 10) for _ in range(20)]
    waiting(place, *busy)
    assert place.num_running == 3
    for _ in range(4):  # whatever runs of it, the next one finds a free slot
        quiet = [place.enter("quiet", 1, 10) for _ in range(2)]  # half of the slots or fewer
        waiting(place, *quiet)
        assert all(one.is_running for one in quiet)
        for one in quiet:
            one.leave(60)
        assert place.num_running == 3
    clock.now += 1000  # it is not kept for ever
    next(one for one in busy if one.is_running).leave(60)
    assert place.num_running == 5


def test_a_request_for_many_answers_is_not_overtaken_for_ever():
    place, _ = admission(capacity=5, max_queued=100)
    place.num_unreserved = 3
    running = [place.enter("many", 1, 1) for _ in range(3)]
    waiting(place, *running)
    large = place.enter("many", 3, 1)
    waiting(place, large)
    for number in range(20):
        running.append(place.enter(f"key {number % 4}", 1, 10))
        waiting(place, running[-1])
    while not large.is_running:
        next(one for one in running if one in place._inside and one.is_running).leave(50)
    assert any(not one.is_running for one in running)


def test_one_key_does_not_fill_the_queue_for_the_others():
    place, _ = admission(capacity=1, max_queued=8, max_queued_tokens=90)
    busy = [place.enter("busy", 1, 10) for _ in range(9)]
    waiting(place, *busy)
    with pytest.raises(APIError, match="answers wait"):
        place.enter("busy", 1, 0)
    quiet = [place.enter("quiet", 1, 10) for _ in range(4)]  # half of the queue
    for key in ("quiet", "busy"):
        with pytest.raises(APIError):
            place.enter(key, 1, 10)
    for ticket in quiet[:2]:
        ticket.leave()
    with pytest.raises(APIError, match="prompt tokens"):
        place.enter("quiet", 1, 30)
    place.enter("third", 1, 20)


def test_keys_get_equal_tokens_not_equal_requests():
    place, _ = admission(capacity=1, max_queued=1000, max_queued_tokens=10**9)
    sizes, served = {"long": 400, "short": 100}, {"long": 0, "short": 0}
    tickets = [place.enter(key, 1, 1) for key in sizes for _ in range(200)]
    waiting(place, *tickets)
    for _ in range(200):
        (ticket,) = [one for one in place._inside if one.is_running]
        served[ticket.key] += sizes[ticket.key]
        ticket.leave(sizes[ticket.key] - 1)
    assert 0.8 < served["long"] / served["short"] < 1.25


def test_priority_orders_the_requests_of_one_key():
    place, _ = admission(capacity=1, max_queued=100)
    first = place.enter("", 1, 1)
    waiting(place, first)
    late, urgent = place.enter("", 1, 1, 5), place.enter("", 1, 1, -1)
    waiting(place, late, urgent)
    first.leave()
    assert urgent.is_running
    assert not late.is_running


def test_random_comings_and_goings_leave_nothing():
    generator = random.Random(0)
    place, clock = admission(capacity=4, max_queued=10, max_queued_tokens=200)
    place.num_unreserved = 2
    inside = []
    for _ in range(3000):
        clock.now += 0.01
        if generator.random() < 0.5 or not inside:
            try:
                ticket = place.enter(generator.choice("abc"), generator.randint(1, 3), generator.randint(1, 50))
            except APIError:
                continue
            inside.append(ticket)
            if generator.random() < 0.8:
                waiting(place, ticket)
        else:
            inside.pop(generator.randrange(len(inside))).leave(generator.randint(0, 30))
        assert place.num_running == sum(one.num_answers for one in inside if one.is_running) <= 4
        assert place.num_waiting == sum(one.num_answers for one in inside if not one.is_running)
    for ticket in inside:
        ticket.leave()
        ticket.leave()
    for key in place._keys.values():
        counts = key.num_inside, key.num_running, key.num_waiting, key.num_waiting_tokens, len(key.queue)
        assert counts == (0, 0, 0, 0, 0)
        assert abs(key.promised) < 1e-6
    assert (place.num_running, place.num_waiting, place.num_waiting_tokens) == (0, 0, 0)


@pytest.mark.slow
def test_the_server_refuses_what_is_too_much_and_loses_nothing_that_it_took(make_service, engine):
    service = make_service(max_queued=3)
    client = Client(make_app(service))

    async def ask():
        body = {"prompt": "def", "max_tokens": 30, "ignore_eos": True, "seed": 1}
        answers = await asyncio.gather(*(client.post("/v1/completions", body) for _ in range(20)))
        await until(lambda: is_idle(engine))
        return answers

    answers = asyncio.run(ask())
    statuses = [one.status for one in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) == service.default.admission.capacity + 3
    assert all(int(one.headers["retry-after"]) >= 1 for one in answers if one.status == 429)
    assert len({one.json["choices"][0]["text"] for one in answers if one.status == 200}) == 1
