"""Server-sent events of the two OpenAI routes, from templates: writing a chunk by a JSON library from objects takes ten
times as long as filling its text into what is the same in every chunk of an answer."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxinfer.openai.answers import Usage

encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class _Chunks:
    """Chunks of one stream; all begin alike.

    Args:
      kind: "chat.completion.chunk" or "text_completion". about: id, time, model and fingerprint. has_usage: whether
        chunks have `usage`, null but for the last.
    """

    def __init__(self, kind: str, about: Mapping[str, Any], has_usage: bool):
        self._head = b"data: " + encode({"object": kind, **about})[:-1]
        self._start = self._head + b',"choices":[{"index":'
        self._end = b',"usage":null}\n\n' if has_usage else b"}\n\n"
        self._rest = b',"logprobs":null,"finish_reason":null}]' + self._end

    def _choice(self, index: int, text: bytes, logprobs: Any, token_ids: Sequence[int] | None) -> bytes:
        if logprobs is None and token_ids is None:
            return b"%b%d%b%b" % (self._start, index, text, self._rest)
        return b'%b%d%b,"logprobs":%b,"finish_reason":null%b}]%b' % (
            self._start,
            index,
            text,
            b"null" if logprobs is None else encode(logprobs),
            b"" if token_ids is None else b',"token_ids":' + encode(token_ids),
            self._end,
        )

    def _ending(self, index: int, text: bytes, finish_reason: str, stop_reason: int | str | None) -> bytes:
        return b'%b%d%b,"logprobs":null,"finish_reason":%b,"stop_reason":%b}]%b' % (
            self._start,
            index,
            text,
            encode(finish_reason),
            encode(stop_reason),
            self._end,
        )

    def usage(self, usage: Usage) -> bytes:
        """The last chunk of the stream, where it was asked for."""
        return b'%b,"choices":[],"usage":%b}\n\n' % (self._head, encode(usage))


class ChatChunks(_Chunks):
    """Of /v1/chat/completions."""

    def first(self, index: int, fields: Mapping[str, Any]) -> bytes:
        """The first chunk of a choice: the role, and beside the choices what else the client should know."""
        more = b"".join(b',"%b":%b' % (name.encode(), encode(value)) for name, value in fields.items())
        delta = b'{"role":"assistant","content":""}'
        choices = b',"choices":[{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}]' % (index, delta)
        return self._head + more + choices + self._end

    def add(
        self, index: int, name: str, value: Any, logprobs: Any = None, token_ids: Sequence[int] | None = None
    ) -> bytes:
        """What is new: content or reasoning_content, which are texts, or tool_calls."""
        delta = b',"delta":{"%b":%b}' % (name.encode(), encode(value))
        return self._choice(index, delta, logprobs, token_ids)

    def end(self, index: int, finish_reason: str, stop_reason: int | str | None) -> bytes:
        """The last chunk of a choice."""
        return self._ending(index, b',"delta":{}', finish_reason, stop_reason)


class CompletionChunks(_Chunks):
    """Of /v1/completions."""

    def add(self, index: int, text: str, logprobs: Any = None, token_ids: Sequence[int] | None = None) -> bytes:
        """New text."""
        return self._choice(index, b',"text":' + encode(text), logprobs, token_ids)

    def end(self, index: int, finish_reason: str, stop_reason: int | str | None) -> bytes:
        """The last chunk of a choice."""
        return self._ending(index, b',"text":""', finish_reason, stop_reason)


def named_event(name: str, body: Mapping[str, Any]) -> bytes:
    """An event of Anthropic's and of the responses API: they have names."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode(body))
