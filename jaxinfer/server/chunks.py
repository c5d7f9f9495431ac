"""Server-sent events of the two OpenAI routes, from templates: writing a chunk by a JSON library from objects takes ten
times as long as filling its text into what is the same in every chunk of an answer."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class Chunks:
    """Chunks of one stream; all begin alike.

    Args:
      kind: "chat.completion.chunk" or "text_completion". has_usage: whether chunks have `usage`, null but for the last.
    """

    def __init__(self, kind: str, answer_id: str, created: int, model: str, fingerprint: str, has_usage: bool):
        head = {"id": answer_id, "object": kind, "created": created, "model": model, "system_fingerprint": fingerprint}
        self._head = b"data: " + encode(head)[:-1]
        self._end = b',"usage":null}\n\n' if has_usage else b"}\n\n"

    def first(self, index: int, fields: Mapping[str, Any]) -> bytes:
        """The first chunk of a chat's choice: the role, and beside the choices what else the client should know."""
        return b"%b%b%b%b" % (
            self._head,
            b"".join(b',"%b":%b' % (name.encode(), encode(value)) for name, value in fields.items()),
            b',"choices":[{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            % index,
            self._end,
        )

    def chat(self, index: int, name: str, text: str, logprobs: Any, token_ids: Sequence[int] | None) -> bytes:
        """New text of a chat; `name` is content or reasoning_content."""
        return b'%b,"choices":[{"index":%d,"delta":{"%b":%b},"logprobs":%b,"finish_reason":null%b}]%b' % (
            self._head,
            index,
            name.encode(),
            encode(text),
            b"null" if logprobs is None else encode({"content": logprobs, "refusal": None}),
            b"" if token_ids is None else b',"token_ids":' + encode(token_ids),
            self._end,
        )

    def completion(self, index: int, text: str, logprobs: Any, token_ids: Sequence[int] | None) -> bytes:
        """New text of a completion."""
        return b'%b,"choices":[{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null%b}]%b' % (
            self._head,
            index,
            encode(text),
            b"null" if logprobs is None else encode(logprobs),
            b"" if token_ids is None else b',"token_ids":' + encode(token_ids),
            self._end,
        )

    def end(self, index: int, is_chat: bool, finish_reason: str, stop_reason: int | str | None) -> bytes:
        """The last chunk of a choice."""
        return b'%b,"choices":[{"index":%d,%b,"logprobs":null,"finish_reason":%b,"stop_reason":%b}]%b' % (
            self._head,
            index,
            b'"delta":{}' if is_chat else b'"text":""',
            encode(finish_reason),
            encode(stop_reason),
            self._end,
        )

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """The last chunk of the stream, where it was asked for."""
        return b'%b,"choices":[],"usage":%b}\n\n' % (self._head, encode(usage))


def with_id(position: object, event: bytes) -> bytes:
    """The event with its id."""
    return b"id: %b\n%b" % (str(position).encode(), event)


def error_event(body: Mapping[str, Any]) -> bytes:
    """An error within a stream."""
    return b"data: %b\n\n" % encode(body)


def named_event(name: str, body: Mapping[str, Any]) -> bytes:
    """An event of Anthropic's and of the responses API: they have names."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode(body))
