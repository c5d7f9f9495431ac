"""Bodies of requests. Fields that are not listed are ignored, and logged once; null means not given.

What clients send and the server does not do is listed too, as `Any`: `jaxinfer.server.params` refuses it by name.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

Ids = list[Annotated[int, Meta(ge=0, lt=2**31)]]
Prompt = str | list[Any]  # a text, token ids, or a list of either
Message = Annotated[
    dict[str, Any],
    Meta(
        description='{"role": ..., "content": text or a list of text parts}',
        extra_json_schema={"properties": {"role": {"type": "string"}}, "required": ["role"]},
    ),
]


class StreamOptions(Struct, kw_only=True):
    """How an answer is streamed."""

    include_usage: bool | None = None


class SamplingFields(Struct, kw_only=True):
    """Fields of `SamplingParams`, and what both OpenAI routes share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Ids | None = None
    bad_words: list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Any = None
    store: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    best_of: Any = None


class ChatRequest(SamplingFields, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
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
    logprobs: int | None = None
    echo: bool | None = None
    suffix: Any = None
    add_special_tokens: bool | None = None


class TokenizeRequest(Struct, kw_only=True):
    """The body of /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
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
    messages: list[Message]
    max_tokens: int
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    service_tier: Any = None
    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None


class CountTokensRequest(Struct, kw_only=True):
    """The body of /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[Message]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None


class ResponsesRequest(Struct, kw_only=True):
    """The body of /v1/responses; nothing is stored."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    stream: bool | None = None
    stream_options: Any = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    top_logprobs: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
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
}
KNOWN = {body: frozenset(field.encode_name for field in msgspec.structs.fields(body)) for body in BODIES.values()}
