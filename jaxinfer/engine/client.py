"""Requests in, outputs out, over one engine: prepare, submit, step, advance, collect.

`LLM` and `AsyncEngine` are thin layers over a `Client`.
"""

import itertools
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from jaxinfer.engine.adapter_slots import LoadedAdapter
from jaxinfer.engine.adapters import AdapterRegistry
from jaxinfer.engine.grammars import Grammars
from jaxinfer.engine.protocol import AnyEngine
from jaxinfer.engine.request import (
    DEFAULT_REQUEST_OPTIONS,
    BegunAnswer,
    CompletionOutput,
    Logprob,
    Pooling,
    Prompt,
    Request,
    RequestOptions,
    RequestOutput,
    SequenceState,
    StreamDelta,
    TokenLogprob,
    WeightsSpan,
)
from jaxinfer.engine.results import end_of, pooled_of, states_of, timings
from jaxinfer.engine.scheduler import QueueFullError, RequestTooLargeError
from jaxinfer.engine.steering import Steering
from jaxinfer.grammar.compiler import Grammar, GrammarCompiler, make_compiler
from jaxinfer.grammar.gate import Gate
from jaxinfer.grammar.structured import StructuredOutputs
from jaxinfer.models import ModelConfig
from jaxinfer.request_arrays import check_arrays
from jaxinfer.sampling import SamplingParams, SamplingParamsError, derive_seed, make_batch, tokenize_bad_words
from jaxinfer.text import StopStringMatcher, StreamingDetokenizer, Tokenizer
from jaxinfer.text.prompts import TakesPrompts
from jaxinfer.text.reasoning import FAMILIES, prompt_end

Key = TypeVar("Key")


