"""Shared by the routes that generate: from a body to its answer, whole or as a stream."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.engine.request import BegunAnswer, StreamDelta
from jaxinfer.openai.bodies import SamplingFields
from jaxinfer.openai.requests import BoundRequest, TextRequest
from jaxinfer.sampling import SamplingParams
from jaxinfer.server.api_error import APIError, refused
from jaxinfer.server.connected import while_connected
from jaxinfer.server.generation import AnswerForm, Generation
from jaxinfer.server.http import EventStream, json_response, lease_for, record_of, work_for
from jaxinfer.server.ids import new_answer_id
from jaxinfer.server.models import Lease, ServedModel
from jaxinfer.server.resume import StreamPosition, begun_answers, request_digest
from jaxinfer.server.sent_tokens import SENT_TOKENS, TELL_TOKENS
from jaxinfer.server.service import Service
from jaxinfer.server.sizes import check_length
from jaxinfer.tool_calls import ToolCallDelta

_MANY_LOGPROBS = 1 << 12  # of an answer: they take some 10 ms
_MAX_SEED = 2**53  # of seeds that the server chooses: every JSON parser keeps them
encode = msgspec.json.Encoder().encode


async def answer(
    request: Request,
    service: Service,
    body: Any,
    read: Callable[[ServedModel], TextRequest],
    make_form: Callable[[Any, Generation, StreamPosition], AnswerForm],
    *,
    is_stream: bool | None = None,
    media_type: str = "text/event-stream",
) -> Response:
    """Answers a body, at once or as a stream, by default as it says.

    Args:
      read: the request of the body, for the model that it names; called when that is loaded. make_form: what writes the
        answer to the body.

    Raises APIError for what cannot be served.
    """
    is_stream = bool(body.stream) if is_stream is None else is_stream
    record_of(request.scope).is_stream = is_stream
    lease = await lease_for(request, service, body)
    try:
        generation, position = await _begin(request, service, lease, body, read, is_stream)
    except BaseException:
        lease.release()
        raise
    form, headers = make_form(body, generation, position), answer_headers(generation.model, position)
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
    read_request: Callable[[ServedModel], TextRequest],
    is_stream: bool,
) -> tuple[Generation, StreamPosition]:
    """A prepared generation, which the caller closes, and where its stream begins: later, where the client resumes
    one."""
    record, model = record_of(request.scope), lease.model

    def read() -> tuple[StreamPosition | None, BoundRequest, str]:
        digest = request_digest(body, model.fingerprint, record.key)
        resumed = _resumed(request, model, body, digest)
        if resumed is not None:
            body.seed = resumed.seed
        job = bind(request, service, body, read_request, model)
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
    resumed = resumed if is_stream else None
    begun = None if record.sent_tokens is None else _begun(model, job, resumed, record.sent_tokens)
    has_front = TELL_TOKENS in request.headers
    tells = service.options.accept_sent_tokens and has_front
    generation = Generation(service, lease, job, record, resumed, begun=begun, tells_tokens=tells, has_front=has_front)
    record.received_seconds = time.perf_counter() - record.start
    try:
        await while_connected(request.receive, generation.prepare())
    except BaseException:
        generation.close()
        raise
    return generation, position


def bind(
    request: Request, service: Service, body: Any, read: Callable[[ServedModel], TextRequest], model: ServedModel
) -> BoundRequest:
    """The request of a body for a model, within the server's limits; without a seed it is given one. Raises APIError,
    RequestError or SamplingParamsError."""
    max_n = service.options.max_n if isinstance(body, SamplingFields) else 1
    _check_sizes(body, model, max_n)
    asked = read(model)
    bound = asked.bind(model.texts, model.answers, _seed)
    service.log_unknown(bound.ignored, record_of(request.scope).route)
    if bound.num_answers > max_n:
        told = f"{bound.num_prompts} prompts times n={bound.params.n} are more than the server's limit of {max_n}"
        raise refused("n", told)
    return bound


def _seed(params: SamplingParams) -> int:
    return 0 if params.is_greedy else secrets.randbelow(_MAX_SEED)


def _check_sizes(body: Any, model: ServedModel, max_n: int = 1) -> None:
    """Raises APIError for more than the model can take, before each of it is looked at."""
    llm, prompt = model.llm, getattr(body, "prompt", None)
    for name in ("messages", "input"):
        if isinstance(items := getattr(body, name, None), list):
            check_length(len(items), "messages" if name == "messages" else "items", llm.max_model_len)
    if isinstance(prompt, list):
        several = any(isinstance(item, (str, list)) for item in prompt)
        if several and len(prompt) > max_n:
            raise refused("n", f"{len(prompt)} prompts are more than the server's limit of {max_n}")
        for ids in prompt if several else [prompt]:
            if isinstance(ids, list) and getattr(body, "truncate_prompt_tokens", None) is None:
                check_length(len(ids), "token ids of the prompt", llm.max_model_len)
    num_allowed, vocab_size = len(getattr(body, "allowed_token_ids", None) or ()), model.texts.client.vocab_size
    if num_allowed > vocab_size:
        raise refused("allowed_token_ids", f"allowed_token_ids has {num_allowed:,} ids, the vocabulary {vocab_size:,}")


def _resumed(request: Request, model: ServedModel, body: Any, digest: str) -> StreamPosition | None:
    """The position that the client has reached, if it sends one. Raises APIError if the answer cannot be resumed."""
    text = request.headers.get("last-event-id") or request.headers.get("x-jaxinfer-resume")
    if not text:
        return None
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


def _begun(
    model: ServedModel,
    job: BoundRequest,
    resumed: StreamPosition | None,
    sent: Sequence[tuple[int, ...]],
) -> list[BegunAnswer]:
    """The beginnings of a stream's choices. Raises APIError where it cannot go on after them."""
    if resumed is None:
        raise refused(SENT_TOKENS, "tokens that were sent need the event's id, Last-Event-ID, and a stream")
    if job.asked.num_kept is not None:
        raise refused(SENT_TOKENS, "the request wants no tokens of its answer, so none were sent")
    if not _is_exact(model):
        told = (
            "in this dtype a prompt's tokens are not computed as an answer's are: start the server with "
            "--deterministic or --dtype float32, or resume the stream without the tokens"
        )
        raise APIError(409, told, param=SENT_TOKENS, code="not_resumable")
    return begun_answers(resumed, sent)


