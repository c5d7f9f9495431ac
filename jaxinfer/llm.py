"""The door for scripts and notebooks: load a model, generate, chat, stream, score, explain, close."""

import dataclasses
import difflib
import functools
import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm.auto import tqdm

from jaxinfer import compilation_cache, parallel
from jaxinfer.cache import KVScales, check_kv_dtype
from jaxinfer.engine.contiguous import ContiguousEngine, ContiguousOptions
from jaxinfer.engine.explanation import Explanation, explain_engine
from jaxinfer.engine.lockstep import Lockstep
from jaxinfer.engine.options import EngineOptions, SpeculationOptions
from jaxinfer.engine.output import AnswerText, StreamDelta
from jaxinfer.engine.paged import PagedEngine
from jaxinfer.engine.processor import DEFAULT_REQUEST_OPTIONS, Prompt, Request, RequestOptions, RequestProcessor
from jaxinfer.engine.replicas import Replicas
from jaxinfer.engine.request import Generation, RequestOutput, Score
from jaxinfer.engine.scheduler import QueueFullError
from jaxinfer.loading import LiveModel, load_draft, load_model
from jaxinfer.models import Params, check_taps
from jaxinfer.parallel import hosts
from jaxinfer.quantization.tree import describe, num_bytes
from jaxinfer.sampling import SamplingParams
from jaxinfer.speculative import Draft, ModelDraft, NgramDraft, SpeculationStats
from jaxinfer.text import Tokenizer

if TYPE_CHECKING:
    from jaxinfer.batch import BatchSummary
    from jaxinfer.planning import MemoryPlan

P = ParamSpec("P")
R = TypeVar("R")
Key = TypeVar("Key")
Engine = PagedEngine | Replicas | ContiguousEngine
# Answers at once, unless told: on a CPU more of them would wait for its few cores.
CPU_MAX_SEQS, DEFAULT_MAX_SEQS = 16, 64
NGRAM_LENGTHS = (3, 7, 15)


def _together(method: Callable[Concatenate["LLM", P], R]) -> Callable[Concatenate["LLM", P], R]:
    """A method that only host 0 runs, where there are several; the others follow, and return or raise the same."""

    @functools.wraps(method)
    def run(self: "LLM", *arguments: P.args, **keywords: P.kwargs) -> R:
        if self._lockstep is None:
            return method(self, *arguments, **keywords)
        return self._lockstep.lead_or_follow(method.__name__, lambda: method(self, *arguments, **keywords))

    return run


