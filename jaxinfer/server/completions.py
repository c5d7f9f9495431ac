"""/v1/completions."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.batch.responses import LogprobLists, prompt_entries
from jaxinfer.engine.request import CompletionOutput, RequestOutput, StreamDelta
from jaxinfer.server.answering import answer_headers, begin, respond, stream_error, usage_of, wants_usage
from jaxinfer.server.chunks import DONE, CompletionChunks
from jaxinfer.server.generation import Generation
from jaxinfer.server.http import EventStream, read_body, while_connected
from jaxinfer.server.params import completion_job
from jaxinfer.server.resume import StreamPosition
from jaxinfer.server.service import Service
from jaxinfer.server.types import CompletionRequest

KIND = "text_completion"


async def completions(request: Request, service: Service) -> Response:
    """Continues prompts, at once or as a stream; choice index = number of the prompt times n + number of the answer."""
    service.check_accepts()
    body = await read_body(request, CompletionRequest, service)
    generation, position = await begin(
        request,
        service,
        body,
        lambda model: completion_job(body, model.llm, service.options.max_n),
        echo=bool(body.echo),
    )
    headers = answer_headers(generation.model, position)
    if body.stream:
        events = generation.events(_CompletionEvents(body, generation, position))
        return EventStream(events, generation.close, stream_error, service.options.send_timeout, headers)
    try:
        outputs = await while_connected(request.receive, generation.run())
    finally:
        generation.close()

    def make() -> dict[str, Any]:
        return {
            "id": f"cmpl-{position.answer_id}",
            "object": KIND,
            "created": position.created,
            "model": generation.model.name,
            "system_fingerprint": generation.model.fingerprint,
            "choices": [
                _choice(number, output, answer, body, generation)
                for number, output in enumerate(outputs)
                for answer in output.outputs
            ],
            "usage": usage_of(outputs),
            "seed": position.seed,
        }

    return await respond(request, generation, make, headers)


def _choice(
    number: int, output: RequestOutput, answer: CompletionOutput, body: CompletionRequest, generation: Generation
) -> dict[str, Any]:
    params = generation.job.params
    logprobs = None
    if answer.logprobs is not None:
        lists = LogprobLists(generation.tokenizer, params.skip_special_tokens)
        if body.echo:
            lists.add_prompt(generation.prompt_text(number), output, params)
        for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
            lists.add(token, entry, params.logprobs or 0)
        logprobs = lists.take()
    choice: dict[str, Any] = {
        "index": number * params.n + answer.index,
        "text": (generation.prompt_text(number) if body.echo else "") + answer.text,
        "logprobs": logprobs,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }
    if body.return_token_ids:
        choice |= {"token_ids": answer.token_ids, "prompt_token_ids": output.prompt_token_ids}
    if body.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_entries(output, params)
    return choice


class _CompletionEvents:
    """The chunks of streamed completions."""

    def __init__(self, body: CompletionRequest, generation: Generation, position: StreamPosition):
        self._generation, self._position, self._has_usage = generation, position, wants_usage(body)
        self._params, self._has_ids = generation.job.params, bool(body.return_token_ids)
        skips = self._params.skip_special_tokens
        self._lists = [LogprobLists(generation.tokenizer, skips, one.num_chars) for one in position.choices]
        answer_id, model = f"cmpl-{position.answer_id}", generation.model
        self._chunks = CompletionChunks(
            KIND, answer_id, position.created, model.name, model.fingerprint, self._has_usage
        )

    def begin(self) -> bytes:
        return b""

    def add(self, delta: StreamDelta, reasoning: str = "", call: object = None) -> bytes:
        position, chunks, index, text, found = self._position, self._chunks, delta.index, delta.text, b""
        if delta.logprobs or self._has_ids:
            logprobs, ids = self._logprobs(delta), list(delta.token_ids) if self._has_ids else None
            if text or logprobs or ids:
                event = chunks.add(index, text, logprobs, ids)
                found = position.advance(index, text, len(delta.token_ids)) + event
        elif text:
            found = position.advance(index, text, len(delta.token_ids)) + chunks.add(index, text)
        elif delta.token_ids:
            position.advance(index, "", len(delta.token_ids))
        if delta.finish_reason is not None:
            found += position.end(index) + chunks.end(index, delta.finish_reason, delta.stop_reason)
        return found

    def _logprobs(self, delta: StreamDelta) -> dict[str, Any] | None:
        if not delta.logprobs:
            return None
        lists = self._lists[delta.index]
        for token, entry in zip(delta.token_ids, delta.logprobs, strict=True):
            lists.add(token, entry, self._params.logprobs or 0)
        return lists.take()

    def finish(self) -> bytes:
        return (self._chunks.usage(usage_of(self._generation.outputs)) if self._has_usage else b"") + DONE
