"""/tokenize, /detokenize and /tokenizer_info."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.openai.errors import RequestError
from jaxinfer.openai.reader import template_kwargs
from jaxinfer.openai.requests import TextRequest
from jaxinfer.server.answering import bind
from jaxinfer.server.api_error import APIError
from jaxinfer.server.errors import client_errors
from jaxinfer.server.http import in_thread, json_response, read_body, record_of, using
from jaxinfer.server.models import ServedModel
from jaxinfer.server.service import Service
from jaxinfer.server.types import DetokenizeRequest, TokenizeRequest


async def tokenize(request: Request, service: Service) -> Response:
    """Token ids of a prompt, or of messages as the chat template renders them."""
    body = await read_body(request, TokenizeRequest, service)
    async with using(request, service, body) as model:
        llm = model.llm

        def read() -> dict[str, Any]:
            ids = _ids(request, service, body, model)
            answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": llm.max_model_len}
            if body.return_token_strs:
                tokenizer = model.texts.client.need_tokenizer("return_token_strs")
                answer["token_strs"] = [tokenizer.id_to_token(token_id) for token_id in ids]
            return answer

        with client_errors("prompt" if body.messages is None else "messages"):
            return json_response(await in_thread(record_of(request.scope), read))


def _ids(request: Request, service: Service, body: TokenizeRequest, model: ServedModel) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give exactly one of prompt and messages", "prompt")
    if body.messages is None:
        return model.texts.client.tokenize(body.prompt or "", body.add_special_tokens is not False)[1]
    ignores, kwargs = service.options.ignore_unknown_fields, template_kwargs(body)
    asked = TextRequest(messages=body.messages, tools=body.tools, ignore_unknown=ignores, template_kwargs=kwargs)
    (ids,) = bind(request, service, body, lambda model: asked, model).prompts(model.texts)
    return list(ids)  # type: ignore[arg-type]


async def detokenize(request: Request, service: Service) -> Response:
    """The text of token ids."""
    body = await read_body(request, DetokenizeRequest, service)
    async with using(request, service, body) as model:
        with client_errors("tokens"):
            tokenizer = model.texts.client.need_tokenizer("detokenize")
            text = await in_thread(record_of(request.scope), lambda: tokenizer.decode(body.tokens, False))
    return json_response({"prompt": text})


async def tokenizer_info(request: Request, service: Service) -> Response:
    """The special tokens and the chat template, so that a client such as lm-eval needs no tokenizer of its own."""
    service.check_accepts()
    model = await service.find(request.query_params.get("model"), record_of(request.scope))
    if model.state != "ready":  # a GET must not load a model: any web page can make a visitor's browser send one
        raise APIError(409, f"{model.name} is not loaded: POST /models/load", param="model", code="model_not_loaded")
    with client_errors():
        tokenizer = model.texts.client.need_tokenizer("tokenizer_info")
    ids = {name: getattr(tokenizer, f"{name}_id") for name in ("bos_token", "eos_token", "pad_token")}
    tokens = {name: None if token_id is None else tokenizer.id_to_token(token_id) for name, token_id in ids.items()}
    about = {"chat_template": tokenizer.chat_template, "model_max_length": model.llm.max_model_len}
    return json_response({**tokens, **about})
