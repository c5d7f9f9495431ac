"""Bodies of OpenAI's chat, completions, responses and embeddings; null means not given.

Each type names what a body may have, at every depth that is not the caller's own (JSON schemas, metadata, arguments of
calls, variables of templates). What clients send and this package does not do is in `NEUTRAL`, with the values that
change nothing: the reader refuses the others by name. What is in neither is an unknown field.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from jaxinfer.checks import TYPES
from jaxinfer.grammar.structured import StructuredOutputs
from jaxinfer.sampling import params

MAX_SALT_CHARS = 1024
MAX_TIMEOUT = 86_400.0  # seconds


def described(**schema: Any) -> Meta:
    """Limits that /openapi.json names. They are checked elsewhere, with a message that says more."""
    return Meta(extra_json_schema=schema)


Ids = list[Annotated[int, Meta(ge=0, lt=2**31)]]
_TEXT_OR_IDS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}, "minItems": 1}]}
Prompts = Annotated[list[Any], described(minItems=1, anyOf=[{"items": {"type": "integer"}}, {"items": _TEXT_OR_IDS}])]
Prompt = str | Prompts  # a text, token ids, or a list of either
NumAnswers = Annotated[int, described(minimum=1, maximum=params.MAX_N)]
Seed = Annotated[int, described(minimum=0, maximum=2**64 - 1)]
Temperature = Annotated[float, described(minimum=0, maximum=params.MAX_TEMPERATURE)]
TopP = Annotated[float, described(exclusiveMinimum=0, maximum=1)]
TopK = Annotated[int, described(minimum=-1)]
MinP = Annotated[float, described(minimum=0, maximum=1)]
Penalty = Annotated[float, described(minimum=-params.MAX_PENALTY, maximum=params.MAX_PENALTY)]
RepetitionPenalty = Annotated[
    float, described(minimum=params.MIN_REPETITION_PENALTY, maximum=params.MAX_REPETITION_PENALTY)
]
Bias = Annotated[float, described(minimum=-params.MAX_LOGIT_BIAS, maximum=params.MAX_LOGIT_BIAS)]
TokenText = Annotated[str, described(pattern="^[0-9]+$")]
LogitBias = Annotated[dict[TokenText, Bias], described(maxProperties=params.MAX_LOGIT_BIAS_ENTRIES)]
StopText = Annotated[str, described(minLength=1, maxLength=params.MAX_STOP_CHARS)]
Stop = StopText | Annotated[list[StopText], described(maxItems=params.MAX_STOP_STRINGS)]
Limit = Annotated[int, described(minimum=1)]
NumTokens = Annotated[int, described(minimum=0)]
NumLogprobs = Annotated[int, described(minimum=0, maximum=params.MAX_LOGPROBS)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_KEPT = "Seconds, or a time such as 5m, that the model stays loaded after the request; below 0 it stays"
KeepAlive = Annotated[int | float | str, described(description=_KEPT)]
Timeout = Annotated[float, described(exclusiveMinimum=0, maximum=MAX_TIMEOUT)]
CacheSalt = Annotated[str, described(maxLength=MAX_SALT_CHARS)]
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "input_text", "output_text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_OBJECTS = {"type": "array", "items": {"type": "object"}}
Message = Annotated[
    dict[str, Any],
    described(
        properties={
            "role": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, {"type": "null"}]},
            "tool_calls": {"anyOf": [_OBJECTS, {"type": "null"}]},
        },
        required=["role"],
        anyOf=[{"required": ["content"]}, {"required": ["tool_calls"]}],
    ),
]
Messages = Annotated[list[Message], described(minItems=1)]
_ITEM_TYPES = ("message", "reasoning", "function_call", "function_call_output")
InputItem = Annotated[dict[str, Any], described(properties={"type": {"enum": _ITEM_TYPES}})]
InputItems = Annotated[list[InputItem], described(minItems=1)]
# Names at the depths below a field: of an object, or of each object of a list; None for a value of any kind.
Names = dict[str, Any]
Neutral = dict[str, tuple[Any, ...]]


def any_of(*names: str) -> Names:
    """Names with values of any kind."""
    return dict.fromkeys(names)


_FUNCTION = any_of("name", "description", "parameters", "strict", "return")
TOOL: Names = {"type": None, "function": _FUNCTION, "cache_control": None}
_NAMED: Names = {"type": None, "function": {"name": None}}
TOOL_CHOICE: Names = {**_NAMED, "allowed_tools": {"mode": None, "tools": _NAMED}}
_FORMAT: Names = {**any_of("type", "schema"), "json_schema": any_of("name", "description", "schema", "strict")}
OF_VLLM = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")  # false changes nothing
_STRUCTURED = any_of(*(option.name for option in fields(StructuredOutputs)), *OF_VLLM)


class Body(Struct, kw_only=True):
    """A body of a request.

    Attributes:
      NESTED: names within its fields. NEUTRAL: names of what is not supported, with the values that change nothing,
        besides null and those that stand for it. WHY: of such a name, a clause for its error.
    """

    NESTED: ClassVar[Names] = {}
    NEUTRAL: ClassVar[Neutral] = {}
    WHY: ClassVar[Mapping[str, str]] = {}


class StreamOptions(Struct, kw_only=True):
    """How an answer is streamed."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # no answer has any
    continuous_usage_stats: bool | None = None


