"""Continuous batching next to static batches, prefix reuse next to none, and what the host costs.

Load: requests arrive as a Poisson process; their prompts and answers have log-uniform lengths, as conversations do
(few are long). Greedy, end of sequence ignored, so that both systems make exactly the same tokens. Throughput is
answer tokens over the time from the first arrival to the last token; time to first token counts from a request's
arrival, time per token is the mean gap after the first.

    python -m benchmarks.continuous_batching --json benchmarks/results/continuous_batching.json
"""

import argparse
import json
import math
import os
import platform
import random
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from benchmarks.static_batches import StaticBatches, Timed
from jaxinfer import SamplingParams, compilation_cache
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.request import Request, SequenceState
from jaxinfer.loading import load_model
from jaxinfer.models import init_params

NUM_REQUESTS = 128
PROMPT_TOKENS, ANSWER_TOKENS = (40, 640), (8, 256)
ARRIVAL_SECONDS = 4.0  # over which the requests arrive, on average
STATIC_BATCH = 16
MAX_SEQS = 64
PAGE_SIZE = 16
PREFIX_TOKENS, NUM_SHARING = 1000, 64


@dataclass(frozen=True)
class Load:
    prompts: list[list[int]]
    lengths: list[int]
    arrivals: list[float]


def make_load(vocab_size: int, num_requests: int, seed: int = 0) -> Load:
    numbers = random.Random(seed)

    def log_uniform(low: int, high: int) -> int:
        return round(math.exp(numbers.uniform(math.log(low), math.log(high))))

    arrivals, now = [], 0.0
    for _ in range(num_requests):
        arrivals.append(now)
        now += numbers.expovariate(num_requests / ARRIVAL_SECONDS)
    prompts = [
        [numbers.randrange(2, vocab_size) for _ in range(log_uniform(*PROMPT_TOKENS))] for _ in range(num_requests)
    ]
    return Load(prompts, [log_uniform(*ANSWER_TOKENS) for _ in range(num_requests)], arrivals)


def sequence(prompt: list[int], length: int) -> SequenceState:
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=length)
    return SequenceState(Request(prompt, params, max_tokens=length, seed=0))


def serve(engine: Engine, load: Load) -> tuple[list[Timed], float]:
    """What each request got and when, and the pages' waste: the share of owned pages' room that holds no token,
    averaged over the dispatches."""
    sequences = [sequence(prompt, length) for prompt, length in zip(load.prompts, load.lengths, strict=True)]
    times: dict[SequenceState, list[float]] = {one: [] for one in sequences}
    num_added, wasted = 0, []
    start = time.perf_counter()
    while num_added < len(sequences) or engine.has_work:
        now = time.perf_counter() - start
        while num_added < len(sequences) and load.arrivals[num_added] <= now:
            engine.add(sequences[num_added])
            num_added += 1
        if not engine.has_work:
            time.sleep(max(load.arrivals[num_added] - now, 0))
            continue
        for one in engine.step():
            now = time.perf_counter() - start
            times[one] += [now] * (one.num_output - len(times[one]))
        running = engine.snapshot().running
        if running:
            stored = sum(one.num_stored for one in running)
            wasted.append(1 - stored / (PAGE_SIZE * sum(len(one.pages) for one in running)))
    return [Timed(one.output, times[one]) for one in sequences], statistics.mean(wasted)


def summary(found: list[Timed], load: Load) -> dict[str, float]:
    first = [one.times[0] - arrival for one, arrival in zip(found, load.arrivals, strict=True)]
    gaps = [(one.times[-1] - one.times[0]) / (len(one.times) - 1) for one in found if len(one.times) > 1]
    seconds = max(one.times[-1] for one in found)
    return {
        "tokens_per_second": sum(load.lengths) / seconds,
        "seconds": seconds,
        "first_token_p50": percentile(first, 50),
        "first_token_p99": percentile(first, 99),
        "per_token_p50": percentile(gaps, 50),
        "per_token_p99": percentile(gaps, 99),
    }


