"""What the routes that generate share: from a body to a prepared generation, and what all answers say of it."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.engine.request import RequestOutput
from jaxinfer.openai.answers import Answer, Usage
from jaxinfer.openai.requests import BoundRequest
from jaxinfer.openai.writer import usage
from jaxinfer.server.errors import APIError, refused
from jaxinfer.server.generation import Generation
from jaxinfer.server.http import json_response, lease_for, record_of, while_connected, work_for
from jaxinfer.server.models import Lease, ServedModel
from jaxinfer.server.resume import StreamPosition, new_answer_id, request_digest
from jaxinfer.server.service import Service

_MANY_LOGPROBS = 1 << 12  # of an answer: they take some 10 ms


async def begin(
    request: Request,
    service: Service,
    body: Any,
    make_job: Callable[[ServedModel], BoundRequest],
    *,
    echo: bool = False,
    can_resume: bool = True,
) -> tuple[Generation, StreamPosition]:
    """A prepared generation for a body, and where its stream begins: later, where the client resumes one.

    Args:
      make_job: from the model that the body names; called when that is loaded.

    Raises APIError for what cannot be served; the caller closes the generation.
    """
    record = record_of(request.scope)
    record.is_stream = bool(body.stream)
    lease = await lease_for(request, service, body)
    try:
        return await _begin(request, service, lease, body, make_job, echo, can_resume)
    except BaseException:
        lease.release()
        raise


async def _begin(
    request: Request,
    service: Service,
    lease: Lease,
    body: Any,
    make_job: Callable[[ServedModel], BoundRequest],
    echo: bool,
    can_resume: bool,
) -> tuple[Generation, StreamPosition]:
    record, model = record_of(request.scope), lease.model

    def read() -> tuple[StreamPosition | None, BoundRequest, str]:
        digest = request_digest(body, model.fingerprint)
        resumed = _resumed(request, model, body, digest, can_resume)
        if resumed is not None:
            body.seed = resumed.seed
        job = make_job(model)
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


async def respond(
    request: Request, generation: Generation, make: Callable[[], Answer], headers: dict[str, str]
) -> Response:
    """A whole answer; where log-probabilities make it long, it is not put together in the event loop."""
    record, params = record_of(request.scope), generation.job.params
    num_prompt = 0 if params.prompt_logprobs is None else record.num_prompt * (params.prompt_logprobs + 1)
    num_output = 0 if params.logprobs is None else record.num_output * (params.logprobs + 1)
    record.is_large |= num_prompt + num_output > _MANY_LOGPROBS
    return await work_for(record, lambda: json_response(make(), headers))


def usage_of(outputs: Sequence[RequestOutput]) -> Usage:
    """Numbers of tokens in OpenAI's form."""
    return usage(outputs, has_cached=True)


def wants_usage(body: Any) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def stream_error(error: APIError) -> bytes:
    """The error event of an OpenAI stream."""
    return b"data: %b\n\n" % msgspec.json.encode(error.openai())
