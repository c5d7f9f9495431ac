"""Bodies of Anthropic's and Ollama's routes and of the server's own; null means not given."""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct, field, structs

from jaxinfer.checks import TYPES
from jaxinfer.openai import bodies
from jaxinfer.text.messages import MESSAGE_NAMES

# The server's own routes.


class ModelRequest(Struct, kw_only=True):
    """The body of /models/unload."""

    model: str


class LoadRequest(ModelRequest, kw_only=True):
    """The body of /models/load."""

    keep_alive: bodies.KeepAlive | None = None


class LoadAdapterRequest(Struct, kw_only=True):
    """The body of /v1/load_lora_adapter: vLLM's, with `keys`, the names of the API keys whose requests may name the
    adapter; by default those of the adapter that it replaces, else all. What `is_3d_lora_weight` tells of the tensors
    is read from their file."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None
    is_3d_lora_weight: bool | None = None
    keys: Annotated[list[str], bodies.described(minItems=1)] | None = None


class InitTransferRequest(Struct, kw_only=True):
    """The body of /init_weight_transfer_engine: {"backend": "path"} or {"backend": "process"}."""

    init_info: dict[str, Any]


class StartUpdateRequest(Struct, kw_only=True):
    """The body of /start_weight_update: vLLM's, with `kv`: whether the keys and values of what runs are computed anew,
    or kept."""

    is_checkpoint_format: bool | None = None
    kv: Literal["recompute", "retain"] | None = None


class UpdateWeightsRequest(Struct, kw_only=True):
    """The body of /update_weights: {"path": FOLDER}, or {"backend": "process", "name": NAME, "partial": false}."""

    update_info: dict[str, Any]


class FinishUpdateRequest(Struct, kw_only=True):
    """The body of /finish_weight_update."""

    weight_version: str | None = None


class UnloadAdapterRequest(bodies.Body, kw_only=True):
    """The body of /v1/unload_lora_adapter. Adapters have no numbers here."""

    NEUTRAL: ClassVar[bodies.Neutral] = {"lora_int_id": ()}

    lora_name: str


class TokenizeRequest(bodies.Body, kw_only=True):
    """The body of /tokenize: a prompt or messages."""

    NESTED: ClassVar[bodies.Names] = {"tools": bodies.TOOL}

    model: str | None = None
    prompt: str | None = None
    messages: bodies.Messages | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """The body of /detokenize."""

    model: str | None = None
    tokens: bodies.Ids


# Scores of texts, as vLLM, Jina and Cohere have them.

_SOME = bodies.described(minItems=1)
_Texts = Annotated[list[str], _SOME]
_Document = Annotated[dict[str, Any], bodies.described(properties={"text": {"type": "string"}}, required=["text"])]


class ScoreRequest(bodies.VectorFields, kw_only=True):
    """The body of /v1/score: pairs of texts, or one text against several."""

    text_1: str | _Texts
    text_2: str | _Texts
    instruction: str | None = None


class HiddenStatesRequest(bodies.Body, kw_only=True):
    """The body of /v1/hidden_states: a text or token ids, of which the states after `layers` are wanted, and of an
    answer of at most `max_tokens` tokens, 1 by default; greedy unless a `temperature` is given."""

    model: str | None = None
    prompt: str | bodies.Ids
    layers: Annotated[bodies.Ids, Meta(min_length=1)]
    max_tokens: bodies.Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    seed: int | None = None
    priority: bodies.Priority | None = None
    keep_alive: bodies.KeepAlive | None = None
    user: str | None = None


class RerankRequest(bodies.VectorFields, kw_only=True):
    """The body of /v1/rerank."""

    query: str
    documents: Annotated[list[str | _Document], _SOME]
    top_n: bodies.Positive | None = None
    return_documents: bool | None = None
    instruction: str | None = None


# Anthropic's.

_BLOCK_TYPES = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
_BLOCKS = {
    "type": "array",
    "items": {"type": "object", "properties": {"type": {"enum": _BLOCK_TYPES}}, "required": ["type"]},
}
AnthropicMessage = Annotated[
    dict[str, Any],
    bodies.described(
        properties={
            "role": {"enum": ["user", "assistant", "system"]},
            "content": {"anyOf": [{"type": "string"}, _BLOCKS]},
        },
        required=["role", "content"],
    ),
]
AnthropicMessages = Annotated[list[AnthropicMessage], bodies.described(minItems=1)]
_TEXT_BLOCK: bodies.Names = bodies.any_of("type", "text", "citations", "cache_control")
_TURN = bodies.any_of(  # a message of the package that is sent back whole
    *("role", "id", "type", "model", "stop_reason", "stop_sequence", "stop_details", "usage", "container"),
    "diagnostics",
)
_BLOCK: bodies.Names = {
    **_TEXT_BLOCK,
    **bodies.any_of("thinking", "signature", "data", "id", "name", "input", "caller", "tool_use_id", "is_error"),
    "toolset_name": None,
    "content": {**_TEXT_BLOCK, TYPES: ("text",)},
    TYPES: _BLOCK_TYPES,
}
_TOOL: bodies.Names = {
    **bodies.any_of("type", "name", "description", "input_schema", "strict", "cache_control"),
    **bodies.any_of("eager_input_streaming", "defer_loading", "allowed_callers"),
    TYPES: ("custom",),
}


class Thinking(Struct, kw_only=True):
    """Anthropic's switch of reasoning."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class Conversation(bodies.Body, kw_only=True):
    """Fields of Anthropic's two bodies. Marks of a cache (`cache_control`) change nothing, since every prefix is kept,
    nor does what may be cleared from the context (`context_management`), since nothing is."""

    NESTED: ClassVar[bodies.Names] = {
        "messages": {**_TURN, "content": _BLOCK},
        "output_config": bodies.any_of("effort", "format"),
        "system": _TEXT_BLOCK,
        "tools": _TOOL,
        "tool_choice": bodies.any_of("type", "name", "disable_parallel_tool_use"),
    }
    NEUTRAL: ClassVar[bodies.Neutral] = {"service_tier": ("auto", "standard_only"), "speed": ("standard",)}

    model: str | None = None
    messages: AnthropicMessages
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessagesRequest(Conversation, kw_only=True):
    """The body of /v1/messages."""

    max_tokens: bodies.Limit
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: bodies.Temperature | None = None
    top_p: bodies.TopP | None = None
    top_k: bodies.TopK | None = None
    metadata: dict[str, Any] | None = None
    seed: bodies.Seed | None = None
    priority: bodies.Priority | None = None
    timeout: bodies.Timeout | None = None
    keep_alive: bodies.KeepAlive | None = None
    cache_salt: bodies.CacheSalt | None = None


