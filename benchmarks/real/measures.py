"""What is measured on published models: requests, and how each system gets them."""

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.workload import DECODE_TOKENS, Measure

MAX_MODEL_LEN, MAX_SEQS = 1024, 16  # of jaxinfer; llama.cpp has one sequence of that length
TITLES = {
    "decode": "decode at batch 1, tokens/s",
    "prompt": "prompt of 512, tokens/s",
    "batch16": "16 requests of 64 tokens, tokens/s",
    "batch64": "64 requests of 64 tokens, tokens/s",
    "start_cold": "process start to first token, nothing compiled, s",
    "start_warm": "process start to first token, s",
    "memory": "peak memory of a process with 16 requests, MiB",
}
LESS_IS_BETTER = ("start_cold", "start_warm", "memory")
QUICK = ("decode", "prompt", "batch16")
SYSTEMS = ("jaxinfer", "llama_cpp", "transformers_eager")
_TOKEN_IDS = range(1_000, 40_000)  # ordinary tokens of all the models


def measure_of(name: str, system: str) -> Measure:
    """The same requests for all systems. llama.cpp, which serves one user here, answers them one after the other."""
    numbers = random.Random(name)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [numbers.choices(_TOKEN_IDS, k=length) for _ in range(count)]

    batch = "each" if system == "llama_cpp" else "batch"
    if name in ("start_cold", "start_warm"):
        return Measure(prompts(1, 16), [1], "batch", 1)
    if name == "decode":
        return Measure(prompts(1, 16), [DECODE_TOKENS], "decode", 2)
    if name == "prompt":
        return Measure(prompts(1, 512), [1], "batch", 3)
    count = 64 if name == "batch64" else 16
    return Measure(prompts(count, 32), [64] * count, batch, 1)


def job_of(system: str, path: Path, names: list[str], num_threads: int, options: dict[str, Any]) -> dict[str, Any]:
    """What a worker of `benchmarks.peers` is told."""
    given: dict[str, Any] = {}
    if system == "jaxinfer":
        given = {"max_model_len": MAX_MODEL_LEN, "max_seqs": MAX_SEQS, **options}
    elif system == "llama_cpp":
        given = {"max_seqs": 1, "cache_tokens": MAX_MODEL_LEN}
    return {
        "system": system,
        "folder": str(path),
        "draft": None,
        "num_threads": num_threads,
        "options": given,
        "measures": {name: asdict(measure_of(name, system)) for name in names},
        "only_starts": all(name.startswith("start") for name in names),
    }


def figure_of(name: str, system: str, found: dict[str, Any]) -> float:
    """The figure of a measure, from what a worker found: the median of its repeats."""
    import statistics

    if name.startswith("start"):
        return found["process_start_seconds"]
    if name == "memory":
        return found["peak_rss_bytes"] / 2**20
    measure, seconds = measure_of(name, system), statistics.median(found["seconds"][name])
    if name == "decode":
        return (DECODE_TOKENS - 1) / seconds
    if name == "prompt":
        return len(measure.prompts[0]) / seconds
    return measure.num_tokens / seconds
