"""/v1/chat/completions."""

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.engine.request import RequestOutput, StreamDelta
from jaxinfer.openai.answers import ChatCompletion
from jaxinfer.openai.bodies import ChatRequest
from jaxinfer.openai.reader import read_chat
from jaxinfer.openai.requests import BoundRequest
from jaxinfer.openai.writer import chat_completion, chat_logprobs
from jaxinfer.server.answering import OpenAIForm, answer
from jaxinfer.server.chunks import ChatChunks
from jaxinfer.server.generation import Generation
from jaxinfer.server.http import read_body
from jaxinfer.server.models import ServedModel
from jaxinfer.server.params import bind, check_sizes
from jaxinfer.server.resume import StreamPosition
from jaxinfer.server.service import Service
from jaxinfer.tool_calls import ToolCallDelta, text_of


async def chat_completions(request: Request, service: Service) -> Response:
    """Answers a conversation, at once or as a stream."""
    service.check_accepts()
    body = await read_body(request, ChatRequest, service)

    def read(model: ServedModel) -> BoundRequest:
        check_sizes(body, model)
        asked = read_chat(body, ignore_unknown=service.options.ignore_unknown_fields)
        return bind(asked, model, service.options.max_n)

    return await answer(request, service, body, read, partial(_ChatForm, body), can_resume=True)


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    """Id, type and name are in the first one of a call only."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


class _ChatForm(OpenAIForm):
    """The answer of a chat, or its chunks."""

    def __init__(self, body: ChatRequest, generation: Generation, position: StreamPosition):
        super().__init__(body, generation, position, "chatcmpl")
        self._chunks = ChatChunks("chat.completion.chunk", self._about, self._has_usage)

    def whole(self, outputs: list[RequestOutput]) -> ChatCompletion:
        (output,) = outputs
        return chat_completion(self._generation.job, self._generation.read(output), self._about, has_cached=True)

    def begin(self) -> bytes:
        if self._generation.is_resumed:
            return b""
        fields: dict[str, Any] = {"seed": self._position.seed}
        if self._has_ids:
            fields["prompt_token_ids"] = list(self._generation.requests[0].token_ids)
        found = b""
        for index in range(self._generation.job.num_answers):
            found += self._position.event_id() + self._chunks.first(index, fields)
            fields = {}
        return found

    def add(self, delta: StreamDelta, reasoning: str = "", call: ToolCallDelta | None = None) -> bytes:
        position, chunks, index, text = self._position, self._chunks, delta.index, delta.text
        name, found = "content", b""
        if call is not None:  # alone in its delta
            found = position.advance(index, text_of(call), 0) + chunks.add(index, "tool_calls", [_call_delta(call)])
        elif reasoning:
            if text:  # the closing tag is within: what belongs to both goes with the text
                found = position.advance(index, reasoning, 0) + chunks.add(index, "reasoning_content", reasoning)
            else:
                name, text = "reasoning_content", reasoning
        if delta.logprobs or self._has_ids:
            logprobs = chat_logprobs(delta.logprobs, self._params)
            ids = list(delta.token_ids) if self._has_ids else None
            if text or logprobs or ids:
                event = chunks.add(index, name, text, logprobs, ids)
                found += position.advance(index, text, len(delta.token_ids)) + event
        elif text:
            found += position.advance(index, text, len(delta.token_ids)) + chunks.add(index, name, text)
        elif delta.token_ids:
            position.advance(index, "", len(delta.token_ids))
        if delta.finish_reason is not None:
            found += position.end(index) + chunks.end(index, delta.finish_reason, delta.stop_reason)
        return found
