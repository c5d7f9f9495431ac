"""Answers and events of the responses API, for /openapi.json."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from jaxinfer.openai.answers import Answer, event_types

Empty = Annotated[list[Any], Meta(max_length=0)]


class OutputText(Answer, tag_field="type", tag="output_text"):
    text: str
    annotations: Empty
    logprobs: Empty


class ReasoningText(Answer, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(Answer, tag_field="type", tag="message"):
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(Answer, tag_field="type", tag="reasoning"):
    id: str
    summary: Empty
    content: list[ReasoningText]


class FunctionCall(Answer, tag_field="type", tag="function_call"):
    """A call of a tool; its arguments are the text of a JSON object."""

    id: str
    status: Literal["in_progress", "completed"]
    call_id: str
    name: str
    arguments: str


Item = OutputMessage | ReasoningItem | FunctionCall


class InputDetails(Answer):
    """Parts of the prompt's tokens."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Answer):
    """Parts of the answer's tokens."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(Answer):
    """Why an answer has no end."""

    reason: Literal["max_output_tokens"]


class Response(Answer):
    """An answer; what the request said is repeated in it."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | UnsetType = UNSET
    user: str | UnsetType = UNSET


_RESPONSE = {"sequence_number": int, "response": Response}
_ITEM = {"sequence_number": int, "output_index": int, "item": Item}
_OF_ITEM = {"sequence_number": int, "item_id": str, "output_index": int}
_OF_PART = {**_OF_ITEM, "content_index": int}
_PART = {**_OF_PART, "part": OutputText | ReasoningText}

ResponseEvent = event_types(
    "Response",
    {
        **dict.fromkeys(("response.created", "response.in_progress"), _RESPONSE),
        **dict.fromkeys(("response.completed", "response.incomplete"), _RESPONSE),
        **dict.fromkeys(("response.output_item.added", "response.output_item.done"), _ITEM),
        **dict.fromkeys(("response.content_part.added", "response.content_part.done"), _PART),
        "response.output_text.delta": {**_OF_PART, "delta": str, "logprobs": Empty},
        "response.output_text.done": {**_OF_PART, "text": str, "logprobs": Empty},
        "response.reasoning_text.delta": {**_OF_PART, "delta": str},
        "response.reasoning_text.done": {**_OF_PART, "text": str},
        "response.function_call_arguments.delta": {**_OF_ITEM, "delta": str},
        "response.function_call_arguments.done": {**_OF_ITEM, "name": str, "arguments": str},
        "error": {"sequence_number": int, "code": str, "message": str, "param": str | None},
    },
)
