"""Events of cached blocks over real sockets: the form, what separates tenants, what a subscriber misses."""

import asyncio
import random
import re
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.adapter_slots import LoadedAdapter
from jaxinfer.engine.prefix_blocks import BlocksCleared, BlockWent
from jaxinfer.engine.scheduler import Scheduler, SchedulerOptions
from jaxinfer.server import kv_events
from jaxinfer.server.app import make_app
from jaxinfer.server.auth import Keys
from jaxinfer.server.kv_events import KVEventPublisher, KVEvents, PrefixNames
from jaxinfer.server.options import ServerOptions, kv_endpoint
from tests.engine.random_work import RandomWork
from tests.engine.sequences import make_sequence
from tests.engine.test_prefix_blocks import truth
from tests.server.asgi import Client
from tests.server.conftest import OPTIONS, tiny_model
from tests.server.kv_subscriber import Subscriber
from tests.server.services import service_of

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


@pytest.mark.parametrize("form", ["maps", pytest.param("positional", marks=pytest.mark.slow)])
def test_messages_that_are_lost_are_had_again(form):
    """A subscriber that loses a third of them has what the tree has."""
    work = RandomWork(4, has_host=True)
    publisher, chance = publisher_of(2, kv_events_format=form, kv_events_topic="kv@here@tiny"), random.Random(1)
    drops = [number for number in range(1, 1000) if chance.random() < 0.33]
    with Subscriber(publisher.endpoint, publisher.replay_endpoint, drops) as subscriber:
        publisher.follow(work.engine)
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


def test_what_separates_requests_is_in_their_events(publisher):
    """Equal texts: of no salt, of a client's salt, of an adapter, of one that begins within the prompt, unknown."""
    adapter = LoadedAdapter("sql", "of-sql", 4, None)
    asked = [
        (make_sequence([1, 2, 3, 4, 5]), (), None),
        (make_sequence([1, 2, 3, 4, 5], salt="hashed"), ("mine", "key:alice"), None),
        (make_sequence([1, 2, 3, 4, 5], adapter=adapter), (), "sql"),
        (make_sequence([1, 2, 3, 4, 5], salt="0f"), None, None),
    ]
    for sequence, extra_keys, name in asked:
        if extra_keys is not None:
            publisher._names.add([sequence.request], extra_keys, name)
    engine = engine_with(*(sequence for sequence, _, _ in asked), max_seqs=4, num_adapters=1)
    with Subscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
        publisher.follow(engine)
        subscriber.read_until(lambda one: len(one.view()) == 8)
        plain, salted, adapted, unknown = [event for event in subscriber.events if event["type"] == "BlockStored"]
    assert len({hash for event in (plain, salted, adapted, unknown) for hash in event["block_hashes"]}) == 8
    assert {tuple(event["token_ids"]) for event in (plain, salted, adapted, unknown)} == {(1, 2, 3, 4)}
    assert list(plain) == [
        "type",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
    ]
    assert (plain["parent_block_hash"], plain["block_size"], plain["lora_id"], plain["medium"]) == (
        None,
        2,
        None,
        "GPU",
    )
    assert salted["extra_keys"] == [["mine", "key:alice"], None]
    assert (adapted["lora_name"], "extra_keys" in adapted) == ("sql", False)
    assert unknown["extra_keys"] == [["0f"], None]


def test_later_blocks_name_the_one_before_and_others_are_apart(publisher):
    """An engine that begins again clears what was told; a batch has its events in their order."""
    first, second = make_sequence([1, 2, 3, 4, 5, 6, 7]), make_sequence([9, 8, 7, 6, 5])
    engine = engine_with(max_seqs=2)
    with Subscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
        publisher.follow(engine)
        for sequence in (first, second):
            engine.scheduler.add(sequence)
        engine.scheduler.schedule()
        engine.scheduler.confirm(first, 4)
        engine.scheduler.confirm(second, 4)
        engine.scheduler.confirm(first, 6)
        subscriber.read_until(lambda one: len(one.view()) == 5)
        begun, last = subscriber.texts, subscriber.events[-1]
        assert begun[last["parent_block_hash"]] == (None, (1, 2), (3, 4))
        assert begun[last["block_hashes"][0]] == (None, (1, 2), (3, 4), (5, 6))
        publisher.follow(engine_with(max_seqs=1))
        subscriber.read_until(lambda one: one.view() == {})
        assert subscriber.events[-1] == {"type": "AllBlocksCleared"}


