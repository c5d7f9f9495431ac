"""Measured trials: one engine after another, over weights that are loaded once for all trials that share them."""

import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jaxinfer import compilation_cache, parallel
from jaxinfer.api.llm import LLM
from jaxinfer.api.options import ON_LOADING
from jaxinfer.calibration import CalibrationOptions, FloatModel, quantize_model
from jaxinfer.calibration.inputs import split_rows
from jaxinfer.calibration.quality import kl_divergence
from jaxinfer.engine.cache_quality import hidden_states, log_probs
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.engine.weights import ModelWeights
from jaxinfer.loading import LoadedModel, load_model
from jaxinfer.measure.advise.candidates import WHY_NO_OFFLOAD, ModelFacts, mesh_shapes
from jaxinfer.measure.advise.goals import ROUNDING, Arguments, TrialResult, median
from jaxinfer.measure.advise.search import Stop
from jaxinfer.measure.bench.metrics import figures
from jaxinfer.measure.bench.runs import RunOptions, serve_all
from jaxinfer.measure.bench.workload import BenchWorkload, WorkloadRequest
from jaxinfer.models import compute_dtype
from jaxinfer.quantization.tree import describe
from jaxinfer.sampling import SamplingParams

# Arguments of a trial that change what is loaded; trials that share all of them share the weights.
OF_WEIGHTS = ("quantize", "method", "mesh")
# A repeat in which a program was compiled is discarded and made again, at most this many times.
MAX_AGAIN = 8
BESIDE_SHARE = 0.1  # of the free memory, for the weights and the cache of a baseline that stays open
_SALTS = itertools.count()  # one for each run, so that no run reuses the prefixes of another


@dataclass(frozen=True)
class TrialSettings:
    """Settings that all trials share.

    Attributes:
      model, arguments: of `LLM`. documents: the user's texts, () for none. calibration: those to calibrate weights on.
      num_requests: concurrent requests. repeats: of each measurement. num_shared: tokens that all prompts begin with.
    """

    model: str
    arguments: Arguments
    workload: BenchWorkload
    documents: tuple[str, ...] = ()
    calibration: tuple[str, ...] = ()
    num_requests: int = 32
    repeats: int = 3
    num_shared: int = 0
    run_options: RunOptions = field(default_factory=RunOptions)


