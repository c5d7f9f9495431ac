"""Models as they are stored, next to llama.cpp: a mixture of experts as Q4_K_M, and a Llama in 16 bits.

    python -m benchmarks.stored_forms [--models NAMES] [--rounds N] [--folder DIR] [--json FILE]

Both are random. "mixture" is a GGUF file of 1.1 GB in Qwen3-MoE's form, which both systems open. "bfloat16" is a Llama
of the SmolLM2-135M shape: safetensors in bfloat16 for jaxinfer, the same weights as BF16 and as F16 for llama.cpp.
Each system runs in a process of its own, in turn, with the same prompts and as many threads; figures are medians.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.compare import job, summed_up, take_turns, versions
from benchmarks.peers.mixture import write_mixture
from benchmarks.peers.workload import DECODE_TOKENS, SHAPE, Measure, make_checkpoint, num_weight_bytes, random_prompts

TITLES = {"decode": "decode at batch 1", "prefill": "prompt of 512", "requests16": "16 requests at once"}
MODELS = ("mixture", "bfloat16")
GOALS = {"mixture": 0.8, "bfloat16": 1.0}  # of decoding, times the better of llama.cpp's
VOCAB_SIZE = 32768  # ids of prompts, which both models have
INSTRUCTION_SETS = (
    *("avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("avx_vnni", "amx_tile", "amx_int8", "amx_bf16"),
)


@dataclass(frozen=True)
class Opened:
    """One system with the file or folder that it opens."""

    system: str
    path: Path


def measures() -> dict[str, Measure]:
    single, long, *many = random_prompts([16, 512, *[64] * 16], VOCAB_SIZE)
    return {
        "decode": Measure([single], [DECODE_TOKENS], "decode", 3),
        "prefill": Measure([long], [1], "batch", 2),
        "requests16": Measure(many, [48] * 16, "batch", 1),
    }


def prepare(model: str, folder: Path) -> tuple[dict[str, Opened], int]:
    """Writes a model where it is not there yet; what is compared by label, and the bytes of weights that decoding one
    token reads in llama.cpp's files."""
    place = folder / model
    record = place / "weight_bytes.json"  # written last
    if model == "mixture":
        file = place / "mixture-Q4_K_M.gguf"
        found = {"jaxinfer": Opened("jaxinfer", file), "llama.cpp": Opened("llama_cpp", file)}
    else:
        found = {"jaxinfer": Opened("jaxinfer", place)}
        found |= {f"llama.cpp {kind}": Opened("llama_cpp", place / f"model-{kind}.gguf") for kind in ("BF16", "F16")}
    if record.exists():
        return found, json.loads(record.read_text(encoding="utf-8"))
    place.mkdir(parents=True, exist_ok=True)
    if model == "mixture":
        num_bytes = write_mixture(found["jaxinfer"].path)
    else:
        from benchmarks.peers.to_gguf import write_gguf

        make_checkpoint(place, dtype="bfloat16")
        for kind in ("BF16", "F16"):
            write_gguf(place, found[f"llama.cpp {kind}"].path, kind)
        num_bytes = num_weight_bytes(SHAPE) // 2
    record.write_text(json.dumps(num_bytes), encoding="utf-8")
    return found, num_bytes


def run(model: str, folder: Path, rounds: int, num_threads: int) -> dict[str, Any]:
    """Medians of each system, and ratios of jaxinfer to each other one."""
    opened, num_bytes = prepare(model, folder)
    asked = measures()
    runs, failed = take_turns(
        list(opened),
        lambda label: [job(opened[label].system, opened[label].path, asked, num_threads)],
        lambda label: sys.executable,
        folder,
        rounds,
        lambda line: print(f"{model}  {line}", file=sys.stderr, flush=True),
    )
    systems = {label: summed_up(found, asked) for label, found in runs.items()}
    own = systems.get("jaxinfer", {})
    ratios = {
        label: {name: own[name]["median"] / row[name]["median"] for name in asked}
        for label, row in systems.items()
        if own and label != "jaxinfer"
    }
    return {"systems": systems, "ratios": ratios, "failed": failed, "weight_bytes": num_bytes, "goal": GOALS[model]}


def cpu() -> dict[str, Any]:
    """The CPU's name and those of its instruction sets that matter here; empty where Linux does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {"cpu": "", "instruction_sets": []}
    fields = dict(reversed([(key.strip(), value.strip()) for key, _, value in _split_lines(text)]))
    has = set(fields.get("flags", "").split())
    return {
        "cpu": fields.get("model name", ""),
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in has],
    }


def _split_lines(text: str) -> list[tuple[str, str, str]]:
    return [line.partition(":") for line in text.splitlines()]


def to_markdown(report: dict[str, Any]) -> str:
    about = f"{report['cpu']}: {', '.join(report['instruction_sets'])}; {report['num_threads']} threads each"
    parts = [about]
    for model, found in report["models"].items():
        names = ", tokens/s | ".join(TITLES.values())
        lines = [f"| {model} | {names}, tokens/s | start, s | second start, s | peak memory, GiB |"]
        lines.append("| --- |" + " ---: |" * (len(TITLES) + 3))
        for label, row in found["systems"].items():
            cells = [f"{row[name]['median']:.1f}" for name in TITLES]
            again = row.get("second_start_seconds", row["start_seconds"])
            cells += [f"{row['start_seconds']:.1f}", f"{again:.1f}", f"{row['peak_rss_bytes'] / 2**30:.2f}"]
            lines.append(f"| {label} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
        for label, ratios in found["ratios"].items():
            shown = ", ".join(f"{TITLES[name]} {ratio:.2f}x" for name, ratio in ratios.items())
            parts.append(f"jaxinfer over {label}: {shown} (goal of decoding {found['goal']}x).")
        parts += [f"{label} failed: {why}" for label, why in found["failed"].items()]
    return "\n\n".join(parts)


def main() -> None:
    from jaxinfer.measure.bench.model import machine
    from pallas_kernels.platform import num_cores

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)} (default: both)")
    parser.add_argument("--rounds", type=int, default=3, help="times each system runs (default 3)")
    parser.add_argument("--threads", type=int, default=num_cores(), help="of each system (default: one a core)")
    parser.add_argument("--folder", type=Path, help="where models are kept for the next run (default: nowhere)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    wanted = options.models.split(",")
    if unknown := [name for name in wanted if name not in MODELS]:
        parser.error(f"--models: {unknown[0]!r} is none of {', '.join(MODELS)}")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    with tempfile.TemporaryDirectory(prefix="stored-forms-") as place:
        folder = options.folder or Path(place)
        models = {name: run(name, folder, options.rounds, options.threads) for name in wanted}
    shared = {"rounds": options.rounds, "num_threads": options.threads, "packages": versions()}
    report = {"version": 1, **cpu(), **shared, "models": models, **machine()}
    print(to_markdown(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
