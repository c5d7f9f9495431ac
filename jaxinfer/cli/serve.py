"""`jaxinfer serve`: an OpenAI-compatible server."""

import logging
import sys
from dataclasses import dataclass

from jaxinfer.cli.command import say
from jaxinfer.cli.options import DraftedServingOptions, llm_arguments, model_argument
from jaxinfer.server.options import ServerOptions


@dataclass(frozen=True, kw_only=True)
class ServeModelOptions(DraftedServingOptions):
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

    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("jaxinfer").setLevel(logging.INFO)
    arguments = llm_arguments(model_options)

    def open_engine() -> AsyncEngine:
        engine = AsyncEngine(model_options.model, **arguments)
        if not options.lazy:
            engine.llm.warm_up()
        return engine

    return run_server(
        options,
        model_options.model,
        open_engine,
        on_listening=lambda url: say(f"listening at {url}; loading {model_options.model}"),
        on_ready=lambda service: say(f"ready: {service.name}, {service.fingerprint}"),
    )
