"""Routes that replace the weights of a model, pause it and give its memory back, in vLLM's form. They are for
administrators, off by default, and on a listener of their own.

An update is begun, written and ended by requests of their own; nothing is answered in between. A client that dies
leaves the model so, until another update gives all that was written.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.api.live_weights import UPDATE_MODES, check_version
from jaxinfer.openai import answers
from jaxinfer.server import types
from jaxinfer.server.adapter_routes import server_info
from jaxinfer.server.api_error import APIError, refused
from jaxinfer.server.http import json_response, read_body, record_of
from jaxinfer.server.openapi import Endpoint, RouteEntry
from jaxinfer.server.service import Service

_FIELDS = {"path": ("path",), "process": ("name", "partial")}  # of `update_info`, by backend


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


def _query(request: Request, **values: tuple[str, ...]) -> dict[str, str]:
    """The query's parameters by name, of several the last. Raises APIError for other names and other values."""
    for name, value in request.query_params.multi_items():
        if name not in values:
            known = ", ".join(values) or "none"
            raise refused(name[:60], f"unknown parameter {name!r:.60}; the parameters are {known}")
        if value not in values[name]:
            raise refused(name, f"{name}={value!r:.60} is none of {', '.join(values[name])}")
    return dict(request.query_params)


_BOOLEANS = ("true", "false", "True", "False", "1", "0")


def _is_true(value: str) -> bool:
    return value in ("true", "True", "1")


@_hidden
async def pause(request: Request, service: Service) -> Response:
    """Answers nothing until /resume. `mode`: of the requests that there are, abort (the default), wait or keep.
    `wait_for_inflight_requests` is vLLM's older form of wait. `clear_cache` changes nothing: what is cached is found
    only by the weights that made it."""
    names = {"wait_for_inflight_requests": _BOOLEANS, "clear_cache": _BOOLEANS}
    query = _query(request, mode=UPDATE_MODES, **names)
    waits = _is_true(query.get("wait_for_inflight_requests", "false"))
    mode: Any = query.get("mode", "wait" if waits else "abort")
    if waits and mode != "wait":
        raise refused(
            "mode", f"mode={mode!r} and wait_for_inflight_requests, which is mode='wait', contradict each other"
        )
    try:
        await service.default.engine.pause(mode)
    except RuntimeError as error:
        raise _conflict(error) from error
    return json_response(answers.Paused(is_paused=True))


@_hidden
async def resume(request: Request, service: Service) -> Response:
    """Goes on with the answers, unless an update of the weights has not ended, or something sleeps; `is_paused` says
    so."""
    engine = service.default.engine
    engine.resume()
    return json_response(answers.Paused(is_paused=engine.why_stopped is not None))


@_hidden
async def is_paused(request: Request, service: Service) -> Response:
    """True between /pause and /resume, and while an update has not ended."""
    return json_response(answers.Paused(is_paused=service.default.engine.why_not_ready is not None))


@_hidden
async def world_size(request: Request, service: Service) -> Response:
    """How many devices run the model; those of one replica with `include_dp=false`."""
    llm = service.default.llm
    size = 1 if llm.mesh is None else llm.mesh.size
    if not _is_true(_query(request, include_dp=_BOOLEANS).get("include_dp", "true")):
        size //= len(llm.engine.engines)
    return json_response(answers.WorldSize(world_size=size))


@_hidden
async def init_transfer(request: Request, service: Service) -> Response:
    """Checks how weights will come. `backend`: "path", from a folder below --weights-root, or "process", from a trainer
    in this process."""
    body = await read_body(request, types.InitTransferRequest, service)
    _backend("init_info", body.init_info, dict.fromkeys(_FIELDS, ()))
    return json_response(answers.Status(status="ready"))


def _backend(param: str, info: dict[str, Any], fields: Mapping[str, tuple[str, ...]]) -> str:
    """The backend that is named, `fields` being those of each. Raises APIError for others, as those of NCCL."""
    backend = info.get("backend", "path")
    if not isinstance(backend, str) or backend not in fields:
        raise refused(param, f"{param}.backend={backend!r:.60} is none of {', '.join(fields)}")
    known = ("backend", *fields[backend])
    if (unknown := next((name for name in info if name not in known), None)) is not None:
        told = f"{param}.{unknown:.60} is not for backend={backend!r}, which has {', '.join(known)}"
        raise refused(f"{param}.{unknown:.60}", f"{told}; the backends are {', '.join(fields)}")
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
    if _backend("update_info", info, _FIELDS) == "process":
        name, is_partial = info.get("name"), info.get("partial", False)
        if not isinstance(name, str) or (source := service.trees.get(name)) is None:
            raise refused("update_info.name", f"update_info.name={name!r:.80} is no tree of this process")
        if not isinstance(is_partial, bool):
            raise refused("update_info.partial", f"update_info.partial must be true or false, got {is_partial!r:.60}")
        options = {"partial": is_partial}
    else:
        path = info.get("path")
        if not isinstance(path, str):
            raise refused("update_info.path", f"update_info.path must be the path of a folder, got {path!r:.80}")
        source, options = service.weights_folders.folder(path), {}
    try:
        await model.engine.write_update(source, **options)
    except RuntimeError as error:
        raise _conflict(error) from error
    except (TypeError, ValueError, OSError) as error:
        told = str(error).replace(str(source), info["path"]) if isinstance(source, Path) else str(error)
        raise refused("update_info", model.source.without_paths(told)) from error
    return json_response(answers.Status(status="written"))


@_hidden
async def finish_update(request: Request, service: Service) -> Response:
    """Ends an update: answers are computed with the new weights, which `weight_version` names."""
    body = await read_body(request, types.FinishUpdateRequest, service)
    try:
        check_version(body.weight_version)
    except ValueError as error:
        raise refused("weight_version", str(error)) from error
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
    level = _query(request, level=("1", "2")).get("level", "1")
    try:
        await service.default.engine.sleep(weights="keep" if level == "1" else "drop")
    except (RuntimeError, ValueError) as error:
        raise _conflict(error) from error
    return _sleeping(service)


@_hidden
async def wake_up(request: Request, service: Service) -> Response:
    """Takes the memory again. `tags`: weights or kv_cache, for one of them."""
    _query(request, tags=("weights", "kv_cache"))
    tags = request.query_params.getlist("tags")
    await service.default.engine.wake_up(weights=not tags or "weights" in tags, cache=not tags or "kv_cache" in tags)
    return _sleeping(service)


def _sleeping(service: Service) -> Response:
    return json_response(answers.Sleeping(is_sleeping=service.default.llm.is_asleep))


@_hidden
async def is_sleeping(request: Request, service: Service) -> Response:
    """True between /sleep and /wake_up."""
    return _sleeping(service)


@_hidden
async def other_method(request: Request, service: Service) -> Response:
    """A route's other methods, which are as hidden as the route."""
    raise APIError(405, "this route does not take this method")


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
