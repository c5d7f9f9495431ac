"""The door for scripts and notebooks: load a model, generate, chat, stream, score, explain, close."""

import dataclasses
import difflib
import inspect
import itertools
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from jaxinfer import compilation_cache
from jaxinfer.data import embedded_path
from jaxinfer.engine.contiguous import ContiguousEngine, EngineOptions
from jaxinfer.engine.explanation import Explanation, explain_engine
from jaxinfer.engine.output import AnswerText, timings
from jaxinfer.engine.request import Generation, RequestOutput, Score
from jaxinfer.models import ModelConfig, Params, abstract_params, check_taps
from jaxinfer.sampling import (
    SamplingParams,
    SamplingRow,
    derive_seed,
    from_generation_config,
    make_batch,
    sample_seed,
    tokenize_bad_words,
)
from jaxinfer.text import Tokenizer, TokenizerNotFoundError

if TYPE_CHECKING:
    from jaxinfer.batch import BatchSummary

DEFAULT_MAX_MODEL_LEN = 4096
Key = TypeVar("Key")
Prompt = str | Sequence[int]
LiveModel = tuple[ModelConfig, Params] | tuple[ModelConfig, Params, Tokenizer | None]


@dataclass(frozen=True)
class StreamDelta:
    """What was added to one answer.

    Attributes:
      index: the answer's number among the request's n. text, token_ids: what is new.
      output: the whole request, in the last delta only.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    output: RequestOutput | None = None


class LLM:
    """A model ready to generate.

    Args:
      model: a folder with a Hugging Face or converted checkpoint, a hub id, "demo" or "demo-draft" (the embedded
        pair), or live `(ModelConfig, params)` or `(ModelConfig, params, tokenizer)`; live parameters are used as they
        are and stay the caller's.
      tokenizer: a `Tokenizer` or a folder with tokenizer files; by default the checkpoint's own. A model without one
        works on token ids.
      dtype: "auto" keeps the checkpoint's, but computes in float32 on CPUs, where bfloat16 is far slower; or a name
        such as "bfloat16".
      max_model_len: tokens of a prompt with its answer. By default what the model allows, at most 4,096.
      max_num_seqs: answers generated at once; the cache is allocated for so many.
      seed: what requests without a seed of their own get theirs from, by their number since the start.
      revision: branch, tag or commit of a hub id.
      steps_per_dispatch: decode steps per call of the device.
      cache: "contiguous".

    Raises:
      TypeError: an unknown argument, with the nearest known name. ValueError: an option out of range.
      FileNotFoundError, ValueError: a checkpoint that is missing or broken, with file and tensor.
    """

    def __init__(
        self,
        model: str | Path | LiveModel,
        *,
        tokenizer: Tokenizer | str | Path | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        seed: int = 0,
        revision: str | None = None,
        steps_per_dispatch: int = 8,
        cache: str = "contiguous",
        **unknown: Any,
    ):
        _refuse_unknown(unknown, type(self).__init__)
        if cache != "contiguous":
            raise ValueError(f"cache={cache!r}: only 'contiguous' exists")
        derive_seed(seed)  # checks its range
        compilation_cache.enable()
        self.seed = seed
        self._request_numbers = itertools.count()
        self._engine: ContiguousEngine | None = None
        generation_config: Mapping[str, Any] = {}
        if isinstance(model, tuple):
            self.name = "live parameters"
            self.config, self.params, own_tokenizer = _check_live(model, dtype)
            self._owns_params = False
            eos_ids: set[int] = set()
        else:
            self.name = str(model)
            loaded = _load(str(model), dtype, revision)
            self.config, self.params, own_tokenizer = loaded.config, loaded.params, loaded.tokenizer
            self._owns_params = True
            generation_config, eos_ids = loaded.generation_config, set(loaded.eos_token_ids)
        if isinstance(tokenizer, (str, Path)):
            tokenizer = Tokenizer.from_dir(tokenizer)
        self.tokenizer = tokenizer or own_tokenizer
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            eos_ids.add(self.tokenizer.eos_token_id)
        defaults = from_generation_config(generation_config)
        self.default_params: SamplingParams = defaults.params
        self.ignored_generation_config = defaults.ignored
        if defaults.ignored:
            warnings.warn(
                f"{self.name}: generation_config.json asks for {', '.join(defaults.ignored)}, which is not applied",
                stacklevel=2,
            )
        self.eos_token_ids = tuple(sorted(eos_ids | set(defaults.eos_token_ids)))
        allowed = self.config.max_position_embeddings
        if max_model_len is None:
            max_model_len = min(allowed, DEFAULT_MAX_MODEL_LEN)
        options = EngineOptions(max_model_len, max_num_seqs, steps_per_dispatch=steps_per_dispatch)
        rope = self.config.rope
        stretches = rope.kind in ("dynamic", "longrope")
        if max_model_len > allowed and not stretches:
            raise ValueError(f"max_model_len={max_model_len} is more than the {allowed} tokens the model declares")
        if stretches and rope.sequence_length is None:
            self.config = replace(self.config, rope=replace(rope, sequence_length=max_model_len))
        self._engine = ContiguousEngine(self.config, self.params, options)

    # Generating.

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        taps: Sequence[str] = (),
    ) -> list[RequestOutput]:
        """Answers to one prompt or many, in their order.

        Args:
          prompts: texts or lists of token ids.
          params: for all prompts, or one for each; None takes the checkpoint's generation_config.
          use_tqdm: a progress bar; None shows one for several prompts on a terminal.
          taps: names of hidden states to return with each request, such as "layers.3.residual".

        Raises:
          ValueError: any prompt or parameter that cannot be served, with its number; nothing is generated then.
        """
        engine = self._open_engine()
        texts_and_ids = [self._tokenize(prompt) for prompt in _as_list(prompts)]
        taps = check_taps(self.config, taps)
        requests = self._requests(texts_and_ids, params)
        for answers in requests:
            for answer in answers:
                engine.add(answer.generation)
        try:
            with _progress_bar(sum(len(answers) for answers in requests), "answer", use_tqdm) as bar:
                self._run(engine, requests, bar)
        except BaseException:
            self._abort(engine, requests)
            raise
        outputs = [
            self._output(text, ids, answers) for (text, ids), answers in zip(texts_and_ids, requests, strict=True)
        ]
        if taps:
            outputs = [
                replace(
                    output,
                    taps=engine.hidden_states([*output.prompt_token_ids, *output.outputs[0].token_ids], taps),
                )
                for output in outputs
            ]
        return outputs

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answers to one conversation or many: `[{"role": "user", "content": "..."}, ...]`.

        The checkpoint's chat template renders them; what users write never becomes a control token.
        """
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = [messages] if is_one else messages
        prompts = [self.chat_prompt(one, tools=tools, **template_kwargs) for one in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, params, use_tqdm=use_tqdm)

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation, ready for `generate` or `stream`."""
        return self._need_tokenizer("chat").apply_chat_template(messages, tools=tools, **template_kwargs)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamDelta]:
        """Yields text as it is generated. Leaving the loop early ends the request and frees its slot."""
        engine = self._open_engine()
        text, ids = self._tokenize(prompt)
        answers = self._requests([(text, ids)], params)[0]
        return self._stream(engine, text, ids, answers)

    def generate_each(
        self, requests: Iterable[tuple[Key, Prompt, SamplingParams]], *, max_queued: int | None = None
    ) -> Iterator[tuple[Key, RequestOutput | ValueError]]:
        """Answers to a stream of requests, in the order in which they finish.

        Args:
          requests: a key that you choose, a prompt and its parameters; taken only as there is room for them.
          max_queued: answers that wait or run at once; by default 2 * max_num_seqs + 4.

        Yields the key with the output, or with the ValueError for which the request was refused; the others go on.
        Closing the iterator aborts what runs.
        """
        engine = self._open_engine()
        limit = 2 * engine.options.max_num_seqs + 4 if max_queued is None else max_queued
        if limit < 1:
            raise ValueError(f"max_queued must be at least 1, got {limit}")
        return self._generate_each(engine, iter(requests), limit)

    def generate_file(
        self,
        path_in: str | Path,
        path_out: str | Path,
        *,
        params: SamplingParams | Mapping[str, Any] | None = None,
        errors: str | Path | None = None,
        resume: bool = True,
        overwrite: bool = False,
        retry_errors: bool = False,
        use_tqdm: bool | None = None,
    ) -> "BatchSummary":
        """Serves a file of requests, one JSON object a line, and writes each answer as it finishes.

        A line is `{"prompt": ..., "temperature": ..., ...}`, the same with "messages", or OpenAI's batch form:
        "custom_id", "url" and "body". Killed at any point, the same call goes on where it was, and every row has the
        tokens that it would have had. See docs/batch.md.

        Args:
          params: for what rows do not say, whole or only some fields; its seed, or the LLM's, is the job's.
          errors: where rows that fail go; by default beside path_out: OUT.errors.jsonl.
          resume: go on where earlier results end; False refuses them. overwrite: drop them and start anew.
          retry_errors: try rows again that failed in an earlier run.

        Raises:
          BatchError: two rows with one custom_id; results of another job; files that another process writes.
          BatchWriteError: the disk is full, or the like; what was written stays and can be resumed.
        """
        from jaxinfer.batch import open_job

        options = {"errors": errors, "resume": resume, "overwrite": overwrite, "retry_errors": retry_errors}
        with open_job(path_in, path_out, **options) as job:
            return job.run(self, params, use_tqdm=use_tqdm)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[Score]:
        """Log-probabilities of each continuation after its prompt: raw, and processed by `params` (default: none).

        Prompt and continuation are tokenized apart; give token ids to choose the split yourself. Memory does not grow
        with length times vocabulary: logits exist for a few positions at a time.
        """
        engine = self._open_engine()
        params = replace(params or SamplingParams(), n=1, max_tokens=1, prompt_logprobs=1, stop=(), logprobs=None)
        pairs = list(zip(_as_list(prompts), _as_list(continuations), strict=True))
        sequences = []
        for number, (prompt, continuation) in enumerate(pairs):
            _, ids = self._tokenize(prompt)
            _, more = self._tokenize(continuation, add_special_tokens=False)
            if not ids or not more:
                raise ValueError(f"pair {number}: {len(ids)} prompt and {len(more)} continuation tokens; both need one")
            row = self._row(params, seed=0)
            self._check_length(f"prompt {number}", len(ids) + len(more), 1)
            sequences.append(Generation([*ids, *more], row, max_tokens=1, score_from=len(ids)))
        for sequence in sequences:
            engine.add(sequence)
        with _progress_bar(len(sequences), "pair", use_tqdm) as bar:
            while engine.has_work:
                bar.update(sum(sequence.finish_reason is not None for sequence in engine.step()))
        return [self._score(sequence) for sequence in sequences]

    # Looking after it.

    def warm_up(self, *, use_tqdm: bool | None = None) -> int:
        """Compiles every program that a request can need, so that none compiles later; returns how many.

        Only hidden states are left out: each choice of taps and length is a program of its own.
        """
        engine = self._open_engine()
        disable = None if use_tqdm is None else not use_tqdm
        num_buckets = len(engine.options.slot_buckets) * len(engine.chunks)
        return engine.warm_up(lambda pairs: tqdm(pairs, total=num_buckets, desc="compile", disable=disable))

    def explain(self) -> Explanation:
        """What was really allocated and chosen: dtypes, bytes, slots, programs, kernels. Prints well."""
        tokenizer = "none: token ids only" if self.tokenizer is None else f"{self.tokenizer.vocab_size} tokens"
        defaults = {field.name: getattr(SamplingParams(), field.name) for field in dataclasses.fields(SamplingParams)}
        changed = {name: value for name, value in vars(self.default_params).items() if value != defaults.get(name)}
        return explain_engine(
            self._open_engine(),
            model={"name": self.name, "tokenizer": tokenizer},
            sampling={
                "seed": self.seed,
                "end-of-sequence ids": ", ".join(str(token) for token in self.eos_token_ids) or "none",
                "defaults changed": ", ".join(f"{name}={value}" for name, value in changed.items()) or "none",
                "generation_config ignored": ", ".join(self.ignored_generation_config) or "nothing",
            },
        )

    def fingerprint(self) -> str:
        """SHA-256 of what answers depend on besides the request: configuration, parameters, tokenizer, length.

        Of the parameters it takes names, shapes, dtypes and a few values of each, not all bytes.
        """
        from jaxinfer.batch.identity import model_fingerprint

        return model_fingerprint(self, self._open_engine().options.max_model_len)

    def close(self) -> None:
        """Frees the device memory of cache and parameters now; live parameters stay. Closing twice is harmless."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        engine.close()
        if self._owns_params:
            for leaf in jax.tree.leaves(self.params):
                leaf.delete()
        self.params = {}

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Requests.

    def _requests(
        self, prompts: Sequence[tuple[str | None, list[int]]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[list[AnswerText]]:
        """Checks everything before anything runs."""
        if params is None or isinstance(params, SamplingParams):
            per_prompt = [params or self.default_params] * len(prompts)
        else:
            per_prompt = list(params)
            if len(per_prompt) != len(prompts):
                raise ValueError(f"{len(per_prompt)} sampling parameters for {len(prompts)} prompts")
        return [
            self._request(f"prompt {number}", ids, one)
            for number, ((_, ids), one) in enumerate(zip(prompts, per_prompt, strict=True))
        ]

    def _request(self, where: str, ids: list[int], params: SamplingParams) -> list[AnswerText]:
        """The answers that one prompt asks for; `where` names it in errors."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"{where}: params must be SamplingParams, got {type(params).__name__}")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"{where}: stop strings need a tokenizer; use stop_token_ids")
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = max(self._open_engine().options.max_model_len - len(ids), 1)
        self._check_length(where, len(ids), max_tokens)
        seed = params.seed
        if seed is None:
            seed = 0 if params.is_greedy else derive_seed(self.seed, next(self._request_numbers))
        answers = []
        for index in range(params.n):
            generation = Generation(ids, self._row(params, sample_seed(seed, index)), max_tokens)
            answers.append(AnswerText(generation, index, self.tokenizer))
        return answers

    def _row(self, params: SamplingParams, seed: int) -> SamplingRow:
        engine = self._open_engine()
        params.validate_for_model(self.config.vocab_size, engine.options.max_model_len)
        bad_words: tuple[tuple[int, ...], ...] = ()
        if params.bad_words:
            tokenizer = self._need_tokenizer("bad_words")
            bad_words = tokenize_bad_words(params.bad_words, lambda text: tokenizer.encode(text, False))
        row = SamplingRow(params, seed, self.eos_token_ids, bad_words)
        if params.allowed_token_ids is not None or params.bad_words or params.logit_bias:
            make_batch([row], self.config.vocab_size)  # raises here rather than among running requests
        return row

    def _check_length(self, where: str, num_prompt: int, max_tokens: int) -> None:
        limit = self._open_engine().options.max_model_len
        if num_prompt == 0:
            raise ValueError(f"{where} is empty: it needs at least 1 token")
        if num_prompt + max_tokens > limit:
            raise ValueError(
                f"{where}: {num_prompt} prompt tokens and max_tokens={max_tokens} make "
                f"{num_prompt + max_tokens}, but max_model_len={limit} "
                f"(the model allows {self.config.max_position_embeddings})"
            )

    def _tokenize(self, prompt: Prompt, add_special_tokens: bool = True) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self._need_tokenizer("a text prompt").encode(prompt, add_special_tokens)
        ids = [int(token) for token in prompt]
        for token in ids:
            if not 0 <= token < self.config.vocab_size:
                raise ValueError(f"token id {token} is outside the vocabulary of {self.config.vocab_size}")
        return None, ids

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and {self.name} has none: pass token ids or tokenizer=...")
        return self.tokenizer

    def _open_engine(self) -> ContiguousEngine:
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

    # Running.

    def _run(self, engine: ContiguousEngine, requests: list[list[AnswerText]], bar: tqdm) -> None:
        answers = {id(answer.generation): answer for request in requests for answer in request}
        num_tokens = 0
        while engine.has_work:
            for generation in engine.step():
                answer = answers.get(id(generation))
                if answer is None:
                    continue
                num_tokens += len(_advance(engine, answer)[1])
                if generation.finish_reason is not None:
                    bar.update()
                    elapsed = bar.format_dict["elapsed"] or 1e-9
                    bar.set_postfix_str(f"{num_tokens / elapsed:.0f} tokens/s", refresh=False)

    def _generate_each(
        self, engine: ContiguousEngine, requests: Iterator[tuple[Key, Prompt, SamplingParams]], limit: int
    ) -> Iterator[tuple[Key, RequestOutput | ValueError]]:
        running: dict[int, _Running] = {}  # by the id of each generation
        try:
            while True:
                while len(running) < limit and (request := next(requests, None)) is not None:
                    key, prompt, params = request
                    try:
                        text, ids = self._tokenize(prompt)
                        answers = self._request("the prompt", ids, params)
                    except ValueError as error:
                        yield key, error
                        continue
                    one = _Running(key, text, ids, answers, len(answers))
                    for answer in answers:
                        running[id(answer.generation)] = one
                        engine.add(answer.generation)
                if not running:
                    return
                for generation in engine.step():
                    one = running.get(id(generation))
                    if one is None:
                        continue
                    _advance(engine, next(answer for answer in one.answers if answer.generation is generation))
                    if generation.finish_reason is None:
                        continue
                    del running[id(generation)]
                    one.num_left -= 1
                    if one.num_left == 0:
                        yield one.key, self._output(one.text, one.ids, one.answers)
        finally:
            self._abort(engine, [one.answers for one in running.values()])

    def _stream(
        self, engine: ContiguousEngine, text: str | None, ids: list[int], answers: list[AnswerText]
    ) -> Iterator[StreamDelta]:
        by_generation = {id(answer.generation): answer for answer in answers}
        for answer in answers:
            engine.add(answer.generation)
        num_running = len(answers)
        try:
            while num_running:
                for generation in engine.step(max_steps=1):
                    answer = by_generation.get(id(generation))
                    if answer is None:
                        continue
                    delta, tokens = _advance(engine, answer)
                    is_done = generation.finish_reason is not None
                    num_running -= is_done
                    if delta or tokens or is_done:
                        output = self._output(text, ids, answers) if num_running == 0 else None
                        yield StreamDelta(answer.index, delta, tokens, generation.finish_reason, output)
        finally:
            self._abort(engine, [answers])

    def _abort(self, engine: ContiguousEngine, requests: list[list[AnswerText]]) -> None:
        for answer in itertools.chain.from_iterable(requests):
            engine.finish(answer.generation, "abort")
        while engine.has_work:
            engine.step()

    def _output(self, text: str | None, ids: list[int], answers: list[AnswerText]) -> RequestOutput:
        generations = [answer.generation for answer in answers]
        first = generations[0]
        prompt_logprobs = None
        if first.params.prompt_logprobs is not None:
            prompt_logprobs = [_with_text(entry, self.tokenizer) for entry in first.prompt_logprobs]
        completions = [answer.completion() for answer in answers]
        completions = [
            replace(one, logprobs=[_with_text(entry, self.tokenizer) or {} for entry in one.logprobs])
            if one.logprobs is not None
            else one
            for one in completions
        ]
        return RequestOutput(
            request_id=str(next(_REQUEST_IDS)),
            prompt=text,
            prompt_token_ids=ids,
            outputs=completions,
            finished=all(generation.finish_reason is not None for generation in generations),
            timings=timings(generations),
            prompt_logprobs=prompt_logprobs,
        )

    def _score(self, sequence: Generation) -> Score:
        assert sequence.score_from is not None
        tokens = list(sequence.prompt[sequence.score_from :])
        entries = sequence.prompt_logprobs[sequence.score_from :]
        if sequence.finish_reason == "error" or len(entries) != len(tokens):
            raise FloatingPointError(sequence.error or "the score was not computed")
        pairs = [(entry or {})[token] for entry, token in zip(entries, tokens, strict=True)]
        return Score(
            token_ids=tokens,
            raw=[pair.logprob for pair in pairs],
            processed=sequence.processed_logprobs,
            is_greedy=all(pair.rank == 1 for pair in pairs),
        )


_REQUEST_IDS = itertools.count()


@dataclass
class _Running:
    """A request of `generate_each` with answers that have not ended."""

    key: Any
    text: str | None
    ids: list[int]
    answers: list[AnswerText]
    num_left: int


@dataclass(frozen=True)
class _Loaded:
    config: ModelConfig
    params: Params
    tokenizer: Tokenizer | None
    generation_config: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]


def _load(name: str, dtype: str, revision: str | None) -> _Loaded:
    import checkpoints_convert

    path = embedded_path(name) or checkpoints_convert.resolve(name, revision=revision)
    if dtype == "auto" and jax.default_backend() == "cpu":
        dtype = "float32"
    config, params = checkpoints_convert.load(path, dtype=dtype)
    try:
        tokenizer = Tokenizer.from_dir(path)
    except TokenizerNotFoundError:
        tokenizer = None
    generation_config = checkpoints_convert.generation_config(path)
    return _Loaded(config, params, tokenizer, generation_config, checkpoints_convert.eos_token_ids(path))


def _check_live(model: tuple, dtype: str) -> tuple[ModelConfig, Params, Tokenizer | None]:
    if len(model) not in (2, 3) or not isinstance(model[0], ModelConfig):
        raise TypeError("a live model is (ModelConfig, params) or (ModelConfig, params, tokenizer)")
    config, params = model[0], model[1]
    wanted = jax.tree.map(lambda leaf: leaf.shape, abstract_params(config))
    given = jax.tree.map(jnp.shape, params)
    if wanted != given:
        flat = dict(jax.tree_util.tree_leaves_with_path(wanted, is_leaf=lambda x: isinstance(x, tuple)))
        other = dict(jax.tree_util.tree_leaves_with_path(given, is_leaf=lambda x: isinstance(x, tuple)))
        path = next(path for path in [*flat, *other] if flat.get(path) != other.get(path))
        raise ValueError(
            f"params do not fit the config at {jax.tree_util.keystr(path)}: "
            f"shape {other.get(path, 'missing')}, the config makes it {flat.get(path, 'absent')}"
        )
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(params)}
    if len(dtypes) != 1:
        raise ValueError(f"params mix dtypes {', '.join(sorted(str(dtype) for dtype in dtypes))}: cast them to one")
    if dtype not in ("auto", str(next(iter(dtypes)))):
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    return config, params, model[2] if len(model) == 3 else None


def _advance(engine: ContiguousEngine, answer: AnswerText) -> tuple[str, list[int]]:
    """Reads an answer's new text; a stop string in it ends the generation."""
    delta, tokens, matched = answer.read()
    if matched is not None:
        engine.finish(answer.generation, "stop", matched)
        answer.generation.finish_reason, answer.generation.stop_reason = "stop", matched
    return delta, tokens


def _progress_bar(total: int, unit: str, use_tqdm: bool | None) -> tqdm:
    """By default shown for several on a terminal, unless JAXINFER_PROGRESS=0."""
    is_off = use_tqdm is False or (use_tqdm is None and (total <= 1 or os.environ.get("JAXINFER_PROGRESS") == "0"))
    # None leaves it to tqdm, which shows nothing where stderr is not a terminal.
    return tqdm(total=total, unit=unit, disable=True if is_off else None if use_tqdm is None else False)


def _with_text(entry, tokenizer: Tokenizer | None):
    if entry is None or tokenizer is None:
        return entry
    return {
        token: dataclasses.replace(value, decoded_token=tokenizer.decode([token], skip_special_tokens=False))
        for token, value in entry.items()
    }


def _as_list(prompts: Any) -> list:
    """One prompt (a text, or a sequence of integers) as a list of one; several as they are."""
    if isinstance(prompts, str):
        return [prompts]
    prompts = list(prompts)
    is_one = bool(prompts) and all(not isinstance(item, str) and np.ndim(item) == 0 for item in prompts)
    return [prompts] if is_one else prompts


def _refuse_unknown(unknown: Mapping[str, Any], function: Any) -> None:
    known = [name for name in inspect.signature(function).parameters if name not in ("self", "unknown")]
    for name in unknown:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
        raise TypeError(f"LLM has no argument {name!r}{hint}")
