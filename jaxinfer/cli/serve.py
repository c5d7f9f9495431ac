"""`jaxinfer serve`: an OpenAI-compatible server."""

import logging
import sys
from dataclasses import dataclass

from jaxinfer.cli.command import say
from jaxinfer.cli.options import ChatServingOptions, llm_arguments, model_argument
from jaxinfer.server.options import ServerOptions


@dataclass(frozen=True, kw_only=True)
class ServeModelOptions(ChatServingOptions):
    """Serving options; the model is given by position."""

    model: str = model_argument()


def serve(model_options: ServeModelOptions, options: ServerOptions) -> int:
    """Serve a model over HTTP.

    The routes of OpenAI and Anthropic: /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, and others
    (docs/serving.md). SIGTERM or Ctrl-C lets running answers end; a second one ends at once.
    """
    try:
        from jaxinfer.server.run import run_server
    except ImportError as error:
        raise ImportError(f"jaxinfer serve needs {error.name}: pip install 'jaxinfer[serve]'") from None
    from jaxinfer.async_engine import AsyncEngine
    from jaxinfer.server.service import Service

    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("jaxinfer").setLevel(logging.INFO)
    arguments = llm_arguments(model_options)

    def open_engine() -> AsyncEngine:
        engine = AsyncEngine(model_options.model, **arguments)
        if not options.lazy:
            engine.llm.warm_up()
        return engine

    def say_listening(url: str) -> None:
        if not options.is_loopback:
            say(
                "warning: requests and API keys are sent in plain text; put a proxy with TLS in front (docs/serving.md)"
            )
        say(f"listening at {url}; loading {model_options.model}")

    def say_ready(service: Service) -> None:
        page = "; the chat page is at /" if options.ui else ""
        say(f"ready: {service.name}, system_fingerprint {service.fingerprint}{page}")

    return run_server(options, model_options.model, open_engine, on_listening=say_listening, on_ready=say_ready)
