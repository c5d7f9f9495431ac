"""Ollama's routes about models: /api/tags, show, ps, pull, copy, delete, version, and embed.

Only a server that was started without models changes what is stored: one of given models serves these.
"""

import asyncio
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxinfer import __version__, store
from jaxinfer.api.llm import LLM
from jaxinfer.engine.abstract_work import shapes_of
from jaxinfer.models import Params
from jaxinfer.models.host_layers import all_layers
from jaxinfer.quantization.tree import describe, num_parameters
from jaxinfer.server.api_error import APIError, refused
from jaxinfer.server.connected import while_connected
from jaxinfer.server.embeddings import run_vectors
from jaxinfer.server.http import EventStream, json_response, read_body, record_of, using
from jaxinfer.server.models import ServedModel
from jaxinfer.server.ollama import LINES, error_line, known_name, time_text
from jaxinfer.server.service import Service
from jaxinfer.server.types import OllamaCopyRequest, OllamaEmbedRequest, OllamaLoading, OllamaModelRequest
from jaxinfer.text.reasoning import family_of

_POLL_SECONDS = 0.2  # between lines of a pull
_HUBS = ("hf.co/", "huggingface.co/")
_FOREVER = datetime(9999, 1, 1, tzinfo=UTC)


async def version(request: Request, service: Service) -> Response:
    """The version of jaxinfer, as Ollama tells its own."""
    return json_response({"version": __version__})


async def tags(request: Request, service: Service) -> Response:
    """The models that may be named, in Ollama's form."""
    stored = {entry.name: entry for entry in await asyncio.to_thread(store.list_models)}
    known = await service.all_models(record_of(request.scope))
    entries = [_entry(name, model, stored) for model in known for name in model.names]
    return json_response({"models": entries})


async def ps(request: Request, service: Service) -> Response:
    """The models that are loaded, in Ollama's form."""
    stored = {known.name: known for known in await asyncio.to_thread(store.list_models)}
    entries = []
    for model in service.models.models:
        if model.state == "ready" and not model.is_dead:
            left = service.models.seconds_left(model)
            ends = _FOREVER if left is None else datetime.fromtimestamp(datetime.now(UTC).timestamp() + left, UTC)
            num_bytes = model.needs.num_bytes
            entry = _entry(model.name, model, stored) | {"expires_at": time_text(ends), "size_vram": num_bytes}
            entries.append({**entry, "size": num_bytes, "context_length": model.llm.max_model_len})
    return json_response({"models": entries})


async def show(request: Request, service: Service) -> Response:
    """A description of a model, in Ollama's form."""
    body = await read_body(request, OllamaModelRequest, service, uses_model=False)
    model = await service.find(await known_name(request, service, _name(body)), record_of(request.scope))
    is_loaded = model.state == "ready" and not model.is_dead
    try:
        stored = model.source.given or model.name
        facts = _loaded_facts(model) if is_loaded else await asyncio.to_thread(store.show_model, stored)
    except (ValueError, OSError) as error:
        raise _store_error(error, model.source.without_paths(str(error))) from None
    name = facts["architecture"]
    alias = facts.get("alias") or {}
    lines = [f"{key} {value}" for key, value in (alias.get("sampling") or {}).items()]
    about = {
        "modelfile": f"FROM {model.source.root}",
        "parameters": "\n".join(lines),
        "template": facts["chat template"] or "{{ .Prompt }}",
        "system": alias.get("system") or "",
        "license": facts.get("license") or "",
        "details": _details(model) | {"quantization_level": str(facts["quantization"] or "")},
        "model_info": {
            "general.architecture": name,
            "general.parameter_count": facts["parameters"],
            f"{name}.context_length": facts["context"],
        },
        "capabilities": _capabilities(facts["chat template"] or ""),
        "modified_at": time_text(datetime.fromtimestamp(model.created, UTC)),
    }
    return json_response(about)


async def pull(request: Request, service: Service) -> Response:
    """Downloads a repository of the hub, as lines of JSON unless `stream` is false."""
    _check_store(service)
    body = await read_body(request, OllamaModelRequest, service, uses_model=False)
    name = _name(body)
    for hub in _HUBS:
        name = name.removeprefix(hub)
    try:
        download = await while_connected(request.receive, asyncio.to_thread(_download, name))
    except (ValueError, OSError) as error:
        raise _store_error(error) from None
    lines = _pulled(download)
    if body.stream is not False:
        return EventStream(lines, lambda: None, error_line, service.options.send_timeout, media_type=LINES)

    async def last() -> Any:
        return msgspec.json.decode([line async for line in lines][-1])

    return json_response(await while_connected(request.receive, last()))


async def embed(request: Request, service: Service) -> Response:
    """The vectors of texts, in Ollama's form. Texts that are too long are cut unless `truncate` is false."""
    body = await read_body(request, OllamaEmbedRequest, service)
    for option in msgspec.structs.fields(body.options) if body.options is not None else ():
        if option.name not in OllamaLoading.__struct_fields__ and getattr(body.options, option.name) is not None:
            name = f"options.{option.encode_name}"
            raise refused(name, f"{name} is not supported for embeddings")
    if body.dimensions is not None and not 1 <= body.dimensions < 2**31:
        raise refused("dimensions", f"dimensions={body.dimensions} must be at least 1, at most a vector's length")
    body.model = await known_name(request, service, body.model)
    texts = [body.input] if isinstance(body.input, str) else body.input
    async with using(request, service, body) as model:
        record, start = record_of(request.scope), time.perf_counter()
        given: dict[str, Any] = {"truncate": body.truncate is not False, "dimensions": body.dimensions}
        make = partial(model.llm.embedder.embed, texts, **given, what="input")
        vectors, num_tokens = await run_vectors(request, service, model, texts, make, "input")
    about = {
        "model": model.name,
        "embeddings": vectors.tolist(),
        "total_duration": round((time.perf_counter() - start + record.load_seconds) * 1e9),
        "load_duration": round(record.load_seconds * 1e9),
        "prompt_eval_count": num_tokens,
    }
    return json_response(about)


