"""jaxinfer next to its peers, on one machine in one run.

    python -m benchmarks.peers [--model NAME] [--systems NAMES] [--measures NAMES] [--rounds N] [--json FILE]

All systems open the same random float32 checkpoint, a Llama of the SmolLM2-135M shape or, with `--model qwen3_5`, a
smaller one with three gated delta nets before each layer with attention, and answer the same token ids
greedily, as many tokens as asked. Each runs in a process of its own, one after the other, round by round, so that a
slow minute of the machine hits all alike; figures are medians over the rounds. The measure "pair" is of the embedded
model, plain and speculative, on Python files that it never saw. What is not installed is left out, and named.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peers import hybrid
from benchmarks.peers.compare import GOALS, job, python_for, report, take_turns
from benchmarks.peers.report import to_markdown
from benchmarks.peers.systems import PEERS, chosen, why_not
from benchmarks.peers.workload import (
    PAIR_ANSWER,
    PAIR_FILES,
    PAIR_PROMPT,
    TITLES,
    Measure,
    make_checkpoint,
    measures,
    num_weight_bytes,
)

PAIR_SYSTEMS = ("jaxinfer", "transformers_eager", "llama_cpp")  # and all that speculate


def pair_measure() -> Measure:
    """The first tokens of files that the embedded pair never saw."""
    from jaxinfer.data import embedded_path
    from jaxinfer.text import Tokenizer
    from jaxinfer.training.corpus import held_out_files

    folder = embedded_path("demo")
    if folder is None:
        raise SystemExit("this installation has no embedded model")
    tokenizer = Tokenizer.from_dir(folder)
    prompts = [tokenizer.encode(text)[:PAIR_PROMPT] for _, text in held_out_files(PAIR_FILES)]
    return Measure(prompts, [PAIR_ANSWER] * len(prompts), "each", 1)


def prepare(folder: Path, systems: list[str], model: str) -> tuple[Path, Path, int]:
    """The random model, the embedded one in float32 as all can open it, with GGUF files where they are needed, and the
    bytes of the random one's weights."""
    import shutil

    from jaxinfer.data import embedded_path

    random_model, embedded = folder / "random", folder / "embedded"
    if model == "llama":
        make_checkpoint(random_model)
        num_bytes = num_weight_bytes()
    else:
        num_bytes = hybrid.make_hybrid(random_model)
    found = embedded_path("demo")
    if found is None:
        raise SystemExit("this installation has no embedded model")
    shutil.copytree(found, embedded)
    if "llama_cpp" in systems:
        from benchmarks.peers.to_gguf import write_gguf

        for one in (random_model, embedded) if model == "llama" else (embedded,):
            write_gguf(one, one / "model-f32.gguf")
    return random_model, embedded, num_bytes


def run(
    systems: list[str], wanted: list[str], rounds: int, easydel_python: str | None, model: str = "llama"
) -> dict[str, Any]:
    """Measures what can be, and says of the rest why not."""
    from jaxinfer.data import embedded_path
    from pallas_kernels.platform import num_cores

    skipped = {name: why for name in systems if (why := why_not(name, easydel_python)) is not None}
    present = [name for name in systems if name not in skipped]
    main = {name: measure for name, measure in measures().items() if name in wanted}
    pair = {"pair": pair_measure()} if "pair" in wanted else {}
    num_threads = num_cores()
    with tempfile.TemporaryDirectory(prefix="peers-") as place:
        folder = Path(place)
        random_model, embedded, num_bytes = prepare(folder, present, model)
        draft = embedded_path("demo-draft")

        def jobs(name: str) -> list[dict[str, Any]]:
            found = []
            if main and not PEERS[name].speculates:
                found.append(job(name, random_model, main, num_threads))
            if pair and (name in PAIR_SYSTEMS or PEERS[name].speculates):
                found.append(job(name, embedded, pair, num_threads, draft))
            return found

        runs, failed = take_turns(present, jobs, python_for(easydel_python), folder, rounds, told)
    goals = GOALS if model == "llama" else hybrid.GOALS
    found = report(runs, failed, skipped, {**main, **pair}, num_bytes, goals)
    return {**found, "model": model, "rounds": rounds}


def told(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("llama", "qwen3_5"), default="llama", help="the random model")
    parser.add_argument("--systems", default=",".join(PEERS), help="names with commas between (default: all)")
    parser.add_argument("--measures", default=",".join(TITLES), help=f"of {', '.join(TITLES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="times each system runs (default 3)")
    parser.add_argument("--easydel-python", metavar="PYTHON", help="of the environment that has EasyDeL")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    wanted = options.measures.split(",")
    if unknown := [name for name in wanted if name not in TITLES]:
        parser.error(f"--measures: {unknown[0]!r} is none of {', '.join(TITLES)}")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    try:
        systems = chosen(options.systems)
    except ValueError as error:
        parser.error(f"--systems: {error}")
    found = run(systems, wanted, options.rounds, options.easydel_python, options.model)
    print(to_markdown(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
