"""What goes into an engine and what comes out. Plain Python: no JAX here."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from jaxinfer.sampling import SamplingParams, SamplingRow


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token under the model's raw logits; its rank counts from 1."""

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprob = dict[int, Logprob]  # the chosen token first, then the best ones by rank


@dataclass(eq=False)
class Generation:
    """One answer in the making: the engine appends to it, the caller reads it.

    Attributes:
      prompt: token ids. row: sampling parameters with seed, end-of-sequence ids and tokenized bad words.
      max_tokens: tokens it may generate. score_from: index into the prompt from which log-probabilities under the
        sampling parameters are wanted (scoring), or None.
      priority: lower goes first. deadline: monotonic seconds after which it is aborted. cache_salt: generations of
        different salts share no cached prefix. leader: an earlier answer to the same prompt, whose pages are shared.
      output, logprobs: what was generated. prompt_logprobs: one entry per prompt token, None for the first.
      processed_logprobs: log-probabilities of prompt[score_from:] under the sampling parameters.
      finish_reason: None while it runs, else one of "stop", "length", "abort", "error".
      stop_reason: the token id that ended it. error: what went wrong, for "error", or why it was aborted.
      arrival, admitted, first_token, finished: monotonic seconds.
      rounds: how often a speculative round drafted and accepted so many tokens, by (drafted, accepted).
    """

    prompt: Sequence[int]
    row: SamplingRow
    max_tokens: int
    score_from: int | None = None
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""
    leader: "Generation | None" = None
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    processed_logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    arrival: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    rounds: Counter[tuple[int, int]] = field(default_factory=Counter)

    @property
    def params(self) -> SamplingParams:
        return self.row.params

    @cached_property
    def ending_ids(self) -> frozenset[int]:
        """Tokens that end the answer."""
        eos_ids = () if self.params.ignore_eos else self.row.eos_token_ids
        return frozenset((*self.params.stop_token_ids, *eos_ids))


@dataclass(frozen=True)
class RequestTimings:
    """Seconds of one request: waiting for a slot, until its first token, over all, and per token after the first."""

    queue_time: float
    time_to_first_token: float
    total_time: float
    time_per_output_token: float


@dataclass(frozen=True)
class CompletionOutput:
    """One answer.

    Attributes:
      index: its number among the `n` of the request. seed: what it was sampled with; giving it as `seed` repeats it.
      finish_reason: "stop" (a stop string, stop id or end-of-sequence id, named by `stop_reason`), "length",
        "abort" or "error" (explained by `error`; None while streaming).
      logprobs: per token, if asked for: its own and the best ones. cumulative_logprob: their sum over own tokens.
    """

    index: int
    text: str
    token_ids: list[int]
    seed: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A request's prompt and its `n` answers.

    Attributes:
      prompt: the text, or None where token ids were given.
      prompt_logprobs: per prompt token, if asked for; the first has none.
      taps: hidden states by name, float arrays [tokens, D] over prompt and first answer, if asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    timings: RequestTimings | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    taps: dict[str, np.ndarray] | None = None


@dataclass(frozen=True)
class Score:
    """Log-probabilities of a continuation's tokens given its prompt and the tokens before.

    Attributes:
      raw: under the model's own distribution. processed: under the sampling parameters' distribution (-inf where
        they forbid the token). The sums are `raw_total` and `processed_total`.
      is_greedy: whether every token was the model's most probable one.
    """

    token_ids: list[int]
    raw: list[float]
    processed: list[float]
    is_greedy: bool

    @property
    def raw_total(self) -> float:
        return float(sum(self.raw))

    @property
    def processed_total(self) -> float:
        return float(sum(self.processed))
