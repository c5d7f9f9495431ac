"""/v1/hidden_states: the hidden states of a prompt and its answer, as safetensors. Off by default."""

from dataclasses import replace
from functools import partial

import numpy as np
from safetensors.numpy import save
from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.engine.request import RequestOptions
from jaxinfer.engine.results import RequestJob
from jaxinfer.sampling import SamplingParams
from jaxinfer.server.api_error import APIError, refused
from jaxinfer.server.embeddings import run_requests
from jaxinfer.server.http import in_thread, read_body, record_of, using
from jaxinfer.server.models import ServedModel
from jaxinfer.server.openapi import RouteEntry
from jaxinfer.server.service import Service
from jaxinfer.server.types import HiddenStatesRequest

_MIB = 2**20


async def hidden_states(request: Request, service: Service) -> Response:
    """Hidden states after layers, as safetensors: "layers.3" float32 [tokens, width], of the prompt and the answer but
    its last token, and "token_ids" int32, of all tokens."""
    body = await read_body(request, HiddenStatesRequest, service)
    async with using(request, service, body) as model:
        if (body.max_tokens or 1) > (most := model.llm.max_model_len):
            raise refused("max_tokens", f"max_tokens={body.max_tokens} is more than max_model_len={most}")
        make = partial(_job, body, model, service.options.hidden_states_max_mib * _MIB)
        place = "prompt", body.priority, body.max_tokens or 1
        _, (output,) = await run_requests(request, service, model, [body.prompt], make, *place)
        (answer,) = output.outputs
        if answer.hidden_states is None or answer.finish_reason == "error":
            raise APIError(500, answer.error or "no hidden states were computed", code="invalid_logits")
        arrays = {f"layers.{layer}": states for layer, states in answer.hidden_states.items()}
        arrays["token_ids"] = np.array([*output.prompt_token_ids, *answer.token_ids], np.int32)
        about = {"model": model.name, "num_prompt_tokens": str(len(output.prompt_token_ids))}
        about["finish_reason"] = str(answer.finish_reason)
        content = await in_thread(record_of(request.scope), lambda: save(arrays, about))
    return Response(content, 200, None, "application/octet-stream")


def _job(body: HiddenStatesRequest, model: ServedModel, most_bytes: int, options: RequestOptions) -> RequestJob:
    """The request. Raises APIError where its states are more bytes than may be, ValueError for what cannot be
    served."""
    llm, num_made, layers = model.llm, body.max_tokens or 1, tuple(dict.fromkeys(body.layers))
    params = SamplingParams(max_tokens=num_made, temperature=body.temperature or 0, seed=body.seed)
    request = llm.prepare(body.prompt, params, replace(options, tapped_layers=layers))
    num_tokens, width = request.num_prompt + num_made - 1, llm.config.hidden_size
    if (num_bytes := 4 * len(layers) * num_tokens * width) > most_bytes:
        told = f"{len(layers)} layers of {num_tokens} tokens of width {width} are {num_bytes} bytes in float32"
        raise APIError(
            400,
            f"{told}, and at most {most_bytes} are answered (--hidden-states-max-mib): ask for fewer layers or tokens",
            param="layers",
            code="answer_too_large",
        )
    return RequestJob([request])


HIDDEN_STATES_ROUTES = (RouteEntry("POST", "/v1/hidden_states", hidden_states, HiddenStatesRequest, errors=(429,)),)
