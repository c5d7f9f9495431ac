"""Events of a stream on their way to the client: whole ones only, with what is needed to go on after the last."""

from array import array

from jaxinfer.server.api_error import unavailable

_TOKENS, _ID = b":tokens ", b"id: "
_ERRORS = b'data: {"error":', b"event: error\n"
_ENDS = (
    *(b"data: [DONE]", b"event: message_stop\n"),
    *(b"event: response.completed\n", b"event: response.incomplete\n", b"event: response.failed\n"),
)
_GONE = unavailable("", 1)
_UNAVAILABLE = tuple(b'"%b"' % kind.encode() for kind in (_GONE.type, _GONE.anthropic()["error"]["type"]))


class SentStream:
    """A stream as far as its client has it.

    Events without an id wait for the next one that has one, or for the end, so that none is sent twice. Comments that
    tell tokens are kept; other comments are passed on.

    Attributes:
      last_id: of the last event that was passed on with one; None before.
      is_done: whether the end was passed on. error: an error event, which was not.
      num_events: that were passed on, of those with ids.
    """

    media_type = b"text/event-stream"
    separator = b"\n\n"

    def __init__(self) -> None:
        self.last_id: bytes | None = None
        self.is_done = False
        self.error: bytes | None = None
        self.num_events = 0
        self._tokens: dict[int, array] = {}
        self._rest = self._held = b""

    @property
    def is_unavailable(self) -> bool:
        """True if the error says that the server, not the request, is the reason."""
        return self.error is not None and any(kind in self.error for kind in _UNAVAILABLE)

    def feed(self, data: bytes) -> bytes:
        """Takes bytes of a replica; returns those to be passed on."""
        self._rest += data
        if (end := self._rest.rfind(self.separator)) < 0:
            return b""
        passed, whole, self._rest = b"", self._rest[:end], self._rest[end + len(self.separator) :]
        for block in whole.split(self.separator):
            if block.startswith(_TOKENS):
                self._keep(block)
            else:
                passed += self._take(block)
            if self.is_done or self.error is not None:
                break
        return passed

    def begin_again(self) -> None:
        """Another replica goes on: what is not whole of the last one's is dropped."""
        self._rest = self._held = b""
        self.error = None

    def tokens(self) -> list[array] | None:
        """The token ids of each choice that `last_id` counts; None where not all are known."""
        if self.last_id is None:
            return None
        counts = [int(part.split(b"-")[0], 16) for part in self.last_id.split(b".")[3].split(b",")]
        known = [self._tokens.get(index, array("i"))[:count] for index, count in enumerate(counts)]
        return known if [len(ids) for ids in known] == counts else None

    def _take(self, block: bytes) -> bytes:
        """Takes what is no comment with tokens; returns what is to be passed on."""
        if block.startswith(_ID):
            return self._pass(block[len(_ID) : block.index(b"\n")], block)
        if block.startswith(_ERRORS):
            self.error = block + self.separator
            return b""
        if block.startswith(b":"):
            return block + self.separator
        return self._hold(block, block.startswith(_ENDS))

    def _pass(self, last_id: bytes, block: bytes) -> bytes:
        """An event with an id, and those that waited for it."""
        self.last_id = last_id
        self.num_events += 1
        passed, self._held = self._held + block + self.separator, b""
        return passed

    def _hold(self, block: bytes, is_end: bool) -> bytes:
        """An event without an id."""
        self._held += block + self.separator
        self.is_done = is_end
        return self._held if is_end else b""

    def _keep(self, block: bytes) -> None:
        index, first, ids = block[len(_TOKENS) :].split(b" ")
        own = self._tokens.setdefault(int(index), array("i"))
        new, start = array("i", map(int, ids.split(b","))), int(first)
        if len(own) >= start:  # else some were never told, and `tokens` says so
            own[start : start + len(new)] = new  # another replica tells those before again


class SentLines(SentStream):
    """A stream of lines of JSON, as Ollama's: comments tell the ids of the lines after them, and all are taken out."""

    media_type = b"application/x-ndjson"
    separator = b"\n"

    def __init__(self) -> None:
        super().__init__()
        self._next_id: bytes | None = None
        self._is_unavailable = False

    @property
    def is_unavailable(self) -> bool:
        return self._is_unavailable

    def begin_again(self) -> None:
        super().begin_again()
        self._next_id, self._is_unavailable = None, False

    def _take(self, block: bytes) -> bytes:
        if block.startswith(b":id: "):
            self._next_id = block[len(b":id: ") :]
        elif block == b":unavailable":
            self._is_unavailable = True
        elif block.startswith(b'{"error":'):
            self.error = block + self.separator
        elif self._next_id is not None:
            last_id, self._next_id = self._next_id, None
            return self._pass(last_id, block)
        elif block:
            return self._hold(block, b'"done":true' in block)
        return b""
