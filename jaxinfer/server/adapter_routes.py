"""Routes that change which adapters a model has, in vLLM's form. They are for administrators, and off by default."""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.openai import answers
from jaxinfer.server import types
from jaxinfer.server.adapters import ServedAdapters
from jaxinfer.server.api_error import APIError, invalid_key, refused
from jaxinfer.server.http import json_response, read_body, record_of
from jaxinfer.server.openapi import Endpoint, RouteEntry
from jaxinfer.server.service import Service


def admin(run: Callable[..., Any]) -> Endpoint:
    """An endpoint that answers requests with an admin key only; it is checked before the body is read."""

    async def checked(request: Request, service: Service) -> Response:
        record = record_of(request.scope)
        if not record.is_admin:
            raise APIError(403, "this route needs an admin key") if record.key else invalid_key(True, "admin")
        service.check_accepts()
        return await run(request, service)

    checked.__doc__ = run.__doc__
    return checked


def _adapters(service: Service) -> ServedAdapters:
    assert service.adapters is not None  # the routes are of a server of one model
    return service.adapters


def _text(text: str) -> Response:
    return Response(text, 200, None, "text/plain; charset=utf-8")


@admin
async def load(request: Request, service: Service) -> Response:
    """Loads an adapter from a folder of the server, and answers when requests can name it."""
    body = await read_body(request, types.LoadAdapterRequest, service)
    if body.keys is not None:
        known = service.key_names
        unknown = [name for name in body.keys if name not in known]
        if unknown or not body.keys:
            told = f"there is no API key named {unknown[0]!r:.80}" if unknown else "keys is empty"
            raise refused("keys", f"{told}; leave keys out for all of them")
    await _adapters(service).load(body.lora_name, body.lora_path, body.keys, replaces=bool(body.load_inplace))
    return _text(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@admin
async def unload(request: Request, service: Service) -> Response:
    """Takes an adapter away; requests that named it go on with it."""
    body = await read_body(request, types.UnloadAdapterRequest, service)
    await _adapters(service).unload(body.lora_name)
    return _text(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@admin
async def server_info(request: Request, service: Service) -> Response:
    """Facts that trainers ask for before they send adapters, under vLLM's names."""
    wanted = request.query_params.get("config_format", "json")
    if wanted != "json":
        raise refused("config_format", f"config_format={wanted!r:.60} is not supported, only json is")
    model = service.default
    spec = model.llm.engine.spec
    sizes = spec.options.adapter_sizes
    room = None if sizes is None else answers.LoraConfig(max_loras=sizes.num_slots, max_lora_rank=sizes.max_rank)
    config = answers.VLLMConfig(
        lora_config=room,
        # A load reaches all replicas of a mesh; by a larger number trainers mean servers that need one load each.
        parallel_config=answers.ParallelConfig(data_parallel_size=1),
        model_config=answers.ModelConfigFacts(
            model=model.name, dtype=f"torch.{spec.dtype.name}", max_model_len=model.llm.max_model_len
        ),
    )
    return json_response(answers.ServerInfo(vllm_config=config))


@admin
async def pause(request: Request, service: Service) -> Response:
    """Keeps all answers as they are until /resume; `mode` must be keep."""
    mode = request.query_params.get("mode", "abort")
    if mode != "keep":
        raise refused("mode", f"mode={mode!r:.60} is not supported, only mode=keep is")
    await service.default.engine.pause()
    return json_response(answers.Paused(is_paused=True))


@admin
async def resume(request: Request, service: Service) -> Response:
    """Goes on with the answers that /pause has kept."""
    service.default.engine.resume()
    return json_response(answers.Paused(is_paused=False))


@admin
async def is_paused(request: Request, service: Service) -> Response:
    """True between /pause and /resume."""
    return json_response(answers.Paused(is_paused=service.default.engine.is_paused))


ADAPTER_ROUTES = (
    RouteEntry("POST", "/v1/load_lora_adapter", load, types.LoadAdapterRequest, is_admin=True),
    RouteEntry("POST", "/v1/unload_lora_adapter", unload, types.UnloadAdapterRequest, is_admin=True),
    RouteEntry("GET", "/server_info", server_info, answer=answers.ServerInfo, errors=(400, 503), is_admin=True),
    RouteEntry("POST", "/pause", pause, answer=answers.Paused, errors=(400, 503), is_admin=True),
    RouteEntry("POST", "/resume", resume, answer=answers.Paused, errors=(503,), is_admin=True),
    RouteEntry("GET", "/is_paused", is_paused, answer=answers.Paused, errors=(503,), is_admin=True),
)
