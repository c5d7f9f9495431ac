"""Events of cached blocks over ZMQ, in vLLM's form, for routers that send a request where its prompt is cached.

A message has three frames: a topic, its number (8 bytes, big-endian), and a batch in msgpack: time, events, and the
number of the engine among those of a `data` axis, each of which has sockets of its own, at the next ports. Who asks the
replay socket with the number of a message gets that one and all later ones that are kept, and then one with the number
-1. Routers hash the tokens themselves: the hashes of blocks need not be vLLM's.
"""

import logging
import os
import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.prefix_blocks import BlockCame, BlockEvent, BlocksCleared, BlockWent, PrefixBlocks
from jaxinfer.engine.request import Request
from jaxinfer.server.options import ServerOptions, kv_endpoint

_LOG = logging.getLogger("jaxinfer.server")
END_NUMBER = (2**64 - 1).to_bytes(8, "big")  # -1
MEDIA = {False: "GPU", True: "CPU"}  # by which routers weigh a hit, whatever the chip
_MAX_NAMES = 1 << 14  # salts whose requests are remembered: far more than run at once
_MAX_BLOCKS = 1024  # of a message
_MAX_MESSAGES = 100_000  # that wait for one subscriber; then it misses some
_LEAST_PENDING = 1 << 16
_MAX_REQUEST = 1024  # bytes of a frame from a client, which sends 8
_GATHER_SECONDS = 0.002  # events of one step go together
_TOKEN_BYTES = array("i").itemsize


@dataclass(frozen=True)
class PrefixName:
    """Names in events for the requests of a salt: their adapter, and what else separates their first block."""

    adapter: str | None = None
    extra_keys: tuple[str, ...] = ()


class PrefixNames:
    """Names by the salts of prefixes, from which nobody could tell them. From any thread."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, PrefixName] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, requests: Iterable[Request], extra_keys: tuple[str, ...], adapter: str | None) -> None:
        """Requests are about to run."""
        with self._lock:
            for request in requests:
                # Pages before the start of an adapter are the model's own; those after it are marked in their keys.
                name = PrefixName(None if request.adapter_start else adapter, extra_keys)
                self._names[request.prefix_salt] = name
                self._names.move_to_end(request.prefix_salt)
            while len(self._names) > _MAX_NAMES:
                self._names.popitem(last=False)

    def find(self, salt: str) -> PrefixName:
        """The name of a salt; the salt itself where it is not known."""
        if (name := self._names.get(salt)) is not None:
            return name
        return PrefixName(None, (salt,) if salt else ())


class KVEvents:
    """The publishers of a server: one for each engine of its model, made when that is loaded.

    Raises OSError for an address that cannot be used, before anything is loaded.
    """

    def __init__(self, options: ServerOptions):
        self.names = PrefixNames()
        self._options = options
        self._publishers = [KVEventPublisher(options, 0, self.names)]

    @property
    def endpoints(self) -> list[str]:
        """Addresses of the engines' events, in their order."""
        return [publisher.endpoint for publisher in self._publishers]

    @property
    def replay_endpoints(self) -> list[str]:
        """Addresses at which messages can be had again, likewise; empty without."""
        return [publisher.replay_endpoint for publisher in self._publishers if publisher.replay_endpoint]

    def follow(self, engines: Sequence[Engine]) -> None:
        """Tells of these engines' blocks from now on, none of which runs yet. Raises ValueError where they have no
        blocks, or ports of events and of replays would meet, and OSError for a port that is taken."""
        events, replay = kv_endpoint(self._options.kv_events or ""), self._options.kv_events_replay
        if replay is not None and 0 < abs(kv_endpoint(replay)[1] - events[1]) < len(engines):
            raise ValueError(
                f"kv_events and kv_events_replay are {abs(kv_endpoint(replay)[1] - events[1])} ports apart, and "
                f"{len(engines)} engines have ports one after the other: they need {len(engines)} or more"
            )
        for rank in range(len(self._publishers), len(engines)):
            self._publishers.append(KVEventPublisher(self._options, rank, self.names))
        for publisher, engine in zip(self._publishers, engines, strict=True):
            publisher.follow(engine)
        where = f"; replays at {', '.join(self.replay_endpoints)}" if self.replay_endpoints else ""
        page_size = engines[0].spec.page_size
        _LOG.info("KV events at %s%s; blocks of %d tokens", ", ".join(self.endpoints), where, page_size)

    def close(self) -> None:
        for publisher in self._publishers:
            publisher.close()