async def copy(request: Request, service: Service) -> Response:
    """Gives a model another name: an alias."""
    _check_store(service)
    body = await read_body(request, OllamaCopyRequest, service, uses_model=False)
    try:
        await asyncio.to_thread(store.copy_model, await known_name(request, service, body.source), body.destination)
    except (ValueError, OSError) as error:
        raise _store_error(error) from None
    return json_response({"status": "success"})


async def delete(request: Request, service: Service) -> Response:
    """Removes an alias, or a model whose files no alias needs; one that is loaded is then unloaded."""
    _check_store(service)
    body = await read_body(request, OllamaModelRequest, service, uses_model=False)
    name = await known_name(request, service, _name(body))
    try:
        await while_connected(request.receive, service.models.drop(name, lambda: store.remove(name)))
    except (ValueError, OSError) as error:
        raise _store_error(error) from None
    return json_response({"status": "success"})


def _name(body: OllamaModelRequest) -> str:
    name = body.model or body.name
    if not name:
        raise refused("model", "model is missing")
    return name


def _check_store(service: Service) -> None:
    """Raises APIError where the server's models were given."""
    if not service.models.is_store:
        message = "this server serves the models that it was given; one that is started without any manages the store"
        raise APIError(403, message)


def _store_error(error: Exception, message: str = "") -> APIError:
    is_unknown = isinstance(error, FileNotFoundError)
    return APIError(404 if is_unknown else 400, message or str(error), param="model")


# Entries.


def _entry(name: str, model: ServedModel, stored: Mapping[str, store.StoredModel]) -> dict[str, Any]:
    adapter = model.adapter
    local = stored.get(name) if adapter is None else None
    digest = hashlib.sha256(model.source.root.encode()).hexdigest() if local is None else local.digest
    modified = model.created if local is None else local.modified_at
    size = model.needs.num_bytes if local is None else local.num_bytes
    return {
        "name": name,
        "model": name,
        "modified_at": time_text(datetime.fromtimestamp(modified, UTC)),
        "size": size if adapter is None else adapter.host.num_bytes,
        "digest": digest if adapter is None else adapter.fingerprint,
        "details": _details(model),
    }


def _details(model: ServedModel) -> dict[str, Any]:
    """Facts that are known without reading files: more of a model that is loaded."""
    family, size = "", ""
    if model.state == "ready" and not model.is_dead:
        family, count = model.llm.config.architecture, num_parameters(_shapes(model.llm))
        size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
    return {
        "parent_model": "" if model.adapter is None else model.base_name,
        "format": "gguf" if model.source.is_gguf else "safetensors",
        "family": family,
        "families": [family] if family else None,
        "parameter_size": size,
        "quantization_level": "",
    }


def _shapes(llm: LLM) -> Params:
    """Abstract parameters, wherever they lie."""
    return all_layers(shapes_of(llm.params))


def _loaded_facts(model: ServedModel) -> dict[str, Any]:
    """As `store.show_model`, of a loaded model."""
    llm = model.llm
    return {
        "architecture": llm.config.architecture,
        "parameters": num_parameters(_shapes(llm)),
        "context": llm.max_model_len,
        "quantization": describe(_shapes(llm)),
        "chat template": None if llm.tokenizer is None else llm.tokenizer.chat_template,
    }


def _capabilities(template: str) -> list[str]:
    capabilities = ["completion"]
    if "tools" in template:
        capabilities.append("tools")
    if family_of("auto", template) is not None:
        capabilities.append("thinking")
    return capabilities


# Pulling.


def _download(name: str) -> store.Download | None:
    """The download of a repository; None for a model of this machine that is no repository's."""
    try:
        local = store.find_model(name, offline=True, fetch=False)
    except store.UnknownModelError:
        return store.prepare(name)
    return None if local.hub is None else store.prepare(name)


async def _pulled(download: store.Download | None) -> AsyncIterator[bytes]:
    yield _status("pulling manifest")
    if download is not None:
        done, stop = [0], threading.Event()

        def record(num_bytes: int) -> None:
            done[0] = num_bytes

        fetching = asyncio.ensure_future(asyncio.to_thread(download.fetch, on_bytes=record, stop=stop))
        about = {"digest": download.commit, "total": download.num_bytes}
        try:
            while not fetching.done():
                yield _status(f"pulling {download.commit[:12]}", **about, completed=done[0])
                await asyncio.wait([fetching], timeout=_POLL_SECONDS)
            try:
                await fetching
            except (ValueError, OSError) as error:
                raise _store_error(error) from None
        finally:
            stop.set()
        yield _status(f"pulling {download.commit[:12]}", **about, completed=download.num_bytes)
        yield _status("verifying sha256 digest")
        yield _status("writing manifest")
    yield _status("success")


def _status(status: str, **more: Any) -> bytes:
    return msgspec.json.encode({"status": status, **more}) + b"\n"
