"""Texts embedded per second, beside Transformers and sentence-transformers: one model, one machine, one run.

    python -m benchmarks.embedding [--rounds N] [--peer-python PYTHON] [--json FILE]

The embedded model as one that embeds, by the last token, float32. The systems take turns, a process each, of which only
one computes at a time; medians over the rounds. Two sets of texts: passages of mixed lengths, and short queries after
one instruction, whose tokens are computed once here. Tokenizing counts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import checkpoints_convert
from jaxinfer import LLM
from jaxinfer.data import embedded_path
from jaxinfer.tables import make_table
from jaxinfer.training.corpus import held_out_files

NUM_PASSAGES, NUM_QUERIES, LONGEST = 48, 64, 480
BOUND = 1e-5
INSTRUCTION = (
    "# Task: for the question below, find functions, classes and modules of this repository that answer it; prefer "
    "code to comments, and definitions to their uses. The name of what is asked for may be abbreviated.\n# Question: "
)
PEERS = ("transformers", "sentence-transformers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with torch, sentence-transformers")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(Path(name) / "model")
        found = measure(folder, options.rounds, options.peer_python)
    rows = [
        (
            one["texts"],
            one["num_tokens"],
            *(f"{one['num_texts'] / one[system]:.1f}" for system in (*PEERS, "jaxinfer")),
            *(f"{one[system] / one['jaxinfer']:.2f}x" for system in PEERS),
            f"{one['distance']:.0e}",
        )
        for one in found
    ]
    titles = ("texts/s", "tokens", *PEERS, "jaxinfer", *(f"over {system}" for system in PEERS), "cosine distance")
    from rich.console import Console

    Console(width=140).print(make_table(titles, rows, num_left=1))
    if options.json is not None:
        options.json.write_text(json.dumps({"cores": os.cpu_count(), "results": found}, indent=1) + "\n")


def write_model(folder: Path) -> Path:
    """The embedded model with the files of sentence-transformers."""
    source = embedded_path("demo")
    if source is None:
        raise SystemExit("the embedded model is missing")
    checkpoints_convert.convert(source, folder, to="huggingface", progress=None)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in list(kinds)[1:]:
        (folder / path).mkdir()
    width = json.loads((folder / "config.json").read_text())["hidden_size"]
    pooling = {"word_embedding_dimension": width, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def texts_of(llm: LLM) -> dict[str, list[str]]:
    """Pieces of files that the model was not trained on."""
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("".join(text for _, text in held_out_files(8)), False)
    random = np.random.default_rng(0)
    lengths = np.exp(random.uniform(np.log(8), np.log(LONGEST), NUM_PASSAGES)).astype(int)
    starts = random.integers(0, len(ids) - LONGEST, NUM_PASSAGES + NUM_QUERIES)
    passages = [tokenizer.decode(ids[start : start + size]) for start, size in zip(starts, lengths, strict=False)]
    short = random.integers(4, 16, NUM_QUERIES)
    queries = [tokenizer.decode(ids[at : at + size]) for at, size in zip(starts[NUM_PASSAGES:], short, strict=True)]
    return {"passages": passages, "queries after an instruction": [INSTRUCTION + one for one in queries]}


def measure(folder: Path, rounds: int, python: str) -> list[dict[str, Any]]:
    """Seconds of each system for each set of texts, medians."""
    found = []
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [python, "-m", "benchmarks.embedding_peers"]
    with (
        LLM(folder, max_model_len=512) as llm,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as peer,
    ):
        ask(peer, {"folder": str(folder), "num_threads": os.cpu_count()})
        for name, texts in texts_of(llm).items():
            seconds: dict[str, list[float]] = {system: [] for system in (*PEERS, "jaxinfer")}
            distance = 0.0
            for number in range(rounds + 1):  # the first one compiles, and is not counted
                # Other texts at the end, so that no whole text is found in the cache of the round before.
                given = [f"{text}{number}" for text in texts] if name != "passages" else [f"{number}{t}" for t in texts]
                start = time.perf_counter()
                vectors = llm.embed(given, use_tqdm=False)
                taken = {"jaxinfer": time.perf_counter() - start}
                for system in PEERS:
                    answer = ask(peer, [system, given])
                    taken[system] = answer["seconds"]
                    distance = max(distance, float(1 - np.sum(vectors * np.array(answer["vectors"]), axis=1).min()))
                for system, value in taken.items() if number else ():
                    seconds[system].append(value)
            if distance > BOUND:
                raise SystemExit(f"{name}: the vectors differ, by a cosine distance of {distance:.1e}")
            medians = {system: statistics.median(values) for system, values in seconds.items()}
            num_tokens = sum(len(llm.get_tokenizer().encode(text)) for text in texts)
            found.append(
                {"texts": name, "num_texts": len(texts), "num_tokens": num_tokens, **medians, "distance": distance}
            )
        if peer.stdin is not None:
            peer.stdin.close()
    return found


def ask(peer: "subprocess.Popen[str]", message: Any) -> Any:
    if peer.stdin is None or peer.stdout is None:
        raise RuntimeError("the peer has no pipes")
    peer.stdin.write(json.dumps(message) + "\n")
    peer.stdin.flush()
    line = peer.stdout.readline()
    if not line:
        raise SystemExit("the peer has ended; see its error above")
    return json.loads(line)


if __name__ == "__main__":
    main()
