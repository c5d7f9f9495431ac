"""Bodies of Anthropic's routes and of the server's own; null means not given."""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Struct

from jaxinfer.checks import TYPES
from jaxinfer.openai.bodies import (
    TOOL,
    Body,
    CacheSalt,
    ChatRequest,
    CompletionRequest,
    Ids,
    KeepAlive,
    Limit,
    Messages,
    Names,
    Neutral,
    Priority,
    ResponsesRequest,
    Seed,
    Temperature,
    Timeout,
    TopK,
    TopP,
    any_of,
    described,
)

_BLOCKS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"enum": ["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]}},
        "required": ["type"],
    },
}
AnthropicMessage = Annotated[
    dict[str, Any],
    described(
        properties={
            "role": {"enum": ["user", "assistant", "system"]},
            "content": {"anyOf": [{"type": "string"}, _BLOCKS]},
        },
        required=["role", "content"],
    ),
]
AnthropicMessages = Annotated[list[AnthropicMessage], described(minItems=1)]


class ModelRequest(Struct, kw_only=True):
    """The body of /models/unload."""

    model: str


class LoadRequest(ModelRequest, kw_only=True):
    """The body of /models/load."""

    keep_alive: KeepAlive | None = None


class TokenizeRequest(Body, kw_only=True):
    """The body of /tokenize: a prompt or messages."""

    NESTED: ClassVar[Names] = {"tools": TOOL}

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Ids


_TEXT_BLOCK: Names = any_of("type", "text", "citations", "cache_control")
# Of a message of the package that is sent back whole.
_TURN = any_of(
    *("role", "id", "type", "model", "stop_reason", "stop_sequence", "stop_details", "usage", "container"),
    "diagnostics",
)
_BLOCK: Names = {
    **_TEXT_BLOCK,
    **any_of("thinking", "signature", "data", "id", "name", "input", "caller", "tool_use_id", "is_error"),
    "toolset_name": None,
    "content": {**_TEXT_BLOCK, TYPES: ("text",)},
    TYPES: ("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
}
_TOOL: Names = {
    **any_of("type", "name", "description", "input_schema", "strict", "cache_control"),
    **any_of("eager_input_streaming", "defer_loading", "allowed_callers"),
    TYPES: ("custom",),
}


class Thinking(Struct, kw_only=True):
    """Anthropic's switch of reasoning."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class Conversation(Body, kw_only=True):
    """Fields of Anthropic's two bodies. Marks of a cache (`cache_control`) change nothing, since every prefix is kept,
    nor does what may be cleared from the context (`context_management`), since nothing is."""

    NESTED: ClassVar[Names] = {
        "messages": {**_TURN, "content": _BLOCK},
        "output_config": any_of("effort", "format"),
        "system": _TEXT_BLOCK,
        "tools": _TOOL,
        "tool_choice": any_of("type", "name", "disable_parallel_tool_use"),
    }
    NEUTRAL: ClassVar[Neutral] = {
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
    }

    model: str | None = None
    messages: AnthropicMessages
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    service_tier: Any = None
    speed: Any = None


class MessagesRequest(Conversation, kw_only=True):
    """The body of /v1/messages."""

    max_tokens: Limit
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    metadata: dict[str, Any] | None = None
    seed: Seed | None = None
    priority: Priority | None = None
    timeout: Timeout | None = None
    keep_alive: KeepAlive | None = None
    cache_salt: CacheSalt | None = None


class CountTokensRequest(Conversation, kw_only=True):
    """The body of /v1/messages/count_tokens."""


BODIES: dict[str, type[Struct]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/models/load": LoadRequest,
    "/models/unload": ModelRequest,
}