class TrialRunner:
    """Measures trials, with one set of weights in memory at a time. Tokens of cache are those that fit in `limit`
    bytes, by default in this machine's memory.

    On a CPU the engine of a small baseline stays open: each repeat of a trial is followed by one of the baseline, and
    the figures are scaled by how much slower this one was than at first. What else runs on the machine slows both.
    """

    def __init__(
        self,
        settings: TrialSettings,
        progress: Callable[[str], None] = lambda text: None,
        limit: int | None = None,
    ):
        self.settings, self.progress, self.limit = settings, progress, limit
        self.requests: list[WorkloadRequest] = []
        self._texts: list[list[int]] = []
        self._expected: list[np.ndarray] = []
        self._key: tuple[Any, ...] = ()
        self._model: LoadedModel | None = None
        self._budget: float | None = limit
        self._beside: tuple[LoadedModel, LLM] | None = None  # the baseline that stays open
        # The baseline that figures of trials are scaled to: to the machine as it was when this was measured.
        self.reference: TrialResult | None = None
        self._qualities: dict[tuple[Any, ...], tuple[float, float]] = {}

    def close(self) -> None:
        """Frees the weights."""
        beside, self._beside = self._beside, None
        if beside is not None:
            beside[1].close()
            if beside[0] is not self._model:
                beside[0].weights.release()
        self._close_model()

    def _close_model(self) -> None:
        model, self._model = self._model, None
        if model is not None and (self._beside is None or model is not self._beside[0]):
            model.weights.release()
        gc.collect()

    def __call__(self, arguments: Arguments, stop: Stop = lambda row: None) -> TrialResult:
        """Runs a trial, until `stop` gives a reason. A failure is a result with the reason; only a failing baseline
        raises."""
        try:
            return self._measured(arguments, stop)
        except (ValueError, RuntimeError, NotImplementedError, MemoryError, OSError) as error:
            if not arguments or "KeyboardInterrupt" in str(error):  # raised by JAX's compiler
                raise
            return TrialResult(arguments, f"failed: {str(error).strip().partition(chr(10))[0] or type(error).__name__}")
        finally:
            # Programs in JAX's caches keep memory mappings, of which a process may have 65,530: on a CPU, the compiler
            # failed after 18 engines.
            jax.clear_caches()
            gc.collect()

    def facts(self, sizes: Sequence[int], default_size: int, drafts: Sequence[str]) -> ModelFacts:
        """The facts that decide which trials make sense."""
        model = self._loaded({})
        devices = jax.devices()
        if self.settings.arguments.get("mesh") is not None:
            devices = devices[:1]
        why_no_offload = "a CPU computes in the host's memory"
        if devices[0].platform != "cpu":
            why_no_offload = None if self.limit is not None else WHY_NO_OFFLOAD
        return ModelFacts(
            given=self.settings.arguments,
            is_quantized=bool(describe(model.params)),
            caches_values=model.config.caches_values,
            sizes=sizes,
            default_size=default_size,
            drafts=drafts,
            shared=shared_share([request.prompt for request in self.requests if not isinstance(request.prompt, str)]),
            longest=self._longest,
            has_limits=bool(self.settings.run_options.limits),
            prompt=max(len(request.prompt) for request in self.requests),
            num_layers=model.config.num_layers,
            meshes=mesh_shapes(len(devices)),
            has_calibration=bool(self.settings.calibration),
            why_no_offload=why_no_offload,
        )

    def prepare(self, texts: list[list[int]] | None = None) -> None:
        """Loads the model and makes the requests, from text sampled from the model unless other texts are given."""
        if self.requests:
            return
        model = self._loaded({})
        if texts is None and self.settings.documents:
            if model.tokenizer is None:
                raise ValueError(f"{self.settings.model} has no tokenizer, so it cannot read texts: omit --texts")
            texts = [model.tokenizer.encode_content(text) for text in self.settings.documents]
            texts = [tokens for tokens in texts if len(tokens) > 1]
            if not texts:
                raise ValueError("the texts have fewer than two tokens")
        rows = model.config.vocab_size if model.tokenizer is None else model.tokenizer.vocab_size
        if texts is None:
            with self._opened({}) as llm:
                texts = sampled(llm, self.settings.workload)
        self._all_texts = texts
        settings = self.settings
        requests = make_requests(settings.workload, texts, settings.num_requests, rows, settings.num_shared)
        if model.tokenizer is not None:
            encode = model.tokenizer.encode
            prompts = (request.prompt for request in requests)
            prompts = [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
            requests = [replace(request, prompt=prompt) for request, prompt in zip(requests, prompts, strict=True)]
        self.requests = requests

    # One trial.

    def _measured(self, arguments: Arguments, stop: Stop) -> TrialResult:
        self.prepare()
        if arguments and not self._expected:  # the baseline was measured by an earlier run
            with self._opened({}) as llm:
                self._quality(llm, self._sizes(llm, TrialResult()))
                self._open_beside(llm)
        with self._opened(arguments) as llm:
            self.progress("compiling")
            row = self._quality(llm, self._sizes(llm, TrialResult(arguments)))
            if not arguments:
                self._open_beside(llm)
            before = llm.speculation_stats()
            stopped = stop(row)
            for number in range(self.settings.repeats):
                if stopped is not None:
                    row = replace(row, stopped=f"stopped after {number} of {self.settings.repeats} repeats: {stopped}")
                    break
                self.progress(f"repeat {number + 1} of {self.settings.repeats}")
                row = self._repeated(llm, row)
                stopped = stop(row) if number + 1 < self.settings.repeats else None
            after = llm.speculation_stats()
            if not arguments and self.reference is None and row.one:
                self.reference = row
            notes = []
            if "float32 copies" in llm.explain().groups["model"]:
                notes.append("on a CPU the weights run as float32 copies, which saves nothing")
            if after is not None and before is not None and row.one:
                stats = after - before
                row = replace(row, acceptance=stats.acceptance_rate)
                notes.append(
                    f"{stats.acceptance_rate:.0%} of draft tokens accepted, {stats.mean_accepted_length:.1f} tokens "
                    f"per round; {stats.num_plain_tokens:,} tokens generated without a draft"
                )
        return replace(row, notes=tuple(notes))

    def _sizes(self, llm: LLM, row: TrialResult) -> TrialResult:
        engine = llm.engine.engines[0]
        memory, sizes = engine.runner.memory, engine.spec.pool_sizes
        longest = self._longest
        rest = memory.weights + memory.sampler + memory.activations
        running = min(engine.spec.max_seqs, self.settings.num_requests)
        if self._budget is None and memory.available is not None:  # of the baseline, since free memory varies
            self._budget = engine.spec.options.memory_fraction * (memory.available + memory.weights)
        fitting = None
        if self._budget is not None:
            fitting = max(sizes.fitting(int(self._budget - rest)) - 1, 0) * sizes.page_size
            if "kv_policy" in row.arguments:  # a sequence keeps less than its tokens
                kept = replace(sizes, max_model_len=longest).sequence_bytes
                fitting = int(max(self._budget - rest, 0) / kept * longest)
        needed = replace(sizes, max_seqs=running, max_model_len=longest)
        return replace(
            row,
            weight_bytes=memory.weights,
            token_bytes=sizes.token_bytes,
            needed_bytes=rest + needed.bytes_of(needed.default),
            cache_tokens=fitting,
        )

    @property
    def _longest(self) -> int:
        """Tokens of the longest request, its answer included."""
        return max(len(request.prompt) + request.num_tokens for request in self.requests)

    def _repeated(self, llm: LLM, row: TrialResult) -> TrialResult:
        """The result with another repeat."""
        ttft, tpot, total = self._again(lambda: self._single(llm))
        batch = self._again(lambda: self._batch(llm))
        slower, slower_batch = self._slower()
        return replace(
            row,
            ttft=(*row.ttft, ttft / slower),
            tpot=(*row.tpot, tpot / slower),
            one=(*row.one, total / slower),
            rate=(*row.rate, batch["tokens_per_second"]["out"] * slower_batch),
            batch_ttft=(*row.batch_ttft, batch["ttft"]["p50"] / slower_batch),
            goodput=(*row.goodput, batch["goodput"]["requests_per_second"]) if "goodput" in batch else (),
        )

    def _open_beside(self, llm: LLM) -> None:
        """Opens a second engine of the baseline `llm`, measured beside the trials: on a CPU, if it takes little of the
        memory."""
        engine = llm.engine.engines[0]
        memory = engine.runner.memory
        held = memory.weights + sum(group.pool_bytes for group in engine.spec.groups)
        is_small = memory.available is not None and held <= BESIDE_SHARE * memory.available
        if self._beside is None and self._model is not None and engine.spec.platform == "cpu" and is_small:
            self._beside = self._model, self._opened_over(self._model, {})

    def _slower(self) -> tuple[float, float]:
        """How much longer the baseline takes than at first: one request, and a batch; 1 where it is not open."""
        if self._beside is None or self.reference is None:
            return 1.0, 1.0
        llm = self._beside[1]
        total, batch = self._again(lambda: self._single(llm))[2], self._again(lambda: self._batch(llm))
        return total / median(self.reference.one), median(self.reference.rate) / batch["tokens_per_second"]["out"]

    def _again(self, run: Callable[[], Any]) -> Any:
        """The result of a run in which nothing was compiled."""
        for _ in range(MAX_AGAIN):
            with compilation_cache.counting() as counts:
                result = run()
            if not counts.compiled + counts.hits:
                return result
        raise RuntimeError(f"programs were compiled in each of {MAX_AGAIN} repeats")

    def _single(self, llm: LLM) -> tuple[float, float, float]:
        """Seconds until the first token, per token and in total of one request at a time: medians of three requests,
        which reuse the prefix that they share."""
        times, salt = [], f"advise {next(_SALTS)}"
        for request in self.requests[:3]:
            [output] = llm.generate(
                [request.prompt], self.settings.run_options.params(request.num_tokens), use_tqdm=False, cache_salt=salt
            )
            timings = output.timings
            if timings is None:
                raise RuntimeError("a request has no timings")
            times.append((timings.time_to_first_token, timings.time_per_output_token, timings.total_time))
        ttft, tpot, total = (median(column) for column in zip(*times, strict=True))
        return ttft, tpot, total

    def _batch(self, llm: LLM) -> dict[str, Any]:
        traces, seconds = serve_all(llm, self.requests, self.settings.run_options)
        return figures(traces, seconds, limits=self.settings.run_options.limits)

    # Quality.

    def _quality(self, llm: LLM, row: TrialResult) -> TrialResult:
        """Adds the KL and the share of equal most probable tokens, compared with the baseline's log-probabilities."""
        if row.is_exact and row.arguments:
            return replace(row, kl=0.0, top1=1.0)
        key = tuple(row.arguments.get(name) for name in ROUNDING)
        engine = llm.engine.engines[0]
        if not row.arguments:
            if not self._expected:
                length = min(max(TEXT_TOKENS, self._longest), llm.max_model_len - 1)
                self._texts = for_quality(self._all_texts, llm.config.vocab_size, length)
                self._expected = [log_probs(engine, states) for states in hidden_states(engine, self._texts)]
            return replace(row, kl=0.0, top1=1.0)
        if key not in self._qualities:
            self.progress("measuring the KL")
            kl = agreeing = 0.0
            starts = self._starts(engine.spec)
            ends = [start or len(text) for start, text in zip(starts, self._texts, strict=True)]
            states = hidden_states(engine, self._texts, ends)
            for start, rows, whole in zip(starts, states, self._expected, strict=True):
                actual, expected = log_probs(engine, rows[start:]), whole[start:]
                kl += float(kl_divergence(expected, actual).sum(dtype=np.float64))
                agreeing += float(np.sum(expected.argmax(-1) == actual.argmax(-1)))
            count = sum(map(len, self._texts)) - sum(starts)
            self._qualities[key] = max(kl, 0.0) / count, agreeing / count
        kl, top1 = self._qualities[key]
        return replace(row, kl=kl, top1=top1)

    def _starts(self, spec: EngineSpec) -> list[int]:
        """The first token of each text whose next one is measured: 0, or half where a policy compacts prompts.

        Raises ValueError for a policy of which the texts would show no loss.
        """
        policy = spec.policy
        compacts = policy.drops and not policy.is_same_in_prompts
        kept = (policy.drops and policy.num_kept) or 0
        longest = max(map(len, self._texts)) // (2 if compacts else 1)
        if longest <= kept:
            raise ValueError(
                f"no KL can be measured: the longest {'prompt' if compacts else 'text'} has {longest} tokens, and the "
                f"policy keeps {kept}"
            )
        return [len(text) // 2 if compacts else 0 for text in self._texts]

    # The model.

    def _loaded(self, arguments: Arguments) -> LoadedModel:
        key = tuple(arguments.get(name) for name in OF_WEIGHTS)
        if self._model is not None and self._key == key:
            return self._model
        if self._beside is not None and not any(key):
            self._close_model()
            self._model, self._key = self._beside[0], key
            return self._model
        self._close_model()
        self.progress("loading")
        values = {name: self.settings.arguments[name] for name in ON_LOADING if name in self.settings.arguments}
        if "quantize" in arguments:
            values["quantize"] = arguments["quantize"]
        self._model = load_model(self.settings.model, mesh=self._mesh(arguments), **values)
        if (method := arguments.get("method")) is not None:
            self._model = self._calibrated(self._model, method)
        self._key = key
        return self._model

    def _mesh(self, arguments: Arguments) -> Any:
        mesh = arguments.get("mesh", self.settings.arguments.get("mesh"))
        return None if mesh is None else parallel.make_mesh(mesh)

    def _calibrated(self, model: LoadedModel, method: Any) -> LoadedModel:
        """The model with weights of 4 bits by GPTQ or AWQ, as `jaxinfer quantize` makes them."""
        self.progress(f"calibrating, {method}")
        if model.tokenizer is None:
            raise ValueError("a model without a tokenizer cannot be calibrated on text")
        tokens = [model.tokenizer.encode_content(text) for text in self.settings.calibration]
        rows = split_rows(tokens, model.tokenizer.eos_token_id, num_rows=128, length=min(512, self._longest), seed=0)
        options = CalibrationOptions(method=method, dtype=compute_dtype(model.params).name)
        quantized = quantize_model(FloatModel.of(model.config, model.params), options, rows.calibration)
        return replace(model, weights=ModelWeights(quantized.params))

    def _opened(self, arguments: Arguments) -> LLM:
        if "offload" in arguments:  # its weights are read to where they stay
            self._close_model()
            return LLM(self.settings.model, **{**self.settings.arguments, **arguments})
        return self._opened_over(self._loaded(arguments), arguments)

    def _opened_over(self, model: LoadedModel, arguments: Arguments) -> LLM:
        values = {**self.settings.arguments, **arguments}
        values = {name: value for name, value in values.items() if name not in (*ON_LOADING, "method")}
        values |= {name: self.settings.arguments[name] for name in ("dtype",) if name in self.settings.arguments}
        if str(values.get("kv_dtype", "")).startswith("fp8") and model.kv_scales is not None:
            values["kv_scales"] = model.kv_scales
        if (mesh := self._mesh(arguments)) is not None:
            values["mesh"] = mesh
        return LLM((model.config, model.params, model.tokenizer), **values)


NUM_TEXTS, TEXT_TOKENS = 8, 256
# Of the baseline's log-probabilities, which stay in memory.
MAX_BYTES = 2**30


def sampled(llm: LLM, workload: BenchWorkload) -> list[list[int]]:
    """Token ids of text sampled from the model at temperature 1, after random first tokens: as long as the requests."""
    seed, longest = workload.seed, workload.prompt_tokens.high + workload.answer_tokens.high
    rows = llm.config.vocab_size if llm.tokenizer is None else min(llm.config.vocab_size, llm.tokenizer.vocab_size)
    starts = np.random.default_rng(seed).integers(0, rows, NUM_TEXTS).tolist()
    length = min(max(TEXT_TOKENS, longest), llm.max_model_len - 1)
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=length, ignore_eos=True)
    outputs = llm.generate([[start] for start in starts], params, use_tqdm=False)
    return [[start, *output.outputs[0].token_ids] for start, output in zip(starts, outputs, strict=True)]


def for_quality(texts: Sequence[Sequence[int]], vocab_size: int, length: int) -> list[list[int]]:
    """The first `length` tokens of texts, of as many as MAX_BYTES of log-probabilities allow."""
    count = max(min(NUM_TEXTS, MAX_BYTES // (4 * vocab_size * length)), 1)
    return [list(text[:length]) for text in texts if len(text) > 1][:count]


def make_requests(
    workload: BenchWorkload, texts: Sequence[Sequence[int]], count: int, vocab_size: int, num_shared: int = 0
) -> list[WorkloadRequest]:
    """`count` requests: from the workload's dataset if it has one, else prompts cut from the texts at random places,
    all preceded by the same `num_shared` tokens."""
    if not workload.dataset:
        numbers = np.random.default_rng([workload.seed, 2])
        stream = [token for text in texts for token in text]
        prompts = [_cut(numbers, stream, length) for length in workload.prompt_tokens.draw(numbers, count)]
        shared = _cut(numbers, stream, num_shared) if num_shared else []
        rows = tuple(([*shared, *prompt], None) for prompt in prompts)
        workload = BenchWorkload(workload.prompt_tokens, workload.answer_tokens, rows, workload.seed)
    return workload.requests(count, vocab_size)


def _cut(numbers: np.random.Generator, stream: list[int], length: int) -> list[int]:
    """`length` tokens from a random place; a stream that is too short is repeated."""
    start = int(numbers.integers(0, max(len(stream) - length, 0) + 1))
    return [stream[(start + place) % len(stream)] for place in range(length)]


def shared_share(prompts: Sequence[Sequence[int]]) -> float:
    """The share of all tokens in prefixes that prompts have in common: what prefix reuse could save."""
    ordered = sorted(map(tuple, prompts))
    total = sum(map(len, ordered))
    same = 0
    for before, after in itertools.pairwise(ordered):
        pairs = enumerate(zip(before, after, strict=False))
        same += next((place for place, (token, other) in pairs if token != other), min(len(before), len(after)))
    return same / total if total else 0.0
