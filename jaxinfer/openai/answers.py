"""Answers of OpenAI's chat and completions and of the small routes: what the writer makes and /openapi.json tells.

Events of streams are written from templates or as dicts; tests hold them to these types.
"""

from collections.abc import Mapping
from typing import Any, Literal, Union

from msgspec import UNSET, Struct, UnsetType, defstruct

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]
StopReason = int | str | None  # the token or the text that ended the answer


class Answer(Struct, kw_only=True, forbid_unknown_fields=True):
    """An object of an answer: it has no other fields."""


def event_types(prefix: str, events: Mapping[str, Mapping[str, Any]]) -> Any:
    """A union of types: of each event its name, which is its `type`, with its fields. `prefix`: of the types' names."""
    made = []
    for tag, fields in events.items():
        parts = tag.removeprefix(f"{prefix.lower()}.").replace(".", "_").split("_")
        name = prefix + "".join(map(str.capitalize, parts))
        made.append(defstruct(name, list(fields.items()), bases=(Answer,), kw_only=True, tag_field="type", tag=tag))
    return Union[tuple(made)]  # noqa: UP007


class _Generated(Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str


Coordinates = list[dict[str, Any]] | UnsetType  # of the choices in their order, if they are requested


class ErrorFields(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Answer):
    error: ErrorFields


# Chat and completions.


class CachedTokens(Answer):
    """Tokens of a prompt that were not computed again."""

    cached_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | UnsetType = UNSET


class TokenEntry(Answer):
    """A token with its log-probability, and its rank among all."""

    token: str
    token_id: int
    logprob: float
    rank: int
    bytes: list[int] | None


class ChatTokenLogprobs(TokenEntry):
    """A token that was chosen, with the most probable ones."""

    top_logprobs: list[TokenEntry]


class ChatLogprobs(Answer):
    content: list[ChatTokenLogprobs]
    refusal: None


class Function(Answer):
    """A tool by its name, and the JSON text of its arguments."""

    name: str
    arguments: str


class ChatToolCall(Answer):
    id: str
    type: Literal["function"]
    function: Function


class ChatMessage(Answer):
    """The answer of a chat; null content is only beside calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChoice(Answer):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: StopReason
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(_Generated):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    seed: int
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[ChatTokenLogprobs | None] | UnsetType = UNSET
    coordinates: Coordinates = UNSET


class FunctionDelta(Answer):
    """The name, and a piece of the arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class ChatToolCallDelta(Answer):
    """A piece of a call; the first one has its id, its type and its name."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Answer):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Answer):
    """New part of one choice; the last of it has its finish_reason."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(_Generated):
    """An event of a streamed chat; the last one has the usage, if it was requested, and no choices."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    coordinates: Coordinates = UNSET


class CompletionLogprobs(Answer):
    """Log-probabilities of a completion; the first token of an echoed prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None


class CompletionChunkChoice(_CompletionChoice):
    """New part of one choice; the last of it has its finish_reason."""

    finish_reason: FinishReason | None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(_CompletionChoice):
    """One answer; its index is the number of the prompt times n + the number of the answer."""

    finish_reason: FinishReason
    stop_reason: StopReason
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[ChatTokenLogprobs | None] | UnsetType = UNSET


class Completion(_Generated):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    seed: int
    coordinates: Coordinates = UNSET


class CompletionChunk(_Generated):
    """An event of streamed continuations; the last one has the usage, if it was requested, and no choices."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    coordinates: Coordinates = UNSET


# Embeddings.


class TokenCounts(Answer):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class TextEmbedding(Answer):
    """The vector of one text; base64 of its float32 values, little-endian, if that is requested."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Answer):
    object: Literal["list"]
    data: list[TextEmbedding]
    model: str
    usage: TokenCounts


# Scores of texts, in the forms of vLLM and of Jina and Cohere.


class ScoreOfPair(Answer):
    index: int
    object: Literal["score"]
    score: float


class Scores(Answer):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreOfPair]
    usage: TokenCounts


class DocumentText(Answer):
    text: str


class RankedDocument(Answer):
    """A document by its index in the request."""

    index: int
    relevance_score: float
    document: DocumentText | UnsetType = UNSET


class Reranked(Answer):
    """The answer of /v1/rerank, the most relevant document first."""

    id: str
    model: str
    usage: TokenCounts
    results: list[RankedDocument]


# Other routes.


class Tokens(Answer):
    """Token ids of a text or of messages."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str | None] | UnsetType = UNSET


class Rendered(Answer):
    """The token ids of a request that was not run, and how they would be answered."""

    request_id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    cache_salt: str | None
    priority: int


class DetokenizedText(Answer):
    """The text of token ids."""

    prompt: str


class TokenizerInfo(Answer):
    """The special tokens and the chat template."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None
    model_max_length: int


class ModelStatus(Answer):
    """The state of a model, the bytes that it holds and its users. Seconds are null where they do not apply, those
    until it is unloaded also where it stays."""

    value: Literal["unloaded", "loading", "ready", "unloading", "failed"]
    is_pinned: bool
    bytes: int
    requests: int
    waiting: int
    idle_seconds: float | None
    keep_alive_seconds: float | None
    load_seconds: float | None
    error: str | None


class Model(Answer):
    """A model with its state, or an adapter with the model that it is for."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    status: ModelStatus | UnsetType = UNSET
    parent: str | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET


class Models(Answer):
    object: Literal["list"]
    data: list[Model]


class LoraConfig(Answer):
    max_loras: int
    max_lora_rank: int


class ParallelConfig(Answer):
    data_parallel_size: int


class ModelConfigFacts(Answer):
    model: str
    dtype: str
    max_model_len: int


class VLLMConfig(Answer):
    """Facts under the names of vLLM's configuration; null for a server without room for adapters."""

    lora_config: LoraConfig | None
    parallel_config: ParallelConfig
    model_config: ModelConfigFacts


class ServerInfo(Answer):
    vllm_config: VLLMConfig


class Paused(Answer):
    is_paused: bool


class Sleeping(Answer):
    is_sleeping: bool


class WorldSize(Answer):
    world_size: int


class WeightInfo(Answer):
    weight_version: str
    is_complete: bool


class Status(Answer):
    status: str


class Version(Answer):
    version: str


class OllamaError(Answer):
    error: str
