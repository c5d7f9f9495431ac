"""Texts to vectors, and pairs of texts to scores: from what a caller gives to requests, and from their vectors back.

`LLM`, `AsyncEngine` and the server run the requests of a `VectorJob` each in their own way.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxinfer.embedding_files import POOLINGS, EmbeddingConfig
from jaxinfer.engine.client import Client
from jaxinfer.engine.request import DEFAULT_REQUEST_OPTIONS, Pooling, Prompt, Request, RequestOptions
from jaxinfer.engine.results import VectorJob
from jaxinfer.engine.scheduler import RequestTooLargeError
from jaxinfer.sampling import SamplingParams
from jaxinfer.text import Tokenizer
from jaxinfer.text.prompts import TakesPrompts

# Of Qwen3-Reranker's model card. The tokens of the middle are those of one text, in which no control token is read.
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_PAIR = "<Instruct>: {}\n<Query>: {}\n<Document>: {}"
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_LABELS = ("yes", "no")
_NEEDED = ("<|im_start|>", "<|im_end|>", *_LABELS)
_PARAMS = SamplingParams(temperature=0.0, max_tokens=1)


class Embedder:
    """Makes jobs for one model.

    Attributes:
      config: its checkpoint's, None where that says nothing of embedding.
      default_pooling: of texts for which `embed` is given none, in place of the checkpoint's; of no effect on a model
        whose checkpoint says that it scores pairs. A model whose checkpoint says nothing is taken for one that embeds.
    """

    def __init__(self, client: Client, config: EmbeddingConfig | None):
        self._client, self.config = client, config
        self.default_pooling: str | None = None

    # Embedding.

    def embed(
        self,
        texts: Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        pooling: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
        options: RequestOptions = DEFAULT_REQUEST_OPTIONS,
        what: str = "text",
    ) -> VectorJob:
        """The job of `LLM.embed`, whose result is float32 [texts, dimensions]."""
        config, width = self._config(pooling), self._client.config.hidden_size
        width = config.dense[-1].weight.shape[0] if config.dense else width
        if dimensions is not None and (isinstance(dimensions, bool) or not isinstance(dimensions, int)):
            raise TypeError(f"dimensions must be an integer, got {dimensions!r}")
        if dimensions is not None and not 1 <= dimensions <= width:
            raise ValueError(f"dimensions={dimensions} must be 1 to {width}, the length of the model's vectors")
        if prompt is not None and prompt_name is not None:
            raise ValueError(f"give either prompt or prompt_name, got prompt={prompt!r:.40} and {prompt_name=}")
        before = config.prompt(prompt_name) if prompt is None else prompt
        prompts = self._client.prompts_of(options.adapter)
        start = 0 if config.includes_prompt or not before else _num_prompt_tokens(prompts, before)
        ids = [
            self._ids(prompts, text, before, config, truncate, f"{what} {number}") for number, text in enumerate(texts)
        ]
        # As in sentence-transformers, "cls" takes the first token where the text has none beside the prompt's.
        least = 1 if config.pooling == "cls" else start + 1
        for number, tokens in enumerate(ids):
            if len(tokens) < least:
                raise ValueError(f"{what} {number} is empty: it has no token to make a vector of")
        requests = [
            self._request(
                tokens, Pooling(config.pooling, start if start < len(tokens) else 0), options, f"{what} {number}"
            )
            for number, tokens in enumerate(ids)
        ]
        normalizes = config.normalizes if normalize is None else normalize

        def finish(vectors: Sequence[np.ndarray]) -> np.ndarray:
            pooled = np.array(vectors, np.float32).reshape(len(ids), self._client.config.hidden_size)
            for module in config.dense:
                pooled = module(pooled)
            pooled = np.ascontiguousarray(pooled[:, :dimensions], np.float32)
            return _normalized(pooled) if normalizes else pooled

        return VectorJob(requests, finish)

    def _config(self, pooling: str | None) -> EmbeddingConfig:
        config = self.config
        if pooling is None and (config is None or config.labels is None):
            pooling = self.default_pooling
        if pooling is not None and pooling not in POOLINGS:
            raise ValueError(f"pooling={pooling!r} is none of {', '.join(POOLINGS)}")
        if pooling is not None:
            return replace(config or EmbeddingConfig(), pooling=POOLINGS[POOLINGS.index(pooling)], labels=None)
        if config is None:
            raise ValueError(
                f"{self._client.name} does not say how it embeds texts (it has no modules.json, the file of "
                f"sentence-transformers): give pooling, one of {', '.join(POOLINGS)}"
            )
        if config.labels is not None:
            raise ValueError(f"{self._client.name} scores pairs of texts and does not pool: use rerank")
        return config

    def _ids(
        self, prompts: TakesPrompts, text: Any, before: str, config: EmbeddingConfig, truncate: bool, what: str
    ) -> list[int]:
        limit = min(self._client.max_model_len, config.max_length or self._client.max_model_len)
        if not isinstance(text, str):
            if before:
                raise ValueError(f"{what}: a prompt goes before texts, not before token ids")
            ids = prompts.tokenize(text, what=what)[1]
        else:
            whole = before + text
            whole = whole.lower() if config.lower_case else whole
            if truncate:
                return _truncated(prompts.need_tokenizer("truncation"), whole, limit)
            ids = prompts.tokenize(whole, what=what)[1]
        if len(ids) > limit and not truncate:
            why = f"max_model_len={self._client.max_model_len}"
            if limit < self._client.max_model_len:
                why = f"the checkpoint's max_seq_length is {limit}"
            raise RequestTooLargeError(f"{what} has {len(ids)} tokens, but {why}; set truncate to cut it")
        return ids[:limit]

    def _request(self, ids: list[int], pooling: Pooling, options: RequestOptions, what: str) -> Request:
        return self._client.prepare_pooled(ids, _PARAMS, pooling, options, what=what)

    # Relevance.

    def relevance(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        truncate: bool = False,
        options: RequestOptions = DEFAULT_REQUEST_OPTIONS,
    ) -> VectorJob:
        """Job whose result is float32 [documents]: the score of each document for its query, or for the single query.

        For an embedding model, the cosine similarity of their vectors; for any other, the probability of "yes" against
        "no" after
        Qwen3-Reranker's template.
        """
        for name, texts in (("query", queries), ("document", documents)):
            if isinstance(texts, str) or not isinstance(texts, Sequence):
                raise TypeError(f"{name}: a list of texts is needed, got {type(texts).__name__}")
            for number, text in enumerate(texts):
                if not isinstance(text, str):
                    raise TypeError(f"{name} {number} must be a text, got {type(text).__name__}")
        if len(queries) not in (1, len(documents)):
            raise ValueError(f"{len(queries)} queries and {len(documents)} documents do not pair up")
        embeds = self.default_pooling is not None if self.config is None else self.config.labels is None
        if embeds:
            return self._cosines(queries, documents, instruction, truncate, options)
        tokenizer, labels = self._reranker()
        before, after = tokenizer.encode(_BEFORE, False), tokenizer.encode(_AFTER, False)
        room = self._client.max_model_len - len(before) - len(after)
        requests = []
        for number, document in enumerate(documents):
            query = queries[number if len(queries) > 1 else 0]
            ids = tokenizer.encode_content(_PAIR.format(instruction or INSTRUCTION, query, document))
            if len(ids) > room and not truncate:
                raise RequestTooLargeError(
                    f"document {number} has {len(ids)} tokens with its query, but max_model_len="
                    f"{self._client.max_model_len} leaves room for {room}; set truncate to cut it"
                )
            whole = [*before, *ids[: max(room, 0)], *after]
            requests.append(self._request(whole, Pooling("last", token_ids=labels), options, f"document {number}"))
        return VectorJob(requests, _yes_probabilities)

    def _reranker(self) -> tuple[Tokenizer, tuple[int, int]]:
        """The tokenizer and the ids of "yes" and "no". Raises ValueError for a model of another kind."""
        tokenizer = self._client.need_tokenizer("rerank")
        missing = [token for token in _NEEDED if tokenizer.token_to_id(token) is None]
        if missing:
            raise ValueError(
                f"{self._client.name} is no reranker of Qwen3-Reranker's kind: its tokenizer has no token "
                f"{' and no '.join(missing)}"
            )
        labels = tuple(tokenizer.token_to_id(token) for token in _LABELS)
        if self.config is not None and self.config.labels != labels:
            raise ValueError(
                f"{self._client.name} is scored by the tokens {self.config.labels}; only {labels}, "
                f"{' and '.join(_LABELS)}, with Qwen3-Reranker's template are supported"
            )
        return tokenizer, labels  # type: ignore[return-value]

    def _cosines(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        instruction: str | None,
        truncate: bool,
        options: RequestOptions,
    ) -> VectorJob:
        keywords: dict[str, Any] = {"normalize": True, "truncate": truncate, "options": options}
        asked: dict[str, Any] = {"prompt_name": "query"} if instruction is None else {"prompt": instruction}
        first = self.embed(queries, **keywords, **asked, what="query")
        second = self.embed(documents, **keywords, prompt_name="document", what="document")
        count = len(first.requests)

        def finish(vectors: Sequence[np.ndarray]) -> np.ndarray:
            return np.sum(first.finish(vectors[:count]) * second.finish(vectors[count:]), axis=-1)

        return VectorJob([*first.requests, *second.requests], finish)


def best_first(scores: np.ndarray, top_n: int | None) -> list[tuple[int, float]]:
    """Pairs of index and score of the `top_n` highest scores (None for all); of equal ones, the first comes first.

    Raises ValueError for a `top_n` below 1.
    """
    if top_n is not None and (isinstance(top_n, bool) or not isinstance(top_n, int) or top_n < 1):
        raise ValueError(f"top_n={top_n!r} must be a positive integer or None")
    order = np.argsort(-scores, kind="stable")[:top_n]
    return [(int(index), float(scores[index])) for index in order]


def _num_prompt_tokens(prompts: TakesPrompts, prompt: str) -> int:
    """Number of tokens of the prompt alone, without a special token at its end, which stands after the text."""
    tokenizer = prompts.need_tokenizer("a prompt")
    ids = tokenizer.encode(prompt)
    return len(ids) - (bool(ids) and ids[-1] in tokenizer.special_ids)


def _truncated(tokenizer: Tokenizer, text: str, limit: int) -> list[int]:
    """At most `limit` token ids of a text: its end is cut, what the tokenizer adds at both ends stays."""
    ids = tokenizer.encode(text)
    if len(ids) <= limit:
        return ids
    bare = tokenizer.encode(text, False)
    num_added = len(ids) - len(bare)
    start = next((at for at in range(num_added + 1) if ids[at : at + len(bare)] == bare), 0)
    num_kept = max(limit - num_added, 0)
    return [*ids[: start + num_kept], *ids[start + len(bare) :]][:limit]


def _normalized(vectors: np.ndarray) -> np.ndarray:
    """Vectors of length 1; zeros stay zeros."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def _yes_probabilities(vectors: Sequence[np.ndarray]) -> np.ndarray:
    """float32 [n] from the logits of "yes" and "no"."""
    logits = np.array(vectors, np.float64).reshape(-1, 2)
    return (1 / (1 + np.exp(np.clip(logits[:, 1] - logits[:, 0], -700, 700)))).astype(np.float32)
