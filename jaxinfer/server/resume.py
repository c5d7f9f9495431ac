"""Streams that are resumed: each event's id says how much of each answer was sent, and with which seed.

An answer is a function of its request, so nothing is stored. A client that lost its connection sends the same request
again with `Last-Event-ID` (or `x-jaxinfer-resume`); the answer is computed anew, and what the client has is left out. A
checksum of the text that was sent tells whether it is the same answer.

A front hands over the token ids that were sent, too (`SENT_TOKENS`): they are then computed as a prompt is, in a few
steps, and the answer goes on after them.
"""

import hashlib
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from jaxinfer.engine.request import BegunAnswer, StreamDelta
from jaxinfer.server.api_error import APIError, refused
from jaxinfer.server.sent_tokens import SENT_TOKENS
from jaxinfer.tool_calls import ToolCallDelta, text_of

_ID = re.compile(r"([0-9a-f]{24})\.([0-9a-f]{16})\.(\d{1,20})\.([0-9a-fx,-]{1,4096})(?:\.(\d{1,9}))?")
_NOT_CONTENT = (
    *("keep_alive", "stream", "stream_options", "seed", "user", "safety_identifier", "prompt_cache_key", "request_id"),
    *("prompt_cache_retention", "prompt_cache_options", "metadata", "priority", "timeout", "cache_salt"),
)


@dataclass
class SentPart:
    """The part of one answer that was sent: tokens, characters, a checksum of the text, and whether its end was."""

    num_tokens: int = 0
    num_chars: int = 0
    checksum: int = 0
    has_ended: bool = False

    def add(self, text: str, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.num_chars += len(text)
        self.checksum = zlib.crc32(text.encode("utf-8", "surrogatepass"), self.checksum)

    def __str__(self) -> str:
        return f"{self.num_tokens:x}-{self.num_chars:x}-{self.checksum:x}{'-x' if self.has_ended else ''}"

    @classmethod
    def read(cls, text: str) -> "SentPart":
        """Raises ValueError."""
        tokens, chars, checksum, *ended = text.split("-")
        if ended not in ([], ["x"]):
            raise ValueError(text)
        return cls(int(tokens, 16), int(chars, 16), int(checksum, 16), bool(ended))


class StreamPosition:
    """The position of a stream. `str()` of it is the id of an event.

    Args:
      answer_id: of the stream, the same after it is resumed. digest: of the request and the model.
      seed: of the request.

    Attributes:
      num_events: that were sent, where they are numbered; None where they are not.
    """

    def __init__(self, answer_id: str, digest: str, seed: int, num_choices: int):
        self.answer_id, self.digest, self.seed = answer_id, digest, seed
        self.choices = [SentPart() for _ in range(num_choices)]
        self.num_events: int | None = None
        self._head = f"{answer_id}.{digest}.{seed}."

    @property
    def created(self) -> int:
        """When the answer was first begun, in seconds since 1970."""
        return int(self.answer_id[:8], 16)

    def advance(self, index: int, text: str, num_tokens: int) -> bytes:
        """Counts what is sent of a choice; returns the line with the id of its event."""
        choice = self.choices[index]
        choice.add(text, num_tokens)
        if len(self.choices) > 1 or choice.has_ended:
            return self.event_id()
        # As `event_id` writes it, without its calls: for every token they take 8 microseconds.
        return f"id: {self._head}{choice.num_tokens:x}-{choice.num_chars:x}-{choice.checksum:x}\n".encode()

    def count(self, delta: StreamDelta, reasoning: str = "", call: ToolCallDelta | None = None) -> None:
        """Counts what is sent of a choice, all together."""
        called = "" if call is None else text_of(call)
        self.choices[delta.index].add(reasoning + delta.text + called, len(delta.token_ids))

    def end(self, index: int) -> bytes:
        """The end of a choice is sent; returns the line with the id of its event."""
        self.choices[index].has_ended = True
        return self.event_id()

    def event_id(self) -> bytes:
        """The line with the id of an event."""
        return f"id: {self}\n".encode()

    def __str__(self) -> str:
        numbered = "" if self.num_events is None else f".{self.num_events}"
        return self._head + ",".join(map(str, self.choices)) + numbered

    @classmethod
    def read(cls, text: str) -> "StreamPosition":
        """Raises APIError 400."""
        match = _ID.fullmatch(text)
        try:
            if match is None or int(match[3]) >= 2**64:
                raise ValueError(text)
            choices = [SentPart.read(part) for part in match[4].split(",")]
        except ValueError:
            raise APIError(400, f"{text!r:.80} is no id of an event of this server", param="Last-Event-ID") from None
        position = cls(match[1], match[2], int(match[3]), len(choices))
        position.choices = choices
        position.num_events = None if match[5] is None else int(match[5])
        return position


def request_digest(body: msgspec.Struct, fingerprint: str, key: str = "") -> str:
    """16 hexadecimal digits of what an answer depends on, besides its seed: the request and the model. With the name of
    the caller's `key`, so that another caller cannot go on with it."""
    content: Mapping[str, Any] = {
        name: value
        for name, value in msgspec.structs.asdict(body).items()
        if value is not None and name not in _NOT_CONTENT
    }
    data = msgspec.json.encode([type(body).__name__, fingerprint, content, *([key] if key else ())], order="sorted")
    return hashlib.sha256(data).hexdigest()[:16]


def begun_answers(position: StreamPosition, sent: Sequence[tuple[int, ...]]) -> list[BegunAnswer]:
    """The beginnings of a stream's choices. Raises APIError 400 where the tokens are not those that its position
    counts."""
    counts, given = [part.num_tokens for part in position.choices], [len(ids) for ids in sent]
    if counts != given:
        raise refused(SENT_TOKENS, f"the event's id counts {counts} tokens of its choices, and {given} are given")
    return [BegunAnswer(ids, part.has_ended) for ids, part in zip(sent, position.choices, strict=True)]


class Skipper:
    """Leaves out of a repeated answer what was sent before."""

    def __init__(self, sent: SentPart):
        self._sent, self._seen = replace(sent), SentPart()  # the stream's own goes on

    def skip(self, text: str, num_tokens: int) -> tuple[int, int]:
        """The numbers of characters and tokens, of new ones, that were sent before. Raises APIError where the text is
        another one."""
        sent, seen = self._sent, self._seen
        num_chars = min(len(text), max(sent.num_chars - seen.num_chars, 0))
        num_known = min(num_tokens, max(sent.num_tokens - seen.num_tokens, 0))
        if num_chars:
            seen.add(text[:num_chars], 0)
        seen.num_tokens += num_known
        if num_chars and seen.num_chars == sent.num_chars and seen.checksum != sent.checksum:
            self._refuse()
        return num_chars, num_known

    @property
    def has_ended(self) -> bool:
        """True if the answer's end was sent before."""
        return self._sent.has_ended

    def check_end(self) -> None:
        """Raises APIError if the repeated answer has ended before what was sent."""
        if self._seen.num_chars < self._sent.num_chars:
            self._refuse()

    def _refuse(self) -> None:
        raise APIError(
            409,
            "the answer is not the one that was begun: its model or the options of its server have changed, or they do "
            "not promise equal answers (bfloat16 without --deterministic); start it anew",
            code="resume_differs",
        )
