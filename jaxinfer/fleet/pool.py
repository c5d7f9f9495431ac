"""Batches over a fleet: a pool of engines in Ray actors, and a class for Ray Data. Ray schedules, we do not.

A row's tokens depend on its parameters and its seed, not on the worker that runs it: so a row that is lost with its
worker is run again, and gives what it would have given. Needs the extra `ray`.
"""

import hashlib
import importlib
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.batch.errors import BatchError
from jaxinfer.engine.adapter_slots import LoadedAdapter
from jaxinfer.engine.request import DEFAULT_REQUEST_OPTIONS, Prompt, RequestOptions
from jaxinfer.extras import install_hint
from jaxinfer.files import Closable
from jaxinfer.openai.requests import AdapterTexts, TextModel
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.seeds import derive_seed
from jaxinfer.text.prompts import TakesPrompts
from jaxinfer.tool_calls import AnswerFormat

if TYPE_CHECKING:
    from jaxinfer.engine.request import RequestOutput
    from jaxinfer.text import Tokenizer

_LOG = logging.getLogger(__name__)
MAX_LOSSES = 3  # of workers that one row may see, before it is taken for what ends them
MAX_FAILED_STARTS = 3  # of workers in a row, before the pool gives up
_QUEUED_PER_SLOT = 2  # rows that a worker holds for each answer that it generates at once


class WorkerLostError(ValueError):
    """A row whose workers were lost, again and again."""


@dataclass
class _Row:
    key: Any
    prompt: Prompt
    params: SamplingParams
    options: RequestOptions = DEFAULT_REQUEST_OPTIONS
    num_losses: int = 0


