"""Routes that replace the weights of a model, pause it and give its memory back, in vLLM's form. They are for
administrators, off by default, and on a listener of their own.

An update is begun, written and ended by requests of their own; nothing is answered in between. A client that dies
leaves the model so, until another update gives all that was written.
"""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.api.live_weights import UPDATE_MODES
from jaxinfer.openai import answers
from jaxinfer.server import types
from jaxinfer.server.adapter_routes import server_info
from jaxinfer.server.api_error import APIError, refused
from jaxinfer.server.http import json_response, read_body, record_of
from jaxinfer.server.openapi import Endpoint, RouteEntry
from jaxinfer.server.service import Service

_BACKENDS = ("path", "process")


def _hidden(run: Callable[..., Any]) -> Endpoint:
    """An endpoint that there is for requests with an admin key only; it is checked before the body is read."""

    async def checked(request: Request, service: Service) -> Response:
        if not record_of(request.scope).is_admin:
            raise APIError(404, "there is no such route")
        service.check_accepts()
        return await run(request, service)

    checked.__doc__ = run.__doc__
    return checked


def _conflict(error: Exception) -> APIError:
    return APIError(409, str(error), code="weights_conflict")


@_hidden
async def pause(request: Request, service: Service) -> Response:
    """Answers nothing until /resume. `mode`: of the requests that there are, abort (the default), wait or keep."""
    mode: Any = request.query_params.get("mode", "abort")
    if mode not in UPDATE_MODES:
        raise refused("mode", f"mode={mode!r:.60} is none of {', '.join(UPDATE_MODES)}")
    try:
        await service.default.engine.pause(mode)
    except RuntimeError as error:
        raise _conflict(error) from error
    return json_response(answers.Paused(is_paused=True))


@_hidden
async def resume(request: Request, service: Service) -> Response:
    """Goes on with the answers, unless an update of the weights has not ended."""
    engine = service.default.engine
    engine.resume()
    return json_response(answers.Paused(is_paused=False))


@_hidden
async def is_paused(request: Request, service: Service) -> Response:
    """True between /pause and /resume, and while an update has not ended."""
    return json_response(answers.Paused(is_paused=service.default.engine.why_not_ready is not None))


@_hidden
async def world_size(request: Request, service: Service) -> Response:
    """How many devices run the model."""
    mesh = service.default.llm.mesh
    return json_response(answers.WorldSize(world_size=1 if mesh is None else mesh.size))


@_hidden
async def init_transfer(request: Request, service: Service) -> Response:
    """Checks how weights will come. `backend`: "path", from a folder below --weights-root, or "process", from a trainer
    in this process."""
    body = await read_body(request, types.InitTransferRequest, service)
    _backend("init_info", body.init_info)
    return json_response(answers.Status(status="ready"))


def _backend(param: str, info: dict[str, Any]) -> str:
    backend = info.get("backend", "path")
    if backend not in _BACKENDS:
        raise refused(param, f"{param}.backend={backend!r:.60} is none of {', '.join(_BACKENDS)}")
    return backend


@_hidden
async def start_update(request: Request, service: Service) -> Response:
    """Begins an update: what runs is set aside and computed anew when it has ended."""
    body = await read_body(request, types.StartUpdateRequest, service)
    if body.is_checkpoint_format is False:
        raise refused("is_checkpoint_format", "is_checkpoint_format=false is not supported: names are a checkpoint's")
    try:
        await service.default.engine.begin_update(kv="retain" if body.kv == "retain" else "recompute")
    except (RuntimeError, ValueError) as error:
        raise _conflict(error) from error
    return json_response(answers.Status(status="started"))


@_hidden
async def update_weights(request: Request, service: Service) -> Response:
    """Replaces weights, in an update that has begun, by those that `update_info` names."""
    body = await read_body(request, types.UpdateWeightsRequest, service)
    info, model = body.update_info, service.default
    source: Any
    if _backend("update_info", info) == "process":
        name = info.get("name")
        if not isinstance(name, str) or (source := service.trees.get(name)) is None:
            raise refused("update_info.name", f"update_info.name={name!r:.80} is no tree of this process")
        options = {"partial": bool(info.get("partial", False))}
    else:
        path = info.get("path")
        if not isinstance(path, str):
            raise refused("update_info.path", f"update_info.path must be the path of a folder, got {path!r:.80}")
        source, options = service.weights_folders.folder(path), {}
    try:
        await model.engine.write_update(source, **options)
    except RuntimeError as error:
        raise _conflict(error) from error
    except (ValueError, OSError) as error:
        told = model.source.without_paths(str(error).replace(str(source), str(info.get("path"))))
        raise refused("update_info", told) from error
    return json_response(answers.Status(status="written"))