class KVEventPublisher:
    """Sends the events of one engine from a thread of its own.

    The engine's thread leaves events in a list and never waits. A list that grows too long is replaced by one that
    clears an index and fills it again.

    Args:
      rank: the number of the engine. names: of salts.
    """

    def __init__(self, options: ServerOptions, rank: int, names: PrefixNames):
        self._rank, self._names = rank, names
        self._encode_event = FORMS[options.kv_events_format]
        self._topic = options.kv_events_topic.encode()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, _MAX_MESSAGES)
        self._pub.setsockopt(zmq.LINGER, 200)
        self._replay: zmq.Socket | None = None
        try:
            self.endpoint = _bind(self._pub, options.kv_events or "", rank)
            self.replay_endpoint = ""
            if options.kv_events_replay is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                # Without these a client would silently get the first thousand messages only.
                self._replay.setsockopt(zmq.SNDHWM, options.kv_events_buffer + 2)
                self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self._replay.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST)
                self._replay.setsockopt(zmq.LINGER, 0)
                self.replay_endpoint = _bind(self._replay, options.kv_events_replay, rank)
        except OSError:
            self._context.destroy(0)
            raise
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=options.kv_events_buffer)
        self._num_sent = 0
        self._pending: list[BlockEvent] = []
        self._max_pending = _LEAST_PENDING
        self._blocks: PrefixBlocks | None = None
        self._page_size, self._num_ahead = 1, 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._wakes, self._wake_end = os.pipe()
        os.set_blocking(self._wake_end, False)
        self._thread = threading.Thread(target=self._run, name="jaxinfer KV events", daemon=True)
        self._thread.start()

    def follow(self, engine: Engine) -> None:
        """Tells of an engine's blocks from now on, after a message that clears what was told before."""
        options = engine.scheduler.options
        self._page_size, self._num_ahead = options.page_size, options.num_ahead
        self._max_pending = max(_LEAST_PENDING, 4 * sum(group.num_pages for group in options.groups))
        self._blocks = None
        self.put([BlocksCleared()])
        self._blocks = engine.scheduler.observe_blocks(self.put)

    def put(self, events: list[BlockEvent]) -> None:
        """Leaves events to be sent; in the engine's thread."""
        if self._is_closed:
            return
        with self._lock:
            was_empty = not self._pending
            if isinstance(events[0], BlocksCleared):
                self._pending = []
            self._pending += events
            if len(self._pending) > self._max_pending and self._blocks is not None:
                self._pending = [BlocksCleared(), *self._blocks.all()]
        if was_empty:
            self._wake()

    def close(self) -> None:
        """Sends what is left and closes the sockets. Closing twice is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        self._wake()
        self._thread.join()
        self._context.destroy()
        os.close(self._wakes)
        os.close(self._wake_end)

    def _wake(self) -> None:
        try:
            os.write(self._wake_end, b"\0")
        except BlockingIOError:  # it is woken already
            return

    # In its thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakes, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while not self._is_closed:
            ready = dict(poller.poll())
            if self._wakes in ready:
                time.sleep(_GATHER_SECONDS)
                os.read(self._wakes, 1 << 16)
                self._publish()
            if self._replay in ready:
                self._answer()
        self._publish()

    def _publish(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, []
        for batch in _batches(_together(pending)):
            events = [self._encode_event(self._described(part)) for part in batch]
            payload = msgspec.msgpack.encode([time.time(), events, self._rank])
            number, self._num_sent = self._num_sent, self._num_sent + 1
            self._sent.append((number, payload))
            self._pub.send_multipart([self._topic, number.to_bytes(8, "big"), payload])

    def _described(self, events: Sequence[BlockEvent]) -> dict[str, Any]:
        """Events of one kind, and of blocks one after the other, as one."""
        first = events[0]
        if isinstance(first, BlocksCleared):
            return {"type": "AllBlocksCleared"}
        hashes = [event.hash for event in events if not isinstance(event, BlocksCleared)]
        if isinstance(first, BlockWent):
            return {"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIA[first.is_on_host]}
        name, num_bytes = self._names.find(first.salt), _TOKEN_BYTES * self._page_size
        keys = [event.key for event in events if isinstance(event, BlockCame)]
        marks = [key[num_bytes + _TOKEN_BYTES * self._num_ahead :] for key in keys]
        extra = [[mark.decode()] if mark else None for mark in marks]
        if first.parent is None and name.extra_keys:
            extra[0] = [*name.extra_keys, *(extra[0] or ())]
        tokens = array("i", b"".join(key[:num_bytes] for key in keys))
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": first.parent,
            "token_ids": tokens.tolist(),
            "block_size": self._page_size,
            "lora_id": None,
            "medium": MEDIA[first.is_on_host],
            "lora_name": name.adapter,
            **({"extra_keys": extra} if any(extra) else {}),
        }

    def _answer(self) -> None:
        """Sends a client the messages from a number on that are kept."""
        assert self._replay is not None
        *client, start = self._replay.recv_multipart()
        if len(start) != 8 or not client:
            _LOG.warning("a request for KV events again has %d bytes, not the 8 of a number", len(start))
            return
        try:
            for number, payload in list(self._sent):
                if number >= int.from_bytes(start, "big"):
                    message = [*client, self._topic, number.to_bytes(8, "big"), payload]
                    self._replay.send_multipart(message, zmq.NOBLOCK)
            self._replay.send_multipart([*client, b"", END_NUMBER, b""], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # it left, or does not read
            _LOG.warning("a client did not get all KV events that it wanted again: %s", error)


def _together(events: Iterable[BlockEvent]) -> Iterator[list[BlockEvent]]:
    """Events in their order, with those together that one message part can tell."""
    part: list[BlockEvent] = []
    for event in events:
        if part and len(part) < _MAX_BLOCKS and _goes_with(part[-1], event):
            part.append(event)
            continue
        if part:
            yield part
        part = [event]
    if part:
        yield part


def _goes_with(last: BlockEvent, event: BlockEvent) -> bool:
    if isinstance(last, BlockWent) and isinstance(event, BlockWent):
        return last.is_on_host == event.is_on_host
    if not (isinstance(last, BlockCame) and isinstance(event, BlockCame)):
        return False
    return (event.parent, event.is_on_host) == (last.hash, last.is_on_host)


def _batches(parts: Iterable[list[BlockEvent]]) -> Iterator[list[list[BlockEvent]]]:
    """Parts of messages, each of at most about `_MAX_BLOCKS` blocks."""
    batch: list[list[BlockEvent]] = []
    num_blocks = 0
    for part in parts:
        batch.append(part)
        num_blocks += len(part)
        if num_blocks >= _MAX_BLOCKS:
            yield batch
            batch, num_blocks = [], 0
    if batch:
        yield batch


def _positional(event: dict[str, Any]) -> list[Any]:
    return list(event.values())


def _map(event: dict[str, Any]) -> dict[str, Any]:
    return event


FORMS: dict[str, Callable[[dict[str, Any]], Any]] = {"maps": _map, "positional": _positional}


def _bind(publisher: zmq.Socket, endpoint: str, rank: int) -> str:
    """Listens at an endpoint's port, or `rank` ports after it; returns where. Raises OSError with the address."""
    host, port = kv_endpoint(endpoint)
    address = f"tcp://{host}:{port + rank if port else '*'}"
    if ":" in host:
        publisher.setsockopt(zmq.IPV6, 1)
    try:
        publisher.bind(address)
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"cannot listen: {error.strerror}", address) from None
    return publisher.getsockopt_string(zmq.LAST_ENDPOINT)
