"""Bodies of requests. Fields that are not listed are ignored, and logged once; null means not given.

What clients send and the server does not do is listed too, as `Any`: `jaxinfer.server.params` refuses it by name.
"""

from functools import cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from jaxinfer.sampling.params import (
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_LOGPROBS,
    MAX_N,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)

MAX_SALT_CHARS = 1024
MAX_TIMEOUT = 86_400.0  # seconds


def _described(**schema: Any) -> Meta:
    """Limits that /openapi.json names. They are checked elsewhere, with a message that says more."""
    return Meta(extra_json_schema=schema)


Ids = list[Annotated[int, Meta(ge=0, lt=2**31)]]
_TEXT_OR_IDS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}, "minItems": 1}]}
Prompts = Annotated[
    list[Any],
    _described(minItems=1, anyOf=[{"items": {"type": "integer"}}, {"items": _TEXT_OR_IDS}]),
]
Prompt = str | Prompts  # a text, token ids, or a list of either
NumAnswers = Annotated[int, _described(minimum=1, maximum=MAX_N)]
Seed = Annotated[int, _described(minimum=0, maximum=2**64 - 1)]
Temperature = Annotated[float, _described(minimum=0, maximum=MAX_TEMPERATURE)]
TopP = Annotated[float, _described(exclusiveMinimum=0, maximum=1)]
TopK = Annotated[int, _described(minimum=-1)]
MinP = Annotated[float, _described(minimum=0, maximum=1)]
Penalty = Annotated[float, _described(minimum=-MAX_PENALTY, maximum=MAX_PENALTY)]
RepetitionPenalty = Annotated[float, _described(minimum=MIN_REPETITION_PENALTY, maximum=MAX_REPETITION_PENALTY)]
Bias = Annotated[float, _described(minimum=-MAX_LOGIT_BIAS, maximum=MAX_LOGIT_BIAS)]
TokenText = Annotated[str, _described(pattern="^[0-9]+$")]
LogitBias = Annotated[dict[TokenText, Bias], _described(maxProperties=MAX_LOGIT_BIAS_ENTRIES)]
StopText = Annotated[str, _described(minLength=1, maxLength=MAX_STOP_CHARS)]
Stop = StopText | Annotated[list[StopText], _described(maxItems=MAX_STOP_STRINGS)]
Limit = Annotated[int, _described(minimum=1)]
NumTokens = Annotated[int, _described(minimum=0)]
NumLogprobs = Annotated[int, _described(minimum=0, maximum=MAX_LOGPROBS)]
Priority = Annotated[int, _described(minimum=-(2**31), maximum=2**31 - 1)]
KeepAlive = Annotated[
    int | float | str,
    _described(
        description="Seconds, or a time such as 5m, that the model stays loaded after the request; below 0 it stays"
    ),
]
Timeout = Annotated[float, _described(exclusiveMinimum=0, maximum=MAX_TIMEOUT)]
CacheSalt = Annotated[str, _described(maxLength=MAX_SALT_CHARS)]
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "input_text", "output_text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_OBJECTS = {"type": "array", "items": {"type": "object"}}
_BLOCKS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"enum": ["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]}},
        "required": ["type"],
    },
}
Message = Annotated[
    dict[str, Any],
    _described(
        properties={
            "role": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, {"type": "null"}]},
            "tool_calls": {"anyOf": [_OBJECTS, {"type": "null"}]},
        },
        required=["role"],
        anyOf=[{"required": ["content"]}, {"required": ["tool_calls"]}],
    ),
]
Messages = Annotated[list[Message], _described(minItems=1)]
AnthropicMessage = Annotated[
    dict[str, Any],
    _described(
        properties={
            "role": {"enum": ["user", "assistant", "system"]},
            "content": {"anyOf": [{"type": "string"}, _BLOCKS]},
        },
        required=["role", "content"],
    ),
]
_ITEM_TYPES = ["message", "reasoning", "function_call", "function_call_output"]
InputItem = Annotated[dict[str, Any], _described(properties={"type": {"enum": _ITEM_TYPES}})]
InputItems = Annotated[list[InputItem], _described(minItems=1)]
AnthropicMessages = Annotated[list[AnthropicMessage], _described(minItems=1)]


class StreamOptions(Struct, kw_only=True):
    """How an answer is streamed."""

    include_usage: bool | None = None


class SamplingFields(Struct, kw_only=True):
    """Fields of `SamplingParams`, and what both OpenAI routes share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: NumAnswers | None = None
    seed: Seed | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: Ids | None = None
    bad_words: list[str] | None = None
    stop: Stop | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: NumTokens | None = None
    min_tokens: NumTokens | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    priority: Priority | None = None
    timeout: Timeout | None = None
    keep_alive: KeepAlive | None = None
    cache_salt: CacheSalt | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Any = None
    store: Any = None
    response_format: Any = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    best_of: Any = None


class ChatRequest(SamplingFields, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionRequest(SamplingFields, kw_only=True):
    """The body of /v1/completions."""

    prompt: Prompt
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    suffix: Any = None
    add_special_tokens: bool | None = None


class ModelRequest(Struct, kw_only=True):
    """The body of /models/unload."""

    model: str


class LoadRequest(ModelRequest, kw_only=True):
    """The body of /models/load."""

    keep_alive: KeepAlive | None = None


class TokenizeRequest(Struct, kw_only=True):
    """The body of /tokenize: a prompt or messages."""

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


class Thinking(Struct, kw_only=True):
    """Anthropic's switch of reasoning."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class MessagesRequest(Struct, kw_only=True):
    """The body of /v1/messages."""

    model: str | None = None
    messages: AnthropicMessages
    max_tokens: Limit
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    metadata: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    service_tier: Any = None
    seed: Seed | None = None
    priority: Priority | None = None
    timeout: Timeout | None = None
    keep_alive: KeepAlive | None = None
    cache_salt: CacheSalt | None = None


class CountTokensRequest(Struct, kw_only=True):
    """The body of /v1/messages/count_tokens."""

    model: str | None = None
    messages: AnthropicMessages
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None


class ResponsesRequest(Struct, kw_only=True):
    """The body of /v1/responses; nothing is stored."""

    model: str | None = None
    input: str | InputItems
    instructions: str | None = None
    stream: bool | None = None
    stream_options: Any = None
    max_output_tokens: Limit | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    top_logprobs: NumLogprobs | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    priority: Priority | None = None
    timeout: Timeout | None = None
    keep_alive: KeepAlive | None = None
    cache_salt: CacheSalt | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    service_tier: Any = None
    truncation: str | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    max_tool_calls: int | None = None
    prompt: Any = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


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


@cache
def known_fields(body: type[Struct]) -> frozenset[str]:
    """Names of the fields that a body may have."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(body))
