"""Prompt throughput where beginnings cycle through a cache that is too small for them: with host memory, and without.

64 prompts of 2,000 tokens, each followed by a few others, come one after another, round after round, to a pool that
holds 4 of them: without a host tier each of them is computed again whenever it comes. Greedy; the answers must agree.

    python -m benchmarks.host_tier --json benchmarks/results/host_tier.json
"""

import argparse
import json
import os
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.continuous_batching import sequence
from jaxinfer import compilation_cache
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.tiers.link_rates import transfer_rule
from jaxinfer.loading import load_model

NUM_PROMPTS, PROMPT_TOKENS, OWN_TOKENS, NUM_ROUNDS = 64, 2000, 8, 3
NUM_IN_POOL = 4
PAGE_SIZE = 16
GIB = 4.0


def make_engine(model: Any, gib: float | None) -> Engine:
    config, params = model
    pages = -(-(PROMPT_TOKENS + OWN_TOKENS + 1) // PAGE_SIZE)
    engine = Engine(
        config,
        params,
        EngineOptions(
            max_model_len=PROMPT_TOKENS + 2 * OWN_TOKENS,
            max_seqs=2,
            page_size=PAGE_SIZE,
            num_pages=NUM_IN_POOL * pages + 1,
            host_cache_gib=gib,
        ),
    )
    engine.warm_up()
    return engine


def serve(engine: Engine, rounds: list[list[list[int]]]) -> tuple[list[float], list[list[int]]]:
    """Seconds of each round, and all answers."""
    seconds, answers = [], []
    for prompts in rounds:
        start = time.perf_counter()
        for prompt in prompts:
            one = sequence(prompt, 1)
            engine.add(one)
            while engine.has_work:
                engine.step()
            answers.append(one.output)
        seconds.append(time.perf_counter() - start)
    return seconds, answers


def measure(model: Any, num_prompts: int = NUM_PROMPTS, num_rounds: int = NUM_ROUNDS) -> dict[str, Any]:
    """Prompt tokens a second of the rounds after the first, in which nothing is known yet."""
    numbers = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [numbers.randrange(2, model[0].vocab_size) for _ in range(count)]

    beginnings = [tokens(PROMPT_TOKENS) for _ in range(num_prompts)]
    rounds = [[[*beginning, *tokens(OWN_TOKENS)] for beginning in beginnings] for _ in range(num_rounds + 1)]
    num_tokens = num_prompts * (PROMPT_TOKENS + OWN_TOKENS)
    found: dict[str, Any] = {}
    answers = {}
    for name, gib in (("recomputed", None), ("host", GIB)):
        engine = make_engine(model, gib)
        seconds, answers[name] = serve(engine, rounds)
        counters = engine.scheduler.counters
        found[name] = {"tokens_per_second": num_tokens / statistics.median(seconds[1:]), "first_round": seconds[0]}
        if gib is not None:
            found[name] |= {"bytes_in": counters.host_bytes_in, "bytes_out": counters.host_bytes_out}
            found["rule"] = str(transfer_rule(engine.spec, engine.device))
        engine.close()
    if answers["host"] != answers["recomputed"]:
        raise SystemExit("the answers differ")
    return {**found, "ratio": found["host"]["tokens_per_second"] / found["recomputed"]["tokens_per_second"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--model", default="demo", help="a checkpoint (default: the embedded model)")
    options = parser.parse_args()
    compilation_cache.enable()
    loaded = load_model(options.model)
    found = measure((loaded.config, loaded.params))
    report = {
        "model": options.model,
        "num_cores": os.cpu_count(),
        "machine": platform.machine(),
        "jax": jax.__version__,
        "platform": jax.default_backend(),
        **found,
    }
    print(
        f"{NUM_PROMPTS} beginnings of {PROMPT_TOKENS} tokens, a pool for {NUM_IN_POOL}: "
        f"{found['host']['tokens_per_second']:,.0f} prompt tokens/s with host memory, "
        f"{found['recomputed']['tokens_per_second']:,.0f} computed again: {found['ratio']:.1f}x"
    )
    print(found["rule"])
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