@pytest.mark.slow
def test_a_list_that_grows_too_long_becomes_a_new_beginning(publisher, monkeypatch):
    monkeypatch.setattr(kv_events, "_GATHER_SECONDS", 0.3)  # the thread is behind
    work = RandomWork(4, has_host=True)
    with Subscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
        publisher.follow(work.engine)
        publisher._max_pending, longest = 4, 0
        for _ in range(150):
            work.step()
            longest = max(longest, len(publisher._pending) - 2 * len(publisher._blocks))
        expected = texts(work.engine.scheduler)
        subscriber.read_until(lambda one: one.view() == expected)
        assert longest <= publisher._max_pending
        assert [type(event) for event in publisher._pending] == []
        num_events = sum(len(event.get("block_hashes", ())) for event in subscriber.events)
        assert num_events < 100 < work.engine.num_operations


def test_a_replay_has_what_is_kept_and_takes_no_nonsense(caplog):
    publisher = publisher_of(kv_events_buffer=3)
    with Subscriber(publisher.endpoint) as subscriber:
        for count in range(5):
            publisher.put([BlocksCleared()])
            while publisher._num_sent <= count:
                pass
        subscriber._replay_endpoint, subscriber.next = publisher.replay_endpoint, 2
        subscriber.replay(0)
        assert [number for number, _ in subscriber.batches] == [2, 3, 4]
        client = subscriber._context.socket(zmq.REQ)
        client.connect(publisher.replay_endpoint)
        client.send(b"7")
        subscriber.replay(5)
        assert subscriber.num_replayed == 3
        assert "a request for KV events again has 1 bytes" in caplog.text
    publisher.close()
    publisher.close()
    publisher.put([BlockWent(1, False)])  # too late
    publisher = publisher_of(kv_events_buffer=3000)
    publisher._sent.extend((number, msgspec.msgpack.encode([0.0, [], 0])) for number in range(3000))
    with Subscriber(publisher.endpoint, publisher.replay_endpoint) as late:
        assert late.next == 3000
    publisher.close()


