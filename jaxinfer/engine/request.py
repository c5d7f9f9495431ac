"""Requests, the state of their answers while they run, and what callers get. Plain Python: no JAX here."""

import hashlib
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from jaxinfer.engine.adapter_slots import LoadedAdapter
from jaxinfer.engine.pages import NULL_PAGE
from jaxinfer.engine.steering import Steering
from jaxinfer.sampling import SamplingParams, SamplingRow, sample_seed
from jaxinfer.speculative.statistics import SpeculationStats
from jaxinfer.tool_calls import ToolCall

Prompt = str | Sequence[int]  # a text, or token ids
_MAX_EXPONENT = math.log(sys.float_info.max)
MAX_PREEMPTIONS = 3  # after so many a sequence goes first, and is spared while any other can be preempted


def tap_name(layer: int) -> str:
    """The name of the hidden states after a layer."""
    return f"layers.{layer}.residual"


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token under the model's raw logits; its rank counts from 1. `token_bytes` are what the token
    adds to the text, which may be a part of a character; None where the text leaves it out."""

    logprob: float
    rank: int
    decoded_token: str | None = None
    token_bytes: bytes | None = None


TokenLogprob = dict[int, Logprob]  # the chosen token first, then the best ones by rank


@dataclass(frozen=True)
class RequestOptions:
    """How a request is scheduled, beside what it asks of the sampler.

    Attributes:
      priority: lower goes first.
      timeout: seconds after which the request is aborted; None for no limit.
      cache_salt: requests of different salts share no cached prefix.
      adapter: the name of a loaded adapter, or the adapter itself, which may have been unloaded meanwhile; None for the
        model without one.
      arrays: by name, arrays that the processors of the model have declared.
      steering: vectors [D] of some layers, by number, that are added to the hidden states after these layers at every
        token of prompt and answers (`Steering`); None for none.
      tapped_layers: layers after which the hidden states of the tokens are wanted.
    """

    priority: int = 0
    timeout: float | None = None
    cache_salt: str = ""
    adapter: str | LoadedAdapter | None = None
    arrays: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    steering: "Mapping[int, Any] | Steering | None" = None
    tapped_layers: Sequence[int] = ()

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
        if not (self.adapter is None or isinstance(self.adapter, (str, LoadedAdapter))):
            raise ValueError(f"adapter must be the name of a loaded adapter or None, got {self.adapter!r:.60}")
        if not (self.steering is None or isinstance(self.steering, Steering)):
            object.__setattr__(self, "steering", Steering(self.steering))
        layers: Any = self.tapped_layers
        if not isinstance(layers, Sequence) or not all(type(layer) is int for layer in layers):
            raise TypeError(f"tapped_layers must be numbers of layers, such as (3, 7), got {layers!r:.60}")
        object.__setattr__(self, "tapped_layers", tuple(dict.fromkeys(layers)))


DEFAULT_REQUEST_OPTIONS = RequestOptions()


@dataclass(frozen=True)
class AdapterUse:
    """The adapter that answers were made with: its name, the hash of its tensors, and the token from which it changes
    the model."""

    name: str
    fingerprint: str
    start: int = 0


@dataclass(frozen=True)
class AnswerOrigin:
    """Everything that the answers of a request follow from, beside its prompt, their seeds and the weights.

    Attributes:
      params: sampling parameters. max_tokens: of an answer at most, where `params` leave it open too.
      adapter: None for the model without one. arrays: that the request gave processors.
      steering: vectors that were added for this request beside those of the `LLM`, by the layer's number as text.
    """

    params: SamplingParams
    max_tokens: int
    adapter: AdapterUse | None = None
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False, repr=False)
    steering: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class BegunAnswer:
    """The beginning of an answer that was made elsewhere, of the same request.

    Attributes:
      token_ids: its first tokens. has_ended: whether they are all, which a stop string may have ended.
    """

    token_ids: tuple[int, ...] = ()
    has_ended: bool = False


PoolingKind = Literal["last", "mean", "cls"]


@dataclass(frozen=True)
class Pooling:
    """How a request for a vector in place of an answer pools the final hidden states of its prompt.

    Attributes:
      kind: that of the last token, of the one at `start` ("cls"), or the mean over all from `start` on.
      token_ids: the logits of these tokens after the last one, in place of its hidden state; empty for the state.
    """

    kind: PoolingKind = "last"
    start: int = 0
    token_ids: tuple[int, ...] = ()

    def rows(self, num_prompt: int, start: int, end: int) -> tuple[int, int]:
        """Which of the tokens `start` to `end` of a prompt are pooled: from the first up to the second."""
        if self.kind == "last":
            return (end - 1, end) if end == num_prompt else (start, start)
        if self.kind == "cls":
            return (self.start, self.start + 1) if start <= self.start < end else (start, start)
        return min(max(self.start, start), end), end

    def finish(self, total: np.ndarray, num_prompt: int) -> np.ndarray:
        """The vector from the sum of what was pooled."""
        return total / np.float32(num_prompt - self.start) if self.kind == "mean" else total


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt, checked and tokenized, with everything that its answers depend on.

    Attributes:
      token_ids: the prompt.
      params: sampling parameters. max_tokens: tokens of an answer at most.
      seed: of answer 0; answer i is sampled with `sample_seed(seed, i)`. None takes `params.seed`.
      text: the prompt's text, or None where token ids were given.
      eos_token_ids: the model's end-of-sequence ids. bad_words: token sequences of `params.bad_words`.
      score_from: index into the prompt from which log-probabilities under the sampling parameters are computed; None
        for none.
      pooling: what vector is wanted of the prompt; the answer, of one token, is then not looked at. None for none.
      grammar: what the answers must match, compiled; None for anything. gate: where in an answer it begins; None for
        its first token.
      adapter: the one that it is answered with; a number of one that the model's weights hold as they are; 0 for none.
      adapter_start: the token from which it changes the model.
      steering: vectors that are added to its hidden states: its own and those of all requests.
      options: priority, timeout and cache salt. deadline: `time.monotonic` seconds when the timeout ends, or None.
      claimed: tokens of an answer that is checked, which `draft="claimed"` proposes.
      arrays: by name, arrays for processors, checked; others have their defaults.
      begun: of each answer its beginning, after which it goes on; () for answers that begin here.
    """

    token_ids: Sequence[int]
    params: SamplingParams
    max_tokens: int
    seed: int | None = None
    text: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    score_from: int | None = None
    pooling: Pooling | None = None
    grammar: Any = None
    gate: Any = None
    adapter: LoadedAdapter | int = 0
    adapter_start: int = 0
    steering: Steering | None = None
    options: RequestOptions = DEFAULT_REQUEST_OPTIONS
    deadline: float | None = None
    claimed: Sequence[int] = ()
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    begun: tuple[BegunAnswer, ...] = ()

    @property
    def origin(self) -> AnswerOrigin | None:
        """Everything that its answers follow from; None for an adapter that only a number names."""
        adapter, own, use = self.adapter, self.options.steering, None
        if isinstance(adapter, LoadedAdapter):
            use = AdapterUse(adapter.name, adapter.fingerprint, self.adapter_start)
        elif adapter:
            return None
        added = own.arrays if isinstance(own, Steering) else {}
        return AnswerOrigin(self.params, self.max_tokens, use, self.arrays, added)

    @property
    def added_vectors(self) -> dict[str, np.ndarray]:
        """Vectors that are added to its hidden states, by the layer's number as text."""
        return {} if self.steering is None else self.steering.arrays

    def followed_by(self, tokens: Sequence[int]) -> "Request":
        """This request with more tokens at the end of its prompt."""
        return replace(self, token_ids=[*self.token_ids, *tokens])

    @cached_property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids)

    @cached_property
    def prefix_salt(self) -> str:
        """Separates its prefixes from others of the same tokens: by its cache salt, adapter and steering."""
        adapter, salt = self.adapter, self.options.cache_salt
        if (steering := self.steering) is not None:
            salt = hashlib.sha256(repr((steering.fingerprint, salt)).encode()).hexdigest()
        if self.adapter_start:
            return salt  # its first pages are the model's own
        if isinstance(adapter, LoadedAdapter):
            adapter = adapter.fingerprint  # by which reuse survives restarts, whatever the name and the slot
        return hashlib.sha256(repr((adapter, salt)).encode()).hexdigest() if adapter else salt

    @property
    def scores_prompt(self) -> bool:
        """True if log-probabilities of the prompt are wanted."""
        return self.params.prompt_logprobs is not None or self.score_from is not None

    @property
    def scores_under_params(self) -> bool:
        """True if log-probabilities under the sampling parameters are wanted that are not the model's own."""
        return self.score_from is not None and not self.params.keeps_distribution

    @property
    def reads_hidden(self) -> bool:
        """True if hidden states of the prompt are needed, for log-probabilities or for a vector."""
        return self.scores_prompt or self.pooling is not None

    @property
    def needs_whole_prompt(self) -> bool:
        """True if all of the prompt is computed, cached or not: its hidden states are needed, which no page has."""
        return (
            self.scores_prompt
            or bool(self.options.tapped_layers)
            or (self.pooling is not None and self.pooling.kind != "last")
        )

    @cached_property
    def ending_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        eos_ids = () if self.params.ignore_eos else self.eos_token_ids
        return frozenset((*self.params.stop_token_ids, *eos_ids))

    def row(self, index: int) -> SamplingRow:
        """The sampler's parameters of answer `index`."""
        seed = None if self.seed is None else sample_seed(self.seed, index)
        return SamplingRow(self.params, seed, self.eos_token_ids, self.bad_words)