@_hidden
async def finish_update(request: Request, service: Service) -> Response:
    """Ends an update: answers are computed with the new weights, which `weight_version` names."""
    body = await read_body(request, types.FinishUpdateRequest, service)
    try:
        label = await service.default.engine.finish_update(body.weight_version)
    except (RuntimeError, ValueError) as error:
        raise _conflict(error) from error
    return json_response(answers.WeightInfo(weight_version=label, is_complete=True))


@_hidden
async def weight_info(request: Request, service: Service) -> Response:
    """The version of the weights, and whether an update has not ended."""
    llm = service.default.llm
    weights = llm.engine.weights
    return json_response(answers.WeightInfo(weight_version=weights.label, is_complete=weights.is_whole))


@_hidden
async def sleep(request: Request, service: Service) -> Response:
    """Gives memory of the device back until /wake_up. `level`: 1 keeps the weights in the host's memory, 2 drops
    them."""
    level = request.query_params.get("level", "1")
    if level not in ("1", "2"):
        raise refused("level", f"level={level!r:.60} is neither 1 nor 2")
    try:
        await service.default.engine.sleep(weights="keep" if level == "1" else "drop")
    except (RuntimeError, ValueError) as error:
        raise _conflict(error) from error
    return json_response(answers.Sleeping(is_sleeping=True))


@_hidden
async def wake_up(request: Request, service: Service) -> Response:
    """Takes the memory again. `tags`: weights or kv_cache, for one of them."""
    tags = request.query_params.getlist("tags")
    if unknown := next((tag for tag in tags if tag not in ("weights", "kv_cache")), None):
        raise refused("tags", f"tags={unknown!r:.60} is neither weights nor kv_cache")
    await service.default.engine.wake_up(weights=not tags or "weights" in tags, cache=not tags or "kv_cache" in tags)
    return json_response(answers.Sleeping(is_sleeping=service.default.engine.why_not_ready is not None))


@_hidden
async def is_sleeping(request: Request, service: Service) -> Response:
    """True between /sleep and /wake_up."""
    why = service.default.engine.why_not_ready
    return json_response(answers.Sleeping(is_sleeping=why is not None and "asleep" in why))


_CHANGES = {"is_admin": True, "errors": (400, 409, 503)}
WEIGHT_ROUTES = (
    RouteEntry(
        "GET", "/server_info", _hidden(server_info), answer=answers.ServerInfo, errors=(400, 503), is_admin=True
    ),
    RouteEntry("POST", "/pause", pause, answer=answers.Paused, **_CHANGES),
    RouteEntry("POST", "/resume", resume, answer=answers.Paused, **_CHANGES),
    RouteEntry("GET", "/is_paused", is_paused, answer=answers.Paused, is_admin=True),
    RouteEntry("GET", "/get_world_size", world_size, answer=answers.WorldSize, is_admin=True),
    RouteEntry(
        "POST", "/init_weight_transfer_engine", init_transfer, types.InitTransferRequest, answers.Status, **_CHANGES
    ),
    RouteEntry("POST", "/start_weight_update", start_update, types.StartUpdateRequest, answers.Status, **_CHANGES),
    RouteEntry("POST", "/update_weights", update_weights, types.UpdateWeightsRequest, answers.Status, **_CHANGES),
    RouteEntry(
        "POST", "/finish_weight_update", finish_update, types.FinishUpdateRequest, answers.WeightInfo, **_CHANGES
    ),
    RouteEntry("GET", "/weight_info", weight_info, answer=answers.WeightInfo, is_admin=True),
    RouteEntry("POST", "/sleep", sleep, answer=answers.Sleeping, **_CHANGES),
    RouteEntry("POST", "/wake_up", wake_up, answer=answers.Sleeping, **_CHANGES),
    RouteEntry("GET", "/is_sleeping", is_sleeping, answer=answers.Sleeping, is_admin=True),
)
