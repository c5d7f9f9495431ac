"""The ratios that docs/speed.md quotes beside the peers', measured again and printed: `make bench-ratios`.

    python -m benchmarks.ratios [--only static-continuous,plain-speculative,prefix,int8] [--rounds N] [--json FILE]

Static against continuous batching, plain against speculative decoding, no reuse against prefix reuse (the embedded
model), float32 against int8 weights (a random Llama of 135 million parameters): both sides of a ratio in turn in one
run, medians over the rounds.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from benchmarks import continuous_batching, speculative
from benchmarks.peers.workload import make_checkpoint
from jaxinfer import LLM, SamplingParams, compilation_cache
from jaxinfer.loading import load_model
from jaxinfer.quantization.tree import num_bytes
from jaxinfer.training.corpus import held_out_files

NUM_FILES, ANSWER_TOKENS, INT8_PROMPT_TOKENS = 8, 128, 16


def static_continuous(rounds: int) -> dict[str, Any]:
    """Tokens/s of requests that arrive over 4 seconds."""
    loaded = load_model("demo")
    model = (loaded.config, loaded.params)
    found = continuous_batching.measure_batching(model, continuous_batching.NUM_REQUESTS, rounds)
    return {
        "before": found["static"]["tokens_per_second"],
        "after": found["continuous"]["tokens_per_second"],
        "unit": "tokens/s",
    }


def plain_speculative(rounds: int) -> dict[str, Any]:
    """Seconds of the same answers, one at a time, with the embedded draft and 9 drafted tokens."""
    texts = [text for _, text in held_out_files(NUM_FILES)]
    with LLM("demo", max_seqs=1) as plain:
        tokenizer = plain.tokenizer
        if tokenizer is None:
            raise SystemExit("the model has no tokenizer")
        batches = [[tokenizer.encode(text)[: speculative.PROMPT_TOKENS]] for text in texts]
        row = speculative.measured(plain, "demo", batches, rounds, draft="demo-draft", num_draft_tokens=9)
    return {"before": row["plain_seconds"], "after": row["seconds"], "unit": "s", "ratio": row["speedup"]}


def prefix(rounds: int) -> dict[str, Any]:
    """Prompt tokens/s of 64 requests that share 1,000 tokens."""
    loaded = load_model("demo")
    found = continuous_batching.measure_prefix((loaded.config, loaded.params), rounds)
    return {
        "before": found["without_tokens_per_second"],
        "after": found["with_tokens_per_second"],
        "unit": "prompt tokens/s",
    }


def int8(rounds: int) -> dict[str, Any]:
    """Tokens/s of one sequence at a time, of the random Llama of `benchmarks.peers`, and bytes of its weights."""
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    speeds: dict[str, list[float]] = {"float32": [], "int8": []}
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder) / "model")
        options: Any = {"max_seqs": 1, "max_model_len": 512}
        full = LLM(str(Path(folder) / "model"), **options)
        small = LLM(str(Path(folder) / "model"), quantize="int8", **options)
        with full, small:
            models = {"float32": full, "int8": small}
            for number in range(rounds + 1):
                turn = list(models.items())
                for name, llm in turn if number % 2 else turn[::-1]:  # neither is always the first
                    # Others in each round: none is found in the prefix cache.
                    prompt = [(7 * token + number) % 4096 for token in range(INT8_PROMPT_TOKENS)]
                    start = time.perf_counter()
                    llm.generate([prompt], params, use_tqdm=False)
                    if number:
                        speeds[name].append(ANSWER_TOKENS / (time.perf_counter() - start))
            sizes = {name: num_bytes(llm.params) for name, llm in models.items()}
    return {
        "before": statistics.median(speeds["float32"]),
        "after": statistics.median(speeds["int8"]),
        "unit": "tokens/s",
        "weight_bytes": sizes,
    }


PARTS: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "static-continuous": ("continuous over static batching", static_continuous),
    "plain-speculative": ("speculative over plain decoding", plain_speculative),
    "prefix": ("prefix reuse over none", prefix),
    "int8": ("int8 over float32 weights, one sequence", int8),
}


def ratio_of(row: dict[str, Any]) -> float:
    """How many times faster the second is; of seconds, fewer are better."""
    if "ratio" in row:
        return row["ratio"]
    return row["before"] / row["after"] if row["unit"] == "s" else row["after"] / row["before"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="times each side runs (default 3)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := [name for name in wanted if name not in PARTS]:
        parser.error(f"--only: {unknown[0]!r} is none of {', '.join(PARTS)}")
    compilation_cache.enable()
    rows: dict[str, Any] = {}
    machine = {"num_cores": os.cpu_count(), "machine": platform.machine(), "jax": jax.__version__}
    for name in wanted:
        title, measure = PARTS[name]
        found = measure(options.rounds)
        row = {"title": title, **found, "ratio": ratio_of(found)}
        rows[name] = row
        line = f"{title:<34}{row['ratio']:>7.2f}x   ({row['before']:.4g} to {row['after']:.4g} {row['unit']})"
        if (sizes := row.get("weight_bytes")) is not None:
            line += f", weights {sizes['float32'] / sizes['int8']:.2f}x smaller"
        print(line, flush=True)
        if options.json:  # after every ratio: a run that is stopped loses none
            report = {"ratios": rows, "rounds": options.rounds, **machine}
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