@dataclass(eq=False)
class SequenceState:
    """One answer of a request while it runs: its tokens, results, place in the schedule, and text so far.

    Attributes:
      request: what was asked. index: the answer's number among the request's n.
      leader: an earlier answer to the same prompt, whose pages this one shares once they are computed.
      tokens: the prompt's, and the answer's as far as they are known.

    Results, which the engine writes:
      weights: the versions of the weights that made its tokens.
      logprobs: per token, if asked for. prompt_logprobs: per prompt token, None for the first. processed_logprobs: of
        the prompt from `score_from` on, under the sampling parameters. pooled: float32 [D] or [token ids], the sum of
        what was pooled so far.
      states: by layer, hidden states [tokens, D] with the positions where they begin; later ones take the places of
        earlier ones.
      finish_reason: None while it runs, else "stop", "length", "abort" or "error". stop_reason: the token id or stop
        string that ended it. error: what went wrong, for "error", or why it was aborted.
      arrived, admitted, first_token, finished: `time.monotonic` seconds.
      rounds: how often a speculative round drafted and accepted so many tokens, by (drafted, accepted); None in an
        engine without a draft. num_plain: tokens that were made without a draft there.

    Schedule, which the scheduler writes:
      order: its number since the start. slot: its row in the device's arrays, None while it waits. adapter_slot: where
        its adapter is, 0 for none. num_overtaken: how many were admitted before it while its adapter had no slot.
      tables: by group of layers, the pages that it owns, in order; NULL_PAGE for those behind a window, which are the
        first `num_released` of the group, but for its sinks.
      num_prompt: tokens of the prompt.
      num_stored: tokens whose keys are in the cache when everything planned has run: at least so many, where steps
        make more than one token. num_reserved: at most so many, if nothing ended it; its pages have room for them.
      num_confirmed: the same, as far as results were read. num_reused: tokens found in the cache when it was
        last admitted; num_cached: when it was first, which others had computed.
      num_listed: leading pages that the device's tables have; the runner raises it, the scheduler lowers it.
      place: how far its pages are in the prefix tree.
      is_retained: whether some of its pages are of weights that were replaced since; no other sequence finds them.
      restore_from: where the state lies that it goes on from; NULL_PAGE for a sequence that begins without one.
      is_compacted: whether the pass that compacts its prompt is planned, or was; then `num_released` are the pages that
        the prompt lost. prompt_tables: by group, the pages that it lay in, until the pass has run; [] before and after.
      save_at: numbers of tokens after which its state is to be saved. saved: by number of tokens, the places of those
        that were, or will be by what is planned, and are not in the prefix tree yet.
      num_drafted: leading tokens that the draft had stored when it was admitted.
      grammar: its place in its request's grammar, which the engine keeps; None without one.
      target: tokens to store before it decodes. num_preemptions: times it was preempted.

    Text, which the client writes:
      text: of the tokens read so far. num_read: answer tokens that were turned into text. reader: what does it.
    """

    request: Request
    index: int = 0
    leader: "SequenceState | None" = None
    tokens: list[int] = field(default_factory=list)
    # Results.
    weights: list["WeightsSpan"] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    processed_logprobs: list[float] = field(default_factory=list)
    pooled: np.ndarray | None = field(default=None, repr=False)
    states: dict[int, list[tuple[int, np.ndarray]]] = field(default_factory=dict, repr=False)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    excludes_itself: bool = False
    arrived: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    rounds: Counter[tuple[int, int]] | None = None
    num_plain: int = 0
    # Schedule.
    order: int = -1
    slot: int | None = None
    adapter_slot: int = 0
    num_overtaken: int = 0
    tables: list[list[int]] = field(default_factory=lambda: [[]])
    num_released: list[int] = field(default_factory=lambda: [0])
    num_stored: int = 0
    num_reserved: int = 0
    num_confirmed: int = 0
    num_reused: int = 0
    num_cached: int | None = None
    num_listed: int = 0
    num_drafted: int = 0
    is_retained: bool = False
    restore_from: int = NULL_PAGE
    is_compacted: bool = False
    prompt_tables: list[list[int]] = field(default_factory=list)
    save_at: list[int] = field(default_factory=list)
    saved: dict[int, int] = field(default_factory=dict)
    place: Any = field(default=None, repr=False)
    grammar: Any = field(default=None, repr=False)
    target: int = 0
    num_preemptions: int = 0
    _keys: list[bytes] = field(default_factory=list, repr=False)
    # Text.
    text: str = ""
    num_read: int = 0
    reader: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.token_ids)
        if not self.tokens:
            self.tokens = list(self.request.token_ids)

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @cached_property
    def row(self) -> SamplingRow:
        """The sampler's parameters."""
        return self.request.row(self.index)

    @property
    def pages(self) -> list[int]:
        """The pages of the first group: of layers without a window, where there are any."""
        return self.tables[0]

    @property
    def num_output(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> list[int]:
        """The answer's tokens so far."""
        return self.tokens[self.num_prompt :]

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_decoding(self) -> bool:
        """True if all of its known tokens but the newest are stored, or planned to be."""
        return self.slot is not None and self.num_stored >= self.target

    @property
    def can_decode(self) -> bool:
        """True if a dispatch may decode it now: under masks from the host, not before all of its tokens are known."""
        if not self.is_decoding or self.num_left <= 0:
            return False
        return self.grammar is None or not self.grammar.is_on_host or self.num_stored == len(self.tokens) - 1

    @cached_property
    def num_storable(self) -> int:
        """Tokens that are ever stored: all but the last."""
        return self.num_prompt + self.request.max_tokens - 1

    @property
    def num_left(self) -> int:
        """Tokens that are still to be planned, once it decodes."""
        return self.num_storable - self.num_stored

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Its place among the others: lower is served first and preempted last."""
        return (self.num_preemptions < MAX_PREEMPTIONS, self.request.options.priority, self.order)

    @cached_property
    def salt(self) -> str:
        """As `Request.prefix_salt`."""
        return self.request.prefix_salt

    def keys(self, page_size: int, num_tokens: int, num_ahead: int = 0) -> list[bytes]:
        """The bytes of each full page of its first `num_tokens` tokens, each with those of `num_ahead` tokens after
        it: always the same number. Those of pages that an adapter changes in part have its fingerprint after them."""
        count = max(num_tokens - num_ahead, 0) // page_size
        if len(self._keys) < count:
            start = len(self._keys)
            data = np.asarray(self.tokens[start * page_size : count * page_size + num_ahead], np.int32).tobytes()
            stride, width = 4 * page_size, 4 * (page_size + num_ahead)
            keys = [data[i * stride : i * stride + width] for i in range(count - start)]
            if (own := self.request.adapter_start) and isinstance(adapter := self.request.adapter, LoadedAdapter):
                mark, first = adapter.fingerprint.encode(), max(own // page_size - start, 0)
                keys[first:] = [key + mark for key in keys[first:]]
            self._keys += keys
        return self._keys[:count]

    def begin_span(self, version: str, *, is_retained: bool = False) -> None:
        """Its next tokens are made with the weights of that name."""
        if self.weights and (self.weights[-1].version, self.weights[-1].is_retained) == (version, is_retained):
            return
        if self.weights and self.weights[-1].start == self.num_output:
            self.weights.pop()
        self.weights.append(WeightsSpan(version, self.num_output, is_retained))

    def drop_after(self, num_output: int) -> None:
        """Drops the answer's tokens beyond its first `num_output`: those after a stop string. It must have ended."""
        del self.tokens[self.num_prompt + num_output :]
        del self.logprobs[num_output:]

    @property
    def speculation(self) -> SpeculationStats | None:
        """Counts of tokens that were drafted and accepted for it; None in an engine without a draft."""
        if self.rounds is None:
            return None
        num_made = self.num_plain + sum((1 + accepted) * count for (_, accepted), count in self.rounds.items())
        return SpeculationStats.of_rounds(self.rounds, self.num_plain, num_cut=max(num_made - self.num_output, 0))


@dataclass(frozen=True)
class RequestTimings:
    """Seconds of one request: waiting for a slot, until its first token, over all, and per token after the first."""

    queue_time: float
    time_to_first_token: float
    total_time: float
    time_per_output_token: float


@dataclass(frozen=True)
class WeightsSpan:
    """Tokens of an answer that were made with the same weights: from number `start` on, until the next span.

    Attributes:
      version: what the weights were called (`LLM.update_params`); "0" if they are those that were loaded.
      is_retained: whether cached keys and values of weights before were read.
    """

    version: str
    start: int = 0
    is_retained: bool = False


@dataclass(frozen=True)
class CompletionOutput:
    """One answer.

    Attributes:
      index: its number among the `n` of the request. seed: what it was sampled with; giving it as `seed` repeats it.
      finish_reason: "stop" (a stop string, stop id or end-of-sequence id, named by `stop_reason`), "length",
        "abort" or "error" (explained by `error`; None while streaming). excludes_itself: whether the error is the
        request's, which excludes all that it asks for.
      logprobs: per token, if requested: its own and the best ones. cumulative_logprob: their sum over own tokens.
      speculation: what was drafted and accepted, where there is a draft.
      weights: which weights made its tokens; one span unless they were replaced meanwhile.
      tool_calls: in chats with tools, the calls, which the text has no more. reasoning: in chats, what the model wrote
        before its answer, which the text has no more either; None where there is none.
      hidden_states: of a finished answer whose request has `tapped_layers`, float32 [tokens, D] by layer, of the prompt
        and the answer but its last token, which was never read.
    """

    index: int
    text: str
    token_ids: list[int]
    seed: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    excludes_itself: bool = False
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprob] | None = None
    speculation: SpeculationStats | None = None
    weights: tuple[WeightsSpan, ...] = ()
    tool_calls: list[ToolCall] | None = None
    reasoning: str | None = None
    hidden_states: dict[int, np.ndarray] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class RequestOutput:
    """A request's prompt and its `n` answers.

    Attributes:
      prompt: the text, or None where token ids were given.
      prompt_logprobs: per prompt token, if asked for; the first has none.
      num_cached_tokens: of the prompt, whose keys and values were found in the cache.
      taps: hidden states by name, float arrays [tokens, D] over prompt and first answer, if asked for.
      pooled: the vector float32 [D] of a request with `pooling`.
      origin: what the answers follow from, for `LLM.coordinate`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    timings: RequestTimings | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0
    taps: dict[str, np.ndarray] | None = None
    pooled: np.ndarray | None = None
    origin: AnswerOrigin | None = field(default=None, repr=False)


@dataclass(frozen=True)
class StreamDelta:
    """Tokens and text that were added to one answer.

    Attributes:
      index: the answer's number among the request's n. text, token_ids: what is new. logprobs: of the new tokens, if
        asked for. finish_reason, stop_reason, error, excludes_itself: as of `CompletionOutput`, once it has ended.
      output: the whole request, in the last delta only.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    output: RequestOutput | None = None
    logprobs: list[TokenLogprob] | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    excludes_itself: bool = False

    def merged(self, later: "StreamDelta") -> "StreamDelta":
        """This delta and the answer's next one in one."""
        logprobs = None if later.logprobs is None else [*(self.logprobs or ()), *later.logprobs]
        return replace(
            later, text=self.text + later.text, token_ids=[*self.token_ids, *later.token_ids], logprobs=logprobs
        )


@dataclass(frozen=True)
class Score:
    """Log-probabilities, in nats, of the tokens of a continuation given its prompt and the tokens before; of a text, of
    all its tokens but the first.

    Attributes:
      token_ids: the tokens that are scored.
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

    @property
    def loss(self) -> float:
        """Mean of -raw: the cross-entropy per token, in nats."""
        return -self.raw_total / len(self.raw)

    @property
    def perplexity(self) -> float:
        """exp(loss); infinity where that is no float."""
        return math.exp(self.loss) if self.loss < _MAX_EXPONENT else math.inf
