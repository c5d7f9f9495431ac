"""Bodies of Ollama's API. Fields that are not listed are ignored, and logged once; null means not given."""

from typing import Any

from msgspec import Struct

from jaxinfer.server.types import (
    CacheSalt,
    KeepAlive,
    MinP,
    Penalty,
    Priority,
    RepetitionPenalty,
    Seed,
    Temperature,
    Timeout,
    TopK,
    TopP,
)


class OllamaOptions(Struct, kw_only=True):
    """Sampling, as Ollama names it. Of how a model is loaded only `num_ctx` is a request's."""

    seed: Seed | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    stop: str | list[str] | None = None
    num_predict: int | None = None
    num_ctx: int | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_last_n: int | None = None
    num_keep: Any = None
    typical_p: Any = None
    tfs_z: Any = None
    mirostat: Any = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    penalize_newline: Any = None
    numa: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    main_gpu: Any = None
    num_thread: Any = None
    low_vram: Any = None
    f16_kv: Any = None
    logits_all: Any = None
    vocab_only: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    embedding_only: Any = None


class OllamaRequest(Struct, kw_only=True):
    """What chat and generate share; `priority`, `timeout` and `cache_salt` are ours."""

    model: str
    stream: bool | None = None
    format: Any = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None
    think: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    priority: Priority | None = None
    timeout: Timeout | None = None
    cache_salt: CacheSalt | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """The body of /api/chat. Without messages, the model is loaded, or with keep_alive 0 unloaded."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """The body of /api/generate. Without a prompt, the model is loaded, or with keep_alive 0 unloaded."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: Any = None
    template: Any = None
    context: Any = None
    images: Any = None


class OllamaModelRequest(Struct, kw_only=True):
    """The body of /api/show, /api/pull and /api/delete; `name` is the older form of `model`."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    verbose: bool | None = None
    insecure: Any = None


class OllamaEmbedRequest(Struct, kw_only=True):
    """The body of /api/embed."""

    model: str
    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


class OllamaCopyRequest(Struct, kw_only=True):
    """The body of /api/copy."""

    source: str
    destination: str


class OllamaError(Struct, kw_only=True):
    """The body of every error of Ollama's routes."""

    error: str


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "template": ("",),
    "context": ([],),
    "images": ([],),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "insecure": (False,),
}  # with the values that change nothing, besides null
NEUTRAL_OPTIONS: dict[str, tuple[Any, ...]] = {
    "repeat_last_n": (-1,),
    "typical_p": (1, 1.0),
    "tfs_z": (1, 1.0),
    "mirostat": (0,),
    "mirostat_tau": (),
    "mirostat_eta": (),
    "penalize_newline": (True,),
    "numa": (False,),
    "num_batch": (),
    "num_gpu": (-1,),
    "main_gpu": (0,),
    "num_thread": (0,),
    "low_vram": (False,),
    "f16_kv": (),
    "logits_all": (False,),
    "vocab_only": (False,),
    "use_mmap": (),
    "use_mlock": (False,),
    "embedding_only": (False,),
}
OF_OTHERS = frozenset(("repeat_last_n", "mirostat_tau", "mirostat_eta"))
"""Those that change nothing where the penalties or mirostat, to which they belong, are off."""
ON_LOADING = frozenset(
    ("numa", "num_batch", "num_gpu", "main_gpu", "num_thread", "low_vram", "f16_kv", "use_mmap", "use_mlock")
)
BODIES: dict[str, type[Struct]] = {
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
    "/api/embed": OllamaEmbedRequest,
    "/api/show": OllamaModelRequest,
    "/api/pull": OllamaModelRequest,
    "/api/copy": OllamaCopyRequest,
}
