"""Bodies and answers of /v1/embeddings, /v1/score and /v1/rerank."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from jaxinfer.openai.answers import Answer
from jaxinfer.openai.bodies import KeepAlive

_Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_Inputs = Annotated[
    list[Any],
    Meta(extra_json_schema={"minItems": 1, "anyOf": [_IDS, {"items": {"anyOf": [{"type": "string"}, _IDS]}}]}),
]
_Document = Annotated[
    dict[str, Any], Meta(extra_json_schema={"properties": {"text": {"type": "string"}}, "required": ["text"]})
]

_SOME = Meta(extra_json_schema={"minItems": 1})
_Texts = Annotated[list[str], _SOME]
_Documents = Annotated[list[str | _Document], _SOME]


class VectorFields(Struct, kw_only=True):
    """What the bodies of all three routes have. `truncate_prompt_tokens` may be -1, vLLM's way to say `truncate`."""

    model: str | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: _Priority | None = None
    keep_alive: KeepAlive | None = None
    user: str | None = None


class EmbeddingsRequest(VectorFields, kw_only=True):
    """The body of /v1/embeddings."""

    input: str | _Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: _Positive | None = None
    prompt_name: str | None = None
    prompt: str | None = None
    pooling: Literal["last", "mean", "cls"] | None = None
    normalize: bool | None = None


class ScoreRequest(VectorFields, kw_only=True):
    """The body of /v1/score: pairs of texts, or one text against several."""

    text_1: str | _Texts
    text_2: str | _Texts
    instruction: str | None = None


class RerankRequest(VectorFields, kw_only=True):
    """The body of /v1/rerank."""

    query: str
    documents: _Documents
    top_n: _Positive | None = None
    return_documents: bool | None = None
    instruction: str | None = None


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


class ScoreOfPair(Answer):
    """One score."""

    index: int
    object: Literal["score"]
    score: float


class Scores(Answer):
    """The answer of /v1/score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreOfPair]
    usage: TokenCounts


class DocumentText(Answer):
    """A document."""

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


BODIES: dict[str, type[Struct]] = {
    "/v1/embeddings": EmbeddingsRequest,
    **dict.fromkeys(("/v1/score", "/score"), ScoreRequest),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), RerankRequest),
}
