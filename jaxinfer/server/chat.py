"""/v1/chat/completions."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.batch.responses import call_entries, prompt_entries, token_entry
from jaxinfer.engine.request import CompletionOutput, StreamDelta, TokenLogprob
from jaxinfer.server.answering import answer_headers, begin, respond, stream_error, usage_of, wants_usage
from jaxinfer.server.chunks import DONE, ChatChunks
from jaxinfer.server.errors import refused
from jaxinfer.server.generation import Generation
from jaxinfer.server.http import EventStream, read_body, while_connected
from jaxinfer.server.params import chat_job
from jaxinfer.server.resume import StreamPosition
from jaxinfer.server.service import Service
from jaxinfer.server.types import ChatRequest
from jaxinfer.tool_calls import ToolCallDelta, text_of

KIND = "chat.completion"


async def chat_completions(request: Request, service: Service) -> Response:
    """Answers a conversation, at once or as a stream."""
    service.check_accepts()
    body = await read_body(request, ChatRequest, service)
    if body.stream and body.prompt_logprobs is not None:
        raise refused("prompt_logprobs", "log-probabilities of the prompt cannot be streamed")
    generation, position = await begin(
        request,
        service,
        body,
        lambda model: chat_job(body, model.llm, model.answers, service.options.max_n),
        has_reasoning=True,
    )
    headers = answer_headers(generation.model, position)
    if body.stream:
        events = generation.events(_ChatEvents(body, generation, position))
        return EventStream(events, generation.close, stream_error, service.options.send_timeout, headers)
    try:
        outputs = await while_connected(request.receive, generation.run())
    finally:
        generation.close()
    (output,) = outputs

    def make() -> dict[str, Any]:
        answer: dict[str, Any] = {
            "id": f"chatcmpl-{position.answer_id}",
            "object": KIND,
            "created": position.created,
            "model": generation.model.name,
            "system_fingerprint": generation.model.fingerprint,
            "choices": [_choice(one, body, generation) for one in output.outputs],
            "usage": usage_of(outputs),
            "seed": position.seed,
        }
        if body.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        if output.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_entries(output, generation.job.params)
        return answer

    return await respond(request, generation, make, headers)


def _choice(answer: CompletionOutput, body: ChatRequest, generation: Generation) -> dict[str, Any]:
    whole = generation.read(0, answer)
    content = None if whole.calls and not whole.content else whole.content
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if whole.reasoning:
        message["reasoning_content"] = whole.reasoning
    if whole.calls:
        message["tool_calls"] = call_entries(whole.calls)
    logprobs = _logprobs(answer.logprobs, generation)
    choice: dict[str, Any] = {
        "index": answer.index,
        "message": message,
        "logprobs": None if logprobs is None else {"content": logprobs, "refusal": None},
        "finish_reason": whole.finish_reason,
        "stop_reason": answer.stop_reason,
    }
    if body.return_token_ids:
        choice["token_ids"] = answer.token_ids
    return choice


def _logprobs(entries: list[TokenLogprob] | None, generation: Generation) -> list[dict[str, Any]] | None:
    if entries is None:
        return None
    return [token_entry(entry, generation.job.params.logprobs or 0) for entry in entries]


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    """Id, type and name are in the first one of a call only."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


class _ChatEvents:
    """The chunks of a streamed chat."""

    def __init__(self, body: ChatRequest, generation: Generation, position: StreamPosition):
        self._generation, self._position, self._has_usage = generation, position, wants_usage(body)
        self._has_ids = bool(body.return_token_ids)
        answer_id, model = f"chatcmpl-{position.answer_id}", generation.model
        self._chunks = ChatChunks(
            f"{KIND}.chunk", answer_id, position.created, model.name, model.fingerprint, self._has_usage
        )

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
            logprobs = _logprobs(delta.logprobs, self._generation)
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

    def finish(self) -> bytes:
        return (self._chunks.usage(usage_of(self._generation.outputs)) if self._has_usage else b"") + DONE
