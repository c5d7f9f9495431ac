"""Answers in Anthropic's form, for /openapi.json."""

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from jaxinfer.openai.answers import Answer, event_types


class AnthropicErrorFields(Answer):
    type: str
    message: str


class AnthropicError(Answer, tag_field="type", tag="error"):
    error: AnthropicErrorFields


class TextBlock(Answer, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Answer, tag_field="type", tag="thinking"):
    thinking: str
    signature: Literal[""]


class ToolUseBlock(Answer, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(Answer):
    """Numbers of tokens; those of the prompt are told apart by whether they were cached."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int | UnsetType = UNSET
    cache_read_input_tokens: int | UnsetType = UNSET


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageEnd(Answer):
    """Why a message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class Message(Answer, tag_field="type", tag="message"):
    """The answer of a conversation."""

    id: str
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


_DELTAS = {"text_delta": {"text": str}, "thinking_delta": {"thinking": str}, "input_json_delta": {"partial_json": str}}
_EVENTS = event_types(
    "Anthropic",
    {
        "message_start": {"message": Message},
        "ping": {},
        "content_block_start": {"index": int, "content_block": Block},
        "content_block_delta": {"index": int, "delta": event_types("Anthropic", _DELTAS)},
        "content_block_stop": {"index": int},
        "message_delta": {"delta": MessageEnd, "usage": MessageUsage},
        "message_stop": {},
    },
)
MessageEvent = _EVENTS | AnthropicError


class TokenCount(Answer):
    """Tokens of a conversation."""

    input_tokens: int