class GenerationFields(Body, kw_only=True):
    """Fields of every body that is answered with new tokens; the last four are ours."""

    stream: bool | None = None
    priority: Priority | None = None
    timeout: Timeout | None = None
    keep_alive: KeepAlive | None = None
    cache_salt: CacheSalt | None = None


class OpenAIFields(GenerationFields, kw_only=True):
    """Fields that chat, completions and responses share. Those from `user` on are the client's notes."""

    model: str | None = None
    stream_options: StreamOptions | None = None
    seed: Seed | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop: Stop | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


class SamplingFields(OpenAIFields, kw_only=True):
    """Fields that chat and completions share: those of `SamplingParams`, and of the prompt and the answer."""

    NEUTRAL: ClassVar[Neutral] = {
        "service_tier": ("auto", "default"),
        "store": (False,),
        "length_penalty": (1.0,),
        "use_beam_search": (False,),
        "spaces_between_special_tokens": (True,),
        "detokenize": (True,),
        "return_tokens_as_token_ids": (False,),
        **dict.fromkeys(("no_stop_trim", "return_hidden_states"), (False,)),  # SGLang's, which vllm-router adds
    }
    NESTED: ClassVar[Names] = {"response_format": _FORMAT, "structured_outputs": _STRUCTURED}

    n: NumAnswers | None = None
    min_p: MinP | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: Ids | None = None
    bad_words: list[str] | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: NumTokens | None = None
    min_tokens: NumTokens | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    return_coordinate: bool | None = None
    request_id: str | None = None
    response_format: Any = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    best_of: Any = None


class ChatRequest(SamplingFields, kw_only=True):
    """The body of /v1/chat/completions."""

    NEUTRAL: ClassVar[Neutral] = SamplingFields.NEUTRAL | {
        **dict.fromkeys(("chat_template", "functions", "audio", "prediction", "web_search_options", "moderation"), ()),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "verbosity": ("medium",),
        "echo": (False,),
        "add_special_tokens": (False,),
        **dict.fromkeys(("include_reasoning", "separate_reasoning", "stream_reasoning"), (True,)),
    }
    NESTED: ClassVar[Names] = SamplingFields.NESTED | {"tools": TOOL, "tool_choice": TOOL_CHOICE}

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


class CompletionRequest(SamplingFields, kw_only=True):
    """The body of /v1/completions."""

    NEUTRAL: ClassVar[Neutral] = SamplingFields.NEUTRAL | {"suffix": ()}

    prompt: Prompt
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


_PART = {
    **any_of("type", "text", "annotations", "logprobs", "cache_control", "parsed", "prompt_cache_breakpoint"),
    TYPES: ("text", "input_text", "output_text", "summary_text", "reasoning_text"),
}
_ITEM: Names = {
    **any_of("type", "id", "status", "role", "phase", "call_id", "name", "namespace", "arguments", "caller"),
    **any_of("encrypted_content", "created_by", "async", "async_", "parsed_arguments", "output"),
    TYPES: _ITEM_TYPES,
    **dict.fromkeys(("content", "summary"), _PART),
}
_TOOL: Names = {
    **any_of("type", "name", "description", "parameters", "strict", "cache_control"),
    **any_of("allowed_callers", "defer_loading", "output_schema", "async"),
}
_STORED = ", nothing is stored: send the whole conversation"


class ResponsesRequest(OpenAIFields, kw_only=True):
    """The body of /v1/responses; nothing is stored."""

    NEUTRAL: ClassVar[Neutral] = {
        **dict.fromkeys(("previous_response_id", "conversation", "prompt", "context_management", "moderation"), ()),
        "background": (False,),
        "truncation": ("disabled",),
        "service_tier": ("auto", "default"),
        "top_logprobs": (0,),
    }
    WHY: ClassVar[Mapping[str, str]] = dict.fromkeys(("previous_response_id", "conversation"), _STORED)
    NESTED: ClassVar[Names] = {
        "input": _ITEM,
        "reasoning": any_of("effort", "summary", "generate_summary"),
        "text": {"format": any_of("type", "name", "description", "schema", "strict"), "verbosity": None},
        "tools": _TOOL | {TYPES: ("function",)},
        "tool_choice": {**_TOOL, "mode": None, "tools": _TOOL},
    }

    input: str | InputItems
    instructions: str | None = None
    max_output_tokens: Limit | None = None
    top_logprobs: NumLogprobs | None = None
    store: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    truncation: str | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    max_tool_calls: int | None = None
    client_metadata: dict[str, Any] | None = None


class VectorFields(Body, kw_only=True):
    """Fields of the bodies of all three routes. `truncate_prompt_tokens` may be -1, vLLM's way to say `truncate`."""

    model: str | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: Priority | None = None
    keep_alive: KeepAlive | None = None
    user: str | None = None


class EmbeddingsRequest(VectorFields, kw_only=True):
    """The body of /v1/embeddings."""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    prompt_name: str | None = None
    prompt: str | None = None
    pooling: Literal["last", "mean", "cls"] | None = None
    normalize: bool | None = None
