"""Answers of OpenAI's chat and completions and of the small routes: what the writer makes and /openapi.json tells.

Events of streams are written from templates (`jaxinfer.server.chunks`); tests hold them to these types.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]
StopReason = int | str | None  # the token or the text that ended the answer


class Answer(Struct, kw_only=True, forbid_unknown_fields=True):
    """An object of an answer: it has no other fields."""


# Errors.


class ErrorFields(Answer):
    """OpenAI's error."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Answer):
    """OpenAI's form of an error."""

    error: ErrorFields


# Chat and completions.


class CachedTokens(Answer):
    """Tokens of a prompt that were not computed again."""

    cached_tokens: int


class Usage(Answer):
    """Numbers of tokens."""

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


class TokenLogprobs(TokenEntry):
    """A token that was chosen, with the most probable ones."""

    top_logprobs: list[TokenEntry]


class ChatLogprobs(Answer):
    """Log-probabilities of a chat's answer."""

    content: list[TokenLogprobs]
    refusal: None


class Function(Answer):
    """A tool by its name, and the JSON text of its arguments."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: Function


class ChatMessage(Answer):
    """The answer of a chat; null content is only beside calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Answer):
    """One answer of a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: StopReason
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Answer):
    """Answers of a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    seed: int
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[TokenLogprobs | None] | UnsetType = UNSET


class FunctionDelta(Answer):
    """The name, and a piece of the arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Answer):
    """What is new of a call; the first piece has its id, its type and its name."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Answer):
    """What is new of a chat's answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Answer):
    """What is new of one choice; the last of it has its finish_reason."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Answer):
    """An event of a streamed chat; the last one has the usage, where it was asked for, and no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(Answer):
    """Log-probabilities of a completion; the first token of an echoed prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChunkChoice(Answer):
    """What is new of one choice; the last of it has its finish_reason."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(Answer):
    """One answer; its index is the number of the prompt times n + the number of the answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[TokenLogprobs | None] | UnsetType = UNSET


class Completion(Answer):
    """Continuations of prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    seed: int


class CompletionChunk(Answer):
    """An event of streamed continuations; the last one has the usage, where it was asked for, and no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET


# Embeddings.


class TokenCounts(Answer):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Answer):
    """The vector of one text; base64 of its float32 values, little-endian, where that is asked for."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Answer):
    """The answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: TokenCounts


# Other routes.


class Tokens(Answer):
    """Token ids of a text or of messages."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str | None] | UnsetType = UNSET


class Text(Answer):
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
    """Whether a model is loaded, what it holds and who uses it. Seconds are null where they do not apply, those until
    it is unloaded also where it stays."""

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
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    status: ModelStatus
    max_model_len: int | UnsetType = UNSET


class Models(Answer):
    """The models that are served."""

    object: Literal["list"]
    data: list[Model]


class Status(Answer):
    """The state of the server."""

    status: str


class Version(Answer):
    """The version of jaxinfer."""

    version: str
