"""Public API: load a model, generate, chat, stream, score, embed."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import jax
import numpy as np

from jaxinfer import compilation_cache, parallel
from jaxinfer.api.adapters import check_adapters, with_room
from jaxinfer.api.arguments import (
    adapters_of_each,
    as_conversations,
    as_count,
    as_pairs,
    as_params,
    as_prompt,
    as_prompts,
    as_taps,
    check_processors,
    checked_options,
    each_request,
    options_of_each,
    params_of_each,
    takes_options,
    takes_other_names,
    unknown_attribute,
    with_steering,
)
from jaxinfer.api.coordinate import Fingerprints
from jaxinfer.api.embedding import Embedder, best_first
from jaxinfer.api.live_weights import LiveWeights
from jaxinfer.api.options import ON_LOADING, LLMOptions, documented
from jaxinfer.api.replayed_answers import ReplayedAnswers
from jaxinfer.cache.policy.kinds import extends_length
from jaxinfer.chips import chip_of_kind
from jaxinfer.engine.abstract_work import shapes_of
from jaxinfer.engine.adapter_slots import LoadedAdapter
from jaxinfer.engine.adapters import AdapterRegistry
from jaxinfer.engine.client import Client
from jaxinfer.engine.explanation import Explanation, explain_engine, summarize_engine
from jaxinfer.engine.lockstep import Lockstep
from jaxinfer.engine.memory import available_bytes
from jaxinfer.engine.offload import DISK, layers_for_host
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.protocol import AnyEngine
from jaxinfer.engine.replicas import make_engine
from jaxinfer.engine.request import (
    DEFAULT_REQUEST_OPTIONS,
    Prompt,
    Request,
    RequestOptions,
    RequestOutput,
    Score,
    SequenceState,
    StreamDelta,
)
from jaxinfer.engine.results import VectorJob, score_of
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.engine.weights import WeightsView, as_weights
from jaxinfer.files import Closable
from jaxinfer.loading import (
    ChooseLayers,
    LiveModel,
    LoadedModel,
    ReadAdapter,
    draft_of,
    for_length,
    load_adapter,
    load_draft,
    load_draft_shapes,
    load_model,
    own_config,
    own_params,
)
from jaxinfer.models import ModelConfig, Params
from jaxinfer.models.host_layers import all_layers
from jaxinfer.openai.fields import check_message_names
from jaxinfer.openai.requests import AdapterTexts, TextModel, TextRequest
from jaxinfer.parallel import hosts
from jaxinfer.param_dict import ParamDict
from jaxinfer.progress import Stage
from jaxinfer.quantization.tree import describe, num_bytes
from jaxinfer.sampling import SamplingParams
from jaxinfer.speculative import SpeculationStats
from jaxinfer.text import Tokenizer
from jaxinfer.tool_calls import AnswerFormat, as_tools

if TYPE_CHECKING:
    from jaxinfer.batch import BatchSummary
    from jaxinfer.planning import MemoryPlan

P = ParamSpec("P")
R = TypeVar("R")
Key = TypeVar("Key")
# Options that change tokens, or how near to those of another program they are.
_OF_TOKENS = (
    *("dtype", "quantize", "requantize", "activations", "kv_dtype", "kv_policy", "deterministic", "tool_parser"),
)


def on_all_hosts(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method that only host 0 runs, where there are several; the others follow, and return or raise the same."""

    @functools.wraps(method)
    def run(self: Any, *arguments: P.args, **keywords: P.kwargs) -> R:
        if self._lockstep is None:
            return method(self, *arguments, **keywords)
        return self._lockstep.lead_or_follow(method.__name__, lambda: method(self, *arguments, **keywords))

    return run