@pytest.mark.slow
def test_each_engine_of_a_data_axis_has_sockets_of_its_own():
    events = KVEvents(ServerOptions(**ANYWHERE))
    with LLM(tiny_model(), **OPTIONS, mesh="data=2") as llm:
        events.follow(llm.engine.engines)
        prompts = [[start, *range(1, 40)] for start in range(8)]
        llm.generate(prompts, SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
        views, pairs = [], zip(events.endpoints, events.replay_endpoints, strict=True)
        for (endpoint, replay), engine in zip(pairs, llm.engine.engines, strict=True):
            with Subscriber(endpoint, replay) as subscriber:
                expected = texts(engine.scheduler)
                subscriber.read_until(lambda one, expected=expected: one.view() == expected)
                assert subscriber.rank == engine.replica
                views.append(set(subscriber.view()))
        assert len(events.endpoints) == 2
        assert all(views)
        assert len(set().union(*views)) == 16
    for endpoint, replay in zip(events.endpoints, events.replay_endpoints, strict=True):
        with Subscriber(endpoint, replay) as subscriber:
            subscriber.read_until(lambda one: one.view() == {})  # the engine is closed
            assert subscriber.events[-1]["type"] == "AllBlocksCleared"
    events.close()


@pytest.mark.slow
def test_events_of_a_server(engine):
    """Tenants, salts and a cleared cache over HTTP; each of two keys has blocks of its own."""
    events = KVEvents(ServerOptions(**ANYWHERE))
    service = service_of(engine)
    service.prefix_names = events.names
    app = make_app(service, Keys({"first-secret-key": "alice", "other-secret-key": "bob"}))
    alice, bob = (
        Client(app, authorization="Bearer first-secret-key"),
        Client(app, authorization="Bearer other-secret-key"),
    )
    ask = {"prompt": list(range(5, 45)), "max_tokens": 1, "temperature": 0}

    async def run():
        for client, body in ((alice, ask), (alice, {**ask, "cache_salt": "mine"}), (bob, ask), (bob, ask)):
            assert (await client.post("/v1/completions", body)).status == 200

    scheduler = engine.llm.engine.scheduler
    scheduler.drop_prefixes()
    events.follow(engine.llm.engine.engines)
    try:
        with Subscriber(events.endpoints[0], events.replay_endpoints[0]) as subscriber:
            asyncio.run(run())
            subscriber.read_until(lambda one: len(one.view()) == 6)
            blocks = tuple(range(5, 21)), tuple(range(21, 37))
            tenants = [("key:alice",), ("mine", "key:alice"), ("key:bob",)]
            assert set(subscriber.view()) == {
                (None, *tenant, *blocks[:count]) for tenant in tenants for count in (1, 2)
            }
            scheduler.drop_prefixes()
            subscriber.read_until(lambda one: one.view() == {})
            assert subscriber.events[-1]["type"] == "AllBlocksCleared"
            assert subscriber.topic == b""
    finally:
        scheduler.prefixes.observer = None
        events.close()


REFUSED = [
    ({"kv_events": "127.0.0.1:5557"}, "kv_events: '127.0.0.1:5557' is no endpoint such as tcp://127.0.0.1:5557"),
    ({"kv_events": "tcp://127.0.0.1:70000"}, "is no endpoint"),
    ({"kv_events": "tcp://*:5557"}, "events carry the token ids of all prompts"),
    ({"kv_events": "tcp://127.0.0.1:1", "kv_events_replay": "tcp://10.0.0.1:2"}, "kv_events_replay='tcp://10.0.0.1:2'"),
    ({"kv_events": "tcp://127.0.0.1:1", "kv_events_replay": "tcp://127.0.0.1:1"}, "need two ports"),
    ({"kv_events": "tcp://127.0.0.1:1", "kv_events_format": "json"}, "none of maps, positional"),
    ({"kv_events_replay": "tcp://127.0.0.1:1"}, "kv_events_replay is for kv_events"),
    ({"kv_events_topic": "x"}, "kv_events_topic is for kv_events"),
    ({"kv_events_any_address": True}, "kv_events_any_address is for kv_events"),
]


def test_options_that_contradict_each_other():
    for options, message in REFUSED:
        with pytest.raises(ValueError, match=re.escape(message)):
            ServerOptions(**options)


@pytest.mark.slow
def test_addresses(publisher):
    assert ServerOptions(kv_events="tcp://*:5557", kv_events_any_address=True).kv_events
    assert kv_endpoint("tcp://[::1]:5557") == ("::1", 5557)
    port = int(publisher.endpoint.rpartition(":")[2])
    with pytest.raises(OSError, match=f"cannot listen.*127.0.0.1:{port}"):
        publisher_of(kv_events=f"tcp://127.0.0.1:{port}")
    events = KVEvents(ServerOptions(kv_events="tcp://127.0.0.1:0", kv_events_replay="tcp://127.0.0.1:0"))
    options = ServerOptions(kv_events="tcp://127.0.0.1:5557", kv_events_replay="tcp://127.0.0.1:5558")
    events._options = options
    with pytest.raises(ValueError, match="1 ports apart, and 2 engines"):
        events.follow([None, None])
    events.close()
