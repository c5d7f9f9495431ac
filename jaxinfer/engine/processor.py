"""From a user's prompt and parameters to `Generation`s, checked before anything runs; and back to outputs."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxinfer.engine.output import AnswerText, timings
from jaxinfer.engine.request import Generation, RequestOutput, TokenLogprob
from jaxinfer.models import ModelConfig
from jaxinfer.sampling import (
    SamplingParams,
    SamplingRow,
    derive_seed,
    make_batch,
    sample_seed,
    tokenize_bad_words,
)
from jaxinfer.text import Tokenizer

Prompt = str | Sequence[int]

_REQUEST_IDS = itertools.count()


@dataclass(eq=False)
class Request:
    """One prompt with its answers in the making. `prompt` is the text, or None where token ids were given."""

    prompt: str | None
    token_ids: list[int]
    answers: list[AnswerText]

    @property
    def generations(self) -> list[Generation]:
        return [answer.generation for answer in self.answers]

    @property
    def is_finished(self) -> bool:
        return all(generation.finish_reason is not None for generation in self.generations)


@dataclass(frozen=True)
class RequestOptions:
    """How a request is served, beside what it asks of the sampler.

    Attributes:
      priority: lower goes first. timeout: seconds after which it is aborted, None for any time.
      cache_salt: requests of different salts share no cached prefix.
    """

    priority: int = 0
    timeout: float | None = None
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise ValueError(f"priority must be an integer, got {self.priority!r}")
        timeout = self.timeout
        if timeout is not None and (
            isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf")
        ):
            raise ValueError(f"timeout must be positive seconds or None, got {timeout!r}")
        if not isinstance(self.cache_salt, str):
            raise ValueError(f"cache_salt must be a text, got {self.cache_salt!r}")


DEFAULT_REQUEST_OPTIONS = RequestOptions()


class RequestProcessor:
    """Checks and tokenizes requests for one model.

    Requests without a seed get theirs from `seed` and their number since the start. Every method that takes a prompt
    raises ValueError, or TypeError, for what cannot be served; `what` names it in the message.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        seed: int,
    ):
        derive_seed(seed)  # checks its range
        self.name, self.config, self.tokenizer = name, config, tokenizer
        self.eos_token_ids, self.max_model_len, self.seed = eos_token_ids, max_model_len, seed
        self._numbers = itertools.count()

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        terms: RequestOptions = DEFAULT_REQUEST_OPTIONS,
        *,
        what: str = "the prompt",
    ) -> Request:
        """A request ready for an engine."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"{what}: params must be SamplingParams, got {type(params).__name__}")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"{what}: stop strings need a tokenizer; use stop_token_ids")
        text, ids = self.tokenize(prompt)
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = max(self.max_model_len - len(ids), 1)
        self.check_length(what, len(ids), max_tokens)
        seed = params.seed
        if seed is None:
            seed = 0 if params.is_greedy else derive_seed(self.seed, next(self._numbers))
        deadline = None if terms.timeout is None else time.monotonic() + terms.timeout
        answers: list[AnswerText] = []
        for index in range(params.n):
            generation = Generation(
                ids,
                self.row(params, sample_seed(seed, index)),
                max_tokens,
                priority=terms.priority,
                deadline=deadline,
                cache_salt=terms.cache_salt,
                leader=answers[0].generation if answers else None,
            )
            answers.append(AnswerText(generation, index, self.tokenizer))
        return Request(text, ids, answers)

    def scored(self, prompt: Prompt, continuation: Prompt, params: SamplingParams, *, what: str) -> Generation:
        """A generation that scores `continuation` after `prompt`; they are tokenized apart."""
        _, ids = self.tokenize(prompt)
        _, more = self.tokenize(continuation, add_special_tokens=False)
        if not ids or not more:
            raise ValueError(f"{what}: {len(ids)} prompt and {len(more)} continuation tokens; both need one")
        params = replace(params, n=1, max_tokens=1, prompt_logprobs=1, stop=(), logprobs=None)
        self.check_length(what, len(ids) + len(more), 1)
        return Generation([*ids, *more], self.row(params, seed=0), max_tokens=1, score_from=len(ids))

    def output(self, request: Request) -> RequestOutput:
        """The request as it stands."""
        first = request.generations[0]
        prompt_logprobs = None
        if first.params.prompt_logprobs is not None:
            prompt_logprobs = [self._with_text(entry) for entry in first.prompt_logprobs]
        completions = [answer.completion() for answer in request.answers]
        completions = [
            replace(one, logprobs=[self._with_text(entry) or {} for entry in one.logprobs])
            if one.logprobs is not None
            else one
            for one in completions
        ]
        return RequestOutput(
            request_id=str(next(_REQUEST_IDS)),
            prompt=request.prompt,
            prompt_token_ids=request.token_ids,
            outputs=completions,
            finished=request.is_finished,
            timings=timings(request.generations),
            prompt_logprobs=prompt_logprobs,
        )

    def tokenize(self, prompt: Prompt, add_special_tokens: bool = True) -> tuple[str | None, list[int]]:
        """The text, if it is one, and its token ids."""
        if isinstance(prompt, str):
            return prompt, self.need_tokenizer("a text prompt").encode(prompt, add_special_tokens)
        ids = [int(token) for token in prompt]
        for token in ids:
            if not 0 <= token < self.config.vocab_size:
                raise ValueError(f"token id {token} is outside the vocabulary of {self.config.vocab_size}")
        return None, ids

    def row(self, params: SamplingParams, seed: int) -> SamplingRow:
        """The request as the sampler needs it."""
        params.validate_for_model(self.config.vocab_size, self.max_model_len)
        bad_words: tuple[tuple[int, ...], ...] = ()
        if params.bad_words:
            tokenizer = self.need_tokenizer("bad_words")
            bad_words = tokenize_bad_words(params.bad_words, lambda text: tokenizer.encode(text, False))
        row = SamplingRow(params, seed, self.eos_token_ids, bad_words)
        if params.allowed_token_ids is not None or params.bad_words or params.logit_bias:
            make_batch([row], self.config.vocab_size)  # raises here rather than among running requests
        return row

    def check_length(self, what: str, num_prompt: int, max_tokens: int) -> None:
        limit = self.max_model_len
        if num_prompt == 0:
            raise ValueError(f"{what} is empty: it needs at least 1 token")
        if num_prompt + max_tokens > limit:
            raise ValueError(
                f"{what}: {num_prompt} prompt tokens and max_tokens={max_tokens} make "
                f"{num_prompt + max_tokens}, but max_model_len={limit} "
                f"(the model allows {self.config.max_position_embeddings})"
            )

    def need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and {self.name} has none: pass token ids or tokenizer=...")
        return self.tokenizer

    def _with_text(self, entry: TokenLogprob | None) -> TokenLogprob | None:
        if entry is None or self.tokenizer is None:
            return entry
        known = {token: value for token, value in entry.items() if self.tokenizer.has_id(token)}
        return entry | {
            token: replace(value, decoded_token=self.tokenizer.decode([token], skip_special_tokens=False))
            for token, value in known.items()
        }
