"""Events of a stream on their way to the client: whole ones only, with what is needed to go on after the last."""

from array import array

_TOKENS, _ID, _DATA, _ERROR, _DONE = b":tokens ", b"id: ", b"data: ", b'data: {"error":', b"data: [DONE]"


class SentStream:
    """A stream as far as its client has it.

    Events without an id are those after the last choice has ended, or an error: they wait for the end, [DONE], so that
    none is sent twice. Comments that tell tokens are kept; all else is passed on as it is.

    Attributes:
      last_id: of the last event that was passed on with one; None before.
      is_done: whether the end was passed on. error: an error event, which was not.
      num_events: that were passed on.
    """

    def __init__(self) -> None:
        self.last_id: bytes | None = None
        self.is_done = False
        self.error: bytes | None = None
        self.num_events = 0
        self._tokens: dict[int, array] = {}
        self._rest = self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Takes bytes of a replica; returns those to be passed on."""
        self._rest += data
        if (end := self._rest.rfind(b"\n\n")) < 0:
            return b""
        passed, whole, self._rest = b"", self._rest[:end], self._rest[end + 2 :]
        for block in whole.split(b"\n\n"):
            if block.startswith(_ID):
                self.last_id = block[len(_ID) : block.index(b"\n")]
                self.num_events += 1
            elif block.startswith(_TOKENS):
                self._keep(block)
                continue
            elif block.startswith(_ERROR):
                self.error = block + b"\n\n"
                break
            elif block.startswith(_DATA):
                self._held += block + b"\n\n"
                if block != _DONE:
                    continue
                self.is_done = True
                return passed + self._held
            passed += block + b"\n\n"
        return passed

    def begin_again(self) -> None:
        """Another replica goes on: what is not whole of the last one's is dropped."""
        self._rest = self._held = b""
        self.error = None

    def tokens(self) -> list[array] | None:
        """The token ids of each choice that `last_id` counts; None where not all are known."""
        if self.last_id is None:
            return None
        counts = [int(part.split(b"-")[0], 16) for part in self.last_id.rpartition(b".")[2].split(b",")]
        known = [self._tokens.get(index, array("i"))[:count] for index, count in enumerate(counts)]
        return known if [len(ids) for ids in known] == counts else None

    def _keep(self, block: bytes) -> None:
        index, first, ids = block[len(_TOKENS) :].split(b" ")
        own = self._tokens.setdefault(int(index), array("i"))
        new, start = array("i", map(int, ids.split(b","))), int(first)
        if len(own) >= start:  # else some were never told, and `tokens` says so
            own[start : start + len(new)] = new  # another replica tells those before again