def _is_exact(model: ServedModel) -> bool:
    spec = model.llm.engine.spec
    return spec.is_deterministic or spec.dtype.name == "float32"


def answer_headers(model: ServedModel, position: StreamPosition) -> dict[str, str]:
    """Headers of every answer: the seed that repeats it, and whether its stream can be resumed: `checked` means that it
    may turn out to differ, which the server then tells."""
    resumable = "no" if not model.is_resumable else "yes" if _is_exact(model) else "checked"
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


def continuing(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Variables of the chat template by which an answer that the client has begun is continued."""
    continues = turns[-1]["role"] == "assistant" and "tool_calls" not in turns[-1]
    return {"add_generation_prompt": not continues, "continue_final_message": continues}


def reasoning_switch(wanted: bool, model: ServedModel, name: str, about: str) -> dict[str, Any]:
    """Variables of the chat template that switch reasoning. Raises APIError, with the field, where it has none."""
    if "enable_thinking" in model.template:
        return {"enable_thinking": wanted}
    if wanted != (model.tags is not None):
        told = "has no reasoning" if wanted else "cannot leave its reasoning out"
        raise refused(name, f"{about} is not supported: the model {told}")
    return {}


def named_event(name: str, /, **fields: Any) -> bytes:
    """An event of Anthropic's or of the responses API, whose name is its type too."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode({"type": name, **fields}))


def with_position(
    events: Sequence[bytes],
    position: StreamPosition,
    delta: StreamDelta,
    reasoning: str = "",
    call: ToolCallDelta | None = None,
) -> bytes:
    """Events of what is new of an answer, which a client has all or none of: the last has their id."""
    position.count(delta, reasoning, call)
    return b"".join((*events[:-1], position.event_id(), events[-1])) if events else b""
