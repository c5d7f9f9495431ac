"""`jaxinfer serve`: an OpenAI-compatible server."""

import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.command import UsageError, say
from jaxinfer.cli.options import ChatServingOptions, llm_arguments
from jaxinfer.options import argument
from jaxinfer.server.options import ServerOptions

if TYPE_CHECKING:
    from jaxinfer.server.service import Service


@dataclass(frozen=True, kw_only=True)
class ServeModelOptions(ChatServingOptions):
    """Serving options; the model is given by position."""

    model: str = argument(
        "",
        "A checkpoint's folder, a GGUF file, a Hugging Face hub id, or demo. It is loaded at the start; without it, "
        "models are loaded as requests name them.",
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
        raise ImportError(f"jaxinfer serve needs {error.name}: pip install 'jaxinfer[serve]'") from None
    from jaxinfer.async_engine import AsyncEngine
    from jaxinfer.server.service import Service

    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("jaxinfer").setLevel(logging.INFO)
    model, arguments = model_options.model, llm_arguments(model_options)
    own = [model] if model else []
    is_one = model and not (options.models or options.allow_any)

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
        name = model or "models are loaded as requests name them"
        if is_one:
            name = f"{service.default.name}, system_fingerprint {service.default.fingerprint}"
        say(f"ready: {name}{page}")

    if is_one:
        for name in ("pin", "model_memory", "keep_alive"):
            if getattr(options, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise UsageError(f"{flag} is for several models: add --model or --allow-any")
        first = [model]
        return run_server(options, model, open_engine, on_listening=say_listening, on_ready=say_ready)
    if options.served_model_name is not None:
        raise UsageError("--served-model-name is for one model: several are named as they are given")
    service = several_models(model, arguments, options)
    first = list(dict.fromkeys([*own, *(options.pin or ())]))
    return run_service(service, first, on_listening=say_listening, on_ready=say_ready)


def several_models(model: str, arguments: dict[str, Any], options: ServerOptions) -> "Service":
    """The service of a server of several models. Raises UsageError for one that is not here."""
    from jaxinfer import compilation_cache
    from jaxinfer.llm_arguments import checked_options
    from jaxinfer.server.catalogue import LocalModels, locate
    from jaxinfer.server.service import Service

    compilation_cache.enable()
    own = [model] if model else []
    given = tuple(dict.fromkeys([*own, *(options.models or ()), *(options.pin or ())]))
    for name in given:
        if (found := locate(name)) is None or found.path is None:
            raise UsageError(f"{name} is not on this machine")
    checked_options("demo", arguments)  # before the server listens
    catalogue = LocalModels(given if options.models or model else None, arguments, options)
    for name in options.pin or ():
        if catalogue.find(name) is None:
            raise UsageError(f"--pin {name}: requests cannot name it; add --model {name}")
    service = Service(options, model or None, catalogue)
    service.max_model_len = arguments.get("max_model_len") or service.max_model_len
    return service
