"""The methods of `LLM` whose results are numbers: scores of texts, embeddings, relevance of documents."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from jaxinfer.embedding import Embedder, VectorJob, best_first
from jaxinfer.engine.client import Client
from jaxinfer.engine.lockstep import Lockstep
from jaxinfer.engine.request import Prompt, Request, Score, SequenceState
from jaxinfer.engine.results import score_of
from jaxinfer.files import Closable
from jaxinfer.llm_arguments import as_pairs, as_params, as_prompts, takes_other_names
from jaxinfer.progress import Stage
from jaxinfer.sampling import SamplingParams

P = ParamSpec("P")
R = TypeVar("R")


def together(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method that only host 0 runs, where there are several; the others follow, and return or raise the same."""

    @functools.wraps(method)
    def run(self: Any, *arguments: P.args, **keywords: P.kwargs) -> R:
        if self._lockstep is None:
            return method(self, *arguments, **keywords)
        return self._lockstep.lead_or_follow(method.__name__, lambda: method(self, *arguments, **keywords))

    return run


class ScoringMethods(Closable):
    """Methods of `LLM`, which sets the attributes."""

    client: Client
    embedder: Embedder
    _lockstep: Lockstep | None

    @takes_other_names
    @together
    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt] | None = None,
        params: SamplingParams | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[Score]:
        """Log-probabilities of texts, or of each continuation after its prompt: of each token, their sum, mean loss and
        perplexity.

        Args:
          prompts: a text or a list of token ids, or a list of these. Without continuations, all their tokens are
            scored but the first, which none predicts: it is BOS where the tokenizer adds one.
          continuations: as many; only their tokens are scored. They are tokenized apart from the prompts; give token
            ids to choose the split yourself.
          params: for `processed` log-probabilities beside `raw` ones; by default they are the same.
          use_tqdm: as of `generate`.

        All run in one batch, in any number. Memory does not grow with length times vocabulary: logits exist for a few
        positions at a time. Raises ValueError, with its number and both lengths, for a text that is longer than
        `max_model_len`, for other numbers of prompts and continuations, and as `generate`.
        """
        params = as_params(params, SamplingParams())
        if continuations is None:
            what, pairs = "text", [(text, None) for text in as_prompts(prompts, "text")]
        else:
            what, pairs = "pair", as_pairs(prompts, continuations)
        requests = [
            self.client.prepare_score(*pair, params, what=f"{what} {number}") for number, pair in enumerate(pairs)
        ]
        scores: dict[SequenceState, Score] = {}

        def take(answer: SequenceState) -> None:
            scores[answer] = score_of(answer)
            answer.prompt_logprobs = []  # ten times as large, while others of a long list run

        return [scores[answer] for (answer,) in self._run(requests, "scoring", what, use_tqdm, take)]

    @takes_other_names
    @together
    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        pooling: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
        use_tqdm: bool | None = None,
    ) -> np.ndarray:
        """Vectors of texts, float32 [texts, dimensions]: pooled final hidden states, as the checkpoint's files of
        sentence-transformers say.

        Args:
          texts: a text or a list of token ids, or a list of these.
          prompt_name: of one of the checkpoint's prompts, such as "query" or "document", which goes before each text;
            None for its default one. prompt: a text to go there instead.
          pooling: "last", "mean" or "cls" (the first token), in place of the checkpoint's.
          dimensions: cuts vectors to their first components (Matryoshka), before they get length 1.
          normalize: whether vectors get length 1; None for what the checkpoint says.
          truncate: cuts texts that are too long at their end.
          use_tqdm: as of `generate`.

        Cached beginnings are used where only the last token counts; for "mean" and "cls" all of a text is computed.
        Raises ValueError, with the text's number and length, for a text that is too long, for a checkpoint that does
        not say how it pools where `pooling` does not either, and for an unknown prompt or too many dimensions.
        """
        keywords: dict[str, Any] = {"prompt_name": prompt_name, "prompt": prompt, "pooling": pooling}
        keywords |= {"dimensions": dimensions, "normalize": normalize, "truncate": truncate}
        return self._vectors(self.embedder.embed(as_prompts(texts), **keywords), "embedding", use_tqdm)

    @together
    def relevance(
        self,
        queries: str | Sequence[str],
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        truncate: bool = False,
        use_tqdm: bool | None = None,
    ) -> np.ndarray:
        """How relevant each document is for its query, or for the only one: float32 [documents].

        For a model that embeds (see `embed`), the cosine of their vectors, with its prompts "query" and "document". For
        any other, the probability of "yes" against "no" after the template of Qwen3-Reranker, from 0 to 1; the query's
        part of the prompt is computed once for all of its documents.

        Args:
          instruction: the task, in place of the reranker's default; for a model that embeds, the prompt of queries.
          truncate: cuts documents that are too long at their end.

        Raises ValueError for other numbers of queries and documents, for a document that is too long, with its number,
        and for a model without the tokens of the template. TypeError for what is no text.
        """
        queries = [queries] if isinstance(queries, str) else queries
        job = self.embedder.relevance(queries, documents, instruction=instruction, truncate=truncate)
        return self._vectors(job, "scoring", use_tqdm)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        truncate: bool = False,
        use_tqdm: bool | None = None,
    ) -> list[tuple[int, float]]:
        """Pairs (index of a document, its `relevance`), the most relevant first, at most `top_n`."""
        scores = self.relevance(query, documents, instruction=instruction, truncate=truncate, use_tqdm=use_tqdm)
        return best_first(scores, top_n)

    def _vectors(self, job: VectorJob, description: str, use_tqdm: bool | None) -> np.ndarray:
        answers = self._run(job.requests, description, "text", use_tqdm)
        return job.result([self.client.collect(one) for one in answers])

    def _run(
        self,
        requests: list[Request],
        description: str,
        unit: str,
        use_tqdm: bool | None,
        take: Callable[[SequenceState], None] = lambda answer: None,
    ) -> list[list[SequenceState]]:
        """Runs requests to their end; the answers of each. `take` is called with each answer as it ends."""
        submitted: list[list[SequenceState]] = []
        try:
            for request in requests:
                submitted.append(self.client.submit(request))
            running: dict[SequenceState, Any] = dict.fromkeys(one for answers in submitted for one in answers)
            num_tokens = 0
            with Stage(description, len(running), unit, show=use_tqdm) as stage:
                stage.describe(lambda: f"{num_tokens / stage.seconds:.0f} tokens/s")
                for answer, delta in self.client.run(running):
                    num_tokens += len(delta.token_ids)
                    if answer.is_finished:
                        take(answer)
                        stage.update()
        except BaseException:
            for answers in submitted:
                self.client.abort(answers)
            raise
        return submitted