class CountTokensRequest(Conversation, kw_only=True):
    """The body of /v1/messages/count_tokens."""


# Ollama's.


class OllamaLoading(bodies.Body, kw_only=True):
    """How a model is loaded, which the options of jaxinfer serve say: none changes anything."""

    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    num_batch: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None


class OllamaOptions(OllamaLoading, kw_only=True):
    """Sampling, under the names of `SamplingParams`, with Ollama's names in bodies; `num_ctx` is the length that a
    prompt may have with its answer. Those of mirostat change nothing without it."""

    NEUTRAL: ClassVar[bodies.Neutral] = {
        "typical_p": (1, 1.0),
        "tfs_z": (1, 1.0),
        "mirostat": (0,),
        "penalize_newline": (True,),
        **dict.fromkeys(("logits_all", "vocab_only", "embedding_only"), (False,)),
    }

    seed: bodies.Seed | None = None
    temperature: bodies.Temperature | None = None
    top_k: bodies.TopK | None = None
    top_p: bodies.TopP | None = None
    min_p: bodies.MinP | None = None
    stop: str | list[str] | None = None
    repetition_penalty: bodies.RepetitionPenalty | None = field(name="repeat_penalty", default=None)
    presence_penalty: bodies.Penalty | None = None
    frequency_penalty: bodies.Penalty | None = None
    max_tokens: int | None = field(name="num_predict", default=None)
    num_ctx: int | None = None
    num_keep: Any = None
    repeat_last_n: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None


class OllamaRequest(bodies.GenerationFields, kw_only=True):
    """Fields that chat and generate share."""

    NEUTRAL: ClassVar[bodies.Neutral] = {
        "logprobs": (False,),
        "top_logprobs": (0,),
        "truncate": (False,),
        "shift": (False,),
    }

    model: str
    format: Any = None
    options: OllamaOptions | None = None
    think: Any = None

    @property
    def seed(self) -> int | None:
        """That of the options, as other bodies have it."""
        return None if self.options is None else self.options.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self.options = structs.replace(self.options or OllamaOptions(), seed=seed)


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """The body of /api/chat. Without messages, the model is loaded, or with keep_alive 0 unloaded."""

    NESTED: ClassVar[bodies.Names] = {
        "tools": bodies.TOOL,
        "messages": {
            **bodies.any_of("role", "content", "thinking", "images", "tool_name", "name", "tool_call_id"),
            "tool_calls": MESSAGE_NAMES["tool_calls"],
        },
    }

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """The body of /api/generate. Without a prompt, the model is loaded, or with keep_alive 0 unloaded."""

    NEUTRAL: ClassVar[bodies.Neutral] = {
        **OllamaRequest.NEUTRAL,
        **dict.fromkeys(("suffix", "template", "context", "images", "width", "height", "steps"), ()),
    }

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


class OllamaModelRequest(bodies.Body, kw_only=True):
    """The body of /api/show, /api/pull and /api/delete; `name` is the older form of `model`."""

    NEUTRAL: ClassVar[bodies.Neutral] = {
        "insecure": (False,),
        **dict.fromkeys(("system", "template", "options", "username", "password"), ()),
    }

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    verbose: bool | None = None


class OllamaEmbedRequest(Struct, kw_only=True):
    """The body of /api/embed."""

    model: str
    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None
    options: OllamaOptions | None = None
    keep_alive: bodies.KeepAlive | None = None


class OllamaCopyRequest(Struct, kw_only=True):
    """The body of /api/copy."""

    source: str
    destination: str
