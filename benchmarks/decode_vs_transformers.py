"""Decode speed at batch 1 next to Hugging Face Transformers, on one machine in one run.

    python -m benchmarks.decode_vs_transformers [--json FILE]

Both open the same random checkpoint, a Llama of the SmolLM2-135M shape in float32, and greedily generate the same
number of tokens from the same prompt. Each system runs in a process of its own, one after the other, several rounds
in turn, so that a slow minute of the machine hits all alike; figures are medians over the rounds. A decode step has to
read every weight once: 4 bytes x 134.5 M parameters, which gives the bytes per second printed beside.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
SYSTEMS = ("jaxinfer", "transformers eager", "transformers static", "transformers compiled")
PROMPT = [(7919 * i) % 49152 for i in range(16)]
NUM_TOKENS = 96
REPEATS = 3


def make_checkpoint(folder: Path) -> None:
    """A random Llama, as Transformers saves it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


def run_jaxinfer(folder: Path) -> list[float]:
    """Seconds per decoded token of each repeat."""
    from jaxinfer import LLM, SamplingParams

    with LLM(folder, dtype="float32", max_model_len=512, max_seqs=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        llm.generate(PROMPT, params)
        found = []
        for _ in range(REPEATS):
            timings = llm.generate(PROMPT, params)[0].timings
            assert timings is not None
            found.append(timings.time_per_output_token)
        return found


def run_transformers(folder: Path, mode: str) -> list[float]:
    """Seconds per decoded token of each repeat, the prompt's pass subtracted."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options: dict = {"do_sample": False}
    if mode in ("static", "compiled"):
        options["cache_implementation"] = "static"
        options["disable_compile"] = True
    if mode == "compiled":
        model.forward = torch.compile(model.forward, fullgraph=True)
    prompt = torch.tensor([PROMPT])

    @torch.inference_mode()
    def seconds(num_tokens: int) -> float:
        start = time.perf_counter()
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            **options,
        )
        assert output.shape[1] == len(PROMPT) + num_tokens
        return time.perf_counter() - start

    seconds(NUM_TOKENS), seconds(1)
    return [(seconds(NUM_TOKENS) - seconds(1)) / (NUM_TOKENS - 1) for _ in range(REPEATS)]


def worker(system: str, folder: Path) -> dict:
    start = time.perf_counter()
    if system == "jaxinfer":
        found = run_jaxinfer(folder)
    else:
        found = run_transformers(folder, system.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds_per_token": found, "peak_rss": peak, "total_seconds": time.perf_counter() - start}


def measure(folder: Path, rounds: int) -> dict[str, dict]:
    """Runs every system `rounds` times, in turn."""
    runs: dict[str, list[dict]] = {system: [] for system in SYSTEMS}
    for number in range(rounds):
        for system in SYSTEMS:
            command = [sys.executable, "-m", "benchmarks.decode_vs_transformers", "--worker", system, str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{system} failed:\n{done.stderr[-3000:]}")
            result = json.loads(done.stdout.splitlines()[-1])
            runs[system].append(result)
            speed = 1 / statistics.median(result["seconds_per_token"])
            print(f"round {number + 1}  {system:<24}{speed:7.1f} tokens/s", file=sys.stderr, flush=True)
    return {
        system: {
            "tokens_per_second": statistics.median(1 / x for run in found for x in run["seconds_per_token"]),
            "slowest": min(1 / x for run in found for x in run["seconds_per_token"]),
            "fastest": max(1 / x for run in found for x in run["seconds_per_token"]),
            "peak_rss_bytes": max(run["peak_rss"] for run in found),
            "process_seconds": statistics.median(run["total_seconds"] for run in found),
        }
        for system, found in runs.items()
    }


def num_weight_bytes() -> int:
    """float32 bytes that a decode step reads: all weights; the tied embedding is the output projection."""
    width, inner, layers = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["num_hidden_layers"]
    kv_width = width * SHAPE["num_key_value_heads"] // SHAPE["num_attention_heads"]
    per_layer = 2 * width * width + 2 * width * kv_width + 3 * width * inner + 2 * width
    return 4 * (layers * per_layer + SHAPE["vocab_size"] * width + width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=3, help="times each system runs (default 3)")
    parser.add_argument("--worker", nargs=2, metavar=("SYSTEM", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(options.worker[0], Path(options.worker[1]))))
        return
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder))
        systems = measure(Path(folder), options.rounds)
    best = max(systems[system]["tokens_per_second"] for system in SYSTEMS[1:])
    ratio = systems["jaxinfer"]["tokens_per_second"] / best
    print(f"{'system':<24}{'tokens/s':>10}{'min':>8}{'max':>8}{'GB/s':>8}{'peak RSS':>12}")
    for system, row in systems.items():
        bandwidth = row["tokens_per_second"] * num_weight_bytes() / 1e9
        print(
            f"{system:<24}{row['tokens_per_second']:>10.1f}{row['slowest']:>8.1f}{row['fastest']:>8.1f}"
            f"{bandwidth:>8.1f}{row['peak_rss_bytes'] / 2**30:>8.2f} GiB"
        )
    print(f"jaxinfer / best Transformers mode: {ratio:.2f}")
    if options.json:
        report = {
            "systems": systems,
            "ratio": ratio,
            "weight_bytes": num_weight_bytes(),
            "shape": SHAPE,
            "prompt_tokens": len(PROMPT),
            "new_tokens": NUM_TOKENS,
            "machine": platform.machine(),
            "num_cores": os.cpu_count(),
            "python": platform.python_version(),
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
