"""A subscriber of events of cached blocks: an index of texts, which asks again for messages that it missed."""

import msgspec
import zmq

END = (2**64 - 1).to_bytes(8, "big")
STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)
FIELDS = {"BlockStored": STORED, "BlockRemoved": ("block_hashes", "medium"), "AllBlocksCleared": ()}


class Subscriber:
    """Attributes:
    batches: the messages that were applied, in their order: numbers, and events as maps. num_replayed: those of them
      that came from the replay socket. drops: numbers of messages that are lost on their way.
    """

    def __init__(self, endpoint: str, replay: str = "", drops=()):
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.subscribe(b"")
        self._sub.connect(endpoint)
        self._replay_endpoint, self._drops = replay, set(drops)
        self.batches: list[tuple[int, list[dict]]] = []
        self.num_replayed = self.num_dropped = 0
        self.topic, self.rank, self.next = b"", None, 0
        self.texts: dict[int, tuple] = {}
        self.media: dict[int, set[str]] = {}
        if replay:
            self.replay(0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._context.destroy(0)

    @property
    def events(self) -> list[dict]:
        return [event for _, events in self.batches for event in events]

    def read(self, seconds: float = 0.2) -> None:
        """Messages, until none has come for so long."""
        while self._sub.poll(1000 * seconds):
            topic, number, payload = self._sub.recv_multipart()
            number = int.from_bytes(number, "big")
            if number in self._drops:
                self.num_dropped += 1
            elif number > self.next and self._replay_endpoint:
                self.replay(self.next)
            elif number >= self.next:
                self._take(topic, number, payload)

    def read_until(self, condition, seconds: float = 20.0) -> None:
        for _ in range(round(seconds / 0.02)):
            if condition(self):
                return
            self.read(0.02)
        raise AssertionError(f"it did not come: {self.batches[-3:]}")

    def replay(self, start: int) -> None:
        """Asks for the messages from a number on."""
        socket = self._context.socket(zmq.DEALER)
        socket.connect(self._replay_endpoint)
        socket.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            assert socket.poll(20_000), "the replay has no end"
            empty, topic, number, payload = socket.recv_multipart()
            assert empty == b""
            if number == END:
                assert payload == b""
                break
            self.num_replayed += 1
            self._take(topic, int.from_bytes(number, "big"), payload)
        socket.close(0)

    def _take(self, topic: bytes, number: int, payload: bytes) -> None:
        time, events, self.rank = msgspec.msgpack.decode(payload)
        assert isinstance(time, float)
        assert number == self.next
        maps = [
            event if isinstance(event, dict) else {"type": event[0], **dict(zip(FIELDS[event[0]], event[1:]))}  # noqa: B905
            for event in events
        ]
        self.topic, self.next = topic, number + 1
        self.batches.append((number, maps))
        for event in maps:
            self._apply(event)

    def _apply(self, event: dict) -> None:
        if event["type"] == "AllBlocksCleared":
            self.texts, self.media = {}, {}
        elif event["type"] == "BlockRemoved":
            for hash in event["block_hashes"]:
                self.media[hash].remove(event["medium"])
                if not self.media[hash]:
                    del self.media[hash], self.texts[hash]
        else:
            self._store(event)

    def _store(self, event: dict) -> None:
        parent, size, tokens = event["parent_block_hash"], event["block_size"], event["token_ids"]
        hashes = event["block_hashes"]
        assert len(tokens) == size * len(hashes)
        for place, hash in enumerate(hashes):
            extra = (event.get("extra_keys") or [None] * len(hashes))[place]
            before = (event["lora_name"],) if parent is None else self.texts[parent]
            self.texts[hash] = (*before, *(extra or ()), tuple(tokens[place * size : (place + 1) * size]))
            self.media.setdefault(hash, set()).add(event["medium"])
            parent = hash

    def view(self) -> dict[tuple, set[str]]:
        """The media of each text: its adapter, its tokens in blocks, and extra keys before the block that has them."""
        return {self.texts[hash]: media for hash, media in self.media.items()}