class LLM(LiveWeights, ReplayedAnswers, Closable):
    """A model ready to generate.

    Args:
      model: a folder with a Hugging Face or converted checkpoint, the URL of the former (gs://, s3://), a GGUF file, a
        hub id, an alias, "demo" or "demo-draft" (the embedded pair), or live `(ModelConfig, params)` or
        `(ModelConfig, params, tokenizer)`; live parameters are used as they are and stay the caller's. They may be a
        tree of Tunix, Gemma in Flax or MaxText (docs/live_weights.md).
      **options: the fields of `LLMOptions`, listed below and in docs/options.md. Names of other engines, such as
        `tensor_parallel_size`, are applied where they mean the same, and refused with the name to use elsewhere.

    Raises:
      TypeError: an unknown argument, with the nearest known name; a wrong type. ValueError: an option out of range.
      FileNotFoundError, ValueError: a checkpoint that is missing or broken, with file and tensor.
      OutOfMemoryError: model and cache do not fit, with needed and available bytes and what would help.
    """

    @takes_options(LLMOptions)
    @hosts.needing
    def __init__(self, model: str | Path | LiveModel, **options: Any):
        chosen = checked_options(model, options)  # before a long load
        with Stage(f"loading {'live parameters' if isinstance(model, tuple) else model}"):
            self._open(model, chosen)

    def _open(self, model: str | Path | LiveModel, chosen: LLMOptions) -> None:
        compilation_cache.enable()
        compilation_cache.compile_attention_beside()
        if not isinstance(model, tuple):
            # Not all options: the text of a live draft would have its weights.
            plain = {name: value for name, value in vars(chosen).items() if isinstance(value, (str, int, float, Path))}
            compilation_cache.begin_start(f"{model} {plain}")
        self._lockstep: Lockstep | None = None
        self._loaded: LoadedModel | None = None
        self._draft: LoadedModel | None = None
        self._fingerprint: WeightsView[str] | None = None
        self._hosts = hosts.current()
        self.mesh = None if chosen.mesh is None else parallel.make_mesh(chosen.mesh)
        if self._hosts is not None:
            hosts.check_mesh(self._hosts, self.mesh)
        loaded = load_model(
            model,
            **{name: getattr(chosen, name) for name in ON_LOADING},
            mesh=self.mesh,
            offload=_layers_chooser(chosen, model),
            from_disk=_is_from_disk(chosen, is_live=isinstance(model, tuple)),
        )
        self._loaded = loaded
        loaded, self.max_model_len = loaded.for_length(
            chosen.max_model_len, has_policy=extends_length(chosen.kv_policy)
        )
        self.name, self.config, self.tokenizer = loaded.name, loaded.config, loaded.tokenizer
        self.answer_format = AnswerFormat(self.tokenizer, chosen.tool_parser)
        self._params = loaded.weights.view(lambda stored: ParamDict.read_only(stored.params))
        self._fingerprints = Fingerprints(self.fingerprint, loaded.weights.label)
        defaults = {field.name: field.default for field in fields(LLMOptions)}
        given = {name: value for name in _OF_TOKENS if (value := getattr(chosen, name)) != defaults[name]}
        plain = {name: value if isinstance(value, (bool, int)) else str(value) for name, value in given.items()}
        self._options_of_tokens: dict[str, Any] = {**plain, "max_model_len": self.max_model_len}
        self.fit, self.seed, self.acceptance = loaded.fit, chosen.seed, chosen.acceptance
        self.default_params, self.ignored_generation_config = loaded.default_params, loaded.ignored_defaults
        self.eos_token_ids, self._weights = loaded.eos_token_ids, [loaded.weights]
        source = None if loaded.source is None else str(loaded.source)
        self._base_names = () if source is None else tuple(filter(None, (chosen.base_model, self.name, source)))
        given = {name: self._read_adapter(adapter, name) for name, adapter in dict(chosen.adapters or {}).items()}
        chosen = with_room(chosen, [read.adapter for read in given.values()], self.config.vocab_size)
        check_adapters(chosen, loaded.fit, self._hosts is not None)
        chosen, self.steering = with_steering(chosen, self.config, self._hosts is not None)
        check_processors(chosen, self.name, has_head=loaded.has_head, has_hosts=self._hosts is not None)
        run = loaded.runnable()
        self._copies, params = run.value[1], run.view(itemgetter(0))
        engine = self._make_engine(loaded, params, replace(chosen, max_model_len=self.max_model_len, adapters=None))
        self._adapters = AdapterRegistry(engine, params, (self.name, Path(self.name).name))
        self.client = Client(
            engine,
            name=self.name,
            config=self.config,
            tokenizer=self.tokenizer,
            eos_token_ids=self.eos_token_ids,
            seed=self.seed,
            has_head=loaded.has_head,
            system=loaded.system,
            adapters=self._adapters,
            steering=self.steering,
        )
        for name, (adapter, folder, tokenizer) in given.items():
            self._adapters.load(name, adapter, source=folder, tokenizer=tokenizer)
        self.embedder = Embedder(self.client, loaded.embedding)
        if self._hosts is not None:
            from jaxinfer.batch import BatchSummary
            from jaxinfer.batch.fingerprint import model_fingerprint

            self._fingerprint = self._params.view(partial(model_fingerprint, self))  # needs all hosts
            self._lockstep = Lockstep(self._hosts, [replica.runner for replica in engine.engines], (BatchSummary,))

    def _make_engine(self, loaded: LoadedModel, params: WeightsView[Params], options: LLMOptions) -> AnyEngine:
        draft, self._draft = load_draft(
            options.draft, loaded, self.max_model_len, dtype=options.dtype, verify=options.verify
        )
        if isinstance(options.draft, tuple) and self._draft is not None:
            options = replace(options, draft=self._draft.name)  # options stay, and would hold its first weights
        scales = loaded.on_mesh(loaded.kv_scales if options.kv_scales is None else options.kv_scales)
        engine = make_engine(self.config, params, options, draft=draft, kv_scales=scales, mesh=self.mesh)
        if self._draft is not None:
            self._weights.append(self._draft.weights)
            run = self._draft.runnable().view(itemgetter(0))
            self._draft_params = run.view(engine.replace_draft, on_drop=engine.drop_draft)
            for replica in engine.engines:
                replica.add_weights(self._draft.weights)
        return engine

    def _read_adapter(self, given: Any, name: str, base_model: str | None = None, **options: bool) -> ReadAdapter:
        return load_adapter(given, self, (base_model,) if base_model else self._base_names, repr(name), **options)

    if not TYPE_CHECKING:  # a type checker would take every name for an attribute
        __getattr__ = unknown_attribute

    # Generating.

    @takes_other_names
    @on_all_hosts
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
        adapter: str | Sequence[str | None] | None = None,
        arrays: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        steering: Mapping[int, Any] | Sequence[Mapping[int, Any] | None] | None = None,
        tapped_layers: Sequence[int] = (),
    ) -> list[RequestOutput]:
        """Answers to one prompt or many, in their order.

        Args:
          prompts: a text or a list of token ids, or a list of these.
          params: SamplingParams for all prompts, or one for each; None takes the checkpoint's generation_config.
          use_tqdm: whether to show progress, in a log too; None shows it on a terminal, unless JAXINFER_PROGRESS=0.
          taps: names of hidden states to return with each request, such as "layers.3.residual".
          priority: for all prompts, or one for each; lower goes first.
          timeout: seconds after which what is not done ends with finish_reason "abort".
          cache_salt: requests of different salts share no cached prefix.
          adapter: the name of a loaded adapter for all prompts, or one for each; None for the model without one.
          arrays: by name, those that the `processors` declare, for all prompts, or a mapping for each.
          steering: for all prompts or for each, vectors [D] by the number of one of the `steered_layers`, added to the
            hidden states of prompt and answer after it; None for none.
          tapped_layers: those of the LLM's after which hidden states are returned, as they were computed for the
            answers (`CompletionOutput.hidden_states`). Such prompts are computed whole, cached or not.

        Raises TypeError for an argument of a wrong type, ValueError for any prompt or parameter that cannot be served,
        with its number; nothing is generated then.
        """
        prompts = as_prompts(prompts)
        taps = as_taps(taps, self.engine.spec, has_hosts=self._lockstep is not None)
        per_prompt = params_of_each(params, self.default_params, len(prompts))
        wanted = {"timeout": timeout, "cache_salt": cache_salt, "tapped_layers": tapped_layers}
        own = {"priority": priority, "adapter": adapter, "arrays": arrays, "steering": steering}
        options = options_of_each(len(prompts), **own, **wanted)
        requests = [
            self.prepare(prompt, sampling, own, what=f"prompt {number}")
            for number, (prompt, sampling, own) in enumerate(zip(prompts, per_prompt, options, strict=True))
        ]
        outputs = [self.client.collect(answers) for answers in self._run(requests, "generating", "answer", use_tqdm)]
        if taps:
            outputs = [
                replace(output, taps=self.engine.hidden_states(request.followed_by(output.outputs[0].token_ids), taps))
                for output, request in zip(outputs, requests, strict=True)
            ]
        return outputs

    @takes_other_names
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        adapter: str | Sequence[str | None] | None = None,
        arrays: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        steering: Mapping[int, Any] | Sequence[Mapping[int, Any] | None] | None = None,
        tapped_layers: Sequence[int] = (),
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answers to one conversation, `[{"role": "user", "content": "..."}, ...]`, or to a list of conversations.

        The checkpoint's chat template renders them, with `template_kwargs` as further variables; what users write never
        becomes a control token. `tools` are Python functions, or dicts of OpenAI's form, as the other two. Calls are in
        an answer's `tool_calls`, what it reasons in `reasoning`, and no more in its text (docs/tools.md). `adapter`,
        `arrays`, `steering` and `tapped_layers` are as of `generate`. Raises TypeError for what is no conversation,
        ValueError as `generate`, and for tools that cannot be served.
        """
        conversations, answers = as_conversations(messages), self.answer_format
        given = {"tools": as_tools(tools), "tool_choice": tool_choice, "parallel_tool_calls": parallel_tool_calls}
        each = params_of_each(params, self.default_params, len(conversations))
        shared = TextRequest(template_kwargs=template_kwargs, **given)  # in which the tools are read once for all
        models = [self.text_model(name) for name in adapters_of_each(adapter, len(conversations))]
        requests = [
            shared.with_messages(conversation).bind(model, answers, given=vars(its))
            for model, conversation, its in zip(models, conversations, each, strict=True)
        ]
        inputs = [request.inputs(model, answers)[0] for model, request in zip(models, requests, strict=True)]
        outputs = self.generate(
            [prompt for prompt, _ in inputs],
            [sampling for _, sampling in inputs],
            use_tqdm=use_tqdm,
            adapter=adapter,
            arrays=arrays,
            steering=steering,
            tapped_layers=tapped_layers,
        )
        return [request.read(output, answers) for output, request in zip(outputs, requests, strict=True)]

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        adapter: str | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation, ready for `generate` or `stream` with the same adapter. Raises ValueError, with
        the place, for a name in a message that neither the chat template nor jaxinfer reads."""
        prompts = self.client.prompts_of(adapter)
        check_message_names(messages, prompts.tokenizer)
        return prompts.tokenize_chat(messages, tools, template_kwargs)

    def text_model(self, adapter: str | LoadedAdapter | None) -> TextModel:
        """The model as texts of requests with an adapter are read. Raises ValueError for one that is not loaded."""
        return AdapterTexts(self.client.prompts_of(adapter), self.default_params)

    @takes_other_names
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        arrays: Mapping[str, Any] | None = None,
        steering: Mapping[int, Any] | None = None,
        tapped_layers: Sequence[int] = (),
    ) -> Iterator[StreamDelta]:
        """Yields text as it is generated, by the adapter of that name if one is given, with `arrays`, `steering` and
        `tapped_layers` as of `generate`: the last delta's output has the hidden states. Leaving the loop early ends the
        request and frees its slot."""
        options = RequestOptions(adapter=adapter, arrays=arrays, steering=steering, tapped_layers=tapped_layers)
        if self._lockstep is not None:
            return self._lockstep.each("stream", lambda: self.client.stream(self.prepare(prompt, params, options)))
        return self.client.stream(self.prepare(prompt, params, options))

    @takes_other_names
    def generate_each(
        self,
        requests: Iterable[tuple[Key, Prompt, SamplingParams] | tuple[Key, Prompt, SamplingParams, RequestOptions]],
        *,
        max_queued: int | None = None,
    ) -> Iterator[tuple[Key, RequestOutput | ValueError]]:
        """Answers to a stream of requests, in the order in which they finish.

        Args:
          requests: tuples of a key that you choose, a prompt and its parameters (or None), or of these and
            RequestOptions; taken only as there is room.
          max_queued: answers that wait or run at once; by default 2 * max_seqs + 4.

        Yields the key with the output, or with the ValueError for which the request was refused; the others go on.
        Closing the iterator aborts what runs. Raises TypeError, with its number, for what is no such tuple.
        """
        limit = 2 * self.engine.spec.max_seqs + 4 if max_queued is None else as_count("max_queued", max_queued)
        items = each_request(requests, self.default_params)
        if self._lockstep is None:
            return self.client.generate_each(items, limit)
        return self._lockstep.each_request(items, lambda numbered: self.client.generate_each(numbered, limit))

    @on_all_hosts
    def generate_file(
        self,
        path_in: str | Path,
        path_out: str | Path,
        *,
        params: SamplingParams | Mapping[str, Any] | None = None,
        use_tqdm: bool | None = None,
        **files: Any,
    ) -> "BatchSummary":
        """Serves a file of requests and writes each answer as it finishes. See docs/batch.md.

        A line is `{"prompt": ..., "temperature": ..., ...}`, the same with "messages", or OpenAI's batch form; tables
        are read too. Killed at any point, the same call goes on where it was, with the tokens that it would have made.

        Args:
          params: for what rows do not say, whole or only some fields; its seed, or the LLM's, is the job's.
          files: as of `jaxinfer.batch.open_job`: errors, resume, overwrite, retry_errors, sort, coordinates; for tables
            prompt_column, prompt, chat, keep, adapter_column.

        Raises:
          BatchError: two rows with one custom_id; results of another job; files that another process writes.
          ValueError: acceptance="maximal", under which answers depend on what else runs.
          BatchWriteError: the disk is full, or the like; what was written stays and can be resumed.
        """
        from jaxinfer.batch import open_job

        with open_job(path_in, path_out, **files) as job:
            return job.run(self, params, use_tqdm=use_tqdm)

    # Scores, vectors, relevance.

    @takes_other_names
    @on_all_hosts
    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt] | None = None,
        params: SamplingParams | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
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
          adapter: the name of a loaded adapter, under which the texts are scored, or one for each; None for the model
            without one.
          use_tqdm: as of `generate`.

        All run in one batch, in any number. Memory does not grow with length times vocabulary: logits exist for a few
        positions at a time. Raises ValueError, with its number and both lengths, for a text that is longer than
        `max_model_len`, for other numbers of prompts and continuations, and as `generate`.
        """
        if params is not None:
            self.client.check_no_processors("scores under sampling parameters", "score")
        params = as_params(params, SamplingParams())
        if continuations is None:
            what, pairs = "text", [(text, None) for text in as_prompts(prompts, "text")]
        else:
            what, pairs = "pair", as_pairs(prompts, continuations)
        each = enumerate(zip(pairs, adapters_of_each(adapter, len(pairs), f"{what}s"), strict=True))
        requests = [
            self.client.prepare_score(*pair, params, RequestOptions(adapter=name), what=f"{what} {number}")
            for number, (pair, name) in each
        ]
        scores: dict[SequenceState, Score] = {}

        def take(answer: SequenceState) -> None:
            scores[answer] = score_of(answer)
            answer.prompt_logprobs = []  # ten times as large, while others of a long list run

        return [scores[answer] for (answer,) in self._run(requests, "scoring", what, use_tqdm, take)]

    @takes_other_names
    @on_all_hosts
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
        adapter: str | None = None,
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
          adapter: the name of a loaded adapter.
          use_tqdm: as of `generate`.

        Cached beginnings are used where only the last token counts; for "mean" and "cls" all of a text is computed.
        Raises ValueError, with the text's number and length, for a text that is too long, for a checkpoint that does
        not say how it pools where `pooling` does not either, and for an unknown prompt or too many dimensions.
        """
        keywords: dict[str, Any] = {"prompt_name": prompt_name, "prompt": prompt, "pooling": pooling}
        keywords |= {"dimensions": dimensions, "normalize": normalize, "truncate": truncate}
        keywords["options"] = RequestOptions(adapter=adapter)
        return self._vectors(self.embedder.embed(as_prompts(texts), **keywords), "embedding", use_tqdm)

    @on_all_hosts
    def relevance(
        self,
        queries: str | Sequence[str],
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        truncate: bool = False,
        adapter: str | None = None,
        use_tqdm: bool | None = None,
    ) -> np.ndarray:
        """How relevant each document is for its query, or for the only one: float32 [documents].

        For a model that embeds (see `embed`), the cosine of their vectors, with its prompts "query" and "document". For
        any other, the probability of "yes" against "no" after the template of Qwen3-Reranker, from 0 to 1; the query's
        part of the prompt is computed once for all of its documents.

        Args:
          instruction: the task, in place of the reranker's default; for a model that embeds, the prompt of queries.
          truncate: cuts documents that are too long at their end.
          adapter: the name of a loaded adapter.

        Raises ValueError for other numbers of queries and documents, for a document that is too long, with its number,
        and for a model without the tokens of the template. TypeError for what is no text.
        """
        queries = [queries] if isinstance(queries, str) else queries
        keywords: dict[str, Any] = {"instruction": instruction, "truncate": truncate}
        job = self.embedder.relevance(queries, documents, options=RequestOptions(adapter=adapter), **keywords)
        return self._vectors(job, "scoring", use_tqdm)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        truncate: bool = False,
        adapter: str | None = None,
        use_tqdm: bool | None = None,
    ) -> list[tuple[int, float]]:
        """Pairs (index of a document, its `relevance`), the most relevant first, at most `top_n`."""
        keywords: dict[str, Any] = {"instruction": instruction, "truncate": truncate, "adapter": adapter}
        scores = self.relevance(query, documents, use_tqdm=use_tqdm, **keywords)
        return best_first(scores, top_n)

    def _vectors(self, job: VectorJob, description: str, use_tqdm: bool | None) -> np.ndarray:
        answers = self._run(job.requests, description, "text", use_tqdm)
        return job.result([self.client.collect(answer) for answer in answers])

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
            running: dict[SequenceState, Any] = dict.fromkeys(answer for answers in submitted for answer in answers)
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

    # The engine.

    def save(
        self, folder: str | Path, *, dtype: str = "auto", dequantize: bool = False, overwrite: bool = False
    ) -> Path:
        """Writes the model as a Hugging Face checkpoint that Transformers opens, and `LLM` with the same answers:
        config.json, generation_config.json, the tokenizer with its chat template, and safetensors.

        Args:
          folder: appears when it is complete; one that is there must be empty.
          dtype: of weights that are not quantized; "auto" writes that in which they compute: on a CPU float32.
          dequantize: write quantized weights as floating-point ones; they are compressed-tensors otherwise.
          overwrite: replace a checkpoint at `folder`.

        Nothing is left after a failure. Raises CheckpointError, a ValueError, for a folder that is not empty, too
        little space, and a kind of quantization that compressed-tensors lacks; ValueError on a mesh.
        """
        from jaxinfer.saving import save_model

        if self._loaded is None:
            raise RuntimeError("this LLM is closed")
        with Stage(f"saving {self.name} to {folder}"):
            return save_model(self._loaded, folder, dtype=dtype, dequantize=dequantize, overwrite=overwrite)

    @on_all_hosts
    def warm_up(self, *, jobs: int | None = None, use_tqdm: bool | None = None) -> int:
        """Compiles every program that a request can need, so that none compiles later; returns how many.

        `jobs` programs are compiled at once: by default as many as there are cores, at most 8. Only hidden states are
        left out: each choice of taps and length is a program of its own.
        """
        if jobs is not None and jobs < 1:
            raise ValueError(f"jobs={jobs} must be at least 1")
        with Stage("compiling", len(self.engine.program_names), "program", show=use_tqdm) as stage:

            def report(name: str) -> None:
                stage.update()
                stage.describe(f"{name} is ready")

            return self.engine.warm_up(jobs, report)

    def explain(self) -> Explanation:
        """Describes what was allocated and chosen: dtypes, bytes, slots, programs, kernels. `str()` is a table."""
        tokenizer = "none: token ids only" if self.tokenizer is None else f"{self.tokenizer.vocab_size} tokens"
        defaults = {field.name: getattr(SamplingParams(), field.name) for field in fields(SamplingParams)}
        quantized = describe(all_layers(shapes_of(self.params)))
        weights: dict[str, Any] = {"quantized": quantized} if quantized else {}
        if self._copies is not None and self._copies.num_copyable:
            weights["float32 copies"] = f"{self._copies}, for XLA:CPU fuses no conversion into products"
            weights["quantized bytes kept too"] = num_bytes(self.params)
        changed = {name: value for name, value in vars(self.default_params).items() if value != defaults.get(name)}
        explanation = explain_engine(
            self.engine,
            model={"name": self.name, "tokenizer": tokenizer, **weights},
            loaded_adapters=(len(self._adapters), self._adapters.host_bytes),
            sampling={
                "seed": self.seed,
                "end-of-sequence ids": ", ".join(str(token) for token in self.eos_token_ids) or "none",
                "defaults changed": ", ".join(f"{name}={value}" for name, value in changed.items()) or "none",
                "generation_config ignored": ", ".join(self.ignored_generation_config) or "nothing",
            },
        )
        first = self.engine.engines[0]
        if (chip := chip_of_kind(first.device.device_kind)) is None:
            return explanation
        from jaxinfer.planning.step_model import predicted_steps

        steps = predicted_steps(chip, first.spec)
        return Explanation({**explanation.groups, "a step of decoding, predicted": steps}) if steps else explanation

    def plan(self) -> "MemoryPlan":
        """The model's needs on this machine: bytes by part as the compiler counts them, how much cache remains, and,
        on chips that `jaxinfer plan` knows, the least time of a step. Prints well; `to_dict()` is JSON-ready.

        Compiles the largest programs, or reads them from the compilation cache.
        """
        from jaxinfer.planning.planner import plan_engine

        return plan_engine(self.name, self.engine.engines[0])

    @on_all_hosts
    def speculation_stats(self) -> SpeculationStats | None:
        """Counts of what was drafted and accepted since the start, all answers together; None without a draft."""
        return self.engine.speculation_stats

    def fingerprint(self) -> str:
        """SHA-256 of what answers depend on besides the request: configuration, parameters, tokenizer, length.

        Of the parameters it takes names, shapes, dtypes and a few values of each, not all bytes.
        """
        from jaxinfer.batch.fingerprint import model_fingerprint

        return model_fingerprint(self, self.params) if self._fingerprint is None else self._fingerprint.value

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer, as `llm.tokenizer`. Raises ValueError for a model without one."""
        return self.client.need_tokenizer("get_tokenizer")

    def __repr__(self) -> str:
        try:
            return f"LLM({self.name!r}, {summarize_engine(self.engine)})"
        except RuntimeError:
            return f"LLM({self.name!r}, closed)"

    def close(self) -> None:
        """Frees the device memory of the cache now, and that of the parameters unless they are live ones or another
        model of this process, loaded from the same files, uses them. Closing twice is harmless."""
        self.client.close()
        for weights in self._weights:
            weights.release()
        self._params, self._weights, self._loaded = as_weights({}).view(ParamDict.read_only), [], None
        self._draft = self._draft_params = None

    # Several hosts.

    @property
    def is_leader(self) -> bool:
        """True on host 0, which reads, writes and shows things; so is a host alone."""
        return self._hosts is None or self._hosts.is_leader

    @property
    def is_alone(self) -> bool:
        """True for a model on one host."""
        return self._lockstep is None

    def on_leader(self, work: Callable[[], R]) -> R | None:
        """Runs `work`, which may call any method, on host 0, while the others follow and return None. What it raises,
        all raise."""
        if self._lockstep is None:
            return work()
        returned: list[R] = []
        self._lockstep.lead_or_follow("on_leader", lambda: returned.append(work()))
        return returned[0] if returned else None

    # One request, step by step, for callers who drive the engine themselves.

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions = DEFAULT_REQUEST_OPTIONS,
        *,
        what: str = "the prompt",
        keeps_answer: bool = True,
    ) -> Request:
        """A checked and tokenized request; raises ValueError if it can never be served, with `what` in the message.
        `keeps_answer`: False where only the prompt counts, which then may be as long as the model takes."""
        params = as_params(params, self.default_params, f"{what}: params")
        return self.client.prepare(as_prompt(prompt, what), params, options, what=what, keeps_answer=keeps_answer)

    def submit(self, request: Request) -> list[SequenceState]:
        """Queues all answers of a request, or none where the queue is full (QueueFullError); returns them."""
        return self.client.submit(request)

    def step(self, max_steps: int | None = None) -> None:
        """One step of the engine: a dispatch of at most `max_steps` decode steps."""
        self.client.step(max_steps)

    def advance(self, answer: SequenceState) -> StreamDelta:
        """An answer's new text and tokens; a stop string in the text ends it."""
        return self.client.advance(answer)

    def collect(self, answers: Sequence[SequenceState]) -> RequestOutput:
        """The output of a request, from its answers as they stand."""
        return self.client.collect(answers)


