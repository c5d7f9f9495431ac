"""/v1/completions/render and /v1/chat/completions/render: the token ids of a request that is not run, as vLLM's.

Routers that index cached blocks ask for them, to find the server that has most of a prompt.
"""

from collections.abc import Callable
from dataclasses import fields

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.engine.request import Request as PreparedRequest
from jaxinfer.openai.answers import Rendered
from jaxinfer.openai.bodies import ChatRequest, CompletionRequest
from jaxinfer.openai.reader import read_chat, read_completion
from jaxinfer.openai.requests import TextRequest
from jaxinfer.sampling import SamplingParams
from jaxinfer.server.answering import bind
from jaxinfer.server.errors import client_errors
from jaxinfer.server.http import in_thread, json_response, read_body, record_of, using
from jaxinfer.server.ids import new_answer_id
from jaxinfer.server.models import ServedModel
from jaxinfer.server.service import Service

# Grammars have no form in JSON that is everywhere the same.
_PARAMS = tuple(param.name for param in fields(SamplingParams) if param.name != "structured")


async def render_chat(request: Request, service: Service) -> Response:
    """The token ids of a conversation, as it would be answered."""
    body = await read_body(request, ChatRequest, service)
    ignores = service.options.ignore_unknown_fields
    (rendered,) = await _render(request, service, body, lambda: read_chat(body, ignore_unknown=ignores), "chatcmpl")
    return json_response(rendered)


async def render_completions(request: Request, service: Service) -> Response:
    """The token ids of each prompt, as it would be continued."""
    body = await read_body(request, CompletionRequest, service)
    return json_response(await _render(request, service, body, lambda: read_completion(body), "cmpl"))


async def _render(
    request: Request,
    service: Service,
    body: ChatRequest | CompletionRequest,
    read: Callable[[], TextRequest],
    prefix: str,
) -> list[Rendered]:
    """Raises APIError for what could not be answered."""
    async with using(request, service, body) as model:

        def render() -> list[Rendered]:
            job, rendered = bind(request, service, body, lambda _: read(), model), []
            for number, (prompt, params) in enumerate(job.inputs(model.texts, model.answers)):
                try:
                    keeps = job.asked.num_kept != 0
                    prepared = model.llm.prepare(prompt, params, what=job.name_of(number), keeps_answer=keeps)
                except (ValueError, TypeError) as error:
                    raise job.refused(error, number) from error
                rendered.append(_rendered(body, job.asked, prepared, model, f"{prefix}-{new_answer_id()}"))
            return rendered

        with client_errors():
            return await in_thread(record_of(request.scope), render)


def _rendered(
    body: ChatRequest | CompletionRequest, asked: TextRequest, prepared: PreparedRequest, model: ServedModel, name: str
) -> Rendered:
    params = {param: getattr(prepared.params, param) for param in _PARAMS}
    return Rendered(
        request_id=name,
        token_ids=list(prepared.token_ids),
        # A seed that the server would choose is chosen again for each answer.
        sampling_params={**params, "seed": body.seed, "max_tokens": prepared.max_tokens},
        model=model.name,
        stream=bool(body.stream),
        cache_salt=asked.cache_salt or None,
        priority=asked.priority,
    )
