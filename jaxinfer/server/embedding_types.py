"""Bodies and answers of /v1/embeddings, /v1/score and /v1/rerank."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from jaxinfer.openai.answers import Answer, TokenCounts
from jaxinfer.openai.bodies import EmbeddingsRequest, Positive, VectorFields

_Document = Annotated[
    dict[str, Any], Meta(extra_json_schema={"properties": {"text": {"type": "string"}}, "required": ["text"]})
]

_SOME = Meta(extra_json_schema={"minItems": 1})
_Texts = Annotated[list[str], _SOME]
_Documents = Annotated[list[str | _Document], _SOME]


class ScoreRequest(VectorFields, kw_only=True):
    """The body of /v1/score: pairs of texts, or one text against several."""

    text_1: str | _Texts
    text_2: str | _Texts
    instruction: str | None = None


class RerankRequest(VectorFields, kw_only=True):
    """The body of /v1/rerank."""

    query: str
    documents: _Documents
    top_n: Positive | None = None
    return_documents: bool | None = None
    instruction: str | None = None


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
