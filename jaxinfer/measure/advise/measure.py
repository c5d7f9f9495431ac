"""Trials on this machine: one engine after another, each over weights that are loaded once for all that share them."""

import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jaxinfer import compilation_cache, parallel
from jaxinfer.engine.cache_quality import hidden_states, log_probs
from jaxinfer.llm import LLM
from jaxinfer.loading import LoadedModel, load_model
from jaxinfer.measure.advise.goals import median
from jaxinfer.measure.advise.texts import encoded, for_quality, requests, sampled, shared_share
from jaxinfer.measure.advise.trials import Arguments, TrialResult
from jaxinfer.measure.bench.metrics import figures
from jaxinfer.measure.bench.probe import engines_of
from jaxinfer.measure.bench.runs import RunOptions, serve_all
from jaxinfer.measure.bench.workload import Ask, Workload

# Arguments of `LLM` that say how weights are loaded.
LOADING = ("tokenizer", "dtype", "revision", "requantize", "quantize")
# A repeat in which a program was compiled does not count; so many of them are made again.
MAX_AGAIN = 8
_SALTS = itertools.count()  # of runs: they reuse no prefix of one another


@dataclass(frozen=True)
class AdviseRequest:
    """What is advised on.

    Attributes:
      model: as of `LLM`; arguments: of `LLM`, those of every trial. documents: texts of the user's, () for none.
      num_requests: at once. repeats: of each measurement. num_shared: tokens that all prompts begin with.
    """

    model: str
    arguments: Arguments
    workload: Workload
    documents: tuple[str, ...] = ()
    num_requests: int = 32
    repeats: int = 3
    num_shared: int = 0
    how: RunOptions = field(default_factory=RunOptions)


