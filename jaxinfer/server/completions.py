"""/v1/chat/completions and /v1/completions, whole or as chunks.

Chunks are written from templates: a JSON library takes ten times as long to write them from objects as it takes to fill
a text into what is the same in every chunk of an answer.
"""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.engine.request import RequestOutput, StreamDelta
from jaxinfer.openai.answers import ChatCompletion, ChatLogprobs, Completion, CompletionLogprobs
from jaxinfer.openai.bodies import ChatRequest, CompletionRequest, SamplingFields
from jaxinfer.openai.reader import read_chat, read_completion
from jaxinfer.openai.writer import LogprobLists, chat_completion, chat_logprobs, completion, usage
from jaxinfer.server.answering import answer, encode
from jaxinfer.server.api_error import APIError
from jaxinfer.server.generation import Generation
from jaxinfer.server.http import read_body
from jaxinfer.server.resume import StreamPosition
from jaxinfer.server.service import Service
from jaxinfer.tool_calls import ToolCallDelta, text_of

_DONE = b"data: [DONE]\n\n"


async def chat_completions(request: Request, service: Service) -> Response:
    """Answers a conversation, at once or as a stream."""
    body = await read_body(request, ChatRequest, service)
    ignores = service.options.ignore_unknown_fields
    return await answer(request, service, body, lambda _: read_chat(body, ignore_unknown=ignores), _ChatForm)


async def completions(request: Request, service: Service) -> Response:
    """Continues prompts, at once or as a stream; choice index = number of the prompt times n + number of the answer."""
    body = await read_body(request, CompletionRequest, service)
    return await answer(request, service, body, lambda _: read_completion(body), _CompletionForm)


class _Form:
    """Base of both forms. Chunks of one stream begin alike; the last has the usage, if it is requested, and the others
    have none, or null."""

    kind, prefix = "", ""  # of chunks, and of ids
    name, new, empty = b"", b"", b""  # of the text; a template of a chunk's field and its value; a chunk without them

    def __init__(self, body: SamplingFields, generation: Generation, position: StreamPosition):
        job = generation.job
        self._generation, self._position = generation, position
        self._params, self._has_ids = job.params, job.asked.return_token_ids
        self._has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._about = {
            "id": f"{self.prefix}-{position.answer_id}",
            "created": position.created,
            "model": generation.model.name,
            "system_fingerprint": generation.model.fingerprint,
        }
        self._head = b"data: " + encode({"object": self.kind, **self._about})[:-1]
        self._start = self._head + b',"choices":[{"index":'
        self._end = b',"usage":null}\n\n' if self._has_usage else b"}\n\n"
        self._rest = b',"logprobs":null,"finish_reason":null}]' + self._end
        self._text = self._start.replace(b"%", b"%%") + b"%d" + self.new % (self.name, b"%b") + self._rest

    def begin(self) -> bytes:
        return b""

    def add(self, delta: StreamDelta, reasoning: str = "", call: ToolCallDelta | None = None) -> bytes:
        position, index, text, name, chunks = self._position, delta.index, delta.text, self.name, b""
        if call is not None:  # alone in its delta
            chunks = position.advance(index, text_of(call), 0) + self._chunk(index, b"tool_calls", [_call_delta(call)])
        elif reasoning:
            if text:  # the closing tag is within: what belongs to both goes with the text
                chunks = position.advance(index, reasoning, 0) + self._chunk(index, b"reasoning_content", reasoning)
            else:
                name, text = b"reasoning_content", reasoning
        if delta.logprobs or self._has_ids:
            logprobs = self._logprobs(delta) if delta.logprobs else None
            token_ids = list(delta.token_ids) if self._has_ids else None
            if text or logprobs or token_ids:
                event = self._chunk(index, name, text, logprobs, token_ids)
                chunks += position.advance(index, text, len(delta.token_ids)) + event
        elif text:
            event = self._text % (index, encode(text)) if name is self.name else self._chunk(index, name, text)
            chunks += position.advance(index, text, len(delta.token_ids)) + event
        elif delta.token_ids:
            position.advance(index, "", len(delta.token_ids))
        if delta.finish_reason is not None:
            end = encode(delta.finish_reason), encode(delta.stop_reason)
            rest = b',"logprobs":null,"finish_reason":%b,"stop_reason":%b}]%b' % (*end, self._end)
            chunks += position.end(index) + b"%b%d%b%b" % (self._start, index, self.empty, rest)
        return chunks

    def pass_over(self, delta: StreamDelta, reasoning: str = "", call: ToolCallDelta | None = None) -> None:
        """No chunk depends on the chunks before it."""

    def finish(self) -> bytes:
        told = b""
        if (coordinates := self._generation.coordinates) is not None:
            told = b'%b,"choices":[],"coordinates":%b%b' % (self._head, encode(coordinates), self._end)
        if not self._has_usage:
            return told + _DONE
        counted = encode(usage(self._generation.outputs, has_cached=True))
        return told + b'%b,"choices":[],"usage":%b}\n\n%b' % (self._head, counted, _DONE)

    def error_event(self, error: APIError) -> bytes:
        return b"data: %b\n\n" % encode(error.openai())

    def _logprobs(self, delta: StreamDelta) -> msgspec.Struct | None:
        raise NotImplementedError

    def _chunk(
        self, index: int, name: bytes, value: Any, logprobs: Any = None, token_ids: list[int] | None = None
    ) -> bytes:
        """New part of a choice."""
        told = b"null" if logprobs is None else encode(logprobs)
        ids = b"" if token_ids is None else b',"token_ids":' + encode(token_ids)
        rest = b',"logprobs":%b,"finish_reason":null%b}]%b' % (told, ids, self._end)
        return b"%b%d%b%b" % (self._start, index, self.new % (name, encode(value)), rest)