class LLM:
    """A model ready to generate.

    Args:
      model: a folder with a Hugging Face or converted checkpoint, the URL of the former (gs://, s3://), a GGUF file, a
        hub id, "demo" or "demo-draft" (the embedded pair), or live `(ModelConfig, params)` or `(ModelConfig, params,
        tokenizer)`; live parameters are used as they are and stay the caller's.
      tokenizer: a `Tokenizer` or a folder with tokenizer files; by default the checkpoint's own. A model without one
        works on token ids.
      dtype: "auto" keeps the checkpoint's, but computes in float32 on CPUs, where bfloat16 is far slower; or a name
        such as "bfloat16".
      max_model_len: tokens of a prompt with its answer. By default what the model allows, at most 4,096.
      max_seqs: answers generated at once; by default 64, on a CPU 16.
      quantize: rounds the weights of linear layers to the nearest values of a format as they are loaded: "int8",
        "w8a8", "int4-g128", "nf4", "fp8" and others (`jaxinfer.quantization.RECIPES`).
      requantize: what becomes of weights that a GGUF file quantized: None keeps them exactly, "dense" makes them
        floating point, one of the same names rounds those of linear layers to it, but for Q8_0 and Q4_0.
      seed: what requests without a seed of their own get theirs from, by their number since the start.
      revision: branch, tag or commit of a hub id.
      steps_per_dispatch: decode steps per call of the device.
      kv_dtype: what keys and values are stored as: "auto" (what the model computes in), "float32", "bfloat16",
        "float16", "int8" (with a scale for each token and head), "fp8_e4m3" or "fp8_e5m2".
      kv_scales: static scales of an fp8 cache; by default the checkpoint's, if it has some.
      cache: "paged", or "contiguous": a cache of max_seqs rows of max_model_len, for research. What follows is for
        the paged one only.
      page_size: tokens of a page; by default 64 on a TPU, 16 elsewhere (32 on a GPU with kv_dtype="int8").
      num_pages: pages of the cache; by default as many as memory_fraction of the device's memory holds beside the
        weights (on a CPU no more than max_seqs answers of max_model_len can use).
      memory_fraction: of the device's memory, for weights, cache and what is computed.
      prefill_chunk: prompt tokens that one step computes beside the decoding answers; by default 512.
      deterministic: log-probabilities keep every bit whatever else runs and however prompts are cut. Slower.
      prefix_cache: reuse the cached beginnings of earlier prompts and answers.
      max_waiting: answers that may wait for their turn, None for any number; beyond it, QueueFullError.
      draft: what drafts tokens that the model then checks several at a time: a model of the same tokens (as `model`),
        "ngram" (looks them up in what stands there already) or "layers:4" (the model's own first 4 layers).
      num_draft_tokens: drafted before each check; "auto" adapts it to what is accepted and to the load, down to none.
      draft_tree: widths per depth, such as (3, 2, 1): drafts a tree of tokens instead of a chain.
      acceptance: "exact", the same answers as without a draft; or "maximal", answers of the same distribution with more
        drafts accepted, which depend on what else runs.
      draft_kv_dtype: as kv_dtype, of a draft model's cache; by default the same. It changes no answer.
      mesh: devices to run on, "model=4" (each holds a part of every layer), "expert=8" (each holds some experts),
        "data=2,model=4" (two replicas of four devices); sizes by name; or a `jax.sharding.Mesh` with such axes. By
        default one device. max_seqs and num_pages are those of each replica. On several hosts
        (`jaxinfer.initialize_hosts`) it names devices of all of them, and every host makes the same calls.

    Raises:
      TypeError: an unknown argument, with the nearest known name. ValueError: an option out of range.
      FileNotFoundError, ValueError: a checkpoint that is missing or broken, with file and tensor.
      OutOfMemoryError: model and cache do not fit, with needed and available bytes and what would help.
    """

    @hosts.needing
    def __init__(
        self,
        model: str | Path | LiveModel,
        *,
        tokenizer: Tokenizer | str | Path | None = None,
        dtype: str = "auto",
        quantize: str | None = None,
        requantize: str | None = None,
        max_model_len: int | None = None,
        max_seqs: int | None = None,
        seed: int = 0,
        revision: str | None = None,
        steps_per_dispatch: int = 8,
        kv_dtype: str = "auto",
        kv_scales: KVScales | None = None,
        cache: str = "paged",
        page_size: int | None = None,
        num_pages: int | None = None,
        memory_fraction: float = 0.9,
        prefill_chunk: int | None = None,
        deterministic: bool = False,
        prefix_cache: bool = True,
        max_waiting: int | None = None,
        draft: str | Path | LiveModel | None = None,
        num_draft_tokens: int | Literal["auto"] = "auto",
        draft_tree: Sequence[int] | None = None,
        acceptance: str = "exact",
        draft_kv_dtype: str | None = None,
        mesh: str | Mapping[str, int] | Mesh | None = None,
        **unknown: Any,
    ):
        _refuse_unknown(unknown, type(self).__init__)
        check_kv_dtype(kv_dtype)  # before a long load
        if draft_kv_dtype is not None:
            check_kv_dtype(draft_kv_dtype, "draft_kv_dtype")
        if kv_scales is not None and not kv_dtype.startswith("fp8"):
            raise ValueError(f"kv_scales are for kv_dtype='fp8_e4m3' or 'fp8_e5m2', not {kv_dtype!r}")
        compilation_cache.enable()
        self._engine: Engine | None = None
        self._lockstep: Lockstep | None = None
        self._fingerprint: str | None = None
        self._hosts = hosts.current()
        self.mesh = None if mesh is None else parallel.make_mesh(mesh)
        if self.mesh is not None and cache != "paged":
            raise ValueError(f"mesh={mesh!r} is for cache='paged' only")
        if self._hosts is not None:
            hosts.check_mesh(self._hosts, self.mesh)
        loaded = load_model(
            model,
            tokenizer=tokenizer,
            dtype=dtype,
            revision=revision,
            quantize=quantize,
            requantize=requantize,
            mesh=self.mesh,
        )
        loaded, max_model_len = loaded.for_length(max_model_len)
        self.name, self.config, self.params, self.tokenizer = (
            loaded.name,
            loaded.config,
            loaded.params,
            loaded.tokenizer,
        )
        self.fit = loaded.fit
        run_params, self._copies = loaded.runnable()
        self._owned_params = [loaded.params] if loaded.is_owned else []
        self.acceptance = acceptance
        self.default_params: SamplingParams = loaded.default_params
        self.ignored_generation_config = loaded.ignored_defaults
        self.eos_token_ids, self.seed, self.max_model_len = loaded.eos_token_ids, seed, max_model_len
        self._processor = RequestProcessor(
            self.name, self.config, self.tokenizer, self.eos_token_ids, max_model_len, seed
        )
        if max_seqs is None:
            max_seqs = CPU_MAX_SEQS if jax.default_backend() == "cpu" else DEFAULT_MAX_SEQS
        self._engine = self._make_engine(
            run_params,
            cache,
            {
                "max_model_len": max_model_len,
                "max_seqs": max_seqs,
                "steps_per_dispatch": steps_per_dispatch,
                "kv_dtype": kv_dtype,
            },
            {
                "page_size": page_size,
                "num_pages": num_pages,
                "memory_fraction": memory_fraction,
                "prefill_chunk": prefill_chunk,
                "deterministic": deterministic,
                "prefix_cache": prefix_cache,
                "max_waiting": max_waiting,
            },
            {
                "draft": draft,
                "num_draft_tokens": num_draft_tokens,
                "draft_tree": None if draft_tree is None else tuple(draft_tree),
                "acceptance": acceptance,
                "draft_kv_dtype": draft_kv_dtype,
            },
            lambda draft: load_draft(draft, loaded, max_model_len, dtype=dtype),
            loaded.on_mesh(loaded.kv_scales if kv_scales is None else kv_scales),
        )
        if self._hosts is not None and not isinstance(self._engine, ContiguousEngine):
            from jaxinfer.batch import BatchSummary

            self._fingerprint = self.fingerprint()  # for which all hosts are needed
            engines = self._engine.engines if isinstance(self._engine, Replicas) else [self._engine]
            self._lockstep = Lockstep(self._hosts, engines, (BatchSummary,))

    def _make_engine(
        self,
        params: Params,
        cache: str,
        common: dict[str, Any],
        paged: dict[str, Any],
        drafting: dict[str, Any],
        load: Callable[[str | Path | LiveModel], tuple[Draft, bool]],
        kv_scales: KVScales | None,
    ) -> Engine:
        defaults = inspect.signature(type(self)).parameters
        if cache == "paged":
            speculation, draft = None, None
            if drafting["draft"] is not None:
                count = drafting["num_draft_tokens"]
                speculation = SpeculationOptions(
                    None if count == "auto" else count,
                    drafting["draft_tree"],
                    drafting["acceptance"],
                    kv_dtype=drafting["draft_kv_dtype"],
                )
                draft, is_owned = load(drafting["draft"])
                if isinstance(draft, NgramDraft):  # drafting costs nothing, and what copies copies much
                    speculation = replace(speculation, lengths=NGRAM_LENGTHS)
                if is_owned and isinstance(draft, ModelDraft):
                    self._owned_params.append(draft.params)
            else:
                for name, value in drafting.items():
                    if value != defaults[name].default:
                        raise ValueError(f"{name}={value!r} needs a draft")
            options = EngineOptions(**common, **paged, speculation=speculation)
            if self.mesh is None:
                return PagedEngine(self.config, params, options, draft=draft, kv_scales=kv_scales)
            engines = [
                PagedEngine(
                    self.config,
                    parallel.on_replica(params, mesh),
                    options,
                    draft=replace(draft, params=parallel.on_replica(draft.params, mesh))
                    if isinstance(draft, ModelDraft)
                    else draft,
                    kv_scales=kv_scales,
                    mesh=mesh,
                )
                for mesh in parallel.replicas(self.mesh)
            ]
            return engines[0] if len(engines) == 1 else Replicas(engines)
        if cache != "contiguous":
            raise ValueError(f"cache={cache!r} is neither 'paged' nor 'contiguous'")
        for name, value in (paged | drafting).items():
            if value != defaults[name].default:
                raise ValueError(f"{name}={value!r} is for cache='paged' only")
        return ContiguousEngine(self.config, params, ContiguousOptions(**common), kv_scales=kv_scales)

    # Generating.

    @_together
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        taps: Sequence[str] = (),
        priority: int | Sequence[int] = 0,
        timeout: float | None = None,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Answers to one prompt or many, in their order.

        Args:
          prompts: texts or lists of token ids.
          params: for all prompts, or one for each; None takes the checkpoint's generation_config.
          use_tqdm: a progress bar; None shows one for several prompts on a terminal.
          taps: names of hidden states to return with each request, such as "layers.3.residual".
          priority: for all prompts, or one for each; lower goes first.
          timeout: seconds after which what is not done ends with finish_reason "abort".
          cache_salt: requests of different salts share no cached prefix.

        Raises:
          ValueError: any prompt or parameter that cannot be served, with its number; nothing is generated then.
        """
        engine = self.engine
        prompts = _as_list(prompts)
        taps = check_taps(self.config, taps)
        if taps and self._lockstep is not None:
            raise ValueError(f"taps={list(taps)}: hidden states are for a model on one host")
        priorities = [priority] * len(prompts) if isinstance(priority, int) else list(priority)
        if params is None or isinstance(params, SamplingParams):
            per_prompt = [params or self.default_params] * len(prompts)
        else:
            per_prompt = list(params)
        for name, values in (("sampling parameters", per_prompt), ("priorities", priorities)):
            if len(values) != len(prompts):
                raise ValueError(f"{len(values)} {name} for {len(prompts)} prompts")
        requests = [
            self.prepare(prompt, one, RequestOptions(its_priority, timeout, cache_salt), what=f"prompt {number}")
            for number, (prompt, one, its_priority) in enumerate(zip(prompts, per_prompt, priorities, strict=True))
        ]
        try:
            for request in requests:
                self.submit(request)
            with _progress_bar(sum(len(request.answers) for request in requests), "answer", use_tqdm) as bar:
                self._run(requests, bar)
        except BaseException:
            self._abort(requests)
            raise
        outputs = [self.output_of(request) for request in requests]
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
        return self._processor.need_tokenizer("chat").apply_chat_template(messages, tools=tools, **template_kwargs)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamDelta]:
        """Yields text as it is generated. Leaving the loop early ends the request and frees its slot."""
        if self._lockstep is not None:
            return self._lockstep.each("stream", lambda: self._stream(self.prepare(prompt, params)))
        return self._stream(self.prepare(prompt, params))

    def generate_each(
        self, requests: Iterable[tuple[Key, Prompt, SamplingParams]], *, max_queued: int | None = None
    ) -> Iterator[tuple[Key, RequestOutput | ValueError]]:
        """Answers to a stream of requests, in the order in which they finish.

        Args:
          requests: a key that you choose, a prompt and its parameters; taken only as there is room for them.
          max_queued: answers that wait or run at once; by default 2 * max_seqs + 4.

        Yields the key with the output, or with the ValueError for which the request was refused; the others go on.
        Closing the iterator aborts what runs.
        """
        limit = 2 * self.engine.options.max_seqs + 4 if max_queued is None else max_queued
        if limit < 1:
            raise ValueError(f"max_queued must be at least 1, got {limit}")
        if self._lockstep is None or self._lockstep.is_inside:
            return self._generate_each(iter(requests), limit)
        return self._generate_each_together(iter(requests), limit)

    @_together
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
          ValueError: acceptance="maximal", under which answers depend on what else runs.
          BatchWriteError: the disk is full, or the like; what was written stays and can be resumed.
        """
        from jaxinfer.batch import open_job

        options = {"errors": errors, "resume": resume, "overwrite": overwrite, "retry_errors": retry_errors}
        with open_job(path_in, path_out, **options) as job:
            return job.run(self, params, use_tqdm=use_tqdm)

    @_together
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
        engine = self.engine
        pairs = zip(_as_list(prompts), _as_list(continuations), strict=True)
        generations = [
            self._processor.scored(prompt, continuation, params or SamplingParams(), what=f"pair {number}")
            for number, (prompt, continuation) in enumerate(pairs)
        ]
        for number, generation in enumerate(generations):
            self._check_fits(generation, f"pair {number}")
        running = set(generations)
        try:
            for generation in generations:
                engine.add(generation)
            with _progress_bar(len(generations), "pair", use_tqdm) as bar:
                while running:
                    done = {one for one in engine.step() if one.finish_reason is not None} & running
                    running -= done
                    bar.update(len(done))
        except BaseException:
            for generation in generations:
                engine.finish(generation, "abort")
            raise
        return [_score(generation) for generation in generations]

    # Looking after it.

    @_together
    def warm_up(self, *, use_tqdm: bool | None = None) -> int:
        """Compiles every program that a request can need, so that none compiles later; returns how many.

        Only hidden states are left out: each choice of taps and length is a program of its own.
        """
        engine = self.engine
        disable = None if use_tqdm is None else not use_tqdm
        total = engine.num_warm_up_calls
        return engine.warm_up(lambda calls: tqdm(calls, total=total, desc="compile", disable=disable))

    def explain(self) -> Explanation:
        """What was really allocated and chosen: dtypes, bytes, slots, programs, kernels. Prints well."""
        tokenizer = "none: token ids only" if self.tokenizer is None else f"{self.tokenizer.vocab_size} tokens"
        defaults = {field.name: getattr(SamplingParams(), field.name) for field in dataclasses.fields(SamplingParams)}
        quantized = describe(self.params)
        weights: dict[str, Any] = {"quantized": quantized} if quantized else {}
        if self._copies is not None and self._copies.num_copyable:
            weights["float32 copies"] = f"{self._copies}, for XLA:CPU fuses no conversion into products"
            weights["quantized bytes kept too"] = num_bytes(self.params)
        changed = {name: value for name, value in vars(self.default_params).items() if value != defaults.get(name)}
        return explain_engine(
            self.engine,
            model={"name": self.name, "tokenizer": tokenizer, **weights},
            sampling={
                "seed": self.seed,
                "end-of-sequence ids": ", ".join(str(token) for token in self.eos_token_ids) or "none",
                "defaults changed": ", ".join(f"{name}={value}" for name, value in changed.items()) or "none",
                "generation_config ignored": ", ".join(self.ignored_generation_config) or "nothing",
            },
        )

    def plan(self) -> "MemoryPlan":
        """What the model needs on this machine: bytes by part as the compiler counts them, how much cache remains, and,
        on chips that `jaxinfer plan` knows, the least time of a step. Prints well; `to_dict()` is JSON-ready.

        Compiles the largest programs, or reads them from the compilation cache. Raises ValueError for
        cache="contiguous".
        """
        from jaxinfer.planning.here import plan_engine

        engine = self.engine.engines[0] if isinstance(self.engine, Replicas) else self.engine
        if not isinstance(engine, PagedEngine):
            raise ValueError("plan is for cache='paged' only")
        return plan_engine(self.name, engine)

    @_together
    def speculation_stats(self) -> SpeculationStats | None:
        """What was drafted and accepted since the start, all answers together; None without a draft."""
        return None if isinstance(self.engine, ContiguousEngine) else self.engine.speculation_stats

    def fingerprint(self) -> str:
        """SHA-256 of what answers depend on besides the request: configuration, parameters, tokenizer, length.

        Of the parameters it takes names, shapes, dtypes and a few values of each, not all bytes.
        """
        from jaxinfer.batch.fingerprint import model_fingerprint

        if self._fingerprint is not None:
            return self._fingerprint
        return model_fingerprint(self, self.max_model_len)

    def close(self) -> None:
        """Frees the device memory of cache and parameters now; live parameters stay. Closing twice is harmless."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        engine.close()
        for leaf in jax.tree.leaves(self._owned_params):
            leaf.delete()
        self.params, self._owned_params = {}, []

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Several hosts.

    @property
    def is_leader(self) -> bool:
        """Whether this is host 0, which reads, writes and shows things; so is a host alone."""
        return self._hosts is None or self._hosts.is_leader

    def on_leader(self, work: Callable[[], R]) -> R | None:
        """Runs `work`, which may call any method, on host 0, while the others follow and return None. What it raises,
        all raise."""
        if self._lockstep is None:
            return work()
        found: list[R] = []
        self._lockstep.lead_or_follow("on_leader", lambda: found.append(work()))
        return found[0] if found else None

    # One request, step by step, for those who run the engine themselves.

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        terms: RequestOptions = DEFAULT_REQUEST_OPTIONS,
        *,
        what: str = "the prompt",
    ) -> Request:
        """A request that was checked: it can be served, some time."""
        request = self._processor.request(prompt, params or self.default_params, terms, what=what)
        self._check_fits(request.generations[0], what)
        options = self.engine.options
        if not isinstance(options, EngineOptions):
            for name in ("timeout", "priority", "cache_salt"):
                if getattr(terms, name) != getattr(DEFAULT_REQUEST_OPTIONS, name):
                    raise ValueError(f"{what}: {name}={getattr(terms, name)!r} is for cache='paged' only")
        elif options.max_waiting is not None and len(request.answers) > options.max_seqs + options.max_waiting:
            raise ValueError(
                f"{what}: n={len(request.answers)} is more than max_seqs={options.max_seqs} and "
                f"max_waiting={options.max_waiting} can take together"
            )
        return request

    def _check_fits(self, generation: Generation, what: str) -> None:
        if not isinstance(self.engine, ContiguousEngine):
            try:
                self.engine.check_fits(len(generation.prompt), generation.max_tokens)
            except ValueError as error:
                raise type(error)(f"{what}: {error}") from None

    def submit(self, request: Request) -> None:
        """Queues all answers of a request, or none where the queue is full (QueueFullError)."""
        try:
            for generation in request.generations:
                self.engine.add(generation)
        except BaseException:
            self._abort([request])
            raise

    def advance(self, answer: AnswerText) -> tuple[str, list[int]]:
        """An answer's new text and tokens; a stop string in the text ends it."""
        delta, tokens, matched = answer.read()
        if matched is not None:
            self.engine.finish(answer.generation, "stop", matched)
            generation = answer.generation  # which may have ended otherwise after the stop string
            generation.finish_reason, generation.stop_reason, generation.error = "stop", matched, None
        return delta, tokens

    def output_of(self, request: Request) -> RequestOutput:
        """The request as it stands."""
        return self._processor.output(request)

    @property
    def engine(self) -> Engine:
        """What runs the requests. Raises RuntimeError once closed."""
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

    # Running.

    def _run(self, requests: list[Request], bar: tqdm) -> None:
        running = {answer.generation: answer for request in requests for answer in request.answers}
        num_tokens = 0
        while running:
            for generation in self.engine.step():
                if generation not in running:
                    continue
                num_tokens += len(self.advance(running[generation])[1])
                if generation.finish_reason is not None:
                    del running[generation]
                    bar.update()
                    elapsed = bar.format_dict["elapsed"] or 1e-9
                    bar.set_postfix_str(f"{num_tokens / elapsed:.0f} tokens/s", refresh=False)

    def _generate_each(
        self, requests: Iterator[tuple[Key, Prompt, SamplingParams]], limit: int
    ) -> Iterator[tuple[Key, RequestOutput | ValueError]]:
        running: dict[Generation, tuple[Key, Request, AnswerText]] = {}
        refused: tuple[Key, Request] | None = None
        try:
            while True:
                while len(running) < limit:
                    if refused is not None:  # as it was prepared: its seed may be derived from its number
                        (key, request), refused = refused, None
                    elif (item := next(requests, None)) is None:
                        break
                    else:
                        key, prompt, params = item
                        try:
                            request = self.prepare(prompt, params)
                        except ValueError as error:
                            yield key, error
                            continue
                    try:
                        self.submit(request)
                    except QueueFullError:
                        if not running:
                            raise
                        refused = key, request  # again, once some have ended
                        break
                    running |= {answer.generation: (key, request, answer) for answer in request.answers}
                if not running:
                    return
                self.engine.step()
                # Not what the step returns: in between the caller may have advanced these answers otherwise.
                for generation, (key, request, answer) in list(running.items()):
                    self.advance(answer)
                    if generation.finish_reason is not None:
                        del running[generation]
                        if not any(other in running for other in request.generations):
                            yield key, self.output_of(request)
        finally:
            self._abort([request for _, request, _ in running.values()])

    def _generate_each_together(
        self, requests: Iterator[tuple[Key, Prompt, SamplingParams]], limit: int
    ) -> Iterator[tuple[Key, RequestOutput | ValueError]]:
        """Keys are what the caller likes: the other hosts find them, by number, among requests of their own."""
        if self._lockstep is None:
            raise RuntimeError("there is one host only")
        keys: dict[int, Key] = {}
        numbers = itertools.count()

        def numbered() -> Iterator[tuple[int, Prompt, SamplingParams]]:
            for number, (key, prompt, params) in zip(numbers, requests, strict=False):
                keys[number] = key
                yield number, prompt, params

        def items() -> Iterator[tuple[int, RequestOutput | str]]:
            for number, result in self._generate_each(numbered(), limit):
                yield number, str(result) if isinstance(result, ValueError) else result

        taken = iter(()) if self.is_leader else numbered()
        for number, result in self._lockstep.each("generate_each", items):
            while number not in keys and next(taken, None) is not None:
                pass
            if number not in keys:
                raise RuntimeError(f"host 0 has a request {number}, and this host has fewer")
            yield keys.pop(number), ValueError(result) if isinstance(result, str) else result

    def _stream(self, request: Request) -> Iterator[StreamDelta]:
        self.submit(request)
        running = list(request.answers)
        try:
            while running:
                self.engine.step(max_steps=1)
                # Not what the step returns: another stream of this model may have advanced these answers meanwhile.
                for answer in list(running):
                    delta, tokens = self.advance(answer)
                    reason = answer.generation.finish_reason
                    if reason is not None:
                        running.remove(answer)
                    if delta or tokens or reason is not None:
                        output = None if running else self.output_of(request)
                        yield StreamDelta(answer.index, delta, tokens, reason, output)
        finally:
            self._abort([request])

    def _abort(self, requests: list[Request]) -> None:
        if self._engine is None:  # closed, which has ended them
            return
        for request in requests:
            for generation in request.generations:
                self._engine.finish(generation, "abort")


def _score(generation: Generation) -> Score:
    first = generation.score_from
    entries = generation.prompt_logprobs[first:]
    tokens = list(generation.prompt[first:])
    if generation.finish_reason == "error" or len(entries) != len(tokens):
        raise FloatingPointError(generation.error or "the score was not computed")
    pairs = [(entry or {})[token] for entry, token in zip(entries, tokens, strict=True)]
    return Score(
        token_ids=tokens,
        raw=[pair.logprob for pair in pairs],
        processed=generation.processed_logprobs,
        is_greedy=all(pair.rank == 1 for pair in pairs),
    )


def _progress_bar(total: int, unit: str, use_tqdm: bool | None) -> tqdm:
    """By default shown for several on a terminal, unless JAXINFER_PROGRESS=0."""
    is_off = use_tqdm is False or (use_tqdm is None and (total <= 1 or os.environ.get("JAXINFER_PROGRESS") == "0"))
    # None leaves it to tqdm, which shows nothing where stderr is not a terminal.
    return tqdm(total=total, unit=unit, disable=True if is_off else None if use_tqdm is None else False)


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