class TrialRunner:
    """Measures trials. One set of weights is held at a time."""

    def __init__(self, asked: AdviseRequest, told: Callable[[str], None] = lambda text: None):
        self.asked, self.told = asked, told
        self.asks: list[Ask] = []
        self._texts: list[list[int]] = []
        self._expected: list[np.ndarray] = []
        self._recipe: str | None = None
        self._model: LoadedModel | None = None
        self._budget: float | None = None
        self._qualities: dict[tuple[Any, Any], tuple[float, float]] = {}
        self._mesh = None
        if (mesh := asked.arguments.get("mesh")) is not None:
            self._mesh = parallel.make_mesh(mesh)

    def close(self) -> None:
        """Frees the weights."""
        model, self._model = self._model, None
        if model is not None:
            for leaf in jax.tree.leaves(model.params):
                leaf.delete()
        gc.collect()

    def __call__(self, arguments: Arguments) -> TrialResult:
        """A trial. What fails is a row with its reason; only the baseline raises."""
        try:
            return self._measured(arguments)
        except (ValueError, RuntimeError, NotImplementedError, MemoryError, OSError) as error:
            if not arguments or "KeyboardInterrupt" in str(error):  # as JAX's compiler says it
                raise
            return TrialResult(arguments, f"failed: {str(error).strip().partition(chr(10))[0] or type(error).__name__}")
        finally:
            gc.collect()

    @property
    def shared(self) -> float:
        """The share of prompt tokens that reuse could save."""
        return shared_share([ask.prompt for ask in self.asks if not isinstance(ask.prompt, str)])

    def prepare(self, texts: list[list[int]] | None = None) -> None:
        """Loads the model and makes the requests; of the model's own text, where there is no other."""
        if self.asks:
            return
        model = self._loaded(None)
        if texts is None and self.asked.documents:
            if model.tokenizer is None:
                raise ValueError(f"{self.asked.model} has no tokenizer, so it can read no text: leave --texts out")
            texts = encoded(model.tokenizer, self.asked.documents)
            if not texts:
                raise ValueError("the texts have no two tokens")
        rows = model.config.vocab_size if model.tokenizer is None else model.tokenizer.vocab_size
        if texts is None:
            with self._opened({}) as llm:
                texts = sampled(llm, self.asked.workload.seed)
        self._all_texts = texts
        asks = requests(self.asked.workload, texts, self.asked.num_requests, rows, self.asked.num_shared)
        if model.tokenizer is not None:
            encode = model.tokenizer.encode
            asks = [replace(ask, prompt=encode(ask.prompt)) if isinstance(ask.prompt, str) else ask for ask in asks]
        self.asks = asks

    @property
    def model(self) -> LoadedModel:
        """As it is now loaded."""
        return self._loaded(self._recipe)

    # One trial.

    def _measured(self, arguments: Arguments) -> TrialResult:
        self.prepare()
        if arguments and not self._expected:  # the baseline is of an earlier run
            with self._opened({}) as llm:
                self._quality(llm, self._sizes(llm, TrialResult()))
        with self._opened(arguments) as llm:
            self.told("compiling")
            row = self._sizes(llm, TrialResult(arguments))
            self._warm(llm)
            before = llm.speculation_stats()
            singles, batches = [], []
            for number in range(self.asked.repeats):
                self.told(f"repeat {number + 1} of {self.asked.repeats}")
                singles.append(self._again(lambda: self._single(llm)))
                batches.append(self._again(lambda: self._batch(llm)))
            after = llm.speculation_stats()
            row = replace(
                row,
                ttft=tuple(one[0] for one in singles),
                tpot=tuple(one[1] for one in singles),
                one=tuple(one[2] for one in singles),
                rate=tuple(one["tokens_per_second"]["out"] for one in batches),
                batch_ttft=tuple(one["ttft"]["p50"] for one in batches),
                goodput=tuple(one["goodput"]["requests_per_second"] for one in batches if "goodput" in one),
            )
            notes = list(self._notes(llm))
            if after is not None and before is not None:
                stats = after - before
                row = replace(row, acceptance=stats.acceptance_rate)
                notes.append(
                    f"{stats.acceptance_rate:.0%} of drafted tokens accepted, {stats.mean_accepted_length:.1f} tokens "
                    f"a round; {stats.num_plain_tokens:,} tokens were made without a draft"
                )
            row = self._quality(llm, row)
        return replace(row, notes=tuple(notes))

    def _sizes(self, llm: LLM, row: TrialResult) -> TrialResult:
        engine = engines_of(llm.engine)[0]
        memory = engine.memory
        lengths = [len(ask.prompt) + ask.num_tokens for ask in self.asks]
        pages = -(-max(lengths) // engine.page_size)
        rest = memory.weights + memory.sampler + memory.activations
        running = min(engine.options.max_seqs, self.asked.num_requests)
        if self._budget is None and memory.available is not None:  # the baseline's: what is free varies
            self._budget = engine.options.memory_fraction * (memory.available + memory.weights)
        fitting = None
        if self._budget is not None:
            fitting = max(int((self._budget - rest) // memory.page_bytes) - 1, 0) * engine.page_size
        return replace(
            row,
            weight_bytes=memory.weights,
            token_bytes=memory.page_bytes / engine.page_size,
            needed_bytes=rest + memory.page_bytes * (running * pages + 1),
            cache_tokens=fitting,
        )

    def limit_memory(self, num_bytes: int | None) -> None:
        """Counts the tokens of cache that fit so many bytes, not those of the machine."""
        self._budget = num_bytes

    def _warm(self, llm: LLM) -> None:
        """Compiles what the requests need, and no more: a trial is not for serving."""
        self._single(llm)
        self._batch(llm)

    def _again(self, run: Callable[[], Any]) -> Any:
        """A run in which nothing is compiled."""
        for _ in range(MAX_AGAIN):
            with compilation_cache.counting() as counts:
                found = run()
            if not counts.compiled + counts.hits:
                return found
        raise RuntimeError(f"programs were compiled in each of {MAX_AGAIN} repeats")

    def _single(self, llm: LLM) -> tuple[float, float, float]:
        """One request alone: seconds until its first token, per token, and in all, the median of a few, one after the
        other. What they begin with alike the first has computed."""
        found, salt = [], f"advise {next(_SALTS)}"
        for ask in self.asks[:3]:
            [output] = llm.generate(
                [ask.prompt], self.asked.how.params(ask.num_tokens), use_tqdm=False, cache_salt=salt
            )
            timings = output.timings
            if timings is None:
                raise RuntimeError("a request has no timings")
            found.append((timings.time_to_first_token, timings.time_per_output_token, timings.total_time))
        ttft, tpot, total = (median(column) for column in zip(*found, strict=True))
        return ttft, tpot, total

    def _batch(self, llm: LLM) -> dict[str, Any]:
        traces, seconds = serve_all(llm, self.asks, self.asked.how)
        return figures(traces, seconds, limits=self.asked.how.limits)

    # Quality.

    def _quality(self, llm: LLM, row: TrialResult) -> TrialResult:
        """KL and equal best tokens next to the baseline: of its own rows this holds the log-probabilities."""
        if row.is_exact and row.arguments:
            return replace(row, kl=0.0, top1=1.0)
        key = row.arguments.get("quantize"), row.arguments.get("kv_dtype")
        engine = engines_of(llm.engine)[0]
        if not row.arguments:
            if not self._expected:
                self._texts = for_quality(self._all_texts, llm.config.vocab_size, llm.max_model_len)
                self._expected = [log_probs(engine, states) for states in hidden_states(engine, self._texts)]
            return replace(row, kl=0.0, top1=1.0)
        if key not in self._qualities:
            self.told("measuring the KL")
            kl = agreeing = 0.0
            for states, expected in zip(hidden_states(engine, self._texts), self._expected, strict=True):
                found = log_probs(engine, states)
                kl += float(np.sum(np.exp(expected) * (expected - found), dtype=np.float64))
                agreeing += float(np.sum(expected.argmax(-1) == found.argmax(-1)))
            self._qualities[key] = max(kl, 0.0) / self.num_quality_tokens, agreeing / self.num_quality_tokens
        kl, top1 = self._qualities[key]
        return replace(row, kl=kl, top1=top1)

    @property
    def num_quality_tokens(self) -> int:
        return sum(map(len, self._texts))

    # The model.

    def _loaded(self, recipe: str | None) -> LoadedModel:
        if self._model is not None and self._recipe == recipe:
            return self._model
        self.close()
        self.told("loading")
        values = {name: self.asked.arguments[name] for name in LOADING if name in self.asked.arguments}
        if recipe is not None:
            values["quantize"] = recipe
        self._model, self._recipe = load_model(self.asked.model, mesh=self._mesh, **values), recipe
        return self._model

    def _opened(self, arguments: Arguments) -> LLM:
        model = self._loaded(arguments.get("quantize"))
        values = {**self.asked.arguments, **arguments}
        values = {name: value for name, value in values.items() if name not in LOADING or name == "dtype"}
        if str(values.get("kv_dtype", "")).startswith("fp8") and model.kv_scales is not None:
            values["kv_scales"] = model.kv_scales
        if self._mesh is not None:
            values["mesh"] = self._mesh
        return LLM((model.config, model.params, model.tokenizer), **values)

    def _notes(self, llm: LLM) -> list[str]:
        facts = llm.explain().groups["model"]
        return ["on a CPU its weights run as float32 copies: nothing is saved"] if "float32 copies" in facts else []
