"""Events of cached blocks over real sockets: the form, what separates tenants, what a subscriber misses."""

import asyncio
import random
import socket
from types import SimpleNamespace

import pytest

from jaxinfer.engine.adapter_slots import LoadedAdapter
from jaxinfer.engine.prefix_blocks import BlockCame, BlocksCleared, BlockWent
from jaxinfer.engine.scheduler import Scheduler, SchedulerOptions
from jaxinfer.server import kv_events
from jaxinfer.server.app import make_app
from jaxinfer.server.auth import Keys
from jaxinfer.server.kv_events import KVEventPublisher, KVEvents, PrefixNames
from jaxinfer.server.options import ServerOptions
from tests.engine.random_work import RandomWork
from tests.engine.sequences import make_sequence
from tests.engine.test_prefix_blocks import truth
from tests.server.asgi import Client
from tests.server.kv_subscriber import Subscriber

ANYWHERE = {"kv_events": "tcp://127.0.0.1:0", "kv_events_replay": "tcp://127.0.0.1:0"}


def texts(scheduler):
    """The tree's blocks as `Subscriber.view` has them, of salts that are not known."""
    size, names, found = 4 * scheduler.options.page_size, {False: "GPU", True: "CPU"}, {}
    for (salt, keys), media in truth(scheduler).items():
        blocks = tuple(tuple(memoryview(key[:size]).cast("i")) for key in keys)
        found[(None, *([salt] if salt else ()), *blocks)] = {names[medium] for medium in media}
    return found


def publisher_of(rank=0, **options) -> KVEventPublisher:
    return KVEventPublisher(ServerOptions(**{**ANYWHERE, **options}), rank, PrefixNames())


@pytest.fixture
def publisher():
    publisher = publisher_of()
    yield publisher
    publisher.close()


@pytest.mark.parametrize("form", ["maps", "positional"])
def test_messages_that_are_lost_are_had_again(form):
    """A subscriber that loses a third of them has what the tree has."""
    work = RandomWork(4, has_host=True)
    publisher, chance = publisher_of(2, kv_events_format=form), random.Random(1)
    drops = [number for number in range(1, 1000) if chance.random() < 0.33]
    with Subscriber(publisher.endpoint, publisher.replay_endpoint, drops) as subscriber:
        publisher.follow(work.engine, "kv@here@tiny")
        for _ in range(50):
            for _ in range(8):
                work.step()
            subscriber.read(0.005)
        subscriber.read()
        subscriber.replay(subscriber.next)  # the last one may have been lost
        assert subscriber.view() == texts(work.engine.scheduler) != {}
        assert {event.get("medium") for event in subscriber.events} == {None, "GPU", "CPU"}
        assert min(subscriber.num_dropped, subscriber.num_replayed) > 5
        assert [number for number, _ in subscriber.batches] == list(range(subscriber.next))
        assert (subscriber.topic, subscriber.rank) == (b"kv@here@tiny", 2)
        print(f"{subscriber.next} messages, {subscriber.num_dropped} lost, {subscriber.num_replayed} had again")
    publisher.close()


def engine_with(*sequences, **changes):
    """The part of an engine that is told of, which has computed the prompts of these."""
    scheduler = Scheduler(SchedulerOptions(**{"num_pages": 33, "page_size": 2, "prefill_chunk": 32, **changes}))
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.schedule()
    for sequence in sequences:
        scheduler.confirm(sequence, sequence.num_prompt)
    return SimpleNamespace(scheduler=scheduler)
