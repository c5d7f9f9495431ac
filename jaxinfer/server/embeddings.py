"""/v1/embeddings, /v1/score and /v1/rerank, in the forms of OpenAI, vLLM, Jina and Cohere."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.api.embedding import best_first
from jaxinfer.engine.request import Prompt, RequestOptions, RequestOutput
from jaxinfer.engine.results import RequestJob, VectorJob
from jaxinfer.openai import answers, writer
from jaxinfer.openai.bodies import EmbeddingsRequest
from jaxinfer.openai.reader import check_number, options_of, read_inputs, truncates
from jaxinfer.openai.requests import num_estimated
from jaxinfer.server.api_error import APIError, refused, unavailable
from jaxinfer.server.connected import while_connected
from jaxinfer.server.errors import client_errors
from jaxinfer.server.http import in_thread, json_response, read_body, record_of, using
from jaxinfer.server.models import ServedModel
from jaxinfer.server.service import Service
from jaxinfer.server.types import RerankRequest, ScoreRequest

AnyJob = TypeVar("AnyJob", bound=RequestJob)


async def embeddings(request: Request, service: Service) -> Response:
    """Vectors of texts, as the checkpoint's files of sentence-transformers make them."""
    body = await read_body(request, EmbeddingsRequest, service)
    texts, given = read_inputs(body), options_of(body)

    async with using(request, service, body) as model:
        make = partial(model.llm.embedder.embed, texts, **given, what="input")
        vectors, num_tokens = await run_vectors(request, service, model, texts, make, "input", body.priority)

    def answer() -> Response:
        return json_response(writer.embeddings(vectors, num_tokens, body, model.name))

    return await in_thread(record_of(request.scope), answer)


async def score(request: Request, service: Service) -> Response:
    """How relevant texts are for others: a reranker's probability, or the cosine of vectors."""
    body = await read_body(request, ScoreRequest, service)
    first, second = ([texts] if isinstance(texts, str) else texts for texts in (body.text_1, body.text_2))
    if len(first) not in (1, len(second)):
        raise refused("text_2", f"{len(first)} texts in text_1 and {len(second)} in text_2 do not pair up")
    name, scores, num_tokens = await _relevance(request, service, body, first, second, "text_2")
    return json_response(
        answers.Scores(
            id=f"score-{secrets.token_hex(12)}",
            object="list",
            created=int(time.time()),
            model=name,
            data=[answers.ScoreOfPair(index=i, object="score", score=float(value)) for i, value in enumerate(scores)],
            usage=answers.TokenCounts(prompt_tokens=num_tokens, total_tokens=num_tokens),
        )
    )


async def rerank(request: Request, service: Service) -> Response:
    """Documents by their relevance for a query, the most relevant first."""
    body = await read_body(request, RerankRequest, service)
    documents = [_document(document, number) for number, document in enumerate(body.documents)]
    name, scores, num_tokens = await _relevance(request, service, body, [body.query], documents, "documents")
    has_texts = body.return_documents is not False
    results = [
        answers.RankedDocument(
            index=index,
            relevance_score=value,
            document=answers.DocumentText(text=documents[index]) if has_texts else UNSET,
        )
        for index, value in best_first(scores, body.top_n)
    ]
    usage = answers.TokenCounts(prompt_tokens=num_tokens, total_tokens=num_tokens)
    return json_response(
        answers.Reranked(id=f"rerank-{secrets.token_hex(12)}", model=name, usage=usage, results=results)
    )


async def _relevance(
    request: Request, service: Service, body: Any, queries: list[str], documents: list[str], param: str
) -> tuple[str, np.ndarray, int]:
    """The model's name, the scores, and the tokens that they took."""
    if not documents:
        raise refused(param, f"{param} is empty: it needs at least 1 text")
    async with using(request, service, body) as model:
        options: dict[str, Any] = {"instruction": body.instruction, "truncate": truncates(body)}
        make = partial(model.llm.embedder.relevance, queries, documents, **options)
        texts = [*queries, *documents]
        return model.name, *await run_vectors(request, service, model, texts, make, param, body.priority)


async def run_vectors(
    request: Request,
    service: Service,
    model: ServedModel,
    texts: Sequence[Prompt],
    make: Callable[..., VectorJob],
    param: str,
    priority: int | None = None,
) -> tuple[np.ndarray, int]:
    """The result of the job that `make(options=...)` returns, in its turn, and how many tokens it took. Raises APIError
    for what cannot be served."""
    job, outputs = await run_requests(request, service, model, texts, make, param, priority)
    try:
        return await in_thread(record_of(request.scope), lambda: job.result(outputs)), job.num_tokens
    except FloatingPointError as error:
        raise APIError(500, str(error), code="invalid_logits") from None


async def run_requests(
    request: Request,
    service: Service,
    model: ServedModel,
    texts: Sequence[Prompt],
    make: Callable[..., AnyJob],
    param: str,
    priority: int | None = None,
    num_answered: int = 0,
) -> tuple[AnyJob, list[RequestOutput]]:
    """The job that `make(options=...)` returns, and the outputs of its requests, run in its turn. `num_answered`:
    tokens of the answers at most. Raises APIError for what cannot be served."""
    check_number(texts, param)
    record, place = record_of(request.scope), object()
    estimate = num_estimated(texts) + num_answered
    num_answers = max(min(len(texts), model.admission.capacity), 1)
    start = time.perf_counter()
    service.generations.add(place)
    try:
        with model.admission.enter(record.key, num_answers, estimate, priority or 0, model.adapter) as ticket:
            salted = RequestOptions(cache_salt=service.salt(record.key, ""), adapter=model.adapter)
            with client_errors(param):
                job = await in_thread(record, lambda: make(options=salted))
            service.name_prefixes(job.requests, record.key, "", model)
            record.num_prompt = job.num_tokens
            await while_connected(request.receive, ticket.turn())
            record.queued_seconds = time.perf_counter() - start
            requests = [replace(text, options=replace(text.options, priority=ticket.rank)) for text in job.requests]
            outputs = await while_connected(request.receive, model.engine.run_job(replace(job, requests=requests)))
            if any(output.outputs[0].finish_reason == "abort" for output in outputs):
                raise unavailable("the server is going away", 5)
            record.end(outputs)
            return job, outputs
    finally:
        service.generations.discard(place)


def _document(given: str | dict[str, Any], number: int) -> str:
    text = given.get("text") if isinstance(given, dict) else given
    if not isinstance(text, str):
        raise refused("documents", f"documents[{number}] must be a text or an object with one, got {given!r:.60}")
    return text
