"""Bodies of Anthropic's routes and of the server's own; null means not given."""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Struct

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
_OTHER_BLOCKS = ("source", "title", "context")  # refused by their type
_BLOCK: Names = {
    **_TEXT_BLOCK,
    **any_of("thinking", "signature", "data", "id", "name", "input", "caller", "tool_use_id", "is_error"),
    **any_of("toolset_name", *_OTHER_BLOCKS),
    "content": _TEXT_BLOCK | dict.fromkeys(_OTHER_BLOCKS),
}
_TOOL: Names = dict.fromkeys(
    ("type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming")
)


class Thinking(Struct, kw_only=True):
    """Anthropic's switch of reasoning."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class Conversation(Body, kw_only=True):
    """What Anthropic's two bodies share. Marks of a cache (`cache_control`) change nothing: every prefix is kept."""

    NESTED: ClassVar[Names] = {
        "messages": {"role": None, "content": _BLOCK},
        "system": _TEXT_BLOCK,
        "tools": _TOOL,
        "tool_choice": any_of("type", "name", "disable_parallel_tool_use"),
    }
    NEUTRAL: ClassVar[Neutral] = {
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
        "container": (),
        "context_management": (),
        "diagnostics": (),
        "inference_geo": (),
        "mcp_servers": (),
        "output_config": (),
        "output_format": (),
    }

    model: str | None = None
    messages: AnthropicMessages
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    cache_control: dict[str, Any] | None = None
    service_tier: Any = None
    speed: Any = None
    container: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    mcp_servers: Any = None
    output_config: Any = None
    output_format: Any = None


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