class Client(TakesPrompts):
    """Prepares requests for one engine, drives it, and turns tokens into text.

    A request without a seed gets one derived from `seed` and its number since the start. Methods that take a prompt
    raise ValueError or TypeError if it cannot be served; `what` names it in the message.

    Args:
      name: of the model, for messages. eos_token_ids: end answers. tokenizer: None for token ids only. has_head: False
        for a model that makes vectors only. system: for conversations without a system message. adapters: that requests
        can name. steering: that every request has, beside its own.
    """

    def __init__(
        self,
        engine: AnyEngine,
        *,
        name: str,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...],
        seed: int,
        has_head: bool = True,
        system: str | None = None,
        adapters: AdapterRegistry | None = None,
        steering: Steering | None = None,
    ):
        derive_seed(seed)  # checks its range
        self._engine: AnyEngine | None = engine
        self.has_head, self.adapters, self._steering = has_head, adapters, steering
        self.name, self.config, self.tokenizer, self.system = name, config, tokenizer, system
        self.vocab_size, self.max_model_len = config.vocab_size, engine.spec.max_model_len
        self.eos_token_ids, self.seed = eos_token_ids, seed
        self._numbers = itertools.count()
        self._request_ids = itertools.count()
        self._compiler: GrammarCompiler | None = None
        self._compiler_lock = threading.Lock()
        self._progressed: dict[SequenceState, None] = {}  # of submitted answers, until `take_progress` returns them

    @property
    def engine(self) -> AnyEngine:
        """The engine that runs the requests. Raises RuntimeError once closed."""
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

    def close(self) -> None:
        """Aborts unfinished requests and frees the engine's memory. A second call does nothing."""
        engine, self._engine = self._engine, None
        if self._compiler is not None:
            self._compiler.close()
        if engine is not None:
            engine.close()

    # Prepare.

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions = DEFAULT_REQUEST_OPTIONS,
        *,
        what: str = "the prompt",
        keeps_answer: bool = True,
    ) -> Request:
        """A checked and tokenized request; raises if it can never be served. Without `keeps_answer` no room is needed
        beside the prompt."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"{what}: params must be SamplingParams, got {type(params).__name__}")
        options = self._with_adapter(options, what)
        prompts = self.prompts_of(options.adapter)
        if params.stop and prompts.tokenizer is None:
            raise ValueError(f"{what}: stop strings need a tokenizer; use stop_token_ids")
        text, ids = prompts.tokenize(prompt, what=what)
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = max(self.max_model_len - len(ids), 1)
        self._check_fits(what, len(ids), params.max_tokens if keeps_answer else 0)
        limit = self.engine.spec.options.max_waiting
        if limit is not None and params.n > self.engine.spec.max_seqs + limit:
            raise ValueError(
                f"{what}: n={params.n} is more than max_seqs={self.engine.spec.max_seqs} and max_waiting={limit} can "
                f"take together"
            )
        bad_words = self._check_params(params, prompts)
        grammar, gate = (None, None) if params.structured is None else self._compile(params.structured, ids)
        arrays = self._check_arrays(options, what)
        seed = params.seed
        if seed is None:
            seed = 0 if params.is_greedy else derive_seed(self.seed, next(self._numbers))
        return Request(
            ids,
            params,
            max_tokens,
            seed,
            text=text,
            eos_token_ids=self._eos_of(prompts),
            bad_words=bad_words,
            grammar=grammar,
            gate=gate,
            **_adapter(options, ids),
            steering=self._steering_of(options, what),
            options=options,
            deadline=_deadline(options),
            arrays=arrays,
        )

    def prompts_of(self, adapter: str | LoadedAdapter | None) -> TakesPrompts:
        """Takes the prompts of requests with an adapter: it may have a tokenizer of its own, and ids that it
        adds. Raises ValueError for a name that is not loaded."""
        if isinstance(adapter, str):
            adapter = self.adapters.find(adapter) if self.adapters is not None else None
        if adapter is None or (adapter.tokenizer is None and not adapter.num_added):
            return self
        return self.with_tokens(adapter.tokenizer, adapter.num_added)

    def _eos_of(self, prompts: TakesPrompts) -> tuple[int, ...]:
        """The ids that end answers: the model's, and that of an adapter's tokenizer."""
        own = None if prompts.tokenizer in (None, self.tokenizer) else prompts.tokenizer.eos_token_id
        return self.eos_token_ids if own is None else tuple(sorted({*self.eos_token_ids, own}))

    def _steering_of(self, options: RequestOptions, what: str) -> Steering | None:
        """The vectors that a request adds: its own beside those of all requests. Raises ValueError for layers that were
        not declared, of steering and of taps, and for vectors of other lengths than hidden states."""
        own = options.steering
        try:
            self.engine.spec.check_taps(options.tapped_layers)
            if not isinstance(own, Steering):
                return self._steering
            self.engine.spec.check_steering(own)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None
        return own + self._steering

    def _with_adapter(self, options: RequestOptions, what: str) -> RequestOptions:
        """The options with the adapter itself in place of its name. Raises ValueError for one that cannot be served."""
        if options.adapter is None:
            return options
        try:
            if self.adapters is None:
                raise ValueError(f"{self.name} has no adapters, and {options.adapter!r} was asked for")
            given = options.adapter
            adapter = given if isinstance(given, LoadedAdapter) else self.adapters.find(given)
            if adapter.owner is not self.adapters:
                raise ValueError(f"adapter {adapter.name!r} was not loaded by this model")
            if adapter.invocation_tokens and self.engine.spec.ends_prompts:
                policy = self.engine.spec.options.kv_policy
                raise ValueError(f"adapter {adapter.name!r} has invocation tokens: not with kv_policy={policy!r}")
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None
        return replace(options, adapter=adapter)

    def _check_arrays(self, options: RequestOptions, what: str) -> dict[str, np.ndarray]:
        """The arrays for processors. Raises ValueError or TypeError for what they have not declared."""
        processors = self.engine.spec.processors
        try:
            return check_arrays({} if processors is None else processors.arrays, options.arrays, "processors")
        except (ValueError, TypeError) as error:
            raise type(error)(f"{what}: {error}") from None

    def check_no_processors(self, name: str, what: str) -> None:
        """Raises ValueError in a model with processors."""
        if (processors := self.engine.spec.processors) is not None:
            told = f"processors={list(processors.names)} change answers alone; open the model without them"
            raise ValueError(f"{what}: {name} are not computed under processors: {told}")

    def _compile(self, structured: StructuredOutputs, prompt: Sequence[int]) -> tuple[Grammar, Gate | None]:
        """The grammar that the answers to a prompt must match, and the gate where it begins; raises
        SamplingParamsError, with the place, for what cannot be served."""
        tokenizer = self.need_tokenizer("structured output")
        if not self.eos_token_ids:
            raise SamplingParamsError(
                "structured", f"structured output needs an end-of-sequence id, and {self.name} has none"
            )
        try:
            with self._compiler_lock:
                if self._compiler is None:
                    self._compiler = make_compiler(tokenizer, self.engine.spec.config.vocab_size, self.eos_token_ids)
            grammar = self._compiler.compile(structured)
        except ValueError as error:
            raise SamplingParamsError("structured", f"structured: {error}") from None
        if structured.reasoning in (None, "none"):
            return grammar, None
        return grammar, self._compiler.gate(FAMILIES[structured.reasoning], prompt_end(tokenizer, prompt))

    def prepare_score(
        self,
        prompt: Prompt,
        continuation: Prompt | None,
        params: SamplingParams,
        options: RequestOptions = DEFAULT_REQUEST_OPTIONS,
        *,
        what: str,
    ) -> Request:
        """A request that scores `continuation` after `prompt`, tokenized apart; without one, all tokens of the prompt
        but its first."""
        options = self._with_adapter(options, what)
        prompts = self.prompts_of(options.adapter)
        _, ids = prompts.tokenize(prompt, what=what)
        start = 1
        if continuation is not None:
            _, more = prompts.tokenize(continuation, add_special_tokens=False, what=f"the continuation of {what}")
            if not ids or not more:
                raise ValueError(f"{what}: {len(ids)} prompt and {len(more)} continuation tokens; both need one")
            start, ids = len(ids), [*ids, *more]
        elif len(ids) < 2:
            raise ValueError(f"{what}: a score needs at least 2 tokens, got {len(ids)}: nothing predicts the first")
        if params.structured is not None:
            raise SamplingParamsError("structured", f"{what}: a score is not taken under structured output")
        if options.arrays:
            self.check_no_processors("scores under sampling parameters", what)
        params = replace(params, n=1, max_tokens=None, prompt_logprobs=0, stop=(), logprobs=None)
        self._check_fits(what, len(ids), 0)
        bad_words = self._check_params(params, prompts)
        prompt_ids = ids if continuation is None else ids[:start]
        fields: dict[str, Any] = {**_adapter(options, prompt_ids), "options": options}
        fields |= {"bad_words": bad_words, "score_from": start, "steering": self._steering_of(options, what)}
        return Request(ids, params, 1, 0, eos_token_ids=self._eos_of(prompts), **fields)

    def prepare_pooled(
        self, token_ids: Sequence[int], params: SamplingParams, pooling: Pooling, options: RequestOptions, *, what: str
    ) -> Request:
        """A request for a vector; it may have as many tokens as the model takes, for none is made after them."""
        if pooling.token_ids and not self.has_head:
            raise ValueError(f"{self.name} has no head: it makes vectors of texts (embed), and no scores of pairs")
        self.check_no_processors("vectors", what)
        self._check_fits(what, len(token_ids), 0)
        options = self._with_adapter(options, what)
        fields: dict[str, Any] = {**_adapter(options, token_ids), "options": options}
        fields["steering"] = self._steering_of(options, what)
        return Request(list(token_ids), params, 1, 0, pooling=pooling, deadline=_deadline(options), **fields)

    def _check_params(self, params: SamplingParams, prompts: TakesPrompts) -> tuple[tuple[int, ...], ...]:
        """Checks sampling parameters against the model; returns the token sequences of `bad_words`."""
        params.validate_for_model(prompts.vocab_size, self.max_model_len)
        if not self.has_head:
            raise ValueError(f"{self.name} has no head: it makes vectors of texts (embed), and no tokens")
        bad_words: tuple[tuple[int, ...], ...] = ()
        if params.bad_words:
            tokenizer = prompts.need_tokenizer("bad_words")
            bad_words = tokenize_bad_words(params.bad_words, lambda text: tokenizer.encode(text, False))
        if params.allowed_token_ids is not None or params.bad_words or params.logit_bias:
            request = Request((), params, 1, 0, eos_token_ids=self._eos_of(prompts), bad_words=bad_words)
            make_batch([request.row(0)], prompts.vocab_size)  # raises here rather than among running requests
        return bad_words

    def _check_fits(self, what: str, num_prompt: int, max_tokens: int | None) -> None:
        """`max_tokens`: of the answer, 0 where none is made, None for as many as fit, at least 1."""
        limit = self.max_model_len
        if num_prompt == 0:
            raise ValueError(f"{what} is empty: it needs at least 1 token")
        num_needed = max(limit - num_prompt, 1) if max_tokens is None else max_tokens
        if num_prompt + num_needed > limit:
            told = f"max_model_len={limit} (the model allows {self.config.max_length})"
            if max_tokens:
                told = f"{num_prompt} prompt tokens and {max_tokens=} make {num_prompt + max_tokens}, but {told}"
            else:
                room = " and leave no room for an answer" if max_tokens is None else ""
                told = f"{num_prompt} tokens are too many{room}: {told}"
            raise RequestTooLargeError(f"{what}: {told}")
        try:
            self.engine.check_fits(num_prompt, max(num_needed, 1))
        except ValueError as error:
            told = str(error) if max_tokens else str(error).replace("max_tokens=", "an answer of ")
            raise type(error)(f"{what}: {told}") from None

    def begun(self, request: Request, answers: Sequence[BegunAnswer], *, what: str = "the prompt") -> Request:
        """The request with the beginnings of its answers, one for each: their tokens are computed as those of a prompt
        are, and text, counts and all that follows are as if they had been made here.

        Raises ValueError for tokens with which no answer to it can begin, and for a request that wants more of them
        than the tokens: log-probabilities of its prompt, or hidden states.
        """
        if len(answers) != request.params.n:
            raise ValueError(f"{what}: {len(answers)} answers were begun, and n={request.params.n}")
        if request.reads_hidden or request.options.tapped_layers:
            raise ValueError(f"{what}: hidden states of its prompt are read, so its answers cannot be begun elsewhere")
        vocab_size, ending = self.prompts_of(request.options.adapter).vocab_size, request.ending_ids
        grammars = None if request.grammar is None else Grammars(self.engine.spec)
        for number, answer in enumerate(answers):
            ids = answer.token_ids
            if (told := len(ids)) > request.max_tokens:
                raise ValueError(f"{what}: answer {number} begins with {told} tokens, of {request.max_tokens} at most")
            if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
                raise ValueError(f"{what}: answer {number} begins with {min(ids)} to {max(ids)} of {vocab_size} tokens")
            if early := ending.intersection(ids[:-1]):
                raise ValueError(f"{what}: answer {number} goes on after token {min(early)}, which ends answers")
            if grammars is not None and ids:
                rest = ids[:-1] if ids[-1] in ending else ids
                grammars.add(SequenceState(request, number, tokens=[*request.token_ids, *rest]))
        return replace(request, begun=tuple(answers))

    # Submit.

    def submit(self, request: Request) -> list[SequenceState]:
        """Queues all answers of a request, or none where the queue is full (QueueFullError); returns them. One that had
        ended when it was begun is not queued: `take_progress` has it at once."""
        answers: list[SequenceState] = []
        try:
            for index in range(request.params.n):
                answer = SequenceState(request, index, leader=answers[0] if answers else None)
                answer.reader = _TextReader(answer, self._tokenizer_of(request))
                if request.begun:
                    self._begin(answer, request.begun[index])
                if answer.is_finished:
                    self._progressed[answer] = None
                else:
                    self.engine.add(answer)
                answers.append(answer)
        except BaseException:
            self.abort(answers)
            raise
        return answers

    def _begin(self, answer: SequenceState, begun: BegunAnswer) -> None:
        """Gives an answer its first tokens, and ends it where they are all."""
        answer.tokens += begun.token_ids
        if answer.num_output:
            answer.weights = [WeightsSpan(self.engine.weights.label)]
        if answer.params.logprobs is not None:  # they were told by whoever made the tokens
            answer.logprobs = [{token: Logprob(math.nan, 0)} for token in begun.token_ids]
        end = end_of(answer, answer.tokens[-1]) if answer.num_output else None
        if end is None and begun.has_ended:
            end = "stop", None  # a stop string, which the text tells
        if end is not None:
            answer.finish_reason, answer.stop_reason = end
            answer.arrived = answer.finished = time.monotonic()

    def submit_begun(self, request: Request, begun: Sequence[int]) -> SequenceState:
        """Queues the only answer of a request, which goes on after the tokens `begun`: fewer than it may have. Raises
        ClaimRefusedError where its grammar refuses one of them, QueueFullError where the queue is full."""
        answer = SequenceState(request, tokens=[*request.token_ids, *begun])
        answer.reader = _TextReader(answer, self._tokenizer_of(request))
        self.engine.add(answer)
        return answer

    def abort(self, answers: Sequence[SequenceState], error: str | None = None) -> None:
        """Ends those that still run with finish_reason "abort"."""
        for answer in answers:
            self._progressed.pop(answer, None)
            if self._engine is not None:  # closing has ended them
                if error is not None and not answer.is_finished:
                    answer.error = error
                self._engine.finish(answer, "abort")

    # Advance.

    def step(self, max_steps: int | None = None) -> None:
        """One step of the engine; `take_progress` tells whose answers it advanced."""
        self._progressed |= dict.fromkeys(self.engine.step(max_steps))

    def come_to_rest(self, mode: str, *, retains: bool = False) -> None:
        """Ends what runs ("wait"), aborts all requests ("abort"), or sets aside what runs ("keep"), with `retains` with
        what is cached of it."""
        while mode == "wait" and self.engine.has_work:
            self.step()
        if mode == "abort":
            answers = self.engine.unfinished
            self.abort(answers, "all requests were aborted")
            self._progressed |= dict.fromkeys(answers)
        self._progressed |= dict.fromkeys(self.engine.come_to_rest(retains=retains))

    def take_progress(self, answers: Mapping[SequenceState, Any]) -> list[SequenceState]:
        """Those of `answers` that made progress since the last call. Several callers may step one engine in turn;
        each gets the progress of all its answers."""
        progressed = [answer for answer in self._progressed if answer in answers]
        for answer in progressed:
            del self._progressed[answer]
        return progressed

    def advance(self, answer: SequenceState) -> StreamDelta:
        """An answer's new tokens and text; a stop string in the text ends it."""
        first = answer.num_read
        text, tokens, matched = answer.reader.read()
        logprobs = None
        if answer.params.logprobs is not None:
            logprobs = [
                self._with_text(entry, answer.request) or {} for entry in answer.logprobs[first : answer.num_read]
            ]
        if matched is not None:
            # It may have ended otherwise after the stop string.
            self.engine.finish(answer, "stop", matched)
            answer.finish_reason, answer.stop_reason, answer.error = "stop", matched, None
            answer.drop_after(answer.num_read)
        return StreamDelta(
            *(answer.index, text, tokens, answer.finish_reason, None, logprobs),
            *(answer.stop_reason, answer.error, answer.excludes_itself),
        )

    def run(
        self, answers: dict[SequenceState, Any], max_steps: int | None = None
    ) -> Iterator[tuple[SequenceState, StreamDelta]]:
        """Steps the engine until all answers have ended; yields the deltas of each, and removes those that have ended.

        The caller may add answers between two yields.
        """
        while answers:
            self.step(max_steps)
            for answer in self.take_progress(answers):
                if answer not in answers:  # the caller has removed it meanwhile
                    continue
                delta = self.advance(answer)
                if answer.is_finished:
                    del answers[answer]
                yield answer, delta

    def stream(self, request: Request) -> Iterator[StreamDelta]:
        """Runs a request; yields what is new as it comes, the whole output last. Closing the iterator aborts it."""
        answers = self.submit(request)
        running: dict[SequenceState, Any] = dict.fromkeys(answers)
        try:
            for _, delta in self.run(running, max_steps=1):
                if delta.text or delta.token_ids or delta.finish_reason is not None:
                    yield delta if running else replace(delta, output=self.collect(answers))
        finally:
            self.abort(answers)

    def generate_each(
        self, requests: Iterator[tuple[Key, Prompt | Request, SamplingParams, RequestOptions]], limit: int
    ) -> Iterator[tuple[Key, RequestOutput | ValueError]]:
        """Runs requests as there is room, at most `limit` answers at once; yields each output, or the error for which
        the request was refused, as it is there. Closing the iterator aborts what runs."""
        running: dict[SequenceState, tuple[Key, list[SequenceState]]] = {}
        refused: tuple[Key, Request] | None = None
        try:
            while True:
                while len(running) < limit:
                    if refused is not None:  # as it was prepared: its seed may be derived from its number
                        (key, request), refused = refused, None
                    elif (item := next(requests, None)) is None:
                        break
                    else:
                        key, prompt, params, options = item
                        try:
                            is_ready = isinstance(prompt, Request)
                            request = prompt if is_ready else self.prepare(prompt, params, options)
                        except ValueError as error:
                            yield key, error
                            continue
                    try:
                        answers = self.submit(request)
                    except QueueFullError:
                        if not running:
                            raise
                        refused = key, request  # again, once some have ended
                        break
                    running |= dict.fromkeys(answers, (key, answers))
                if not running:
                    return
                self.step()
                for answer in self.take_progress(running):
                    self.advance(answer)
                    if answer.is_finished:
                        key, answers = running.pop(answer)
                        if not any(other in running for other in answers):
                            yield key, self.collect(answers)
        finally:
            self.abort(list(running))

    # Collect.

    def collect(self, answers: Sequence[SequenceState]) -> RequestOutput:
        """The output of a request with these answers, as they stand."""
        request = answers[0].request
        prompt_logprobs = None
        if request.params.prompt_logprobs is not None:
            prompt_logprobs = [self._with_text(entry, request) for entry in answers[0].prompt_logprobs]
        return RequestOutput(
            request_id=str(next(self._request_ids)),
            prompt=request.text,
            prompt_token_ids=list(request.token_ids),
            outputs=[self._completion(answer) for answer in answers],
            finished=all(answer.is_finished for answer in answers),
            timings=timings(answers),
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=min(answers[0].num_cached or 0, request.num_prompt),
            pooled=pooled_of(answers[0]) if request.pooling is not None and answers[0].is_finished else None,
            origin=request.origin,
        )

    def _completion(self, answer: SequenceState) -> CompletionOutput:
        logprobs = total = None
        if answer.params.logprobs is not None:
            total = float(sum(next(iter(entry.values())).logprob for entry in answer.logprobs))
            logprobs = [self._with_text(entry, answer.request) or {} for entry in answer.logprobs]
        seed = answer.row.seed if answer.row.seed is not None else answer.params.seed
        return CompletionOutput(
            index=answer.index,
            text=answer.text,
            token_ids=answer.output,
            seed=seed or 0,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            error=answer.error,
            excludes_itself=answer.excludes_itself,
            cumulative_logprob=total,
            logprobs=logprobs,
            speculation=answer.speculation,
            weights=tuple(answer.weights),
            hidden_states=states_of(answer),
        )

    def _tokenizer_of(self, request: Request) -> Tokenizer | None:
        adapter = request.options.adapter
        own = adapter.tokenizer if isinstance(adapter, LoadedAdapter) else None
        return self.tokenizer if own is None else own

    def _with_text(self, entry: TokenLogprob | None, request: Request) -> TokenLogprob | None:
        if entry is None or (texts := self._tokenizer_of(request)) is None:
            return entry
        skip = request.params.skip_special_tokens
        return entry | {
            token: replace(
                logprob, decoded_token=texts.decode([token], False), token_bytes=texts.token_bytes(token, skip)
            )
            for token, logprob in entry.items()
            if texts.has_id(token)
        }


