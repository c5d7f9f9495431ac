"""Bodies of Ollama's API; null means not given."""

from typing import Any, ClassVar

from msgspec import Struct

from jaxinfer.openai.bodies import (
    TOOL,
    Body,
    CacheSalt,
    KeepAlive,
    MinP,
    Names,
    Neutral,
    Penalty,
    Priority,
    RepetitionPenalty,
    Seed,
    Temperature,
    Timeout,
    TopK,
    TopP,
    any_of,
)
from jaxinfer.text.messages import MESSAGE_NAMES

_MESSAGE: Names = {
    **any_of("role", "content", "thinking", "images", "tool_name", "name", "tool_call_id"),
    "tool_calls": MESSAGE_NAMES["tool_calls"],
}


class OllamaOptions(Struct, kw_only=True):
    """Sampling, as Ollama names it. How a model is loaded, the options of jaxinfer serve say: of those that Ollama has
    for that, only `num_ctx` is a request's, and the others (`num_gpu` to `use_mlock`) change nothing."""

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
    logits_all: Any = None
    vocab_only: Any = None
    embedding_only: Any = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    num_batch: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None


class OllamaRequest(Body, kw_only=True):
    """What chat and generate share; `priority`, `timeout` and `cache_salt` are ours."""

    NEUTRAL: ClassVar[Neutral] = {"logprobs": (False,), "top_logprobs": (0,), "truncate": (False,), "shift": (False,)}

    model: str
    stream: bool | None = None
    format: Any = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None
    think: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    truncate: Any = None
    shift: Any = None
    priority: Priority | None = None
    timeout: Timeout | None = None
    cache_salt: CacheSalt | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """The body of /api/chat. Without messages, the model is loaded, or with keep_alive 0 unloaded."""

    NESTED: ClassVar[Names] = {"tools": TOOL, "messages": _MESSAGE}

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """The body of /api/generate. Without a prompt, the model is loaded, or with keep_alive 0 unloaded."""

    NEUTRAL: ClassVar[Neutral] = {
        **OllamaRequest.NEUTRAL,
        **dict.fromkeys(("suffix", "template", "context", "images", "width", "height", "steps"), ()),
    }

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: Any = None
    template: Any = None
    context: Any = None
    images: Any = None
    width: Any = None
    height: Any = None
    steps: Any = None


class OllamaModelRequest(Body, kw_only=True):
    """The body of /api/show, /api/pull and /api/delete; `name` is the older form of `model`."""

    NEUTRAL: ClassVar[Neutral] = {
        "insecure": (False,),
        **dict.fromkeys(("system", "template", "options", "username", "password"), ()),
    }

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    verbose: bool | None = None
    insecure: Any = None
    system: Any = None
    template: Any = None
    options: Any = None
    username: Any = None
    password: Any = None


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


NEUTRAL_OPTIONS: dict[str, tuple[Any, ...]] = {
    "repeat_last_n": (-1,),
    "typical_p": (1, 1.0),
    "tfs_z": (1, 1.0),
    "mirostat": (0,),
    "mirostat_tau": (),
    "mirostat_eta": (),
    "penalize_newline": (True,),
    "logits_all": (False,),
    "vocab_only": (False,),
    "embedding_only": (False,),
}
LOADING = frozenset(
    ("num_gpu", "main_gpu", "num_thread", "num_batch", "numa", "low_vram", "f16_kv", "use_mmap", "use_mlock")
)
"""Those of how a model is loaded, which change nothing."""
OF_OTHERS = frozenset(("repeat_last_n", "mirostat_tau", "mirostat_eta"))
"""Those that change nothing where the penalties or mirostat, to which they belong, are off."""
BODIES: dict[str, type[Struct]] = {
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
    "/api/embed": OllamaEmbedRequest,
    "/api/show": OllamaModelRequest,
    "/api/pull": OllamaModelRequest,
    "/api/copy": OllamaCopyRequest,
}
