"""Answers and events of the responses API, for /openapi.json."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from jaxinfer.openai.answers import Answer

Empty = Annotated[list[Any], Meta(max_length=0)]


class OutputText(Answer, tag_field="type", tag="output_text"):
    """Text of a message."""

    text: str
    annotations: Empty
    logprobs: Empty


class ReasoningText(Answer, tag_field="type", tag="reasoning_text"):
    """Text of the model's reasoning."""

    text: str


class OutputMessage(Answer, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class Reasoning(Answer, tag_field="type", tag="reasoning"):
    """The model's reasoning."""

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


class InputDetails(Answer):
    """Of the prompt's tokens."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Answer):
    """Of the answer's tokens."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """Numbers of tokens."""

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
    output: list[OutputMessage | Reasoning | FunctionCall]
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


class _Event(Answer):
    sequence_number: int


class _PartEvent(_Event):
    item_id: str
    output_index: int
    content_index: int


class ResponseCreated(_Event, tag_field="type", tag="response.created"):
    response: Response


class ResponseInProgress(_Event, tag_field="type", tag="response.in_progress"):
    response: Response


class ResponseCompleted(_Event, tag_field="type", tag="response.completed"):
    response: Response


class ResponseIncomplete(_Event, tag_field="type", tag="response.incomplete"):
    response: Response


class ItemAdded(_Event, tag_field="type", tag="response.output_item.added"):
    output_index: int
    item: OutputMessage | Reasoning | FunctionCall


class ItemDone(_Event, tag_field="type", tag="response.output_item.done"):
    output_index: int
    item: OutputMessage | Reasoning | FunctionCall


class PartAdded(_PartEvent, tag_field="type", tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(_PartEvent, tag_field="type", tag="response.content_part.done"):
    part: OutputText | ReasoningText


class OutputTextDelta(_PartEvent, tag_field="type", tag="response.output_text.delta"):
    delta: str
    logprobs: Empty


class OutputTextDone(_PartEvent, tag_field="type", tag="response.output_text.done"):
    text: str
    logprobs: Empty


class ReasoningTextDelta(_PartEvent, tag_field="type", tag="response.reasoning_text.delta"):
    delta: str


class ReasoningTextDone(_PartEvent, tag_field="type", tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(_Event, tag_field="type", tag="response.function_call_arguments.delta"):
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(_Event, tag_field="type", tag="response.function_call_arguments.done"):
    item_id: str
    output_index: int
    name: str
    arguments: str


class ResponseError(_Event, tag_field="type", tag="error"):
    code: str
    message: str
    param: str | None


ResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
    | ResponseError
)