def percentile(values: list[float], percent: int) -> float:
    """The smallest value that is at least as large as `percent` % of them."""
    return sorted(values)[max(math.ceil(len(values) * percent / 100) - 1, 0)]


def make_engine(model: Any, **options: Any) -> Engine:
    config, params = model
    engine = Engine(
        config, params, EngineOptions(max_model_len=1024, max_seqs=MAX_SEQS, page_size=PAGE_SIZE, **options)
    )
    engine.warm_up()
    return engine


def measure_batching(model: Any, num_requests: int, rounds: int) -> dict[str, Any]:
    """Both systems in turn, `rounds` times; the median round of each by throughput."""
    config, params = model
    load = make_load(config.vocab_size, num_requests)
    static = StaticBatches(config, params, STATIC_BATCH, PROMPT_TOKENS[1] + ANSWER_TOKENS[1])
    static.warm_up()
    engine = make_engine(model, prefix_cache=False)
    runs: dict[str, list[dict[str, float]]] = {"static": [], "continuous": []}
    waste = 0.0
    for _ in range(rounds):
        expected = static.serve(load.prompts, load.lengths, load.arrivals)
        found, waste = serve(engine, load)
        if [one.tokens for one in expected] != [one.tokens for one in found]:
            raise SystemExit("the two systems made different tokens")
        runs["static"].append(summary(expected, load))
        runs["continuous"].append(summary(found, load))
    engine.close()
    middle = {
        name: sorted(found, key=lambda run: run["tokens_per_second"])[len(found) // 2] for name, found in runs.items()
    }
    ratio = middle["continuous"]["tokens_per_second"] / middle["static"]["tokens_per_second"]
    return {**middle, "ratio": ratio, "page_waste": waste}


def measure_prefix(model: Any, rounds: int) -> dict[str, float]:
    """Prompt tokens per second of requests that share a long beginning, with and without reuse; and the share of the
    time that looking for prefixes takes when none is found."""
    config, _ = model
    numbers = random.Random(1)
    shared = [numbers.randrange(2, config.vocab_size) for _ in range(PREFIX_TOKENS)]
    prompts = [[*shared, *(numbers.randrange(2, config.vocab_size) for _ in range(8))] for _ in range(NUM_SHARING)]
    load = Load(prompts, [1] * NUM_SHARING, [0.0] * NUM_SHARING)
    num_tokens, seconds = sum(len(prompt) for prompt in prompts), {}
    for name, is_on in (("without", False), ("with", True)):
        found = []
        for _ in range(rounds):
            engine = make_engine(model, prefix_cache=is_on)  # a new one: nothing is known yet
            start = time.perf_counter()
            serve(engine, load)
            found.append(time.perf_counter() - start)
            engine.close()
        seconds[name] = statistics.median(found)
    cost = prefix_cost(model)
    return {
        "with_tokens_per_second": num_tokens / seconds["with"],
        "without_tokens_per_second": num_tokens / seconds["without"],
        "ratio": seconds["without"] / seconds["with"],
        "cost_without_hits": cost,
    }


def prefix_cost(model: Any) -> float:
    """The share of the serving time spent on keys, look-up, insertion and eviction where no prompt begins alike."""
    config, _ = model
    engine, spent = make_engine(model, prefix_cache=True), 0.0
    scheduler = engine.scheduler

    def timed(function):
        def call(*args):
            nonlocal spent
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                spent += time.perf_counter() - start

        return call

    for name in ("_find_known", "_make_known", "_should_wait"):
        setattr(scheduler, name, timed(getattr(scheduler, name)))
    load = make_load(config.vocab_size, NUM_REQUESTS, seed=2)
    start = time.perf_counter()
    serve(engine, load)
    total = time.perf_counter() - start
    engine.close()
    return spent / total


def measure_host(model: Any) -> dict[str, dict[str, float]]:
    """What the host does for a decode step, for the model, for one of its structure whose layers are so narrow that
    they leave the processor's caches to the host, as an accelerator does, and for such a one of 32 layers."""
    config, _ = model
    found = {"model, 8 steps a dispatch": host_times(model, steps_per_dispatch=8), "model": host_times(model)}
    narrow = {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    narrow["rope"] = replace(config.rope, rotary_dim=8)
    for name, num_layers in (("same structure, narrow", config.num_layers), ("32 layers, narrow", 32)):
        other = replace(config, **narrow, num_layers=num_layers)
        found[name] = host_times((other, init_params(other, jax.random.key(0))))
    return found


def host_times(model: Any, steps_per_dispatch: int = 1, num_dispatches: int = 50) -> dict[str, float]:
    """Seconds that the host's thread works for one decode step of 64 sequences: planning and sending, and taking in
    the results. Its own processor time: on a CPU the device's threads take the cores as soon as they have work, and a
    wait for a core is not work of the host."""
    engine = make_engine(model, steps_per_dispatch=steps_per_dispatch)
    for i in range(MAX_SEQS):
        engine.add(sequence([2 + i] * 20, (num_dispatches + 10) * steps_per_dispatch))
    while any(not one.is_decoding for one in engine.scheduler.running) or len(engine.scheduler.running) < MAX_SEQS:
        engine.step()
    engine._commit_all()
    sending, reading = [], []
    for _ in range(num_dispatches):
        start = time.thread_time()
        plan = engine.scheduler.schedule()
        if plan is None:
            raise SystemExit("the pool is too small for this measurement")
        flight = engine.runner.run(plan)
        if flight is None:
            raise SystemExit("nothing was left to run")
        sending.append(time.thread_time() - start)
        jax.block_until_ready(flight.output)
        start = time.thread_time()
        engine._commit(flight)
        reading.append(time.thread_time() - start)
    engine.close()
    sent, read = (statistics.median(seconds) / steps_per_dispatch for seconds in (sending, reading))
    return {"plan_and_send": sent, "take_in": read, "per_step": sent + read}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--model", default="demo", help="a checkpoint (default: the embedded model)")
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS, help=f"default {NUM_REQUESTS}")
    parser.add_argument("--rounds", type=int, default=3, help="each system runs so often; medians (default 3)")
    parser.add_argument("--only", choices=("batching", "prefix", "host"), help="one part")
    options = parser.parse_args()
    compilation_cache.enable()
    loaded = load_model(options.model)
    model = (loaded.config, loaded.params)
    report: dict[str, Any] = {
        "model": options.model,
        "num_requests": options.requests,
        "num_cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "platform": jax.default_backend(),
    }
    if options.only in (None, "batching"):
        report["batching"] = found = measure_batching(model, options.requests, options.rounds)
        print(f"{'':<12}{'tokens/s':>10}{'first token p50 / p99':>26}{'per token p50 / p99':>26}")
        for name in ("static", "continuous"):
            row = found[name]
            print(
                f"{name:<12}{row['tokens_per_second']:>10.1f}"
                f"{row['first_token_p50']:>15.2f} / {row['first_token_p99']:.2f} s"
                f"{row['per_token_p50'] * 1e3:>15.1f} / {row['per_token_p99'] * 1e3:.1f} ms"
            )
        print(f"continuous / static: {found['ratio']:.2f}; page waste {found['page_waste']:.2%} at {PAGE_SIZE} tokens")
    if options.only in (None, "prefix"):
        report["prefix"] = found = measure_prefix(model, options.rounds)
        print(
            f"{NUM_SHARING} requests share {PREFIX_TOKENS} tokens: {found['with_tokens_per_second']:.0f} prompt "
            f"tokens/s with reuse, {found['without_tokens_per_second']:.0f} without: {found['ratio']:.1f}x; "
            f"without hits it costs {found['cost_without_hits']:.2%} of the time"
        )
    if options.only in (None, "host"):
        report["host"] = found = measure_host(model)
        for name, row in found.items():
            print(
                f"{name:<28} host per decode step of {MAX_SEQS} sequences: {row['per_step'] * 1e3:.2f} ms "
                f"(plan and send {row['plan_and_send'] * 1e3:.2f}, take in {row['take_in'] * 1e3:.2f})"
            )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
