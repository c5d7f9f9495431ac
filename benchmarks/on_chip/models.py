"""Pieces about whole models with random weights, served by the engine as users' are."""

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.on_chip import steps
from benchmarks.on_chip.results import CardResults, Row
from benchmarks.on_chip.sizes import Sizes
from jaxinfer import LLM, SamplingParams, compilation_cache
from jaxinfer.loading import LiveModel
from jaxinfer.measure.bench.model import Bench, opened, random_model
from jaxinfer.measure.bench.runs import RunOptions, latency
from jaxinfer.measure.bench.workload import BenchWorkload, Lengths
from jaxinfer.measure.profiling.phases import Workload

# Least shares of the roofline, by recipe of the weights (None: bfloat16) and number of sequences.
GOALS = {(None, 1): 0.85, ("int8", 1): 0.80, ("int4-g128", 1): 0.75, (None, 64): 0.80}
DRAFT_TOKENS = 4
LEAST_CHUNK, MOST_STEPS = 256, 16  # of prompts and of a dispatch, for the length of traced answers


def model_folder(sizes: Sizes, name: str, folder: str) -> str:
    """A folder with the config.json of a model."""
    path = Path(folder) / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(sizes.configs[name]), encoding="utf-8")
    return str(path)


def live_model(sizes: Sizes, name: str) -> LiveModel:
    """The configuration of a model with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        return random_model(model_folder(sizes, name, folder))


@contextlib.contextmanager
def open_bench(name: str, num_tokens: int, options: dict[str, Any], sizes: Sizes) -> Iterator[Bench]:
    """A model with random weights, for requests of `num_tokens`; only what is measured is compiled, in the first batch,
    which does not count."""
    length = min(num_tokens, sizes.configs[name]["max_position_embeddings"])
    arguments = {"max_model_len": length, "prefix_cache": False, **options, **sizes.engine}
    with tempfile.TemporaryDirectory() as folder:
        path = model_folder(sizes, name, folder)
        with opened(path, arguments, random_weights=True, warms_up=False, sizes=sizes.rate_sizes) as bench:
            yield bench


def decode(
    name: str, batch: int, options: dict[str, Any], traces: tuple[Path, str] | None, sizes: Sizes, results: CardResults
) -> Iterator[Row]:
    """Decoding `batch` sequences, their first tokens, and the host's gaps.

    traces: an archive and a name in it for a trace of some steps, whose kernels are listed; None traces nothing.
    """
    traced = Workload(batch, sizes.prompt_tokens, sizes.trace_steps).answer_tokens(LEAST_CHUNK, MOST_STEPS, 1)
    num_tokens = sizes.prompt_tokens + max(sizes.answer_tokens, traced)
    with open_bench(name, num_tokens, {"max_seqs": batch, **options}, sizes) as bench:
        yield from _decode_rows(bench, name, options, batch, sizes)
        if traces is not None:
            yield from steps.kernels(bench, batch, sizes.prompt_tokens, sizes.trace_steps, *traces)


def _decode_rows(bench: Bench, name: str, options: dict[str, Any], batch: int, sizes: Sizes) -> Iterator[Row]:
    workload = _workload(sizes.prompt_tokens, sizes.answer_tokens)
    batches = [workload.requests(batch, bench.vocab_size, part) for part in range(1 + sizes.repeats)]
    run = latency(bench, batches, RunOptions())
    decoded, gap = run["decode"], run["host_gap"]
    has_goal = name == "8b" and sizes.has_goals and "kv_dtype" not in options
    goal = GOALS.get((options.get("quantize"), batch)) if has_goal else None
    rate, share = batch / decoded["step_seconds"], decoded["percent"] / 100
    note = f"bound by {decoded['bound']}, deterministic {bench.llm.engine.engines[0].spec.is_deterministic}"
    yield Row(f"decode at {sizes.prompt_tokens}", rate, "tokens/s", share, "roofline", goal, note=note)
    least = f"roofline at measured rates {decoded['roofline_seconds'] * 1e3:.3g} ms"
    spec = bench.llm.engine.engines[0].spec
    step = steps.predicted_step(spec, batch, sizes.prompt_tokens + sizes.answer_tokens // 2)
    predicted = None if step is None else step.seconds * 1e3
    yield Row("decode step", decoded["step_seconds"] * 1e3, "ms", predicted=predicted, note=least)
    prefill = run["prefill"]
    note = f"{batch} prompts of {sizes.prompt_tokens}"
    yield Row("prompts", prefill["seconds"], "s", prefill["percent"] / 100, "roofline", note=note)
    if gap is not None:
        note = f"p99 {gap['per_dispatch_p99'] * 1e6:.0f} us, {gap['dispatches']} dispatches, {gap['steps']} steps"
        yield Row("host gap", gap["per_dispatch_mean"] * 1e6, "us/dispatch", note=note)
    compiled = run["compiled_after_warm_up"]
    yield Row("compiled while measured", compiled, "programs", is_right=compiled == 0)


def prompt(name: str, options: dict[str, Any], sizes: Sizes, results: CardResults) -> Iterator[Row]:
    """One long prompt."""
    num_tokens = sizes.prefill_tokens
    with open_bench(name, num_tokens + 2, {"max_seqs": 1, **options}, sizes) as bench:
        workload = _workload(num_tokens, 1)
        run = latency(bench, [workload.requests(1, bench.vocab_size, 90 + part) for part in range(3)], RunOptions())
    prefill = run["prefill"]
    rate = num_tokens / prefill["seconds"]
    yield Row(f"prompt of {num_tokens}", rate, "tokens/s", prefill["percent"] / 100, "roofline")


def start(name: str, sizes: Sizes, results: CardResults) -> Iterator[Row]:
    """Everything compiled at the start, and nothing afterwards."""
    length = sizes.prompt_tokens + sizes.answer_tokens
    arguments = {"max_seqs": sizes.model_batches[-1], "max_model_len": length, "prefill_chunk": min(512, length)}
    arguments |= sizes.engine
    with tempfile.TemporaryDirectory() as folder:
        path = model_folder(sizes, name, folder)
        with opened(path, arguments, random_weights=True, sizes=sizes.rate_sizes) as bench:
            note = f"{bench.start.programs} programs, {bench.start.from_cache} from the cache"
            yield Row("warm-up", bench.start.compile_seconds, "s", note=note)
            prompts = BenchWorkload(Lengths("uniform", 1, sizes.prompt_tokens), Lengths("fixed", 8, 8))
            params = SamplingParams(temperature=0.7, seed=1, max_tokens=8, ignore_eos=True)
            requests = [request.prompt for request in prompts.requests(24, bench.vocab_size)]
            with compilation_cache.counting() as counts:
                bench.llm.generate(requests, params, use_tqdm=False)
            compiled = counts.compiled + counts.hits
            yield Row("compiled after warm-up", compiled, "programs", is_right=compiled == 0, note="24 mixed requests")


def speculation(sizes: Sizes, results: CardResults) -> Iterator[Row]:
    """Speculation at several rates of acceptance, next to plain decoding.

    Both models have random weights. Requests allow few token ids, so that the draft's choice is the target's about
    once in as many: one id is always accepted.
    """
    target, draft = live_model(sizes, "8b"), live_model(sizes, "1b")
    options: dict[str, Any] = {
        "max_seqs": 1,
        "max_model_len": sizes.prompt_tokens + sizes.answer_tokens + DRAFT_TOKENS + 1,
        "prefix_cache": False,
        **sizes.engine,
    }
    workload = _workload(sizes.prompt_tokens // 2, sizes.answer_tokens)
    prompts = [one.prompt for one in workload.requests(1 + sizes.repeats, sizes.configs["8b"]["vocab_size"])]
    plain: dict[int, tuple[float, list[list[int]]]] = {}
    with LLM(target, **options) as llm:
        for count in sizes.allowed_ids:
            plain[count] = _timed(llm, prompts, count, sizes)
    with LLM(target, draft=draft, num_draft_tokens=DRAFT_TOKENS, **options) as llm:
        for count in sizes.allowed_ids:
            before = llm.speculation_stats()
            seconds, tokens = _timed(llm, prompts, count, sizes)
            after = llm.speculation_stats()
            stats = None if after is None or before is None else after - before
            accepted = 0.0 if stats is None else stats.acceptance_rate
            is_same = tokens == plain[count][1]
            note = f"{accepted:.0%} accepted of {DRAFT_TOKENS}, {seconds * 1e3:.0f} ms an answer"
            case = f"speculation, {count} ids allowed"
            yield Row(case, plain[count][0] / seconds, "times plain", is_right=is_same or None, note=note)


def _timed(llm: LLM, prompts: list[Any], num_allowed: int, sizes: Sizes) -> tuple[float, list[list[int]]]:
    """Seconds of an answer, the median without the first, and the tokens of all."""
    allowed = list(range(5, 5 + num_allowed))
    params = SamplingParams(temperature=0, max_tokens=sizes.answer_tokens, ignore_eos=True, allowed_token_ids=allowed)
    spent, tokens = [], []
    for prompt in prompts:
        begin = time.perf_counter()
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        spent.append(time.perf_counter() - begin)
        tokens.append(output.outputs[0].token_ids)
    return statistics.median(spent[1:]), tokens


def _workload(num_prompt: int, num_answer: int) -> BenchWorkload:
    """Random prompts and answers of these lengths."""
    return BenchWorkload(Lengths("fixed", num_prompt, num_prompt), Lengths("fixed", num_answer, num_answer))
