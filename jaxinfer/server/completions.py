"""/v1/completions."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.engine.request import RequestOutput, StreamDelta
from jaxinfer.openai.answers import Completion, CompletionLogprobs
from jaxinfer.openai.bodies import CompletionRequest
from jaxinfer.openai.reader import read_completion
from jaxinfer.openai.requests import BoundRequest
from jaxinfer.openai.writer import LogprobLists, completion
from jaxinfer.server.answering import OpenAIForm, answer
from jaxinfer.server.chunks import CompletionChunks
from jaxinfer.server.generation import Generation
from jaxinfer.server.http import read_body
from jaxinfer.server.models import ServedModel
from jaxinfer.server.params import bind, check_sizes
from jaxinfer.server.resume import StreamPosition
from jaxinfer.server.service import Service


async def completions(request: Request, service: Service) -> Response:
    """Continues prompts, at once or as a stream; choice index = number of the prompt times n + number of the answer."""
    service.check_accepts()
    body = await read_body(request, CompletionRequest, service)

    def read(model: ServedModel) -> BoundRequest:
        check_sizes(body, model, service.options.max_n)
        return bind(read_completion(body), model, service.options.max_n)

    return await answer(
        request, service, body, read, partial(_CompletionForm, body), echo=bool(body.echo), can_resume=True
    )


class _CompletionForm(OpenAIForm):
    """The answer to prompts, or its chunks."""

    def __init__(self, body: CompletionRequest, generation: Generation, position: StreamPosition):
        super().__init__(body, generation, position, "cmpl")
        self._chunks = CompletionChunks("text_completion", self._about, self._has_usage)
        skips = self._params.skip_special_tokens
        self._lists = [LogprobLists(generation.tokenizer, skips, one.num_chars) for one in position.choices]

    def whole(self, outputs: list[RequestOutput]) -> Completion:
        return completion(self._generation.job, outputs, self._about, self._generation.tokenizer, has_cached=True)

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

    def _logprobs(self, delta: StreamDelta) -> CompletionLogprobs | None:
        if not delta.logprobs:
            return None
        lists = self._lists[delta.index]
        for token, entry in zip(delta.token_ids, delta.logprobs, strict=True):
            lists.add(token, entry, self._params.logprobs or 0)
        return lists.take()