class _Worker:
    """The actor: one engine, many rows at once. Runs in a process of its own."""

    def __init__(self, model: str, options: Mapping[str, Any]):
        from jaxinfer.api.async_engine import AsyncEngine

        self._engine = AsyncEngine(model, **{"steps_per_dispatch": 8, **options, "max_waiting": None})

    async def describe(self) -> dict[str, Any]:
        """Facts of the model that a job needs."""
        llm = self._engine.llm
        return {
            "name": llm.name,
            "seed": llm.seed,
            "default_params": llm.default_params,
            "acceptance": llm.acceptance,
            "fingerprint": llm.fingerprint(),
            "adapters": {name: one.identity for name, one in llm.adapters.items()},
            "texts of adapters": [
                (own.name, own.fingerprint, own.num_added, own.tokenizer) for own in llm.adapters.values()
            ],
            "max_seqs": llm.engine.spec.max_seqs,
            "vocab_size": llm.config.vocab_size,
            "max_model_len": llm.max_model_len,
        }

    async def generate(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> "RequestOutput | ValueError":
        """The whole answer, or why the row cannot be served."""
        output = None
        try:
            async for delta in self._engine.generate(prompt, params, **vars(options)):
                output = delta.output or output
        except (ValueError, TypeError) as error:
            return ValueError(str(error))
        return output if output is not None else ValueError("the row ended without an answer")


class RayPool(TakesPrompts, Closable):
    """Engines in Ray actors, for a batch job: what `open_job(...).run` takes in place of an `LLM`.

    Args:
      model: a checkpoint's folder, a GGUF file, a hub id or an embedded model, as every worker can open it.
      num_workers: engines. options: those of `LLM`, for each.
      resources: what Ray reserves for each worker, such as {"num_gpus": 1} or {"resources": {"TPU": 4}}; one CPU unless
        given. address: of a running cluster, such as "auto"; None starts Ray on this machine if it does not run.

    Raises BatchError where Ray is not installed or no worker starts.
    """

    def __init__(
        self,
        model: str | Path,
        num_workers: int = 2,
        *,
        options: Mapping[str, Any] | None = None,
        resources: Mapping[str, Any] | None = None,
        address: str | None = None,
    ):
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {num_workers}")
        self._ray = _import_ray()
        self._is_ours = not self._ray.is_initialized()
        if self._is_ours:
            self._ray.init(address=address, log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
        self._model, self._options = str(model), dict(options or {})
        self._actor = self._ray.remote(_Worker).options(max_concurrency=1000, **{"num_cpus": 1, **(resources or {})})
        self._tokenizer_of: Tokenizer | None = None
        self._has_tokenizer = False
        self._answer_format: AnswerFormat | None = None
        self._workers: list[Any] = []
        try:
            self._workers = [self._start() for _ in range(num_workers)]
            self._facts = self._describe(self._workers[0])
        except BaseException:
            self.close()
            raise
        self.name, self.seed, self.acceptance = (self._facts[name] for name in ("name", "seed", "acceptance"))
        self.default_params: SamplingParams = self._facts["default_params"]
        self.vocab_size, self.max_model_len = self._facts["vocab_size"], self._facts["max_model_len"]
        self._adapters = {
            name: LoadedAdapter(name, fingerprint, None, num_added=num_added, tokenizer=tokenizer)
            for name, fingerprint, num_added, tokenizer in self._facts["texts of adapters"]
        }
        self.num_lost = 0  # workers, since the start

    @property
    def tokenizer(self) -> "Tokenizer | None":  # type: ignore[override]
        """The model's, for the rows' texts."""
        if not self._has_tokenizer:
            self._tokenizer_of, self._has_tokenizer = _tokenizer_of(self._model, self._options), True
        return self._tokenizer_of

    @property
    def answer_format(self) -> AnswerFormat:
        """As of `LLM`."""
        if self._answer_format is None:
            self._answer_format = AnswerFormat(self.tokenizer, self._options.get("tool_parser", "auto"))
        return self._answer_format

    def fingerprint(self) -> str:
        """As `LLM.fingerprint`."""
        return self._facts["fingerprint"]

    @property
    def adapters(self) -> Mapping[str, LoadedAdapter]:
        """Those that every worker was given, without their tensors."""
        return self._adapters

    def text_model(self, adapter: LoadedAdapter | None) -> TextModel:
        """As of `LLM`."""
        if adapter is None or (adapter.tokenizer is None and not adapter.num_added):
            return self
        return AdapterTexts(self.with_tokens(adapter.tokenizer, adapter.num_added), self.default_params)

    @property
    def client(self) -> TakesPrompts:
        """Tokenizes the rows' prompts: this pool, in the job's own process."""
        return self

    @property
    def system(self) -> str | None:  # type: ignore[override]
        """The system prompt of the model's alias."""
        from jaxinfer.store import find_model

        return find_model(self._model, fetch=False).system

    def generate_each(
        self, requests: Iterable[tuple[Any, ...]], *, max_queued: int | None = None
    ) -> Iterator[tuple[Any, "RequestOutput | ValueError"]]:
        """As `LLM.generate_each`: every row once, whichever workers are lost on the way.

        Every row needs a seed of its own if it is sampled: a worker would derive one from the order of its rows.

        Raises BatchError where workers cannot be started any more.
        """
        per_worker = _QUEUED_PER_SLOT * self._facts["max_seqs"] if max_queued is None else max_queued
        if per_worker < 1:
            raise ValueError(f"max_queued must be at least 1, got {per_worker}")
        ray, source, again = self._ray, iter(requests), deque[_Row]()
        running: dict[Any, tuple[_Row, Any]] = {}
        counts: Counter[Any] = Counter()
        is_over = False
        try:
            while True:
                while (worker := min(self._workers, key=lambda worker: counts[worker])) and counts[worker] < per_worker:
                    if again:
                        row = again.popleft()
                    elif is_over or (item := next(source, None)) is None:
                        is_over = True
                        break
                    else:
                        row = _Row(*item)
                        if row.params.temperature > 0 and row.params.seed is None:
                            raise ValueError(f"row {row.key} is sampled, so it needs a seed")
                    running[worker.generate.remote(row.prompt, row.params, row.options)] = row, worker
                    counts[worker] += 1
                if not running:
                    return
                ready, _ = ray.wait(list(running), num_returns=1)
                for reference in ready:
                    if reference not in running:  # of a worker that was lost meanwhile
                        continue
                    row, worker = running.pop(reference)
                    counts[worker] -= 1
                    try:
                        yield row.key, ray.get(reference)
                    except ray.exceptions.RayActorError:
                        lost = [row, *(running_row for running_row, its in running.values() if its is worker)]
                        running = {other: pair for other, pair in running.items() if pair[1] is not worker}
                        del counts[worker]
                        self._replace(worker, len(lost))
                        for lost_row in lost:
                            lost_row.num_losses += 1
                            if lost_row.num_losses < MAX_LOSSES:
                                again.append(lost_row)
                            else:
                                why = f"{lost_row.num_losses} workers were lost while they ran it"
                                yield lost_row.key, WorkerLostError(why)
        finally:
            for reference in running:
                ray.cancel(reference)

    def close(self) -> None:
        """Ends the workers, and Ray if it was started here."""
        for worker in self._workers:
            self._ray.kill(worker)
        self._workers = []
        if self._is_ours and self._ray.is_initialized():
            self._ray.shutdown()

    def _start(self) -> Any:
        return self._actor.remote(self._model, self._options)

    def _describe(self, worker: Any) -> dict[str, Any]:
        try:
            return self._ray.get(worker.describe.remote())
        except self._ray.exceptions.RayActorError as error:
            raise BatchError(f"a worker could not start: {str(error).strip().splitlines()[-1]}") from error

    def _replace(self, worker: Any, num_rows: int) -> None:
        """Starts another worker for one that was lost; the same model, or none."""
        self.num_lost += 1
        _LOG.warning("a worker was lost with %d rows; another is started, and they are run again", num_rows)
        place = self._workers.index(worker)
        for attempt in range(1, MAX_FAILED_STARTS + 1):
            started = self._start()
            try:
                facts = self._describe(started)
            except BatchError as error:
                if attempt == MAX_FAILED_STARTS:
                    raise BatchError(f"{attempt} workers could not be started one after another; {error}") from error
                time.sleep(attempt)
                continue
            if any(facts[name] != self._facts[name] for name in ("fingerprint", "adapters")):
                raise BatchError(f"the model {self._model!r} has changed since the job began")
            self._workers[place] = started
            return


class RayDataGenerator:
    """For `ray.data.Dataset.map_batches`: adds the answers to a batch of rows.

    dataset.map_batches(RayDataGenerator, fn_constructor_kwargs={"model": ...}, concurrency=4, batch_size=256)

    Args:
      model: as for `LLM`.
      params: for all rows, such as {"temperature": 0.8, "max_tokens": 64}.
      prompt_column: texts, or arrays of token ids.
      seed: the job's; a row's own is derived from it and from its prompt, or from what stands in `id_column`, an
        integer: so it is the same in whichever batch and worker it comes.
      **options: as for `LLM`.

    Adds the columns "text", "token_ids", "finish_reason" and "seed".
    """

    def __init__(
        self,
        model: str | Path,
        params: Mapping[str, Any] | None = None,
        *,
        prompt_column: str = "prompt",
        id_column: str | None = None,
        seed: int = 0,
        **options: Any,
    ):
        from jaxinfer.api.llm import LLM

        self._given, self._prompts, self._ids, self._seed = dict(params or {}), prompt_column, id_column, seed
        if self._given.get("n", 1) != 1:
            raise ValueError(f"n={self._given['n']}: a row has one answer; repeat the row, with ids of its own")
        self._llm = LLM(model, **options)
        if self._llm.acceptance != "exact":
            raise ValueError("acceptance='maximal' gives a row other tokens beside other rows: use 'exact'")
        SamplingParams.from_dict(self._given)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        import numpy as np

        for column in (self._prompts, *(() if self._ids is None else (self._ids,))):
            if column not in batch:
                raise ValueError(f"there is no column {column!r}; there are {', '.join(map(repr, batch))}")
        column = batch[self._prompts]
        prompts = [prompt if isinstance(prompt, str) else [int(token) for token in prompt] for prompt in column]
        ids = [_content_id(prompt) for prompt in prompts] if self._ids is None else list(map(int, batch[self._ids]))
        defaults = {name: value for name, value in vars(self._llm.default_params).items() if name != "seed"}
        params = [
            SamplingParams.from_dict({**defaults, "seed": derive_seed(self._seed, number), **self._given})
            for number in ids
        ]
        answers = [output.outputs[0] for output in self._llm.generate(prompts, params, use_tqdm=False)]
        tokens = np.empty(len(answers), object)
        tokens[:] = [np.asarray(answer.token_ids, np.int32) for answer in answers]
        return {
            **batch,
            "text": np.array([answer.text for answer in answers], object),
            "token_ids": tokens,
            "finish_reason": np.array([answer.finish_reason for answer in answers], object),
            "seed": np.array([answer.seed for answer in answers], np.uint64),
        }


def _content_id(prompt: Prompt) -> int:
    """64 bits of a prompt's SHA-256."""
    text = prompt if isinstance(prompt, str) else ",".join(map(str, prompt))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise BatchError(f"Ray is not installed: {install_hint('ray')}") from None


def _tokenizer_of(model: str, options: Mapping[str, Any]) -> "Tokenizer | None":
    from jaxinfer.loaded_tokenizers import tokenizer_named
    from jaxinfer.text import Tokenizer

    given = options.get("tokenizer")
    if given is not None:
        return given if isinstance(given, Tokenizer) else Tokenizer.from_dir(given)
    return tokenizer_named(model, options.get("revision"))
