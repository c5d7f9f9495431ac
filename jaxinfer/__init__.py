"""LLM inference in JAX/XLA for TPUs and GPUs.

Names are resolved when first used: importing the package loads neither JAX nor anything else that is slow.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.api.async_engine import AsyncEngine
    from jaxinfer.api.coordinate import Coordinate
    from jaxinfer.api.llm import LLM
    from jaxinfer.engine.request import CompletionOutput, Logprob, RequestOutput, RequestTimings, Score, StreamDelta
    from jaxinfer.models import ModelConfig, RopeConfig
    from jaxinfer.parallel.hosts import initialize_hosts
    from jaxinfer.request_arrays import RequestArray
    from jaxinfer.sampling import Processor, SamplingParams, TokenHistory
    from jaxinfer.text import Tokenizer

__version__ = "0.1.0"

_HOMES = {
    "LLM": "jaxinfer.api.llm",
    "AsyncEngine": "jaxinfer.api.async_engine",
    "Coordinate": "jaxinfer.api.coordinate",
    "StreamDelta": "jaxinfer.engine.request",
    "SamplingParams": "jaxinfer.sampling",
    "Processor": "jaxinfer.sampling",
    "TokenHistory": "jaxinfer.sampling",
    "RequestArray": "jaxinfer.request_arrays",
    "CompletionOutput": "jaxinfer.engine.request",
    "Logprob": "jaxinfer.engine.request",
    "RequestOutput": "jaxinfer.engine.request",
    "RequestTimings": "jaxinfer.engine.request",
    "Score": "jaxinfer.engine.request",
    "ModelConfig": "jaxinfer.models",
    "RopeConfig": "jaxinfer.models",
    "Tokenizer": "jaxinfer.text",
    "initialize_hosts": "jaxinfer.parallel.hosts",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "Coordinate",
    "Logprob",
    "ModelConfig",
    "Processor",
    "RequestArray",
    "RequestOutput",
    "RequestTimings",
    "RopeConfig",
    "SamplingParams",
    "Score",
    "StreamDelta",
    "TokenHistory",
    "Tokenizer",
    "initialize_hosts",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        known = "" if name.startswith("_") else f"; it has {', '.join(__all__)}"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{known}")
    return getattr(importlib.import_module(_HOMES[name]), name)