class _TextReader:
    """Turns an answer's new tokens into text.

    What `read` returns adds up to `answer.text`. Nothing after a stop string is part of it; the text of a stop token is
    left out unless the request includes it.
    """

    def __init__(self, answer: SequenceState, tokenizer: Tokenizer | None):
        params = answer.params
        self._answer, self._tokenizer, self._is_closed = answer, tokenizer, False
        self._detokenizer = None if tokenizer is None else StreamingDetokenizer(tokenizer, params.skip_special_tokens)
        self._stops = StopStringMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None

    def read(self) -> tuple[str, list[int], str | None]:
        """The text of the tokens since the last call, the tokens, and the stop string that was found. After one, tokens
        beyond `num_read` do not count."""
        answer, first, text, matched = self._answer, self._answer.num_read, "", None
        tokens = answer.tokens[answer.num_prompt + first :]
        while answer.num_read < first + len(tokens) and matched is None:
            token = tokens[answer.num_read - first]
            answer.num_read += 1
            is_stop_token = isinstance(answer.stop_reason, int) and answer.num_read == first + len(tokens)
            if is_stop_token and answer.finish_reason == "stop" and not answer.params.include_stop_str_in_output:
                continue
            new, matched = self._text_of(token)
            text += new
        if matched is None and answer.is_finished and not self._is_closed:
            text, matched = self._close(text)
        self._is_closed |= answer.is_finished or matched is not None
        answer.text += text
        return text, tokens[: answer.num_read - first], matched

    def _text_of(self, token: int) -> tuple[str, str | None]:
        """A token's text and the stop string that it completes. An id without a token gives no text."""
        if self._detokenizer is None or self._tokenizer is None or not self._tokenizer.has_id(token):
            return "", None
        text = self._detokenizer.add([token])
        if self._stops is None or self._answer.num_read <= self._answer.params.min_tokens:
            return text, None
        result = self._stops.feed(text)
        return result.text, result.matched

    def _close(self, text: str) -> tuple[str, str | None]:
        """The text with what was held back when the answer has ended, which may itself complete a stop string."""
        if self._detokenizer is None:
            return text, None
        rest, matched = self._detokenizer.finalize(), None
        if self._stops is not None and self._answer.num_read > self._answer.params.min_tokens:
            result = self._stops.feed(rest)
            rest, matched = result.text, result.matched
            if matched is None:
                rest += self._stops.flush()
        return text + rest, matched


def _adapter(options: RequestOptions, token_ids: Sequence[int]) -> dict[str, Any]:
    """The adapter of the options, and where it starts; nothing for none, and for a prompt that does not invoke it."""
    adapter = options.adapter
    start = adapter.start_in(token_ids) if isinstance(adapter, LoadedAdapter) else None
    return {} if start is None else {"adapter": adapter, "adapter_start": start}


def _deadline(options: RequestOptions) -> float | None:
    return None if options.timeout is None else time.monotonic() + options.timeout
