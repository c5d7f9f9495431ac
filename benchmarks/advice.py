"""`jaxinfer advise` beside an exhaustive search of the same options, on the embedded model:

    python -m benchmarks.advice

1. Every combination of the options that `advise` tries is measured, each in an engine of its own.
2. `jaxinfer advise` runs once for each goal, as a user would, and is timed.
3. What it recommends and the best of all combinations are measured in turn, forwards and backwards.

All results are written to benchmarks/results/advice.json as they come; a run that was stopped goes on there.
tests/measure/advise/test_tables.py searches the recorded figures.
"""

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.measure.advise.candidates import candidates
from jaxinfer.measure.advise.goals import GOALS, Arguments, Goal, TrialResult, median, ordered
from jaxinfer.measure.advise.measure import TrialRunner, TrialSettings
from jaxinfer.measure.advise.search import after_one
from jaxinfer.measure.bench.model import machine
from jaxinfer.measure.bench.workload import BenchWorkload, Lengths
from jaxinfer.training.corpus import held_out_files

FILE = Path(__file__).parent / "results/advice.json"
MODEL, SIZES, DRAFTS = "demo", (16,), ("ngram", "demo-draft")
PROMPT_TOKENS, ANSWER_TOKENS, REQUESTS, REPEATS, DEFAULT_SIZE = 32, 32, 8, 7, 16
ROUNDS = 9
WITHIN = 0.97
LIMIT_SECONDS = 300
FLAGS = (
    *("--prompt-tokens", str(PROMPT_TOKENS), "--answer-tokens", str(ANSWER_TOKENS), "--requests", str(REQUESTS)),
    *("--sizes", ",".join(map(str, SIZES)), "--repeats", str(REPEATS)),
)


def combinations(singles: Iterable[Arguments]) -> list[Arguments]:
    """All combinations of single changes of different kinds, with none first."""
    kinds: dict[str, list[Any]] = {}
    for one in singles:
        [(name, value)] = one.items()
        kinds.setdefault(name, [None]).append(value)
    choices = (
        {name: value for name, value in zip(kinds, values, strict=True) if value is not None}
        for values in itertools.product(*kinds.values())
    )
    return list(map(ordered, choices))


def best_of(goal: Goal, rows: Sequence[TrialResult]) -> TrialResult:
    """The best within the limits; for quality of those that lose least."""
    good = [row for row in rows if goal.ruled_out(row) is None and goal.values(row)]
    if goal.name == "quality":
        least = min(row.kl or 0.0 for row in good)
        good = [row for row in good if (row.kl or 0.0) == least]
    return max(good, key=lambda row: median(goal.values(row)))


def advise(goal: str) -> dict[str, Any]:
    """Runs the command; its recommendation, and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        file, start = Path(folder) / "advice.json", time.monotonic()
        command = [sys.executable, "-m", "jaxinfer.cli", "advise", MODEL, "--goal", goal, "--json", str(file)]
        done = subprocess.run([*command, *FLAGS], check=True, capture_output=True, text=True)
        seconds, found = time.monotonic() - start, json.loads(file.read_text())
    tried = [row for row in found["base"] + found["alone"] + found["together"] if row["reason"] is None]
    return {
        "seconds": seconds,
        "recommended": found["advice"]["arguments"],
        "trials": len(tried),
        "printed": done.stdout,
    }


def in_turn(runner: TrialRunner, goal: Goal, first: Arguments, second: Arguments) -> list[float]:
    """The first's figure over the second's, of each round."""
    if first == second:
        return []
    ratios = []
    for number in range(ROUNDS):
        order = (first, second) if number % 2 == 0 else (second, first)
        found = {str(arguments): runner(arguments, after_one) for arguments in order}
        one, other = (median(goal.values(found[str(arguments)])) for arguments in (first, second))
        ratios.append(one / other)
    return ratios


def make_runner() -> TrialRunner:
    prompts, answers = (Lengths("fixed", count, count) for count in (PROMPT_TOKENS, ANSWER_TOKENS))
    texts = tuple(text for _, text in held_out_files(8))
    return TrialRunner(TrialSettings(MODEL, {}, BenchWorkload(prompts, answers), texts, (), REQUESTS, REPEATS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=FILE, help="where results are kept")
    parser.add_argument("--minutes", type=float, help="begin nothing after this time; a later run goes on")
    options = parser.parse_args()
    end = time.monotonic() + 60 * (options.minutes or 10_000)
    with contextlib.closing(make_runner()) as runner:
        runner.prepare()
        result: dict[str, Any] = {"machine": machine(), "flags": list(FLAGS), "rows": [], "goals": {}}
        if options.file.exists():
            result = json.loads(options.file.read_text())
        if rows := [TrialResult.from_dict(row) for row in result["rows"]]:
            runner.reference = rows[0]
        about = runner.facts(SIZES, DEFAULT_SIZE, DRAFTS)
        goals = [Goal(name) for name in GOALS]
        wanted = {str(one): one for goal in goals for one in combinations(candidates(goal, about)[0])}
        rows = {str(row.arguments): row for row in rows}
        for number, (name, arguments) in enumerate(wanted.items(), 1):
            if name not in rows and time.monotonic() < end:
                rows[name] = runner(arguments)
                result["rows"] = [row.to_dict() for row in rows.values()]
                write(options.file, result)
                print(f"{number} of {len(wanted)}: {rows[name].name}: {rows[name].reason or 'measured'}", flush=True)
        for goal in goals:
            if goal.name in result["goals"] or len(rows) < len(wanted) or time.monotonic() > end:
                continue
            own = [rows[str(one)] for one in combinations(candidates(goal, about)[0])]
            found, best = advise(goal.name), best_of(goal, own)
            found |= {"best": best.arguments, "exhaustive_trials": len(own)}
            found["in_turn"] = in_turn(runner, goal, found["recommended"], best.arguments)
            result["goals"][goal.name] = found
            write(options.file, result)
    report(result)


def report(result: dict[str, Any]) -> None:
    for goal, found in result["goals"].items():
        share = median(found["in_turn"]) if found["in_turn"] else 1.0
        holds = share >= WITHIN and found["seconds"] < LIMIT_SECONDS
        print(
            f"{goal}: {found['recommended'] or 'no change'} in {found['seconds']:.0f} s with {found['trials']} trials; "
            f"best of {found['exhaustive_trials']}: {found['best'] or 'no change'}; {share:.2f} of it"
            f"{'' if holds else ': NOT WITHIN THE LIMITS'}"
        )


def write(file: Path, result: dict[str, Any]) -> None:
    file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
