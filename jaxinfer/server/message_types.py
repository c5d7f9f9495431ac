"""Answers in Anthropic's form, for /openapi.json."""

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from jaxinfer.openai.answers import Answer


class AnthropicErrorFields(Answer):
    """Anthropic's error."""

    type: str
    message: str


class AnthropicError(Answer, tag_field="type", tag="error"):
    """Anthropic's form of an error."""

    error: AnthropicErrorFields


class TextBlock(Answer, tag_field="type", tag="text"):
    """Text of a message."""

    text: str


class ThinkingBlock(Answer, tag_field="type", tag="thinking"):
    """Reasoning of a message."""

    thinking: str
    signature: Literal[""]


class ToolUseBlock(Answer, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Answer):
    """Numbers of tokens; those of the prompt are told apart by whether they were cached."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int | UnsetType = UNSET
    cache_read_input_tokens: int | UnsetType = UNSET


class Message(Answer, tag_field="type", tag="message"):
    """The answer of a conversation."""

    id: str
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TextDelta(Answer, tag_field="type", tag="text_delta"):
    """New text."""

    text: str


class ThinkingDelta(Answer, tag_field="type", tag="thinking_delta"):
    """New reasoning."""

    thinking: str


class InputJsonDelta(Answer, tag_field="type", tag="input_json_delta"):
    """A piece of the JSON text of a call's input."""

    partial_json: str


class MessageEnd(Answer):
    """Why a message ended."""

    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None


class MessageStart(Answer, tag_field="type", tag="message_start"):
    message: Message


class Ping(Answer, tag_field="type", tag="ping"):
    pass


class BlockStart(Answer, tag_field="type", tag="content_block_start"):
    index: int
    content_block: TextBlock | ThinkingBlock | ToolUseBlock


class BlockDelta(Answer, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class BlockStop(Answer, tag_field="type", tag="content_block_stop"):
    index: int


class MessageDelta(Answer, tag_field="type", tag="message_delta"):
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(Answer, tag_field="type", tag="message_stop"):
    pass


MessageEvent = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | AnthropicError


class TokenCount(Answer):
    """Tokens of a conversation."""

    input_tokens: int
