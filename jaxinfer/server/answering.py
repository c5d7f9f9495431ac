"""Shared by the routes that generate: from a body to its answer, whole or as a stream."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.engine.request import RequestOutput
from jaxinfer.openai.bodies import SamplingFields
from jaxinfer.openai.requests import BoundRequest
from jaxinfer.openai.writer import usage
from jaxinfer.server.chunks import DONE
from jaxinfer.server.errors import APIError, refused
from jaxinfer.server.generation import Generation, StreamFormat
from jaxinfer.server.http import EventStream, json_response, lease_for, record_of, while_connected, work_for
from jaxinfer.server.models import Lease, ServedModel
from jaxinfer.server.resume import StreamPosition, new_answer_id, request_digest
from jaxinfer.server.service import Service

_MANY_LOGPROBS = 1 << 12  # of an answer: they take some 10 ms


class AnswerForm(StreamFormat, Protocol):
    """Writes one answer in a route's form, as a whole or as a stream of events."""

    def whole(self, outputs: list[RequestOutput]) -> Any:
        """The whole answer, as JSON data or a Struct."""
        ...

    def error_event(self, error: APIError) -> bytes:
        """The last event of a stream that fails."""
        ...


async def answer(
    request: Request,
    service: Service,
    body: Any,
    read: Callable[[ServedModel], BoundRequest],
    make_form: Callable[[Generation, StreamPosition], AnswerForm],
    *,
    is_stream: bool | None = None,
    media_type: str = "text/event-stream",
    echo: bool = False,
    can_resume: bool = False,
) -> Response:
    """Answers a body, at once or as a stream, by default as it says.

    Args:
      read: the request of the body, for the model that it names; called when that is loaded. make_form: what writes the
        answer. echo: whether texts begin with the prompt's. can_resume: whether its streams can be resumed.

    Raises APIError for what cannot be served.
    """
    is_stream = bool(body.stream) if is_stream is None else is_stream
    record_of(request.scope).is_stream = is_stream
    lease = await lease_for(request, service, body)
    try:
        generation, position = await _begin(request, service, lease, body, read, echo, can_resume)
    except BaseException:
        lease.release()
        raise
    form, headers = make_form(generation, position), answer_headers(generation.model, position)
    if is_stream:
        timeout, events = service.options.send_timeout, generation.events(form)
        return EventStream(events, generation.close, form.error_event, timeout, headers, media_type=media_type)
    try:
        outputs = await while_connected(request.receive, generation.run())
    finally:
        generation.close()
    return await _respond(request, generation, lambda: form.whole(outputs), headers)


async def _begin(
    request: Request,
    service: Service,
    lease: Lease,
    body: Any,
    read_request: Callable[[ServedModel], BoundRequest],
    echo: bool,
    can_resume: bool,
) -> tuple[Generation, StreamPosition]:
    """A prepared generation, which the caller closes, and where its stream begins: later, where the client resumes
    one."""
    record, model = record_of(request.scope), lease.model

    def read() -> tuple[StreamPosition | None, BoundRequest, str]:
        digest = request_digest(body, model.fingerprint)
        resumed = _resumed(request, model, body, digest, can_resume)
        if resumed is not None:
            body.seed = resumed.seed
        job = read_request(model)
        if service.options.log_prompts:
            record.prompt = repr(job.asked.messages or job.asked.prompts)[:10_000]
        job.num_estimated  # noqa: B018 (computed once, here)
        return resumed, job, digest

    resumed, job, digest = await work_for(record, read)
    seed = job.params.seed or 0
    record.seed, record.params = seed, job.params
    if resumed is not None and len(resumed.choices) != job.num_answers:
        raise refused("Last-Event-ID", "the event's id is of a request with another number of answers")
    position = resumed or StreamPosition(new_answer_id(), digest, seed, job.num_answers)
    resumed = resumed if body.stream else None
    generation = Generation(service, lease, job, record, resumed=resumed, echo=echo)
    record.received_seconds = time.perf_counter() - record.start
    try:
        await while_connected(request.receive, generation.prepare())
    except BaseException:
        generation.close()
        raise
    return generation, position


def _resumed(request: Request, model: ServedModel, body: Any, digest: str, can_resume: bool) -> StreamPosition | None:
    """Where the client was, if it says so. Raises APIError if the answer cannot be resumed."""
    text = request.headers.get("last-event-id") or request.headers.get("x-jaxinfer-resume")
    if not text:
        return None
    if not can_resume:
        raise refused("Last-Event-ID", "streams of this route cannot be resumed, those of /v1/chat/completions can")
    if not model.is_resumable:
        raise APIError(
            409, "acceptance=maximal promises no equal answers, so none can be resumed", code="not_resumable"
        )
    position = StreamPosition.read(text)
    if body.seed not in (None, position.seed):
        raise refused("seed", f"seed={body.seed}, but the stream to be resumed has seed {position.seed}")
    if position.digest != digest:
        raise APIError(
            409,
            "the event's id is of another request, or of another model: send the same body to a server with the same "
            "weights and options, or start anew",
            code="resume_differs",
        )
    return position


def answer_headers(model: ServedModel, position: StreamPosition) -> dict[str, str]:
    """Headers of every answer: the seed that repeats it, and whether its stream can be resumed: `checked` means that it
    may turn out to differ, which the server then tells."""
    spec = model.llm.engine.spec
    is_exact = spec.is_deterministic or spec.dtype.name == "float32"
    resumable = "no" if not model.is_resumable else "yes" if is_exact else "checked"
    return {"x-jaxinfer-seed": str(position.seed), "x-jaxinfer-resumable": resumable}


async def _respond(
    request: Request, generation: Generation, make: Callable[[], Any], headers: dict[str, str]
) -> Response:
    """A whole answer; where log-probabilities make it long, it is not put together in the event loop."""
    record, params = record_of(request.scope), generation.job.params
    num_prompt = 0 if params.prompt_logprobs is None else record.num_prompt * (params.prompt_logprobs + 1)
    num_output = 0 if params.logprobs is None else record.num_output * (params.logprobs + 1)
    record.is_large |= num_prompt + num_output > _MANY_LOGPROBS
    return await work_for(record, lambda: json_response(make(), headers))


class OpenAIForm:
    """Base of the forms of chat and completions: their streams end with the usage, where it is asked for."""

    _chunks: Any

    def __init__(self, body: SamplingFields, generation: Generation, position: StreamPosition, prefix: str):
        self._generation, self._position = generation, position
        self._params, self._has_ids = generation.job.params, bool(body.return_token_ids)
        self._has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._about = generation.about(prefix, position)

    def finish(self) -> bytes:
        counted = usage(self._generation.outputs, has_cached=True)
        return (self._chunks.usage(counted) if self._has_usage else b"") + DONE

    def error_event(self, error: APIError) -> bytes:
        return b"data: %b\n\n" % msgspec.json.encode(error.openai())
