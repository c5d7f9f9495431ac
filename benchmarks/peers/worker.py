"""One system in a process of its own: opens it, runs the measures of a job, prints the times as one line of JSON.

    python -m benchmarks.peers.worker JOB.json

It imports nothing of the other systems, so it runs in the environment of any of them.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()

from benchmarks.peers.systems import PEERS, System  # noqa: E402
from benchmarks.peers.workload import Measure  # noqa: E402

WARM_UP_TOKENS = 2  # of each answer, where nothing compiles


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each measure (a list, one for each repeat), the answers, the start and when it ended, the peak of
    memory."""
    draft = job.get("draft")
    make = PEERS[job["system"]].open
    system = make(Path(job["folder"]), Path(draft) if draft else None, job["num_threads"], **job.get("options", {}))
    measures = {name: Measure(**values) for name, values in job["measures"].items()}
    first = next(iter(measures.values()))
    system.generate(first.prompts[:1], [1])
    start_seconds, started_at = time.perf_counter() - STARTED, time.time()
    if job.get("only_starts"):
        measures = {}
    found: dict[str, Any] = {}
    answers: dict[str, list[list[int]]] = {}
    for name, measure in measures.items():
        warm_up(system, measure)
        seconds = []
        for _ in range(measure.repeats):
            spent, answers[name] = timed(system, measure)
            seconds.append(spent)
        found[name] = seconds
        if [len(one) for one in answers[name]] != measure.lengths:
            raise SystemExit(f"{name}: answers of {[len(one) for one in answers[name]]} tokens, not {measure.lengths}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if (close := getattr(system, "close", None)) is not None:
        close()
    return {
        "seconds": found,
        "answers": answers,
        "start_seconds": start_seconds,
        "started_at": started_at,
        "peak_rss_bytes": peak,
    }


def warm_up(system: System, measure: Measure) -> None:
    """The same shapes once; whole answers where each shape is compiled."""
    if system.compiles_shapes:
        timed(system, measure)
    else:
        short = [min(length, WARM_UP_TOKENS) for length in measure.lengths]
        timed(system, Measure(measure.prompts, short, "each" if measure.kind == "each" else "batch", 1))


def timed(system: System, measure: Measure) -> tuple[float, list[list[int]]]:
    """Seconds as the measure's kind counts them, and the answers."""
    start = time.perf_counter()
    if measure.kind == "each":
        answers = [
            system.generate([prompt], [length])[0]
            for prompt, length in zip(measure.prompts, measure.lengths, strict=True)
        ]
    else:
        answers = system.generate(measure.prompts, measure.lengths)
    seconds = time.perf_counter() - start
    if measure.kind == "decode":  # without the prompt
        start = time.perf_counter()
        system.generate(measure.prompts, [1])
        seconds -= time.perf_counter() - start
    return seconds, answers


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(json.dumps(run(job)), flush=True)


if __name__ == "__main__":
    main()