class _ChatForm(_Form):
    """The answer of a chat, or its chunks."""

    kind, prefix = "chat.completion.chunk", "chatcmpl"
    name, new, empty = b"content", b',"delta":{"%b":%b}', b',"delta":{}'

    def whole(self, outputs: list[RequestOutput]) -> ChatCompletion:
        (output,) = outputs
        job, told = self._generation.job, {"has_cached": True, "coordinates": self._generation.coordinates}
        return chat_completion(job, self._generation.read(output), self._about, **told)

    def begin(self) -> bytes:
        """The role of each choice; in the first chunk, what else the client should know."""
        if self._generation.is_resumed:
            return b""
        more, chunks = b',"seed":%b' % encode(self._position.seed), b""
        if self._has_ids:
            more += b',"prompt_token_ids":%b' % encode(list(self._generation.requests[0].token_ids))
        for index in range(self._generation.job.num_answers):
            start = b'%b%b,"choices":[{"index":%d' % (self._head, more, index)
            delta = b',"delta":{"role":"assistant","content":""}'
            chunks, more = chunks + self._position.event_id() + start + delta + self._rest, b""
        return chunks

    def _logprobs(self, delta: StreamDelta) -> ChatLogprobs | None:
        return chat_logprobs(delta.logprobs, self._params)


class _CompletionForm(_Form):
    """The answer to prompts, or its chunks."""

    kind, prefix = "text_completion", "cmpl"
    name, new, empty = b"text", b',"%b":%b', b',"text":""'

    def __init__(self, body: CompletionRequest, generation: Generation, position: StreamPosition):
        super().__init__(body, generation, position)
        skips = self._params.skip_special_tokens
        self._lists = [LogprobLists(generation.tokenizer, skips, sent.num_chars) for sent in position.choices]
        for lists, begun in zip(self._lists, generation.begun, strict=False):
            lists.pass_over(begun.token_ids)

    def whole(self, outputs: list[RequestOutput]) -> Completion:
        job, told = self._generation.job, {"has_cached": True, "coordinates": self._generation.coordinates}
        return completion(job, outputs, self._about, self._generation.tokenizer, **told)

    def _logprobs(self, delta: StreamDelta) -> CompletionLogprobs:
        lists = self._lists[delta.index]
        for token, entry in zip(delta.token_ids, delta.logprobs or (), strict=True):
            lists.add(token, entry, self._params.logprobs or 0)
        return lists.take()


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    """Id, type and name are in the first one of a call only."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