LLM.__doc__ = documented(LLM.__doc__)


def _layers_chooser(options: LLMOptions, model: Any) -> ChooseLayers | None:
    """The function that names the layers which `options.offload` moves to the host, for `load_model`; None for none."""
    if not options.offload or options.offload == DISK:
        return None
    is_live = isinstance(options.draft, tuple)

    def choose(config: ModelConfig, params: Params) -> tuple[int, ...]:
        config, length = for_length(config, options.max_model_len)
        own_options = {field.name: getattr(options, field.name) for field in fields(EngineOptions)}
        given: Any = options.draft
        if is_live:
            own = own_config(given[0])
            shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), own_params(given[1], own))
            draft = draft_of("live parameters", own, shapes, config, length)
        else:
            draft = load_draft_shapes(given, model, config, params, length, options.dtype)
        platform = jax.default_backend()
        spec = EngineSpec(
            config, params, EngineOptions(**{**own_options, "max_model_len": length}), platform, None, draft
        )
        total = available_bytes(jax.devices()[0]) if options.offload == "auto" else None
        if total is not None and is_live:
            total += sum(num_bytes(params) for _, params in draft.own)
        return layers_for_host(spec, options.offload, total)

    return choose


def _is_from_disk(options: LLMOptions, *, is_live: bool) -> bool:
    """True if layers stay in a checkpoint's files. Raises ValueError for live parameters and devices but a CPU."""
    if options.offload != DISK:
        return False
    if is_live:
        raise ValueError("offload='disk' is for the files of a checkpoint, not for live parameters")
    if (platform := jax.default_backend()) != "cpu":
        raise ValueError(f"offload='disk' is for a CPU, not for {platform}; offload='auto' is")
    return True
