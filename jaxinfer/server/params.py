"""Requests of the server's bodies, bound to its models, with the server's limits."""

import secrets
from typing import Any

from jaxinfer.openai.errors import RequestError
from jaxinfer.openai.reader import template_kwargs
from jaxinfer.openai.requests import BoundRequest, TextRequest
from jaxinfer.sampling import SamplingParams
from jaxinfer.server.errors import refused
from jaxinfer.server.models import ServedModel
from jaxinfer.server.sizes import check_length
from jaxinfer.server.types import TokenizeRequest

MAX_SEED = 2**53  # of seeds that the server chooses: every JSON parser keeps them


def bind(asked: TextRequest, model: ServedModel, max_n: int = 1) -> BoundRequest:
    """A request for a model that is served; without a seed it is given one. Raises APIError, RequestError or
    SamplingParamsError."""
    found = asked.bind(model.llm, model.answers, _seed)
    if found.num_answers > max_n:
        told = f"{found.num_prompts} prompts times n={found.params.n} are more than the server's limit of {max_n}"
        raise refused("n", told)
    return found


def _seed(params: SamplingParams) -> int:
    return 0 if params.is_greedy else secrets.randbelow(MAX_SEED)


def check_sizes(body: Any, model: ServedModel, max_n: int = 1) -> None:
    """Raises APIError for more than the model can take, before each of it is looked at."""
    llm, prompt = model.llm, getattr(body, "prompt", None)
    for name in ("messages", "input"):
        if isinstance(items := getattr(body, name, None), list):
            check_length(len(items), "messages" if name == "messages" else "items", llm.max_model_len)
    if isinstance(prompt, list):
        several = any(isinstance(one, (str, list)) for one in prompt)
        if several and len(prompt) > max_n:
            raise refused("n", f"{len(prompt)} prompts are more than the server's limit of {max_n}")
        for ids in prompt if several else [prompt]:
            if isinstance(ids, list) and getattr(body, "truncate_prompt_tokens", None) is None:
                check_length(len(ids), "token ids of the prompt", llm.max_model_len)
    num_allowed, vocab_size = len(getattr(body, "allowed_token_ids", None) or ()), llm.client.config.vocab_size
    if num_allowed > vocab_size:
        raise refused("allowed_token_ids", f"allowed_token_ids has {num_allowed:,} ids, the vocabulary {vocab_size:,}")


def tokenize_ids(body: TokenizeRequest, model: ServedModel, *, ignore_unknown: bool) -> list[int]:
    """Token ids of a prompt or of messages. Raises RequestError or ValueError."""
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
    if body.messages is None:
        return model.llm.client.tokenize(body.prompt or "", body.add_special_tokens is not False)[1]
    check_sizes(body, model)
    kwargs = template_kwargs(body)
    asked = TextRequest(messages=body.messages, tools=body.tools, ignore_unknown=ignore_unknown, template_kwargs=kwargs)
    (ids,) = bind(asked, model).prompts(model.llm)
    return list(ids)  # type: ignore[arg-type]
