"""Embeddings: from a body to texts and options, and from vectors to an answer."""

import base64
from typing import TYPE_CHECKING, Any

from jaxinfer.openai import answers as types
from jaxinfer.openai.bodies import EmbeddingsRequest, VectorFields
from jaxinfer.openai.errors import RequestError

if TYPE_CHECKING:
    import numpy as np

Text = str | list[int]  # or token ids

MAX_TEXTS = 2048  # of a request, as OpenAI allows
_OPTIONS = ("prompt_name", "prompt", "pooling", "dimensions", "normalize")


def read_inputs(body: EmbeddingsRequest) -> list[Text]:
    """A text, token ids, or a list of either, as a list. Raises RequestError."""
    given: Any = body.input
    if isinstance(given, str):
        return [given]
    if given and all(isinstance(one, int) and not isinstance(one, bool) for one in given):
        return [given]
    if not given:
        raise RequestError("input is empty: it needs at least 1 text", "input")
    check_number(given, "input")
    for number, one in enumerate(given):
        if not isinstance(one, (str, list)) or one == []:
            raise RequestError(f"input[{number}] must be a text or a list of token ids, got {one!r:.60}", "input")
    return given


def check_number(texts: Any, name: str) -> None:
    """Raises RequestError for more texts than one request may have."""
    if len(texts) > MAX_TEXTS:
        raise RequestError(f"{name}: {len(texts):,} texts, at most {MAX_TEXTS:,} are allowed", name)


def options_of(body: EmbeddingsRequest) -> dict[str, Any]:
    """Keyword arguments that `Embedder.embed` takes beside the texts. Raises RequestError."""
    return {**{name: getattr(body, name) for name in _OPTIONS}, "truncate": truncates(body)}


def truncates(body: VectorFields) -> bool:
    """Tells whether texts that are too long are cut. Raises RequestError."""
    if body.truncate_prompt_tokens not in (None, -1):
        told = "truncate_prompt_tokens must be -1, for as many tokens as fit, or null"
        raise RequestError(told, "truncate_prompt_tokens")
    return bool(body.truncate) or body.truncate_prompt_tokens == -1


def embeddings(vectors: "np.ndarray", num_tokens: int, body: EmbeddingsRequest, model: str) -> types.Embeddings:
    """The answer with these vectors, float32 [texts, dimensions]."""
    as_base64 = body.encoding_format == "base64"
    rows = [base64.b64encode(row).decode() for row in vectors.astype("<f4")] if as_base64 else vectors.tolist()
    return types.Embeddings(
        object="list",
        data=[types.Embedding(object="embedding", index=index, embedding=row) for index, row in enumerate(rows)],
        model=model,
        usage=types.TokenCounts(prompt_tokens=num_tokens, total_tokens=num_tokens),
    )
