"""`jaxinfer serve`: an OpenAI-compatible server."""

import logging
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jaxinfer.api.options import LLMOptions
from jaxinfer.cli.command import UsageError, say
from jaxinfer.cli.options import ChatServingOptions, given, llm_arguments
from jaxinfer.extras import install_hint
from jaxinfer.options import argument
from jaxinfer.server.options import ServerOptions

if TYPE_CHECKING:
    from jaxinfer.server.service import Service


@given(LLMOptions, ("tapped_layers",))
@dataclass(frozen=True, kw_only=True)
class ServeModelOptions(ChatServingOptions):
    """Serving options; the model is given by position."""

    model: str = argument(
        "",
        "A checkpoint's folder, a GGUF file, a Hugging Face hub id, or demo; NAME=MODEL names it in requests. It is "
        "loaded at the start; without it, models are loaded as requests name them.",
        "[MODEL]",
    )


def serve(model_options: ServeModelOptions, options: ServerOptions) -> int:
    """Serve a model, or several, over HTTP.

    The routes of OpenAI, Anthropic and Ollama: /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages,
    /api/chat and others (docs/serving.md). SIGTERM or Ctrl-C lets running answers end; a second one ends at once.
    """
    try:
        from jaxinfer.server.run import run_server, run_service
    except ImportError as error:
        raise ImportError(f"jaxinfer serve needs {error.name}: {install_hint('serve')}") from None
    from jaxinfer.api.async_engine import AsyncEngine
    from jaxinfer.server.names import check_adapter_name, split_name
    from jaxinfer.server.service import Service

    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("jaxinfer").setLevel(logging.INFO)
    name, model = split_name(model_options.model) if model_options.model else ("", "")
    arguments = llm_arguments(model_options)
    first = [options.served_model_name or name] if name else []

    def open_engine() -> AsyncEngine:
        engine = AsyncEngine(model, **arguments)
        if not options.lazy:
            engine.llm.warm_up()
        return engine

    def say_listening(url: str) -> None:
        if not options.is_loopback:
            say(
                "warning: requests and API keys are sent in plain text; put a proxy with TLS in front (docs/serving.md)"
            )
        say(f"listening at {url}" + (f"; loading {', '.join(first)}" if first else ""))

    def say_ready(service: Service) -> None:
        page = "; the chat page is at /" if options.ui else ""
        served = ", ".join(first) or "models are loaded as requests name them"
        if service.is_one:
            served = f"{service.default.name}, system_fingerprint {service.default.fingerprint}"
        say(f"ready: {served}{page}")

    if options.hidden_states != bool(arguments.get("tapped_layers")):
        raise UsageError(
            "--hidden-states and --tapped-layers need each other: a route, and the layers that it may answer"
        )
    for adapter in arguments.get("adapters", ()):
        check_adapter_name(adapter, (*first, name))
    if model and not (options.models or options.allow_any):
        for field in ("pin", "model_memory", "keep_alive"):
            if getattr(options, field) is not None:
                flag = "--" + field.replace("_", "-")
                raise UsageError(f"{flag} is for several models: add --model or --allow-any")
        return run_server(options, name, open_engine, model=model, on_listening=say_listening, on_ready=say_ready)
    if options.kv_events is not None:
        raise UsageError("--kv-events is for a server of one model: blocks of several would be one index")
    if options.adapter_routes or arguments.get("adapters") or arguments.get("max_adapters"):
        raise UsageError("--adapter, --max-adapters and --adapter-routes are for a server of one model")
    if options.served_model_name is not None:
        raise UsageError("--served-model-name is for one model: several are named as in --model NAME=MODEL")
    service = several_models(model_options.model, arguments, options)
    if not first and options.models and not options.lazy:
        first.append(split_name(options.models[0])[0])
    first += [name for name in service.options.pin or () if name not in first]
    return run_service(service, first, on_listening=say_listening, on_ready=say_ready)


def several_models(model: str, arguments: dict[str, Any], options: ServerOptions) -> "Service":
    """The service of a server of several models, with `model` ("": none) for requests that name no model.

    Raises UsageError for a model that is not on this machine, ValueError for two models of one name.
    """
    from jaxinfer import compilation_cache
    from jaxinfer.api.arguments import checked_options
    from jaxinfer.server.catalogue import LocalModels, locate
    from jaxinfer.server.names import served_models, split_name
    from jaxinfer.server.service import Service

    compilation_cache.enable()
    given = [*([model] if model else []), *(options.models or ())]
    names = served_models(given)
    pins = [name for name in options.pin or () if name not in names]
    served = served_models([*given, *pins])
    for name in served.values():
        if (location := locate(name)) is None or location.path is None:
            raise UsageError(f"{name} is not on this machine")
    checked_options("demo", arguments)  # before the server listens
    pin_names = [name if name in names else split_name(name)[0] for name in options.pin or ()]
    options = replace(options, pin=pin_names or None)
    catalogue = LocalModels(served if given else None, arguments, options)
    for flag, wanted in (("--pin", pin_names), ("--keep-alive", filter(None, options.keep_alive_seconds))):
        for name in wanted:
            if catalogue.find(name) is None:
                raise UsageError(f"{flag} {name}: requests cannot name it; add --model {name}")
    service = Service(options, split_name(model)[0] if model else None, catalogue)
    service.max_model_len = arguments.get("max_model_len") or service.max_model_len
    return service
