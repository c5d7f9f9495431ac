"""LoRA adapters beside the model without any, on this machine: decoding, and how long an adapter takes to arrive.

    python -m benchmarks.adapters [--model smollm2] [--rank 16] [--rounds 5] [--json FILE]

16 requests decode at once: in an engine without adapters, and in one with 8 slots whose requests have 4 adapters in
turn; both in turn in one run, medians over the rounds. An adapter's copy into a slot is timed alone, and as the longest
step of 15 decoding requests while adapters move; from the disk with reading and checks.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints_convert.adapters import save_adapter
from checkpoints_convert.checkpoint import param_shapes
from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.request import RequestOptions
from jaxinfer.models import ModelConfig
from jaxinfer.models.adapter import Adapter, LowRank

NUM_REQUESTS, NUM_SLOTS, NUM_ADAPTERS, PROMPT_TOKENS, ANSWER_TOKENS = 16, 8, 4, 16, 64
NUM_MOVED = 12  # adapters that take turns in the slots while requests decode
OPTIONS: dict[str, Any] = {"max_seqs": NUM_REQUESTS, "max_model_len": 512}


def random_adapter(config: ModelConfig, rank: int, seed: int) -> Adapter:
    """Small changes of all linear layers."""
    rng = np.random.default_rng(seed)
    pairs = {}
    for path, shape in param_shapes(config).items():
        if path[0] == "layers" and path[-2].endswith("_proj") and len(shape) == 2:
            a, b = (rng.normal(size=size).astype(np.float32) for size in ((shape[0], rank), (rank, shape[1])))
            pairs[".".join(path[:-1])] = LowRank(a / shape[0] ** 0.5, 0.01 * b, 1.0)
    return Adapter(pairs)


def seconds_of(llm: LLM, prompts: list[list[int]], adapters: list[str | None]) -> float:
    """Seconds of decoding steps with all requests."""
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    each = zip(prompts, adapters, strict=True)
    requests = [llm.prepare(prompt, params, RequestOptions(adapter=name)) for prompt, name in each]
    answers = [answer for request in requests for answer in llm.submit(request)]
    while any(answer.num_output < 2 for answer in answers):
        llm.step()
    start, before = time.perf_counter(), sum(answer.num_output for answer in answers)
    while llm.engine.has_work:
        llm.step()
    spent = time.perf_counter() - start
    made = sum(answer.num_output for answer in answers) - before
    return spent / made


def measure(model: str, rank: int, rounds: int) -> dict[str, Any]:
    prompts = np.random.default_rng(0).integers(10, 1000, (NUM_REQUESTS, PROMPT_TOKENS)).tolist()
    with LLM(model, **OPTIONS) as base:
        config = base.config
        adapters = {f"adapter{number}": random_adapter(config, rank, number) for number in range(NUM_MOVED)}
        with LLM(model, adapters=adapters, max_adapters=NUM_SLOTS, max_adapter_rank=rank, **OPTIONS) as adapted:
            names = [f"adapter{number % NUM_ADAPTERS}" for number in range(NUM_REQUESTS)]
            kinds = {"base": (base, [None] * NUM_REQUESTS), "adapters": (adapted, names)}
            kinds["no row has one"] = (adapted, [None] * NUM_REQUESTS)
            times: dict[str, list[float]] = {name: [] for name in kinds}
            for number in range(rounds + 1):
                for name, (llm, own) in kinds.items():
                    spent = seconds_of(llm, prompts, own)
                    if number:
                        times[name].append(spent)
            found: dict[str, Any] = {
                f"tokens/s, {name}": round(1 / statistics.median(own), 1) for name, own in times.items()
            }
            for name in ("adapters", "no row has one"):
                pairs = zip(times["base"], times[name], strict=True)
                found[f"speed beside the base, {name}"] = round(statistics.median(a / b for a, b in pairs), 3)
            found |= _moves(adapted, prompts, adapters)
    found["ms from the disk to a slot"] = _from_disk(model, config, rank)
    return found


def _moves(llm: LLM, prompts: list[list[int]], adapters: dict[str, Adapter]) -> dict[str, Any]:
    """Milliseconds of a copy, and by how much a step of decoding is longer with one."""
    runner, loaded = llm.engine.engines[0].runner, [llm.adapters[name] for name in adapters]
    copies = []
    for adapter in loaded:
        start = time.perf_counter()
        runner.write_stacks(1, adapter.host)
        jax.block_until_ready(runner.weights.value)
        copies.append(time.perf_counter() - start)
    steps: dict[bool, list[float]] = {False: [], True: []}
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    answers = [answer for prompt in prompts[1:] for answer in llm.submit(llm.prepare(prompt, params))]
    while any(answer.num_output < 2 for answer in answers):
        llm.step(1)
    for number in range(4 * len(loaded)):
        is_moved = number % 2 == 1
        start = time.perf_counter()
        if is_moved:
            runner.write_stacks(1 + number % NUM_SLOTS, loaded[number % len(loaded)].host)
        llm.step(1)
        steps[is_moved].append(time.perf_counter() - start)
    llm.client.abort(answers)
    plain, moved = (statistics.median(own) for own in steps.values())
    return {
        "adapter MB": round(loaded[0].host.num_bytes / 1e6, 1),
        "ms of a copy to a slot": round(1e3 * statistics.median(copies), 2),
        "ms of a decoding step": round(1e3 * plain, 2),
        "ms more with a copy, median": round(1e3 * (moved - plain), 2),
        "ms more with a copy, most": round(1e3 * (max(steps[True]) - plain), 2),
    }


def _from_disk(model: str, config: ModelConfig, rank: int) -> float:
    """Milliseconds from the call to the copy's end."""
    times = []
    with tempfile.TemporaryDirectory() as folder, LLM(model, max_adapters=1, max_adapter_rank=rank, **OPTIONS) as llm:
        runner = llm.engine.engines[0].runner
        for number in range(6):
            save_adapter(random_adapter(config, rank, number), Path(folder) / str(number), config)
            start = time.perf_counter()
            loaded = llm.load_adapter(str(number), Path(folder) / str(number))
            runner.write_stacks(1, loaded.host)
            jax.block_until_ready(runner.weights.value)
            times.append(time.perf_counter() - start)
    return round(1e3 * statistics.median(times[1:]), 1)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.adapters", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    found = measure(options.model, options.rank, options.rounds)
    for name, value in found.items():
        print(f"{name:40} {value}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
